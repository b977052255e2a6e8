"""A replica joins while the others train: started, announced, given a donor's state, sent to work.

    start      its actors come up and become stages; nobody else notices
    announce   all leaders hear from which iteration on it takes part
    copy       the donor's stages save themselves between two steps, and go on
    take over  the newcomer becomes what they saved, and gets its first step

Where all replicas exchange in step, the others wait in that iteration until the newcomer is
there; everything slow has happened before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ray_pipe.errors import RayPipeError
from ray_pipe.failures import cause_of
from ray_pipe.same_source import refuse_other_source
from stages.sync.strategy import MemberEvent

if TYPE_CHECKING:
    from ray_pipe.replica_members import Members

HEAR_TIMEOUT_S = 60.0


class Joining:
    """One newcomer on its way; `tend` is called whenever something has happened."""

    def __init__(self, pipeline: Members, index: int) -> None:
        self._pipeline = pipeline
        self.index = index
        self.donor = min(pipeline.alive)
        self.since: int | None = None
        """The first iteration it takes part in; None before it was announced."""

        self.is_over = False
        self._next: Callable[[list[Any]], None] = self._announce
        actors, first = pipeline.actors, index * pipeline.num_stages
        actors.add(index)
        self._own = actors.of(index)
        pipeline.extend_specs(index)
        places = tuple(range(first, first + pipeline.num_stages))
        fleet = [*pipeline.alive, index]
        self.calls: list[Any] = [
            *(handle.connect.remote(dict(enumerate(self._own))) for handle in self._own),
            *(h.connect_fleet.remote(actors.fleet_of(s, fleet)) for s, h in enumerate(self._own)),
            *pipeline.set_up(places),
        ]

    def tend(self) -> None:
        """Go on to the next part if this one is done."""
        if self.since is not None and self._next == self._take_over and not self.calls:
            self._copy()
        if not self.calls:
            return
        ready, waiting = ray.wait(self.calls, num_returns=len(self.calls), timeout=0)
        if waiting and not any(_failed(ref) for ref in ready):
            return
        calls, self.calls = self.calls, []
        try:
            self._next(ray.get(calls, timeout=HEAR_TIMEOUT_S))
        except (RayError, RayPipeError) as error:
            self.give_up(str(cause_of(error)).strip().splitlines()[0])

    def give_up(self, why: str) -> None:
        """It will not come; whoever expects it is told."""
        pipeline = self._pipeline
        self.is_over = True
        pipeline.actors.end(self.index)
        pipeline.actors.dead.add(self.index)
        for track in pipeline.tracks.values():
            track.stop = None
        if self.since is not None:
            pipeline.announce("dead", self.index, 0)
        text = f"replica {self.index} could not join: {why}"
        pipeline.book.events.append(text)
        pipeline.on_event(text)

    def _announce(self, results: list[Any]) -> None:
        pipeline, actors = self._pipeline, self._pipeline.actors
        infos = results[2 * pipeline.num_stages :]
        refuse_other_source(infos)
        pipeline.note_infos(self.index, infos)
        fleet = [*pipeline.alive, self.index]
        hear = [
            handle.connect_fleet.remote(actors.fleet_of(stage, fleet))
            for replica in pipeline.alive
            for stage, handle in enumerate(actors.of(replica))
        ]
        if actors.generator is not None:
            hear.append(actors.generator.connect.remote(actors.leaders()))
        ray.get(hear, timeout=HEAR_TIMEOUT_S)
        donor = pipeline.tracks[self.donor]
        since = donor.next_step
        if pipeline.in_lockstep:  # nobody has been sent this one, so everybody hears of it first
            since = max(track.next_step for track in pipeline.tracks.values())
            since += -since % pipeline.every
        donor.stop = since
        leader = self._own[0]
        state = actors.of(self.donor)[0].strategy_state.remote()
        ray.get(leader.adopt.remote(state, since), timeout=HEAR_TIMEOUT_S)
        self.since = since
        ray.get(pipeline.announce("joined", self.index, since), timeout=HEAR_TIMEOUT_S)
        event = MemberEvent(kind="joined", replica=self.index, epoch=pipeline.epoch, since=since)
        ray.get(leader.on_member.remote(event), timeout=HEAR_TIMEOUT_S)
        self._next = self._take_over
        self._copy()

    def _copy(self) -> None:
        """Once the donor was sent all steps before; between that and the next it saves itself."""
        donor = self._pipeline.tracks[self.donor]
        if donor.next_step == self.since:
            self.calls = [h.save_state.remote() for h in self._pipeline.actors.of(self.donor)]
            donor.stop = None

    def _take_over(self, saved: list[Any]) -> None:
        self._next = self._begin
        self.calls = [
            handle.take_over.remote(state, self.since)
            for handle, state in zip(self._own, saved, strict=True)
        ]

    def _begin(self, results: list[Any]) -> None:
        assert self.since is not None
        self.is_over = True
        self._pipeline.admit(self.index, self.since, self.donor)


def _failed(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except RayError:
        return True
    return False
