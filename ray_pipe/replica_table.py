"""What the replicas of a run did, for the eye: where each one is, what it waited for, its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ray_pipe.results_format import NONE, show_amount, show_seconds
from stages.record import KINDS

Arm = Mapping[str, Any]
CAUSES = {
    "plan": "a group",
    "reduce": "the mean",
    "fetch": "the mean",
    "updates": "neighbours",
    "mailbox": "mixing",
    "swap": "a peer",
    "gate": "tokens",
}
"""What a replica waited for, in words; see `stages.sync.replica`."""

COUNTS = {
    "groups": "groups formed",
    "conflicts": "conflicts",
    "cancelled": "cancelled",
    "half_applied": "half applied",
    "solo": "steps alone",
    "bridges": "bridges",
}


def replica_parts(results: Mapping[str, Any]) -> list[RenderableType]:
    """A table of all replicas, one of bytes by kind, and a sentence for each arm."""
    arms = [arm for arm in results.get("arms", ()) if arm.get("replicas")]
    if not arms:
        return []
    parts: list[RenderableType] = [members_table(arms), bytes_table(arms)]
    parts += [Text(sentence(arm)) for arm in arms]
    for arm in arms:
        parts += [Text(f"{arm['name']}: {event}") for event in arm["replicas"]["events"]]
    return [*parts, ""]


def members_table(arms: list[Arm]) -> Table:
    """Each replica of each arm."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title in ("arm", "replica"):
        table.add_column(title)
    for title in ("iteration", "steps run", "skipped"):
        table.add_column(title, justify="right")
    table.add_column("waited for")
    table.add_column("")
    for arm in arms:
        for place, member in enumerate(arm["replicas"]["members"]):
            table.add_row(
                str(arm["name"]) if not place else "",
                str(member["replica"]),
                str(member["iteration"]),
                str(member["run"]),
                str(member["skipped"]),
                show_waits(member["waited_s"]) or NONE,
                fate(member),
            )
    return table


def bytes_table(arms: list[Arm]) -> Table:
    """Bytes by kind, and how far each kind shrank against fp32."""
    used = [k for k in KINDS if any((arm.get("bytes_total") or {}).get(k) for arm in arms)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("bytes sent")
    for arm in arms:
        table.add_column(Text(str(arm["name"]), justify="right"), justify="right")
    for kind in used:
        table.add_row(kind, *(show_shrunk(arm, kind) for arm in arms))
    return table


def show_shrunk(arm: Arm, kind: str) -> str:
    """`1.2 MB, 1/7.4 of fp32`."""
    sent = (arm.get("bytes_total") or {}).get(kind, 0)
    plain = arm["replicas"]["fp32_bytes"].get(kind, 0)
    text = show_amount(sent, "B")
    return f"{text}, 1/{plain / sent:.1f} of fp32" if plain and plain > 1.05 * sent else text


def sentence(arm: Arm) -> str:
    """What the strategy did, in one line."""
    fleet = arm["replicas"]
    gap = fleet["largest_gap"]
    facts = [f"largest gap {gap} iteration{'' if gap == 1 else 's'}"]
    counts = fleet["generator"]
    facts += [f"{counts[name]:.0f} {text}" for name, text in COUNTS.items() if counts.get(name)]
    facts.append(f"{fleet['skipped']} updates skipped")
    if fleet["interrupted"]:
        facts.append(f"{fleet['interrupted']} exchanges begun again")
    if fleet.get("orphaned"):
        facts.append(f"{fleet['orphaned']} steps without an answer of the Group Generator")
    waits = show_waits(fleet["waited_s"])
    if waits:
        facts.append(f"waited in all for {waits}")
    return f"{arm['name']}, {fleet['strategy']}: {', '.join(facts)}."


def show_waits(waited_s: Mapping[str, float]) -> str:
    """`the mean 1.2 s, a group 80.0 ms`; what took next to no time is left out."""
    by_word: dict[str, float] = {}
    for cause, seconds in waited_s.items():
        word = CAUSES.get(cause, cause)
        by_word[word] = by_word.get(word, 0.0) + seconds
    longest = sorted(by_word.items(), key=lambda item: -item[1])
    return ", ".join(f"{word} {show_seconds(s)}" for word, s in longest if s >= 0.01)


def fate(member: Mapping[str, Any]) -> str:
    """Whether it came later or went before the end."""
    words = []
    if member.get("joined_at") is not None:
        words.append(f"joined before step {member['joined_at']}")
    if member.get("died_at") is not None:
        words.append(f"died in step {member['died_at']}")
    return ", ".join(words)


NUM_LINKS = 2
"""Links that the progress line names: the busiest."""


def where_replicas_are(
    fleet: Mapping[str, Any], links: Mapping[str, Mapping[str, int]] | None = None
) -> str:
    """`replicas at 12 12 9 12, gap 3 (largest 4), 17 groups, 2 conflicts, waited for …`.

    Iterations are of all that live, in order; waits are those of the mean replica so far. `links`
    are the bytes of the step by link and kind.
    """
    places = [int(k) for k in (fleet.get("iterations") or {}).values()]
    if not places:
        return ""
    gap, largest = fleet["gap"], fleet["largest_gap"]
    facts = [
        f"replicas at {' '.join(map(str, places))}, gap {gap}"
        if gap
        else f"{len(places)} replicas in step at {places[0]}"
    ]
    if largest > gap:
        facts[0] += f" (largest {largest})"
    for name in ("groups", "conflicts"):
        if name in fleet:
            facts.append(f"{fleet[name]} {name if fleet[name] != 1 else name[:-1]}")
    if fleet.get("orphaned"):
        facts.append(f"{fleet['orphaned']} without an answer")
    if fleet["skipped"]:
        facts.append(f"{fleet['skipped']} skipped")
    waits = show_waits(fleet["waited_s"])
    if waits:
        facts.append(f"waited for {waits}")
    sent = sorted(((sum(k.values()), link) for link, k in (links or {}).items()), reverse=True)
    if sent:
        busiest = ", ".join(f"{link} {show_amount(n, 'B')}" for n, link in sent[:NUM_LINKS])
        facts.append(f"busiest of {len(sent)} links: {busiest}")
    return ", ".join(facts)
