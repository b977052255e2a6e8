"""The doctor's words: progress while it looks, then tables, findings, a verdict, the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from netsim.units import show_bandwidth, show_size
from ray_pipe.doctor_reports import PACKAGES, Checkup, Finding, LinkReport, NodeReport, Verdict
from ray_pipe.progress import Terminal, plain_console
from ray_pipe.results_table import show_clock, show_seconds

MAX_MATRIX = 8
"""Nodes up to which links are shown as a matrix; beyond, as a list of the slowest."""

NUM_SLOWEST = 12
STYLES = {"ok": "bold green", "warnings": "bold yellow", "faults": "bold red"}


class Watching:
    """Progress on a terminal, lines elsewhere. Time is a parameter."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = make_console(stream)
        self._clock = clock
        self._start_s = clock()
        self._phase = "loading Ray"
        self._num_links = 0
        self._done = 0
        self._each_s = 0.0
        self._links_start_s = self._latest_s = 0.0
        self._latest = ""
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = (
            Live(
                console=self.console,
                get_renderable=self.render,
                refresh_per_second=4,
                transient=True,
            )
            if live
            else None
        )

    def __enter__(self) -> Watching:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_phase(self, text: str) -> None:
        self._phase = text
        self._line(text)

    def on_links(self, num_links: int, seconds: float) -> None:
        self._num_links, self._each_s = num_links, seconds / max(1, num_links)
        self._links_start_s = self._latest_s = self._clock()
        self.on_phase(f"measuring {num_links} links, about {show_clock(max(1.0, seconds))}")

    def on_link(self, link: LinkReport) -> None:
        self._done += 1
        self._latest_s = self._clock()
        self._each_s = (self._latest_s - self._links_start_s) / self._done
        self._latest = f"{link.source} -> {link.target}: {_rate(link)}"
        left = f", about {show_clock(self.left_s)} left" if self._done < self._num_links else ""
        self._line(f"link {self._done}/{self._num_links}  {self._latest}{left}")

    @property
    def left_s(self) -> float:
        """For the links that remain: as long as those before took, or as estimated."""
        since = self._clock() - self._latest_s
        return max(0.0, (self._num_links - self._done) * self._each_s - since)

    def render(self) -> RenderableType:
        """The display as it stands."""
        elapsed = show_clock(self._clock() - self._start_s)
        status = Text(f"{self._phase} - {elapsed}", style="cyan")
        if not self._num_links:
            return status
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=self._num_links, completed=self._done, width=32),
            f"{self._done}/{self._num_links} links",
            self._latest,
            f"about {show_clock(self.left_s)} left",
        )
        return Group(bar, status)

    def _line(self, text: str) -> None:
        if self._live is None:
            elapsed = self._clock() - self._start_s
            self.console.print(Text(f"[{elapsed:6.1f} s] {text}"), soft_wrap=True)


def make_console(stream: TextIO) -> Console:
    """A terminal if it is one, else plain text."""
    console = Terminal(file=stream, highlight=False, markup=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return console
    return plain_console(stream)


def show(console: Console, checkup: Checkup, verdict: Verdict) -> None:
    """Everything, ending with what to do next."""
    parts = list(_parts(checkup, verdict))
    if console.is_terminal:
        console.print(Group(*parts))
    else:
        with console.capture() as capture:
            console.print(Group(*parts))
        console.file.write("\n".join(x.rstrip() for x in capture.get().splitlines()) + "\n")
    for step in verdict.next_commands:  # on a line of its own and unwrapped, to be copied
        console.print(Text(f"  # {step.why}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {step.command}", style="bold"), soft_wrap=True)


def _parts(checkup: Checkup, verdict: Verdict) -> Iterator[RenderableType]:
    yield ""
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("here", style="bold"), Text(_software(checkup)))
    head.add_row(Text("source", style="bold"), Text(_source(checkup)))
    if checkup.dashboard:
        head.add_row(Text("dashboard", style="bold"), Text(checkup.dashboard))
    metrics = [node.metrics for node in checkup.nodes if node.metrics]
    if metrics:
        head.add_row(Text("metrics", style="bold"), Text(", ".join(metrics)))
    yield head
    if checkup.nodes:
        yield nodes_table(checkup)
    if checkup.links:
        yield links_table(checkup)
    for finding in verdict.findings:
        yield from _finding(finding)
    yield ""
    yield Text.assemble((_headline(verdict), STYLES[verdict.state]), f"  {_summary(checkup)}")
    yield "After mending that:" if verdict.faults else "Next:"


def nodes_table(checkup: Checkup) -> Table:
    """A row for each node; a column of versions only for what is not the same everywhere."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    differing = _differing(checkup)
    titles = ("node", "address", "host", "cores", "load", "memory", "disk", "GPUs", "clock", "core")
    for title in (*titles, *differing):
        left = title in ("node", "address", "host", "core", *differing)
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for node in checkup.nodes:
        name = f"{node.index}{' head' if node.is_head else ''}"
        if node.error is not None:
            table.add_row(name, node.address, node.host, "not reached", style="red")
            continue
        table.add_row(
            name,
            node.address,
            node.host,
            f"{node.num_cores}",
            f"{node.load:.1f}",
            _size(node.free_memory_nbytes),
            _disk(node),
            f"{len(node.gpus)}" if node.gpus else "-",
            _clock(node),
            node.software.core or "-",
            *(_value(node, name) for name in differing),
        )
    return table


def links_table(checkup: Checkup) -> Table:
    """From row to column: rate and one-way latency; for many nodes the slowest links."""
    if len(checkup.nodes) > MAX_MATRIX:
        return _slowest(checkup.links)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("from \\ to")
    for node in checkup.nodes:
        table.add_column(f"node {node.index}", justify="right", no_wrap=True)
    for row in checkup.nodes:
        cells = []
        for column in checkup.nodes:
            link = checkup.link(row.index, column.index)
            cells.append("-" if link is None else _cell(link))
        table.add_row(f"node {row.index}", *cells)
    return table


def _slowest(links: Sequence[LinkReport]) -> Table:
    worst = sorted(links, key=lambda link: (link.error is None, link.bandwidth_bps or 0.0))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(f"slowest of {len(links)} links")
    table.add_column("rate", justify="right")
    table.add_column("latency", justify="right")
    for link in worst[:NUM_SLOWEST]:
        table.add_row(f"{link.source} -> {link.target}", _rate(link), _latency(link))
    return table


def _cell(link: LinkReport) -> Text:
    if link.error is not None:
        return Text("unreachable", style="bold red")
    if link.bandwidth_bps is None:
        return Text(_latency(link))
    return Text.assemble(_rate(link), "\n", (_latency(link), "dim"))


def _finding(finding: Finding) -> Iterator[RenderableType]:
    style = STYLES["faults" if finding.level == "fault" else "warnings"]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=7)
    grid.add_column(overflow="fold")
    grid.add_row(Text(finding.level, style=style), Text(f"{finding.where}: {finding.what}"))
    grid.add_row("", Text(f"-> {finding.way_out}", style="cyan"))
    yield grid


def _headline(verdict: Verdict) -> str:
    if verdict.state == "ok":
        return "All is well."
    found = [
        f"{len(group)} {word}{'s' if len(group) > 1 else ''}"
        for group, word in ((verdict.faults, "fault"), (verdict.warnings, "warning"))
        if group
    ]
    return f"{' and '.join(found)}."


def _summary(checkup: Checkup) -> str:
    if not checkup.nodes:
        return ""
    words = [f"{len(checkup.nodes)} node{'s' if len(checkup.nodes) > 1 else ''}"]
    measured = [link for link in checkup.links if link.bandwidth_bps is not None]
    if measured:
        slowest = min(measured, key=lambda link: link.bandwidth_bps or 0.0)
        words.append(
            f"{len(measured)} links measured, the slowest is {slowest.source} -> {slowest.target} "
            f"with {_rate(slowest)}"
        )
    elif checkup.links:
        words.append(f"{len(checkup.links)} links, bandwidth not measured")
    return ", ".join(words)


def _software(checkup: Checkup) -> str:
    here = checkup.here
    names = [f"Python {here.versions.get('python')}"]
    names += [f"{name} {here.versions.get(name) or 'missing'}" for name in PACKAGES]
    return ", ".join(names)


def _source(checkup: Checkup) -> str:
    here = checkup.here
    core = f"{here.core} core" if here.core else "no core"
    if here.core == "native" and here.instructions:
        core += f", {here.instructions}"
    seen = [node for node in checkup.nodes if node.error is None]
    same = all(node.software.source == here.source for node in seen)
    where = ", the same on every node" if same and len(seen) > 1 else ""
    return f"{here.source or 'unknown'}{where}; {core}"


def _differing(checkup: Checkup) -> list[str]:
    """Names of software that some node has in another version than here."""
    seen = [node for node in checkup.nodes if node.error is None]
    names = [
        name
        for name in ("python", *PACKAGES)
        if any(node.software.versions.get(name) != checkup.here.versions.get(name) for node in seen)
    ]
    other = any(node.software.source != checkup.here.source for node in seen)
    return [*names, "source"] if other else names


def _value(node: NodeReport, name: str) -> str:
    if name == "source":
        return node.software.source or "missing"
    return node.software.versions.get(name) or "missing"


def _disk(node: NodeReport) -> str:
    if any(disk.error is not None for disk in node.disks):
        return "not writable"
    free = [disk.free_nbytes for disk in node.disks]
    return _size(min(free)) if free else "-"


def _clock(node: NodeReport) -> str:
    """`+12 ms`, or `same` where the offset is below what a round trip can tell."""
    offset = node.clock_offset_s
    if offset is None:
        return "-"
    if abs(offset) <= max(node.clock_error_s, 0.0005):
        return "same"
    sign = "+" if offset > 0 else "-"
    return f"{sign}{show_seconds(abs(offset))}"


def _rate(link: LinkReport) -> str:
    if link.error is not None:
        return "unreachable"
    if link.bandwidth_bps is None:
        return "-"
    text = show_bandwidth(link.bandwidth_bps, digits=3)
    number = text.rstrip("GMkbps")
    return f"{number} {text[len(number) :]}"


def _latency(link: LinkReport) -> str:
    return "-" if link.latency_s is None else show_seconds(link.latency_s)


def _size(nbytes: int) -> str:
    text = show_size(nbytes, digits=3)
    number = text.rstrip("TGMkB")
    return f"{number} {text[len(number) :]}"
