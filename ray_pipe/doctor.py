"""`python -m ray_pipe.doctor`: is this machine, or this cluster, fit for a run? Parse, look, show.

Loads neither torch nor ray before the flags are known to be good. Who looks is a parameter, so that
tests can run the whole command without a cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ray_pipe.errors import ConfigError, RayPipeError, nearest
from ray_pipe.flags import FlagParser
from ray_pipe.streams import let_go

if TYPE_CHECKING:
    from ray_pipe.doctor_reports import Checkup

OK, FAULTS, REFUSED, STOPPED = 0, 1, 2, 130
MIN_SECONDS, MAX_SECONDS = 0.1, 60.0

EXAMPLES = """\
examples:
  python -m ray_pipe.doctor
      this machine alone: software, native core, memory, disk, and whether Ray can start
  python -m ray_pipe.doctor --address auto
      on a node of a cluster: every node and every link
  python -m ray_pipe.doctor --address 10.0.0.10:6379 --topology-out links.yaml
      also write the measured links, to rehearse a run on one machine
  ray exec cluster.yaml 'python -m ray_pipe.doctor --address auto'
      the same from your own computer

Exit status: 0 all is well or warnings only, 1 faults, 2 bad flag, 130 stopped by Ctrl-C.
"""


def make_parser() -> FlagParser:
    """All flags of the doctor."""
    parser = FlagParser(
        prog="python -m ray_pipe.doctor",
        usage="%(prog)s [flags]",
        description="Look at this machine, or at every node and link of a Ray cluster, and say\n"
        "what is wrong, how to mend it, and which command to run next.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("--address", metavar="ADDRESS", help="The cluster: HOST:PORT, or auto on one of its nodes.")
    add("--quick", action="store_true", help="Do not measure bandwidth.")
    add(
        "--neighbours",
        action="store_true",
        help="Measure bandwidth between neighbours (0-1, 1-2, ...) only: for many nodes.",
    )
    add(
        "--seconds",
        metavar="S",
        type=float,
        default=2.0,
        help="How long each link is filled, each way. (default: 2.0)",
    )
    add(
        "--max-transfer",
        metavar="SIZE",
        default="256MB",
        help="Never send more than this over a link. (default: 256MB)",
    )
    add(
        "--out",
        metavar="DIR",
        default="runs",
        help="Folder for the run's results, as of ray_pipe.run. (default: runs)",
    )
    add(
        "--folder",
        metavar="DIR",
        action="append",
        default=[],
        help="A folder that stages will write to, such as codec.spill_dir; looked at on every "
        "node, besides Ray's own; may be given again.",
    )
    add("--topology-out", metavar="FILE.yaml", help="Write the measured links for --topology.")
    add("--json", action="store_true", help="Print the findings as JSON, all else to stderr.")
    add("--debug", action="store_true", help="Show tracebacks.")
    add("-h", "--help", action="help", help="Print this help.")
    return parser


def parse_flags(words: Sequence[str]) -> argparse.Namespace:
    """The flags, checked."""
    from netsim.units import UnitError, parse_size

    parser = make_parser()
    args, unknown = parser.parse_known_args(words)
    args.address = args.address or os.environ.get("RAY_ADDRESS") or None  # as ray_pipe.run
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        flag = unknown[0].partition("=")[0]
        raise ConfigError(f"there is no flag {flag}{nearest(flag, known)} See --help for all.")
    if not MIN_SECONDS <= args.seconds <= MAX_SECONDS:
        raise ConfigError(
            f"--seconds {args.seconds:g}: must be from {MIN_SECONDS:g} to {MAX_SECONDS:g}."
        )
    try:
        args.max_transfer = parse_size(args.max_transfer)
    except UnitError as error:
        raise ConfigError(f"--max-transfer: {error}") from None
    if args.max_transfer < 1 << 20:
        raise ConfigError("--max-transfer: less than 1MiB tells nothing about a link.")
    if args.topology_out and (args.quick or args.neighbours):
        raise ConfigError("--topology-out needs every link: leave out --quick and --neighbours.")
    if args.topology_out and args.address is None:
        raise ConfigError("--topology-out: one machine has no links; give --address.")
    if args.topology_out:
        _check_file(Path(args.topology_out).expanduser())
        args.topology_out = os.path.expanduser(args.topology_out)
    return args


def _check_file(path: Path) -> None:
    """Before minutes of measuring: what cannot be written would be lost with all findings."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--topology-out {path}: there is no such folder.")
    if path.is_dir():
        raise ConfigError(f"--topology-out {path}: is a folder; name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--topology-out {path}: cannot be written by this account.")


def main(
    argv: Sequence[str] | None = None,
    *,
    examine: Callable[..., Checkup] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """The whole command; returns its exit status. `examine` defaults to the doctor's rounds."""
    out, err = stdout or sys.stdout, stderr or sys.stderr
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with contextlib.redirect_stdout(out):
            args = parse_flags(words)
        return _look(args, examine=examine, out=out, err=err)
    except SystemExit as asked:  # --help
        return int(asked.code or 0)
    except KeyboardInterrupt:
        for stream in (out, err):
            let_go(stream)
        with contextlib.suppress(OSError):
            err.write("stopped\n")
        return STOPPED
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        let_go(out)
        return FAULTS
    except (RayPipeError, OSError) as error:  # a disk that takes no topology file, too
        if "--debug" in words:
            err.write("".join(traceback.format_exception(error)))
        err.write(f"error: {' '.join(str(error).split())}\n")
        return REFUSED if isinstance(error, ConfigError) else FAULTS


def _look(
    args: argparse.Namespace,
    *,
    examine: Callable[..., Checkup] | None,
    out: TextIO,
    err: TextIO,
) -> int:
    from ray_pipe.doctor_judge import judge
    from ray_pipe.doctor_reports import as_dict
    from ray_pipe.doctor_view import Watching, make_console, show
    from ray_pipe.measured_links import write_topology

    # Ray and others print to standard output; the JSON must stay alone there.
    quiet = contextlib.redirect_stdout(err) if args.json else contextlib.nullcontext()
    with quiet, Watching(err if args.json else out) as watching:
        watching.on_phase("loading Ray")
        checkup = (examine or _rounds())(
            args.address,
            watching,
            out=args.out,
            folders=args.folder,
            bandwidth=not args.quick,
            neighbours_only=args.neighbours,
            seconds=args.seconds,
            limit_nbytes=args.max_transfer,
        )
    verdict = judge(checkup, topology_path=args.topology_out)
    if args.topology_out and not verdict.faults:
        write_topology(checkup, args.topology_out, when=time.strftime("%Y-%m-%d %H:%M"))
    if args.json:
        out.write(json.dumps(as_dict(checkup, verdict)) + "\n")
    else:
        if args.topology_out and verdict.faults:
            out.write(f"{args.topology_out}: the measured links were not written, see below.\n")
        show(make_console(out), checkup, verdict)
    out.flush()
    return verdict.exit_code


def _rounds() -> Any:
    try:
        return importlib.import_module("ray_pipe.doctor_rounds").examine
    except ImportError as error:
        raise RayPipeError(
            f"{error.name or error} cannot be loaded in this environment ({sys.executable}): "
            f"{error}; install ray_pipe with its dependencies: `pip install .`"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
