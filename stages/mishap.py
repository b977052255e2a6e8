"""Faults on purpose, for tests: a stage that ends itself at a named place, links that misbehave.

Part of a `StageSpec`, so that the fault happens inside the stage's own process, at the same
action of the same step in every run. A spec without them costs nothing.

    recv F2   before waiting for the activation of micro-batch 2 (recv B2: for its gradient)
    F2, B2    before the forward or backward pass     send F2, send B2   before encoding
    norm      before the norm is computed             prepared           the norms are sent
    update    before the weights change               commit             before rows are permanent
    committed after both                              box rows, box arrays, box mark, box kept
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from netsim.faults import Fault, FaultyLink
from netsim.link import Link, LinkLike
from stages.plan import StepPlan

Deed = Literal["kill", "stop", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """What happens to a stage, once."""

    point: str
    """A place of the list above."""

    step: int
    deed: Deed = "kill"
    attempt: int = 0
    """Only in this attempt: the replay passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """What happens to frames from this stage to another; see `netsim.faults`."""

    target: int
    action: Literal["drop", "duplicate", "delay", "corrupt"]
    kind: str | None = None
    nth: int | None = None
    share: float = 1.0
    by_s: float = 0.0


class Mischief(RuntimeError):
    """Raised by a mishap whose deed is to raise."""


def commit_deed(deed: Deed) -> None:
    """Do to the own process what the mishap says."""
    if deed == "raise":
        raise Mischief("a test said so")
    os.kill(os.getpid(), signal.SIGKILL if deed == "kill" else signal.SIGSTOP)


class Mishaps:
    """Watches the points that a stage passes, and strikes."""

    def __init__(
        self, mishaps: tuple[Mishap, ...], *, strike: Callable[[Deed], None] = commit_deed
    ) -> None:
        self._waiting = list(mishaps)
        self._strike = strike
        self._attempts: dict[int, int] = {}  # the latest, by step

    def on_point(self, point: str, plan: StepPlan) -> None:
        """`Stage.on_point`."""
        self._attempts[plan.step] = plan.attempt
        self._look(point, plan.step)

    def on_write(self, part: str, step: int) -> None:
        """`BlackBox.on_write`: a box is written behind the step that it belongs to, when the next
        one may have begun."""
        self._look(f"box {part}", step)

    def _look(self, point: str, step: int) -> None:
        now = (point, step, self._attempts.get(step))
        for mishap in self._waiting:
            if (mishap.point, mishap.step, mishap.attempt) == now:
                self._waiting.remove(mishap)
                self._strike(mishap.deed)
                return


INJECTED = "injected on purpose"


def faulty_links(
    faults: tuple[LinkFault, ...], *, seed: int, note: Callable[[str], None]
) -> Callable[[Link], LinkLike]:
    """What puts the faults around a stage's links, told apart by their names.

    `note` is given a line for each fault that is injected: a test without a fault tests nothing.
    """

    def wrap(link: Link) -> LinkLike:
        own = [fault for fault in faults if link.name.endswith(f"->{fault.target}")]
        if not own:
            return link

        def tell(fault: Fault) -> None:
            note(f"{INJECTED}: {fault.action} of {fault.kind} {fault.nth} on {link.name}")

        faulty = FaultyLink(link, seed=seed, on_fault=tell)
        for fault in own:
            options: dict[str, Any] = {"nth": fault.nth, "share": fault.share}
            if fault.action == "delay":
                options["by_s"] = fault.by_s
            getattr(faulty, fault.action)(fault.kind, **options)
        return faulty

    return wrap
