"""`python -m tests.cluster.rig up|sh|ray|rate|down`: a rig to play with."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from netsim.units import parse_bandwidth
from tests.cluster.host import Host
from tests.cluster.rig import Rig
from tests.cluster.rig_remains import RIGS, destroy, sweep


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.rig", description=__doc__)
    parser.add_argument("--name", default="by-hand", help="several rigs may be up at once")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make hosts; they stay until `down`")
    up.add_argument("--hosts", type=int, default=4)
    up.add_argument("--rate", default="unlimited", help="such as 100Mbps")
    up.add_argument("--ssh", action="store_true", help="with sshd, and a laptop to drive from")
    up.add_argument("--ray", action="store_true", help="start Ray on the hosts")
    shell = commands.add_parser("sh", help="run a command on a host (a shell without one)")
    shell.add_argument("host", help="0, 1, ... or laptop")
    shell.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="end the rig")
    commands.add_parser("sweep", help="remove what ended owners left behind")
    args = parser.parse_args(argv)
    folder = RIGS / args.name
    if args.command == "up":
        rate_bps = parse_bandwidth(args.rate)
        rig = Rig(
            args.hosts,
            rate_bps=None if rate_bps == float("inf") else rate_bps,
            ssh=args.ssh,
            laptop=args.ssh,
            name=args.name,
            keep=True,
        )
        rig.up()
        if args.ssh:
            from tests.cluster.login import open_doors

            open_doors(rig)
        if args.ray:
            rig.start_ray()
        for host in rig.everyone:
            sys.stdout.write(f"{host.name} {host.ip}\n")
        return 0
    if args.command == "sh":
        name = args.host if args.host == "laptop" else f"node{args.host}"
        book = json.loads((folder / "book.json").read_text(encoding="utf-8"))
        host = Host(name=name, ip=book[name]["ip"], folder=folder / name, python=sys.executable)
        host.env = book[name]["env"]
        host.pid = int((host.folder / "pid").read_text(encoding="ascii"))
        words = host.command(args.words or ["bash"])
        os.execvp(words[0], words)
    if args.command == "down":
        destroy(folder)
    if args.command == "sweep":
        sweep()
    return 0
