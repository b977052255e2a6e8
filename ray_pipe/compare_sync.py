"""`python -m ray_pipe.compare_sync`: one training job under every way to keep replicas together.

Homogeneous and with a straggler, in virtual time for any number of replicas (`--replicas 16,256`),
with `--real` in real time too, for four replicas on Ray. Shows a table, and leaves
`compare_sync.json` and `compare_sync.png` (loss against time). `python -m ray_pipe.compare-sync` is
the same command.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from netsim.units import UnitError, parse_bandwidth, parse_duration, parse_size
from ray_pipe.errors import ConfigError, RayPipeError, nearest

if TYPE_CHECKING:
    from stages.sync.strategies import SyncSpec
    from stages.sync.trial import Costs, Trial

DONE, REFUSED, STOPPED = 0, 2, 130
STEP, MODEL_SIZE, SLOW = "1s", "1MB", "2:4x"
BASE = "all-reduce"
EQUAL = "homogeneous"

STRATEGIES: dict[str, dict[str, Any]] = {
    BASE: {"name": "allreduce"},
    "all-reduce, direct": {"name": "allreduce", "route": "direct"},
    "quantized-adam": {"name": "quantized-adam", "warmup": 8},
    "local, 8 steps": {
        "name": "local", "local_steps": 8, "outer_lr": 1.0, "outer_momentum": 0.0,
    },
    "diloco, 8 steps": {"name": "local", "local_steps": 8},
    "ripples, ruler": {"name": "ripples", "groups": "ruler"},
    "ripples": {"name": "ripples"},
    "ripples, pairs": {"name": "ripples", "group_size": 2},
    "ad-psgd": {"name": "ad-psgd"},
    "hop": {"name": "hop"},
    "hop, backup 1": {"name": "hop", "backup_workers": 1},
    "hop, stale 5": {"name": "hop", "staleness": 5},
    "hop, skip 8": {"name": "hop", "backup_workers": 1, "skip": 8, "max_gap": 8},
}  # fmt: skip
"""Every strategy with the options that are worth comparing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy with so many replicas, among equals and with a straggler."""

    strategy: str
    num_replicas: int
    is_real: bool
    cases: Mapping[str, Trial]


def main(
    argv: Sequence[str] | None = None, *, out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """The command; 0 done, 2 refused, 130 stopped."""
    out, err = out or sys.stdout, err or sys.stderr
    args = _parser().parse_args(argv)
    try:
        plan = Plan.of(args)
        rows = list(plan.run(err))
    except (RayPipeError, UnitError, ValueError) as error:
        err.write(f"error: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        err.write("stopped\n")
        return STOPPED
    from ray_pipe.compare_sync_view import as_json, show_table, write_figure

    text = as_json(rows, plan)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare_sync.json").write_text(text + "\n", encoding="utf-8")
    write_figure(folder / "compare_sync.png", rows, straggler=plan.straggler)
    if args.json:
        out.write(text + "\n")
    else:
        show_table(rows, straggler=plan.straggler, out=out)
        out.write(f"{folder / 'compare_sync.png'}: loss against time\n")
        out.write(f"{folder / 'compare_sync.json'}: these numbers\n")
    return DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to compare, checked before anything runs."""

    strategies: Mapping[str, SyncSpec]
    sizes: tuple[int, ...]
    slow: str
    seconds: float
    costs: Costs
    seed: int
    real_steps: int = 0
    """Steps of each trial on Ray; 0 leaves Ray alone."""

    real_step_s: float = 0.25

    slow_link: str = ""
    """The straggler has a slow uplink instead."""

    out: str = ""
    resume: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Refuses what cannot work, with the way out."""
        from compressors.registry import CodecSpec
        from stages.sync.slowness import parse_slow, parse_slow_link
        from stages.sync.strategies import SyncSpec, check_spec
        from stages.sync.trial import LETTERS, Costs

        codec = CodecSpec(name=args.codec, bits=args.bits)
        coded = CodecSpec(name="directq", bits=4) if args.codec == "fp32" else codec
        found = {
            name: SyncSpec(
                **STRATEGIES[name],
                codec=coded if name == "quantized-adam" else codec,
                seed=args.seed,
            )
            for name in _chosen(args.only)
        }
        sizes = _sizes(args.replicas)
        slow = args.slow if args.slow is not None else "" if args.slow_link else SLOW
        for num in sizes:
            parse_slow(slow, num_replicas=num)
            parse_slow_link(args.slow_link, num_replicas=num)
        if args.slow_link and max(sizes) > LETTERS:
            raise ConfigError(
                f"--slow-link {args.slow_link} with {max(sizes)} replicas: the clock of all-reduce "
                f"is computed above {LETTERS}, for equal links; give --replicas {LETTERS} or fewer."
            )
        if args.slow_link and args.real:
            raise ConfigError(
                f"--slow-link {args.slow_link} is of virtual time: on Ray give unequal links to "
                "`ray_pipe.run --topology`; leave out --real."
            )
        fitting = {
            name: replace(spec, group_size=min(spec.group_size, *sizes))
            for name, spec in found.items()
        }
        for spec in fitting.values():
            for num in sizes:
                check_spec(spec, num)
        seconds = parse_duration(args.seconds)
        costs = Costs(
            step_s=parse_duration(args.step),
            model_nbytes=parse_size(args.model_size),
            bandwidth_bps=parse_bandwidth(args.bandwidth),
            latency_s=parse_duration(args.latency),
        )
        if args.real and not 6 <= args.real_steps <= 1000:
            raise ConfigError(f"--real-steps {args.real_steps}: give 6 to 1000")
        if args.real:
            parse_slow(slow, num_replicas=4)
            for flag, given, usual in (
                ("--step", args.step, STEP),
                ("--model-size", args.model_size, MODEL_SIZE),
            ):
                if given != usual:
                    raise ConfigError(
                        f"{flag} {given} is of virtual time: on Ray a gpt-nano is trained, whose "
                        "size is its own, and a step takes --real-step; run the two apart."
                    )
        if costs.step_s <= 0 or seconds < 10 * costs.step_s:
            raise ConfigError(
                f"--seconds {args.seconds} is less than ten steps of {args.step}: nothing would "
                f"be seen; give {10 * max(costs.step_s, 0.001):g}s or more, or a shorter --step"
            )
        return cls(
            strategies=fitting, sizes=sizes, slow=slow, seconds=seconds, costs=costs,
            slow_link=args.slow_link,
            seed=args.seed, real_steps=args.real_steps if args.real else 0,
            real_step_s=parse_duration(args.real_step), out=args.out, resume=args.resume,
        )  # fmt: skip

    @property
    def straggler(self) -> str:
        """What the second case is called."""
        link = f"link {self.slow_link}" if self.slow_link else ""
        return ", ".join(part for part in (self.slow, link) if part)

    @property
    def cases(self) -> dict[str, str]:
        """What replicas are slowed by, by name."""
        return {EQUAL: "", self.straggler: self.slow}

    def run(self, err: TextIO) -> Iterator[Row]:
        """One row after the other; tells on `err` what it is at."""
        from ray_pipe.compare_sync_kept import KeptTrials
        from stages.sync.trial import run_trial

        kept = KeptTrials(self.out, resume=self.resume)
        places = [(num, name) for num in self.sizes for name in self.strategies]
        total = (len(places) + len(self.strategies) * bool(self.real_steps)) * len(self.cases)
        teller = _Teller(err, total)
        for num, name in places:
            trials = {}
            for case, slow in self.cases.items():
                with teller(f"{name}, {num} replicas, {case}") as tell:
                    sync = self.strategies[name]
                    link = self.slow_link if case != EQUAL else ""
                    costs = replace(self.costs, slow_link=link)
                    asked: dict[str, Any] = {
                        "num_replicas": num, "slow": slow, "seconds": self.seconds,
                        "seed": self.seed,
                    }  # fmt: skip
                    trials[case] = kept.get(
                        {"sync": asdict(sync), "costs": asdict(costs), **asked},
                        partial(run_trial, sync, costs=costs, **asked),
                    )
                    tell(trials[case])
            yield Row(strategy=name, num_replicas=num, is_real=False, cases=trials)
        if self.real_steps:
            yield from self._run_real(teller)

    def _run_real(self, teller: _Teller) -> Iterator[Row]:
        from ray_pipe.compare_sync_real import NUM_REPLICAS, real_replicas, run_real

        base: dict[str, Trial] = {}  # comes first; the others train as long as it did
        with real_replicas() as actors:
            for name in self.strategies:
                trials = {}
                for case, slow in self.cases.items():
                    with teller(f"{name}, {NUM_REPLICAS} replicas on Ray, {case}") as tell:
                        trials[case] = run_real(
                            actors, self.strategies[name], slow=slow, steps=self.real_steps,
                            costs=self.costs, seed=self.seed, step_s=self.real_step_s,
                            seconds=base[case].seconds if base else None,
                        )  # fmt: skip
                        tell(trials[case])
                base = base or trials
                yield Row(strategy=name, num_replicas=NUM_REPLICAS, is_real=True, cases=trials)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "seconds": self.seconds, "slow": self.slow, "slow_link": self.slow_link,
            "seed": self.seed, "costs": asdict(self.costs),
        }  # fmt: skip


class _Teller:
    """Progress: on a terminal each line replaces what it announced, elsewhere only results."""

    def __init__(self, err: TextIO, total: int) -> None:
        self._err = err
        self._total = total
        self._count = 0

    @contextmanager
    def __call__(self, what: str) -> Iterator[Callable[[Trial], None]]:
        self._count += 1
        head = f"[{self._count}/{self._total}] {what}"
        start = time.perf_counter()
        if self._err.isatty():
            self._err.write(f"\r\x1b[K{head} ...")
            self._err.flush()

        def tell(trial: Trial) -> None:
            took_s = time.perf_counter() - start
            self._err.write(
                ("\r\x1b[K" if self._err.isatty() else "")
                + f"{head}: {trial.iteration_s:.2f} s an iteration, loss {trial.final_loss:.3f} "
                f"(took {took_s:.1f} s)\n"
            )
            self._err.flush()

        yield tell


def _chosen(only: str) -> list[str]:
    if not only:
        return list(STRATEGIES)
    found = [BASE]
    for word in (part.strip() for part in only.split(";")):
        if word not in STRATEGIES:
            raise ConfigError(
                f"--only {word!r} is none of the strategies compared"
                f"{nearest(word, STRATEGIES)} Known are: {'; '.join(STRATEGIES)}"
            )
        found += [word] if word not in found else []
    return found


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--replicas {text!r} is not understood: give numbers joined by commas, as 16,256"
        ) from None
    if min(sizes) < 4 or max(sizes) > 2000:
        raise ConfigError(
            f"--replicas {text!r}: give numbers from 4 (Hop's graph has three neighbours) to 2000"
        )
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ray_pipe.compare_sync",
        description="The same training job under every way to keep replicas together, among "
        "equals and with a straggler, in virtual time and with --real on Ray: a table, and loss "
        "against time.",
    )
    parser.add_argument(
        "--replicas", default="16", help="how many, from 4 to 2000; several as 16,256,1000"
    )
    parser.add_argument("--slow", help=f"the straggler: {SLOW} (the default), random:6x@0.06, …")
    parser.add_argument(
        "--slow-link", default="", help="a straggler whose uplink is slow instead: 2:10x"
    )
    parser.add_argument("--seconds", default="120s", help="virtual time of each trial")
    parser.add_argument("--step", default=STEP, help="computing of one step, up to 10 %% more")
    parser.add_argument(
        "--model-size", default=MODEL_SIZE, help="of the model on the wire, in fp32"
    )
    parser.add_argument("--bandwidth", default="80Mbps", help="of every replica's uplink")
    parser.add_argument("--latency", default="20ms", help="of every link")
    parser.add_argument("--codec", default="fp32", help="of what replicas send, such as directq")
    parser.add_argument("--bits", type=int, default=4, help="of --codec")
    parser.add_argument("--real", action="store_true", help="four replicas on Ray as well")
    parser.add_argument("--real-steps", type=int, default=24, help="of each trial on Ray")
    parser.add_argument(
        "--real-step", default="250ms", help="pause of one step on Ray, beside some computing"
    )
    parser.add_argument("--only", default="", help="some strategies, joined by ';'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/compare-sync", help="folder for picture and JSON")
    parser.add_argument(
        "--resume", action="store_true", help="keep what a comparison that was stopped left there"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON, not the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
