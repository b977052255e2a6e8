"""Bytes on the wire, added up once, by link and kind.

Every byte in results, tables and pictures is read from here, and here only from what the sender
reported. A link has one owner, the stage that sends on it: a second stage that reports the same
link would count its bytes at both ends, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stages.record import KINDS, StepRecord

Sent = dict[str, dict[str, int]]
"""Link "0->1" -> kind -> bytes."""


class LedgerError(ValueError):
    """Bytes that would be counted twice, or that have no kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One line of the table of links."""

    link: str
    kinds: dict[str, int]
    total: int
    share: float
    """Of all bytes of the ledger; 0.0 where nothing was sent."""


class Ledger:
    """The bytes of one arm."""

    def __init__(self) -> None:
        self._sent: Sent = {}
        self._owner: dict[str, int] = {}
        self._last_step: dict[int, int] = {}

    def add(self, records: Iterable[StepRecord], *, also: Sent | None = None) -> Sent:
        """Count the records of a step and return what they sent; all of them or, on error, none.

        `also` is what somebody sent meanwhile who is no stage (the Group Generator).
        """
        records = tuple(records)
        owner, last_step = dict(self._owner), dict(self._last_step)
        step_sent: Sent = {link: dict(kinds) for link, kinds in (also or {}).items()}
        for record in records:
            seen = last_step.get(record.stage)
            if seen is not None and record.step <= seen:
                raise LedgerError(
                    f"stage {record.stage} reported step {record.step} after step {seen}: its "
                    f"bytes would be counted twice; call `rewind` before steps run again"
                )
            last_step[record.stage] = record.step
            for link, kinds in record.sent.items():
                if owner.setdefault(link, record.stage) != record.stage:
                    raise LedgerError(
                        f"link {link} was reported by stage {owner[link]} and by stage "
                        f"{record.stage}: only the sender counts its bytes"
                    )
                into = step_sent.setdefault(sys.intern(link), {})
                for kind, nbytes in kinds.items():
                    _check(record, link, kind, nbytes)
                    into[sys.intern(kind)] = into.get(kind, 0) + nbytes
        self._owner, self._last_step = owner, last_step
        for link, kinds in step_sent.items():
            into = self._sent.setdefault(link, {})
            for kind, nbytes in kinds.items():
                into[kind] = into.get(kind, 0) + nbytes
        return step_sent

    def add_late(self, sent: Sent) -> None:
        """Count what was sent behind the last step, and belongs to none."""
        for link, kinds in sent.items():
            into = self._sent.setdefault(link, {})
            for kind, nbytes in kinds.items():
                into[kind] = into.get(kind, 0) + nbytes

    def rewind(self, step: int) -> None:
        """Steps from `step` on run again (recovery); what they sent before stays counted."""
        self._last_step = {stage: min(last, step - 1) for stage, last in self._last_step.items()}

    def restore(self, sent: Sent) -> None:
        """Begin with what was counted before the run was stopped."""
        self._sent = {link: dict(kinds) for link, kinds in sent.items()}
        self._owner, self._last_step = {}, {}

    def by_link(self) -> Sent:
        """Bytes by link and kind, links in order; kinds that never occurred are left out."""
        return {link: dict(self._sent[link]) for link in sorted(self._sent)}

    def total(self) -> dict[str, int]:
        """Bytes by kind, all five kinds present."""
        return total_by_kind(self._sent)

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return sum(self.total().values())

    def table(self) -> list[LinkRow]:
        """A row for each link, for people."""
        return link_table(self._sent)


def total_by_kind(sent: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Bytes by kind over all links, all five kinds present."""
    return {kind: sum(kinds.get(kind, 0) for kinds in sent.values()) for kind in KINDS}


def link_table(sent: Mapping[str, Mapping[str, int]]) -> list[LinkRow]:
    """A row for each link of `sent`, in order of their names."""
    total = sum(total_by_kind(sent).values())
    rows = []
    for link in sorted(sent):
        kinds = {kind: sent[link].get(kind, 0) for kind in KINDS}
        own = sum(kinds.values())
        rows.append(LinkRow(link=link, kinds=kinds, total=own, share=own / total if total else 0.0))
    return rows


def _check(record: StepRecord, link: str, kind: str, nbytes: int) -> None:
    where = f"stage {record.stage}, step {record.step}, link {link}"
    if kind not in KINDS:
        raise LedgerError(f"{where}: unknown kind of bytes {kind!r}; one of {', '.join(KINDS)}")
    if nbytes < 0:
        raise LedgerError(f"{where}: {nbytes} bytes of {kind}; a count is never negative")
