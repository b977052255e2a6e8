"""Who takes part: the replicas of one arm as actors, those who die and those who come.

A replica of which a stage fails is ended as a whole and the others are told: they hold the same
parameters, so no black box is needed (decision 21). One may join while training goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from ray_pipe.calls import Item, lend
from ray_pipe.failures import name_failure, to_error
from ray_pipe.fleet_book import FleetBook
from ray_pipe.joining import Joining
from ray_pipe.pipeline import Pipeline
from ray_pipe.plans import Arm
from ray_pipe.pulse import Pulse
from ray_pipe.recovery import Failure, replica_verdict
from ray_pipe.replica_actors import ReplicaActors
from ray_pipe.replica_plans import shares_work
from ray_pipe.replica_watch import ReplicaWatch
from stages.state import StageState
from stages.sync.strategy import MemberEvent

LOCKSTEP = ("allreduce", "quantized-adam", "local")
"""Strategies in which all replicas change members at the same iteration."""

HEAR_TIMEOUT_S = 60.0
GENERATOR_PATIENCE_S = 5.0


@dataclass(kw_only=True)
class Track:
    """One replica as the driver sees it."""

    index: int
    next_step: int = 0
    """The first that it was not sent."""

    num_done: int = 0
    flight: deque[Item] = field(default_factory=deque)
    """Steps that it was sent, in order."""

    since: int = 0
    """The first step that it takes part in."""

    has_left: bool = False

    stop: int | None = None
    """Sends wait before this step: a newcomer is about to copy this replica."""


class Members(Pipeline):
    """All replicas of one arm; `handles` and `specs` are of all stages, replica by replica."""

    actors: ReplicaActors

    def __init__(
        self,
        actors: ReplicaActors,
        arm: Arm,
        *,
        epoch_s: float,
        failures: list[Failure] | None = None,
    ) -> None:
        assert arm.fleet is not None
        self.fleet = arm.fleet
        self.num_stages = actors.num_stages
        self.epoch = 0
        self.dead: set[int] = set()
        self.tracks = {index: Track(index=index) for index in self.fleet.members}
        self.book = FleetBook(strategy=self.fleet.sync.name)
        self.on_event: Callable[[str], None] = lambda text: None
        self.can_train_on = self.fleet.sync.name in LOCKSTEP
        self._by_work = shares_work(self.fleet.sync)
        self._asked: Any = None
        self.in_lockstep = self.can_train_on or (
            self.fleet.sync.name == "ripples" and self.fleet.sync.groups != "smart"
        )
        """Whether all replicas must change members at the same iteration."""

        sync = self.fleet.sync
        self.every = sync.local_steps if sync.name in ("local", "ripples", "ad-psgd") else 1
        self.joining: list[Joining] = []
        self._revive(actors)
        super().__init__(actors, arm, epoch_s=epoch_s, failures=failures)
        self.watch = ReplicaWatch(self.handles, self._pulse, crowding=self.crowding)
        self._start_generator()

    @property
    def num_replicas(self) -> int:
        return len(self.handles) // self.num_stages

    @property
    def alive(self) -> list[int]:
        return sorted(self.tracks)

    def _pulse(self) -> Pulse:
        return Pulse(self.handles, self.infos, doing="in a step", crowding=self.crowding)

    def set_up(self, stages: range | tuple[int, ...], *, reborn: bool = False) -> dict[Any, int]:
        """Calls that make these actors stages of this arm."""
        ends = (0, self.num_stages - 1)
        return {
            self.handles[index].setup.remote(
                self.spec_of(index),
                [self._samples] if index % self.num_stages in ends else None,
                self.transport,
                reborn,
            ): index
            for index in stages
        }

    def _revive(self, actors: ReplicaActors) -> None:
        """Replicas that died in an earlier arm begin this one with the others."""
        for replica in sorted(actors.dead):
            actors.add(replica)
        if actors.dead:
            actors.dead.clear()
            actors.introduce()

    def _start_generator(self) -> None:
        sync = self.fleet.sync
        if self.actors.generator is not None:
            ray.kill(self.actors.generator)
            self.actors.generator = None
        if sync.name == "ripples" and sync.groups == "smart":
            from stages.sync.generator_actor import remote_generator

            self.actors.generator = remote_generator(
                self.fleet,
                self.arm.topology,
                num_stages=self.num_stages,
                generation=self.specs[0].generation,
                leaders=self.actors.leaders(),
                name=self.actors.name_of(f"group-generator-{self.specs[0].generation}"),
            )
            ray.get(self.actors.generator.stats.remote(), timeout=HEAR_TIMEOUT_S)
        self.actors.introduce(but=self.dead)

    # --- who comes and goes ---------------------------------------------------------------------

    def lose(self, replica: int, errors: dict[int, BaseException]) -> None:
        """End what is left of a replica and tell the others; raises if the run must end here."""
        track = self.tracks[replica]
        step = track.flight[0].plan.step if track.flight else track.num_done
        infos = self.infos[replica * self.num_stages :][: self.num_stages]
        failure = name_failure(errors, step=step, infos=infos, arm=self.arm.name)
        failure = replace(failure, replica=replica, num_left=len(self.tracks) - 1)
        limit = self.arm.config.faults.max_failures
        why = replica_verdict(failure, self.failures, max_failures=limit)
        if why:
            self.failures.append(replace(failure, num_left=0))
            raise to_error(failure, doing=f"in step {step} of replica {replica}", hint=why)
        self._drop(replica)
        self.failures.append(failure)
        self.book.died(replica, str(failure))
        self.on_failure(failure)
        for newcomer in [one for one in self.joining if one.donor == replica]:
            newcomer.give_up(f"replica {replica}, whose state it was to take over, died")
            self.joining.remove(newcomer)
        if self.arm.config.sync.rejoin:
            self.join(replica)

    def _drop(self, replica: int) -> None:
        """A replica takes part no longer."""
        del self.tracks[replica]
        self.dead.add(replica)
        self.actors.dead.add(replica)
        self.actors.end(replica)
        self.watch.changed()
        self.announce("dead", replica, 0)

    def announce(self, kind: Any, replica: int, since: int) -> list[Any]:
        """Tell all leaders and the Group Generator who came or went; their answers."""
        self.epoch += 1
        event = MemberEvent(kind=kind, replica=replica, epoch=self.epoch, since=since)
        heard = [self.actors.of(other)[0].on_member.remote(event) for other in self.alive]
        if self.actors.generator is not None:
            heard.append(self.actors.generator.on_member.remote(event))
        return heard

    def join(self, replica: int | None = None) -> int:
        """Have a new replica take part, or one that died again, while the others train; its index.

        Its state is another one's, copied between two steps; its samples are those of the one that
        died, or shared with one of the first replicas.
        """
        if replica is None:
            waiting = {one.index for one in self.joining}
            free = sorted(self.dead - waiting)
            replica = free[0] if free else max(self.num_replicas, *(i + 1 for i in waiting or {0}))
        newcomer = Joining(self, replica)
        self.joining.append(newcomer)
        return replica

    def admit(self, replica: int, since: int, donor: int) -> None:
        """A newcomer has its donor's state and gets its first step next."""
        self.tracks[replica] = Track(index=replica, next_step=since, num_done=since, since=since)
        self.dead.discard(replica)
        self.actors.dead.discard(replica)
        self.watch.changed()
        text = f"replica {replica} joined before step {since} with the state of replica {donor}"
        self.book.came(replica, since, text)
        self.on_event(text)

    def extend_specs(self, replica: int) -> None:
        """What a newcomer's stages need to know."""
        old = self.specs[0]
        own = self.arm.replica_specs(replica, epoch_s=old.epoch_s, generation=old.generation)
        first = replica * self.num_stages
        self.specs[first : first + self.num_stages] = own

    def note_infos(self, replica: int, infos: list[dict[str, Any]]) -> None:
        """Who a newcomer's stages are."""
        first = replica * self.num_stages
        self.infos[first : first + self.num_stages] = infos
        for info, handle in zip(infos, self.actors.of(replica), strict=True):
            info["actor"] = handle._actor_id.hex()

    def _tend(self) -> None:
        for newcomer in self.joining:
            newcomer.tend()
        self.joining = [newcomer for newcomer in self.joining if not newcomer.is_over]

    def _ask_generator(self, *, wait: bool = False) -> None:
        """Have the Group Generator's counters, without waiting for them unless asked to."""
        generator = self.actors.generator
        if generator is None:
            return
        if self._asked is None:
            self._asked = generator.stats.remote()
        ready, _ = ray.wait([self._asked], timeout=GENERATOR_PATIENCE_S if wait else 0)
        if not ready:
            return
        try:
            stats = ray.get(self._asked)
        except RayError:  # it is being restarted
            self._asked = None
            return
        self._asked = None
        if self.book.heard_generator(stats):
            generator.connect.remote(self.actors.leaders())
            self.on_event(self.book.events[-1])

    # --- what they hold -------------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        """The mean of the replicas' weights, stage by stage, with the first one's optimizer."""
        self.settle()
        calls = {
            handle.state_dict.remote(): replica * self.num_stages + stage
            for replica in self.alive
            for stage, handle in enumerate(self.actors.of(replica))
        }
        states = self.gather(calls, doing="telling its weights")
        by_stage = [states[stage :: self.num_stages] for stage in range(self.num_stages)]
        return [{**own[0], "module": _mean([s["module"] for s in own])} for own in by_stage]

    def load_states(self, states: Sequence[StageState]) -> None:
        """Make each stage what it was; every replica goes on after its own last step."""
        calls: dict[Any, int] = {}
        found: dict[int, int] = {}
        for position, state in enumerate(states):
            sync = state.notes["sync"]
            replica = int(sync["replica"])
            if replica not in self.tracks:  # one that had joined beyond those asked for
                continue
            found[replica] = state.step + 1
            place = replica * self.num_stages + position % self.num_stages
            calls[self.handles[place].load_state.remote(lend(state.to_bytes()))] = place
            if "strategy" in sync and self.fleet.sync.name != "ripples":
                self.epoch = max(self.epoch, int(sync["strategy"]["epoch"]))
        self.gather(calls, doing="loading its state", patience_s=self.patience_s())
        for replica, step in found.items():
            track = self.tracks[replica]
            track.next_step = track.num_done = step
            self.book.iterations[replica] = step
        for replica in sorted(self.tracks.keys() - found.keys()):
            self._drop(replica)
            self.book.iterations[replica] = 0
            self.book.died(replica, f"replica {replica} had died before the checkpoint")
            if self.arm.config.sync.rejoin:
                self.join(replica)


def _mean(modules: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of equal tensors is that tensor, to the bit."""
    first = modules[0]
    return {
        name: tensor
        if not tensor.is_floating_point()
        or all(bool((other[name] == tensor).all()) for other in modules[1:])
        else sum(other[name] for other in modules) / len(modules)
        for name, tensor in first.items()
    }
