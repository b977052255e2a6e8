"""Process 1 of a host of the rig: private mounts, then wait and reap.

Runs in mount, pid, uts, ipc and net namespaces of its own, so nothing it mounts is seen outside,
and everything is gone when it ends. Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

STASH = Path("/run/rig-stash")


def main() -> None:
    """`host_init.py FOLDER`: become the host that FOLDER/host.json describes."""
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "host.json").read_text(encoding="utf-8"))
    # /proc is still the machine's, so this is the pid by which the machine can end us.
    outer_pid = Path("/proc/self/stat").read_text(encoding="ascii").split()[0]
    furnish(folder, plan)
    part = folder / "pid.part"
    part.write_text(outer_pid, encoding="ascii")
    part.rename(folder / "pid")
    reap()


def furnish(folder: Path, plan: dict[str, Any]) -> None:
    """Give the host its own view: processes, name, memory files, scratch folders, accounts."""
    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    socket.sethostname(plan["name"])
    mount("-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm")
    mount("-t", "tmpfs", "tmpfs", "/run")
    keep = [Path(path) for path in plan["keep"]]
    hide(Path("/tmp"), keep, mode=0o1777)
    hide(Path("/root"), keep, mode=0o755)  # or the login user could not reach the interpreter
    overlay(Path("/etc"), folder, plan["lower"])
    if plan["lower"] is not None:
        overlay(Path("/usr"), folder, plan["lower"])
    write_accounts(plan)
    Path("/run/sshd").mkdir()


def hide(place: Path, keep: list[Path], *, mode: int) -> None:
    """An empty folder instead of `place`, except for what is kept below it."""
    STASH.mkdir(parents=True, exist_ok=True)
    mount("--rbind", str(place), str(STASH))
    mount("-t", "tmpfs", "-o", f"mode={mode:o}", "tmpfs", str(place))
    for path in keep:
        if place in path.parents and (STASH / path.relative_to(place)).exists():
            path.mkdir(parents=True, exist_ok=True)
            mount("--rbind", str(STASH / path.relative_to(place)), str(path))
    subprocess.run(["umount", "--lazy", str(STASH)], check=True)


def overlay(place: Path, folder: Path, lower: str | None) -> None:
    """A writable view of `place`, with unpacked packages below it if there are any.

    Changes go to memory: an upper folder on an overlay, as in a container, would be refused.
    """
    scratch = Path("/run/overlay") / place.name
    (scratch / "upper").mkdir(parents=True)
    (scratch / "work").mkdir()
    lowers = [str(place)]
    if lower is not None and (Path(lower) / place.name).is_dir():
        lowers.append(str(Path(lower) / place.name))
    options = f"lowerdir={':'.join(lowers)},upperdir={scratch}/upper,workdir={scratch}/work"
    mount("-t", "overlay", "-o", options, "overlay", str(place))


def write_accounts(plan: dict[str, Any]) -> None:
    """The login user, sshd's user, and the names of all hosts."""
    user, home = plan["user"], plan["home"]
    with open("/etc/passwd", "a", encoding="ascii") as file:
        file.write(f"{user}:x:{plan['uid']}:{plan['uid']}::{home}:/bin/bash\n")
        file.write("sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n")
    with open("/etc/group", "a", encoding="ascii") as file:
        file.write(f"{user}:x:{plan['uid']}:\n")
    with open("/etc/shadow", "a", encoding="ascii") as file:
        file.write(f"{user}:*:19000:0:99999:7:::\n")  # "!" would be a locked account
    with open("/etc/hosts", "w", encoding="ascii") as file:
        file.write("127.0.0.1 localhost\n")
        file.writelines(f"{ip} {name}\n" for name, ip in plan["hosts"].items())


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def reap() -> None:
    """Process 1 has to bury its orphans."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break


if __name__ == "__main__":
    main()
