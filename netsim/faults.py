"""A link that misbehaves on purpose, by rules that a test can read and a seed can repeat.

    link = FaultyLink(Link(...), seed=7).drop("activation", nth=3).corrupt("gradient", share=0.01)

Faults happen at the far end of the wire: the frame was sent, shaped and counted as any other.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from netsim.link import Frame, Link, Span, frame_nbytes

Action = Literal["drop", "duplicate", "delay", "corrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault that was injected."""

    action: Action
    kind: str
    nth: int
    """Which frame of its kind it was, the first is 1."""

    at: float
    """When it was sent, in loop time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What to do with which frames."""

    action: Action
    kind: str | None
    nth: int | None
    share: float
    delay_s: float = 0.0


class FaultyLink:
    """A `Link` with faults; without rules it is the link that it wraps."""

    def __init__(
        self,
        link: Link,
        *,
        seed: int = 0,
        corrupt: Callable[[Frame, random.Random], Frame] | None = None,
        on_fault: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        """`corrupt` damages frames that are not bytes; by default one bit of the bytes flips.
        `on_fault` is told each fault as it is injected."""
        self.link = link
        self._on_fault = on_fault
        self.injected: list[Fault] = []
        self._rules: list[Rule] = []
        self._random = random.Random(seed)
        self._seen: Counter[str] = Counter()
        self._corrupt = corrupt or flip_a_bit
        self._deliver_right = link.deliver
        link.deliver = self._deliver

    def drop(
        self, kind: str | None = None, *, nth: int | None = None, share: float = 1.0
    ) -> FaultyLink:
        """Lose the nth frame of a kind, or a share of them (all kinds if None)."""
        return self._add(Rule(action="drop", kind=kind, nth=nth, share=share))

    def duplicate(
        self, kind: str | None = None, *, nth: int | None = None, share: float = 1.0
    ) -> FaultyLink:
        """Deliver it twice."""
        return self._add(Rule(action="duplicate", kind=kind, nth=nth, share=share))

    def delay(
        self,
        kind: str | None = None,
        *,
        by_s: float,
        nth: int | None = None,
        share: float = 1.0,
    ) -> FaultyLink:
        """Deliver it later, so that frames behind it may overtake it."""
        if not by_s > 0:
            raise ValueError(f"delay by_s is {by_s}, must be more than 0")
        return self._add(Rule(action="delay", kind=kind, nth=nth, share=share, delay_s=by_s))

    def corrupt(
        self, kind: str | None = None, *, nth: int | None = None, share: float = 1.0
    ) -> FaultyLink:
        """Flip a bit of it."""
        return self._add(Rule(action="corrupt", kind=kind, nth=nth, share=share))

    def send(self, frame: Frame, *, kind: str) -> None:
        """As `Link.send`; the fate of the frame is drawn here, in the order of sending."""
        self._seen[kind] += 1
        hits = [rule for rule in self._rules if self._hits(rule, kind)]
        if not hits:
            self.link.send(frame, kind=kind)
            return
        doomed = _Doomed(frame, hits)
        for rule in hits:
            if rule.action == "corrupt":
                doomed.frame = self._corrupt(doomed.frame, self._random)
        self.link.send(doomed, kind=kind)
        now = asyncio.get_running_loop().time()
        faults = [
            Fault(action=rule.action, kind=kind, nth=self._seen[kind], at=now) for rule in hits
        ]
        self.injected += faults
        for fault in faults:
            self._on_fault(fault)

    def _add(self, rule: Rule) -> FaultyLink:
        if rule.nth is not None and rule.nth < 1:
            raise ValueError(f"nth is {rule.nth}, the first frame is 1")
        if not 0 < rule.share <= 1:
            raise ValueError(f"share is {rule.share}, must be above 0 and at most 1")
        self._rules.append(rule)
        return self

    def _hits(self, rule: Rule, kind: str) -> bool:
        if rule.kind is not None and rule.kind != kind:
            return False
        if rule.nth is not None:
            count = self._seen[kind] if rule.kind is not None else self._seen.total()
            if count != rule.nth:
                return False
        return rule.share >= 1 or self._random.random() < rule.share

    def _deliver(self, frame: Frame) -> None:
        if not isinstance(frame, _Doomed):
            self._deliver_right(frame)
            return
        actions = [rule.action for rule in frame.rules]
        if "drop" in actions:
            return
        delay_s = sum(rule.delay_s for rule in frame.rules)
        for _ in range(1 + actions.count("duplicate")):
            if delay_s:
                loop = asyncio.get_running_loop()
                loop.call_later(delay_s, self._deliver_right, frame.frame)
            else:
                self._deliver_right(frame.frame)

    # The rest is the link's own.

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def sent(self) -> dict[str, int]:
        return self.link.sent

    @property
    def messages(self) -> dict[str, int]:
        return self.link.messages

    @property
    def busy_until(self) -> float:
        return self.link.busy_until

    def queued_nbytes(self) -> int:
        """See `Link.queued_nbytes`."""
        return self.link.queued_nbytes()

    def drain_spans(self) -> list[Span]:
        """See `Link.drain_spans`."""
        return self.link.drain_spans()

    def close(self) -> None:
        """See `Link.close`; delayed frames that are past the link still arrive."""
        self.link.close()


class _Doomed:
    """A frame on its way to a fault. Weighs what the frame weighs."""

    def __init__(self, frame: Frame, rules: list[Rule]) -> None:
        self.frame = frame
        self.rules = rules
        self.nbytes = frame_nbytes(frame)


def flip_a_bit(frame: Any, source: random.Random) -> bytes:
    """The bytes of `frame` with one bit changed."""
    if not isinstance(frame, bytes | bytearray | memoryview) and not hasattr(frame, "__bytes__"):
        raise TypeError(
            f"cannot flip a bit of a {type(frame).__name__}; "
            "give FaultyLink(corrupt=...) a function that damages such frames"
        )
    damaged = bytearray(bytes(frame))
    if damaged:
        damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
    return bytes(damaged)
