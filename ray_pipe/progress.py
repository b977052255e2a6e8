"""What a run shows while it works: live bars on a terminal, plain lines elsewhere.

The driver speaks to an `Observer` and knows nothing of terminals. Time is a parameter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_pipe.ctr_table import progress_text
from ray_pipe.replica_table import where_replicas_are
from ray_pipe.results_table import number, show_amount, show_clock, show_results

PLAIN_WIDTH = 120
PLAIN_INTERVAL_S = 5.0


class Observer(Protocol):
    """Whom the driver tells how the run goes."""

    def on_start(self, plan: Mapping[str, Any]) -> None:
        """Before anything else. `plan`: text about the run, `bandwidth_bps`, and if known
        `predicted_step_s` by arm, which the estimate of the time left uses."""

    def on_phase(self, text: str) -> None:
        """Something that takes a while begins: `starting Ray`."""

    def on_arm(self, name: str, index: int, num_arms: int, steps: int) -> None:
        """Arm `index` (from 0) begins."""

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        """A step ended. `row` is its line of metrics.jsonl; `step` counts from 0."""

    def on_arm_end(self, arm: Mapping[str, Any]) -> None:
        """The arm as it stands in results.json."""

    def on_note(self, text: str) -> None:
        """Something the user may want to keep: where the dashboard is."""

    def on_warning(self, text: str) -> None:
        """Something the user should know; the run goes on."""

    def on_end(self, results: Mapping[str, Any], path: str | Path | None) -> None:
        """The whole of results.json, and the run's folder."""


@dataclass(slots=True)
class ArmState:
    """What is known of an arm while it runs."""

    name: str
    steps: int
    done: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    link_use: float | None = None
    """Share of the busiest uplink's capacity that was used; None where links are not shaped."""

    bits_per_s: float | None = None
    unit: str = "tokens"
    more: str = ""
    """What else a step has to say: rows and staleness of a click model, where replicas are."""

    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    ended: bool = False

    @property
    def step_s(self) -> float | None:
        return median(self.step_times) if self.step_times else None


class RunState:
    """The numbers behind every display."""

    def __init__(self) -> None:
        self.plan: Mapping[str, Any] = {}
        self.arms: list[ArmState] = []
        self.num_arms = 0

    def add_step(self, arm: str, row: Mapping[str, Any]) -> ArmState:
        state = next(state for state in reversed(self.arms) if state.name == arm)
        state.done = max(state.done, int(row["step"]) + 1)
        state.steps = max(state.steps, state.done)
        state.loss = number(row.get("loss"))
        state.tokens_per_s = number(row.get("tokens_per_s"))
        state.unit = str(self.plan.get("unit", "tokens"))
        state.more = progress_text(row) or where_replicas_are(
            row.get("fleet") or {}, row.get("links")
        )
        step_s = number(row.get("step_s"))
        if step_s:
            state.step_times.append(step_s)
            state.bits_per_s = 8 * _total(row.get("bytes")) / step_s
            state.link_use = self._link_use(row, step_s)
        return state

    def left_s(self) -> float | None:
        """Time left for all arms. An arm that has not begun is taken at its predicted step time,
        scaled by how far predictions were off so far; without one, as slow as those before."""
        predicted: Mapping[str, Any] = self.plan.get("predicted_step_s") or {}
        known = {state.name: state.step_s for state in self.arms if state.step_s is not None}
        if not known or not self.arms:
            return None
        ratios = [
            own / hint for name, own in known.items() if (hint := number(predicted.get(name)))
        ]
        scale = median(ratios) if ratios else 1.0
        usual = median(known.values())
        current = self.arms[-1]
        left = 0.0 if current.ended else (current.steps - current.done) * (current.step_s or usual)
        for name in self.waiting():
            hint = number(predicted.get(name))
            left += current.steps * (hint * scale if hint else usual)
        return left

    def waiting(self) -> list[str]:
        """Arms that have not begun."""
        names = [str(name) for name in self.plan.get("arms", ())]
        begun = len(self.arms)
        return names[begun:] if names else ["?"] * max(0, self.num_arms - begun)

    def _link_use(self, row: Mapping[str, Any], step_s: float) -> float | None:
        bandwidth_bps = number(self.plan.get("bandwidth_bps"))
        links = row.get("links")
        if not bandwidth_bps or not isinstance(links, Mapping) or not links:
            return None
        uplinks: dict[str, int] = {}
        for link, sent in links.items():
            node = str(link).partition("->")[0]
            uplinks[node] = uplinks.get(node, 0) + _total(sent)
        return 8 * max(uplinks.values()) / (step_s * bandwidth_bps)


class Progress:
    """What the live and the plain display share: warnings once, the results once."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.state = RunState()
        self._clock = clock
        self._start_s = clock()
        self._warned: set[str] = set()
        self._shown = False
        self.is_stopping = False
        """The run ends, and whoever has read us may be gone (`| tee` at Ctrl-C, `| head`): what is
        left to do is done all the same, and not shown."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""

    def on_start(self, plan: Mapping[str, Any]) -> None:
        self.state.plan = plan
        text = str(plan.get("text", ""))
        if text:
            self._print(Text(text, style="bold"))

    def on_phase(self, text: str) -> None:
        raise NotImplementedError

    def on_arm(self, name: str, index: int, num_arms: int, steps: int) -> None:
        self.state.num_arms = num_arms
        self.state.arms.append(ArmState(name=name, steps=steps))

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        self.state.add_step(arm, row)

    def on_arm_end(self, arm: Mapping[str, Any]) -> None:
        if self.state.arms:
            self.state.arms[-1].ended = True

    def on_note(self, text: str) -> None:
        self._print(Text(text, style="cyan"), soft_wrap=True)

    def on_warning(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            line = Text.assemble(("warning: ", "bold yellow"), text)
            self._print(line, soft_wrap=True)

    def on_end(self, results: Mapping[str, Any], path: str | Path | None) -> None:
        if not self._shown:
            self._shown = True
            self.close()
            show_results(self.console, results, path)

    def _print(self, text: Text, *, soft_wrap: bool = False) -> None:
        try:
            self.console.print(text, soft_wrap=soft_wrap)
        except (OSError, RuntimeError):  # the latter: a signal has struck amid a print
            if not self.is_stopping:
                self.is_stopping = True
                raise


class PlainProgress(Progress):
    """A line every few seconds; no control codes. For files, pipes and CI."""

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        super().__init__(console, clock=clock)
        self._interval_s = interval_s
        self._last_s = -float("inf")

    def on_phase(self, text: str) -> None:
        self._line(text)

    def on_step(self, arm: str, row: Mapping[str, Any]) -> None:
        super().on_step(arm, row)
        now = self._clock()
        state = self.state.arms[-1]
        if now - self._last_s < self._interval_s and state.done not in (1, state.steps):
            return
        self._last_s = now
        index = len(self.state.arms)
        parts = [
            f"{state.name} ({index}/{max(self.state.num_arms, index)})",
            f"step {state.done}/{state.steps}",
            *_numbers(state),
            state.more,
        ]
        left_s = self.state.left_s()
        if left_s is not None:
            parts.append(f"about {show_clock(left_s)} left" if left_s else "done")
        self._line("  ".join(part for part in parts if part))

    def _line(self, text: str) -> None:
        elapsed = self._clock() - self._start_s
        self._print(Text(f"[{elapsed:6.1f} s] {text}"), soft_wrap=True)


class LiveProgress(Progress):
    """Bars that move: one for each arm, and the time left for all of them."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._phase = "starting"
        # Four times a second: the display shares two cores with the stages.
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def close(self) -> None:
        self._live.stop()

    def on_phase(self, text: str) -> None:
        self._phase = text

    def on_arm(self, name: str, index: int, num_arms: int, steps: int) -> None:
        super().on_arm(name, index, num_arms, steps)
        self._phase = f"training {name}"

    def render(self) -> RenderableType:
        """The display as it stands."""
        bars = Table.grid(padding=(0, 2))
        bars.add_column(no_wrap=True)
        bars.add_column(no_wrap=True)
        for _ in range(5):
            bars.add_column(justify="right", no_wrap=True)
        for state in self.state.arms:
            style = "green" if state.ended else "bold"
            loss, speed, link = _numbers(state)
            bar = ProgressBar(total=max(state.steps, 1), completed=state.done, width=24)
            bars.add_row(
                Text(state.name, style=style),
                bar,
                f"{state.done}/{state.steps}",
                loss,
                speed,
                link,
                state.more,
            )
        for name in self.state.waiting() if self.state.arms else ():
            bars.add_row(Text(name, style="dim"), ProgressBar(total=1, completed=0, width=24))
        left_s = self.state.left_s()
        elapsed = show_clock(self._clock() - self._start_s)
        left = f", about {show_clock(left_s)} left for all arms" if left_s is not None else ""
        status = Text(f"{self._phase} - {elapsed}{left}", style="cyan")
        return Group(bars, status) if self.state.arms else status


class Terminal(Console):
    """A console that leaves to us what becomes of a run that nobody reads."""

    def on_broken_pipe(self) -> None:
        """Pass the error on; rich would end the process here, wherever it is."""
        raise


def make_progress(stream: TextIO) -> Progress:
    """The display that fits the stream."""
    console = Terminal(file=stream, highlight=False, markup=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainProgress(plain_console(stream))


def plain_console(stream: TextIO) -> Console:
    """Text only, as wide as the table needs."""
    return Terminal(
        file=stream,
        width=PLAIN_WIDTH,
        force_terminal=False,
        no_color=True,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _numbers(state: ArmState) -> tuple[str, str, str]:
    loss = f"loss {state.loss:.4f}" if state.loss is not None else ""
    speed = f"{show_amount(state.tokens_per_s)} {state.unit}/s" if state.tokens_per_s else ""
    if state.link_use is not None:
        link = f"link {100 * state.link_use:.0f} %"
    elif state.bits_per_s is not None:
        link = f"{show_amount(state.bits_per_s, 'bit/s')} sent"
    else:
        link = ""
    return loss, speed, link


def _total(sent: Any) -> int:
    """Bytes, given as a number or by kind."""
    return sum(sent.values()) if isinstance(sent, Mapping) else int(sent or 0)
