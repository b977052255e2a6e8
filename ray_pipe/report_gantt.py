"""The pipeline as a picture: stages as rows, one step from left to right.

Each stage has three strips: what it computed (with micro-batch numbers), its codecs, and its
outgoing links, forward above backward. White in the first strip is idle time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray_pipe.report_charts import WIDTH, svg
from ray_pipe.report_markup import Markup, seconds, tag
from ray_pipe.report_scales import ticks
from ray_pipe.time_share import link_of
from stages.record import Span, StepRecord

LEGEND = (
    ("forward", "--forward"),
    ("backward", "--backward"),
    ("update", "--update"),
    ("encode, decode", "--encode"),
    ("on the wire, forward", "--wire"),
    ("on the wire, backward", "--wire-back"),
)
_LEFT, _RIGHT, _TOP, _AXIS = 64.0, 12.0, 6.0, 24.0
_COMPUTE, _CODEC, _LINK = 20.0, 4.0, 6.0
_MAX_SPANS = 4000


def gantt(records: Sequence[StepRecord], *, title: str, span_s: float | None = None) -> Markup:
    """One step. `span_s` sets the scale, so that arms can be compared; None fits the step."""
    records = sorted(records, key=lambda record: record.stage)
    spans = [span for record in records for span in record.spans if span.lane != "wait"]
    if not spans:
        return tag("p", "This step was recorded without spans.", class_="empty")
    start = min(span.start_s for span in spans)
    length = span_s or (max(span.end_s for span in spans) - start) or 1e-9
    scale = (WIDTH - _LEFT - _RIGHT) / length
    marks: list[str] = []
    y = _TOP
    row_starts = []
    for record in records:
        links = sorted({link_of(span.name) for span in record.spans if span.lane == "wire"})
        # Forward links first: "1->2" above "1->0".
        links.sort(key=lambda link: not _goes_forward(link))
        row_starts.append(y)
        marks.append(
            tag(
                "text",
                f"stage {record.stage}",
                x=_LEFT - 10,
                y=y + 15,
                text_anchor="end",
                class_="tick",
            )
        )
        marks.append(
            tag("rect", class_="track", x=_LEFT, y=y, width=WIDTH - _LEFT - _RIGHT, height=_COMPUTE)
        )
        for span in record.spans[:_MAX_SPANS]:
            place = _place(span, y, links)
            if place is not None:
                marks += _bar(span, place, _LEFT + (span.start_s - start) * scale, scale)
        y += _COMPUTE + _CODEC + 2 + (_LINK + 1) * max(len(links), 1) + 9
    height = y + _AXIS - 6
    axis = y - 4
    for tick in ticks(0.0, length, 8):
        x = _LEFT + tick * scale
        marks.insert(0, tag("line", class_="grid", x1=x, x2=x, y1=_TOP, y2=axis))
        marks.append(
            tag("text", seconds(tick), x=x, y=axis + 14, text_anchor="middle", class_="tick")
        )
    return svg(marks, title=title, width=WIDTH, height=height)


def step_length(records: Sequence[StepRecord]) -> float:
    """From the first span to the last of a step."""
    spans = [span for record in records for span in record.spans if span.lane != "wait"]
    if not spans:
        return 0.0
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def _place(span: Span, y: float, links: Sequence[str]) -> tuple[float, float, str] | None:
    """Top, height and colour of a span; None for waits, which show as white."""
    if span.lane == "compute":
        return (y, _COMPUTE, "--backward" if span.name.startswith("B") else "--forward")
    if span.lane == "update":
        return (y, _COMPUTE, "--update")
    if span.lane in ("encode", "decode"):
        return (y + _COMPUTE + 1, _CODEC, "--encode")
    if span.lane == "wire":
        link = link_of(span.name)
        top = y + _COMPUTE + _CODEC + 2 + (_LINK + 1) * links.index(link)
        return (top, _LINK, "--wire" if _goes_forward(link) else "--wire-back")
    return None


def _bar(span: Span, place: tuple[float, float, str], x: float, scale: float) -> list[Markup]:
    top, height, color = place
    took = span.end_s - span.start_s
    width = max(took * scale, 0.5)
    bar = tag(
        "rect",
        tag("title", f"{span.lane} {span.name}: {seconds(took)}"),
        x=x,
        y=top,
        width=max(width - 0.5, 0.5),
        height=height,
        rx=1.5,
        style=f"fill:var({color})",
    )
    number = str(span.micro_batch)
    if span.lane != "compute" or span.micro_batch < 0 or width < 7 * len(number) + 1.5:
        return [bar]
    label = tag(
        "text",
        number,
        x=x + width / 2,
        y=top + height / 2 + 4,
        text_anchor="middle",
        class_=f"in in{color}",
    )
    return [bar, label]


def _goes_forward(link: str) -> bool:
    source, _, target = link.partition("->")
    return source.isdigit() and target.isdigit() and int(source) < int(target)
