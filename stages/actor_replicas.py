"""Calls of a stage's actor that concern the other replicas.

Path: stages.actor -> stages.actor_replicas -> stages.sync.seat
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.stage_process import StageProcess
from stages.state import StageState, as_newcomer
from stages.state_tree import from_tree
from stages.sync.seat import Seat
from stages.sync.strategy import MemberEvent


class ReplicaCalls(StageProcess):
    """Letters of other replicas, and who they are."""

    def connect_fleet(self, fleet: dict[int, Any]) -> None:
        """Learn the same stage's actors of the other replicas, and the Group Generator."""
        self._fleet = fleet

    def deliver_letter(self, generation: int, frame: Any) -> None:
        """A letter of another replica, or of the Group Generator: enqueue only."""
        if self._stage is not None and generation == self._spec.generation:
            self._loop.call_soon(self._seat.on_frame, frame)

    def on_member(self, event: MemberEvent) -> None:
        """A replica came or went."""
        self._do(self.seat.on_member, event)

    def leave(self) -> None:
        """There are no more steps for this replica; it still answers others."""
        self._do(self.seat.leave)

    def strategy_state(self) -> dict[str, Any]:
        """What a newcomer adopts."""
        return self._do(self.seat.strategy_state)

    def adopt(self, state: dict[str, Any], k: int) -> None:
        """Join: others may write from now on; the first iteration will be `k`."""
        self._do(self.seat.adopt, state, k)

    def take_over(self, saved: Any, k: int) -> None:
        """Become what a donor saved, before its iteration `k`."""
        state = StageState.from_bytes(np.asarray(saved).tobytes())
        self._loop.submit(self.stage.load_state(as_newcomer(state))).result()
        sync = from_tree(state.notes["sync"], state.arrays)
        self._do(self.seat.take_over, sync, k)

    @property
    def seat(self) -> Seat:
        assert self._stage is not None
        assert self._spec.fleet is not None
        return self._seat
