"""Which visit of which sample a packet holds, and whether the receiver may apply it.

Path: compressors.delta -> compressors.visits -> compressors.buffers

    COLD   overwrites, sets generation and visit 1; an old generation is a duplicate
    DELTA  needs a row of equal generation and shape, and visit = own + 1
           an old generation, or a visit <= own, is a duplicate; all else needs a cold resend

Generations rise with every cold visit of the sender and never fall, so "old" is well defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from compressors.base import DuplicatePacket, NeedCold, RowMarks
from compressors.buffers import Mark

Kind = Literal["warm", "cold", "raw"]
KINDS: tuple[Kind, ...] = ("warm", "cold", "raw")


class Group(NamedTuple):
    """Samples of a micro-batch that travel in one inner packet."""

    kind: Kind
    positions: list[int]


def waves(ids: Sequence[int]) -> list[list[int]]:
    """Positions by how often their sample came before in the same micro-batch.

    The second visit of a sample is coded against the outcome of the first, so it waits for it.
    """
    found: list[list[int]] = []
    count: dict[int, int] = {}
    for position, sample in enumerate(ids):
        wave = count.get(sample, 0)
        count[sample] = wave + 1
        if wave == len(found):
            found.append([])
        found[wave].append(position)
    return found


def groups(rows: RowMarks, raw: frozenset[int]) -> list[Group]:
    """The inner packets of a packet, in order: by wave, then warm, cold, raw."""
    found: list[Group] = []
    for wave in waves(rows.ids):
        by_kind: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
        for position in wave:
            cold: Kind = "raw" if position in raw else "cold"
            by_kind[cold if rows.cold[position] else "warm"].append(position)
        found += [Group(kind, by_kind[kind]) for kind in KINDS if by_kind[kind]]
    return found


def check_visits(
    rows: RowMarks, shapes: Sequence[tuple[int, ...]], mark_of: Callable[[int], Mark | None]
) -> None:
    """Return if every sample may be applied, in order; else raise and say why.

    `DuplicatePacket` only if every sample was applied before. A packet that is old in part still
    holds values that the receiver has never seen: that needs a cold resend like any gap.
    """
    dropped = frozenset(rows.evicted)
    fresh: dict[int, Mark] = {}
    failed: dict[int, str] = {}
    old: dict[int, str] = {}
    for sample, visit, generation, cold, shape in zip(
        rows.ids, rows.visits, rows.generations, rows.cold, shapes
    ):
        own = fresh.get(sample)
        if own is None and sample not in dropped:
            own = mark_of(sample)
        if own is not None and _is_old(own, generation, visit, cold=cold):
            old[sample] = (
                f"sample {sample} is at generation {own.generation} visit {own.visit}, "
                f"the packet brings generation {generation} visit {visit}"
            )
        elif not cold and (reason := _refuse(own, generation, visit, shape)):
            failed[sample] = f"sample {sample} {reason}"
        else:
            fresh[sample] = Mark(generation, visit, shape)
    if old and not failed and not fresh:
        first = next(iter(old.values()))
        raise DuplicatePacket(
            f"{first}; if the sender lost its rows, start it with a higher incarnation"
        )
    if old or failed:
        reasons = [*failed.values(), *old.values()]
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise NeedCold(reasons[0] + more, tuple(sorted(failed.keys() | old.keys())))


def _is_old(own: Mark, generation: int, visit: int, *, cold: bool) -> bool:
    if generation < own.generation:
        return True
    return generation == own.generation and (cold or visit <= own.visit)


def _refuse(own: Mark | None, generation: int, visit: int, shape: tuple[int, ...]) -> str:
    """Why a delta cannot be added; empty if it can."""
    if own is None:
        return f"has no row here, the packet brings the change of visit {visit}"
    if generation != own.generation:
        return f"is of generation {own.generation} here, the packet's is {generation}"
    if visit != own.visit + 1:
        return f"was last seen at visit {own.visit}, the packet brings {visit}"
    if not own.kept:
        return "has a row that was not finite and was not kept"
    if shape != own.shape:
        return f"has a row of shape {own.shape}, the packet's is {shape}"
    return ""
