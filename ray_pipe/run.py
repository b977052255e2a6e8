"""`python -m ray_pipe.run`: parse, call, show. Decides nothing.

Path: (command line) -> ray_pipe.run -> ray_pipe.driver

Loads neither torch nor ray before the configuration is known to be good. The driver is a
parameter, so that tests can run the whole command without a cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO

from ray_pipe.errors import ConfigError, RayPipeError, Terminated, lost_checkpoints
from ray_pipe.flags import build_config, parse_flags, with_flag
from ray_pipe.metrics import to_json
from ray_pipe.settings_file import show_settings
from ray_pipe.streams import let_go

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig
    from ray_pipe.progress import Observer, Progress

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 130
AGAIN_S = 0.05
"""Until a stop that Python dropped is repeated."""


class RunResult(Protocol):
    """What the driver gives back."""

    @property
    def results(self) -> dict[str, Any]: ...
    @property
    def path(self) -> str | Path | None: ...


Driver = Callable[["RunConfig", "Observer"], RunResult]


def main(
    argv: Sequence[str] | None = None,
    *,
    driver: Driver | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """The whole command; returns its exit status. `driver` defaults to `ray_pipe.driver.run`."""
    out, err = stdout or sys.stdout, stderr or sys.stderr
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with contextlib.redirect_stdout(out):
            args = parse_flags(words)
        config = build_config(args)
        if args.show_config:
            out.write(json.dumps(config.to_dict()) + "\n" if args.json else show_settings(config))
            return DONE
        warnings = config.validate()
        return _train(config, warnings, driver=driver, as_json=args.json, out=out, err=err)
    except SystemExit as asked:  # --help and --version
        return int(asked.code or 0)
    except KeyboardInterrupt:
        for stream in (out, err):
            let_go(stream)
        with contextlib.suppress(OSError):
            err.write("stopped\n")
        return STOPPED
    except ConfigError as error:
        _show_error(error, err, debug=debug, words=words)
        return REFUSED
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        let_go(out)
        return FAILED
    except Exception as error:
        _show_error(error, err, debug=debug)
        return FAILED


def _train(
    config: RunConfig,
    warnings: list[str],
    *,
    driver: Driver | None,
    as_json: bool,
    out: TextIO,
    err: TextIO,
) -> int:
    from ray_pipe.progress import make_progress

    show = err if as_json else out
    # Ray and others print to standard output; the JSON line must stay alone there.
    quiet = contextlib.redirect_stdout(err) if as_json else contextlib.nullcontext()
    with quiet, make_progress(show) as progress, stop_on_signals(progress, err):
        for text in warnings:
            progress.on_warning(text)
        if driver is None:
            progress.on_phase("loading torch and ray")
            driver = importlib.import_module("ray_pipe.driver").run
            assert driver is not None
        result = driver(config, progress)
        progress.on_end(result.results, result.path)
    if as_json:
        out.write(to_json(result.results) + "\n")
        out.flush()
    if lost := lost_checkpoints(result.results):
        _show_error(lost, err, debug=False)
        return FAILED
    return DONE


@contextlib.contextmanager
def stop_on_signals(
    progress: Progress, err: TextIO, *, leave: Callable[[int], NoReturn] = os._exit
) -> Iterator[None]:
    """The first Ctrl-C stops cleanly, by KeyboardInterrupt, and so does SIGTERM, by `Terminated`;
    a second one at once.

    Python drops what is raised in a weak reference's callback or in `__del__`, wherever the signal
    happened to strike; such a stop is repeated a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    asked: int | None = None
    is_lost = False
    again: list[threading.Timer] = []

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked, is_lost
        for timer in again:
            timer.cancel()
        if asked is not None and not is_lost:
            progress.close()  # gives the cursor back
            err.write("stopped at once\n")
            err.flush()
            leave(STOPPED)
        is_first, asked, is_lost = asked is None, number, False
        if is_first:
            progress.is_stopping = True
            progress.on_phase("stopping ... (Ctrl-C again to stop at once)")
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal is_lost
        if asked is None or not issubclass(dropped.exc_type, KeyboardInterrupt):
            tell(dropped)
            return
        is_lost = True
        again.append(threading.Timer(AGAIN_S, os.kill, (os.getpid(), asked)))
        again[-1].start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    tell, sys.unraisablehook = sys.unraisablehook, on_dropped
    try:
        yield
    finally:
        sys.unraisablehook = tell
        for timer in again:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_error(
    error: BaseException, err: TextIO, *, debug: bool, words: Sequence[str] = ()
) -> None:
    """One paragraph, with the flag among `words` that is to blame; the traceback only on wish."""
    if debug:
        err.write("".join(traceback.format_exception(error)))
    if isinstance(error, RayPipeError):
        text = with_flag(str(error), words)
    else:
        cause = getattr(error, "cause", None) or error  # Ray wraps what a stage raised
        lines = [line for line in str(cause).splitlines() if line.strip()]
        text = f"{type(cause).__name__}: {lines[-1] if lines else 'no message'}"
        if not debug:
            text += " (--debug shows where)"
    err.write(f"error: {' '.join(text.split())}\n")
    err.flush()


if __name__ == "__main__":
    sys.exit(main())
