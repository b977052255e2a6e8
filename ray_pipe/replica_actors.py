"""The actors of several replicas: named by replica and stage, introduced to those they write to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_pipe.planner.placement import Placement
from ray_pipe.stage_actors import GUEST, Look, StageActors, nobody_is_lost
from stages.sync.post import GENERATOR


class ReplicaActors(StageActors):
    """Stage s of replica r is handle `r * num_stages + s`."""

    def __init__(
        self,
        num_replicas: int,
        num_stages: int,
        *,
        label: str | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.num_stages = num_stages
        self._names: dict[int, str] = {}
        self.generator: Any = None
        self.dead: set[int] = set()
        """Replicas that were ended and have no actors."""

        super().__init__(num_replicas * num_stages, label=label, placement=placement)

    @property
    def num_replicas(self) -> int:
        """All that there ever were."""
        return len(self.handles) // self.num_stages

    def of(self, replica: int) -> list[Any]:
        """The actors of a replica, in order of stages."""
        first = replica * self.num_stages
        return self.handles[first : first + self.num_stages]

    def leaders(self) -> dict[int, str]:
        """Names of stage 0 of each replica."""
        return {r: self._names[r * self.num_stages] for r in range(self.num_replicas)}

    def name_of(self, what: str) -> str:
        """A name in the dashboard's list of actors."""
        return f"ray_pipe/{self._label}/{what}"

    def _start(self, index: int, strategy: Any, *, part: str) -> Any:
        from stages.remote import remote_stage  # loads torch, which `connect` does not need

        replica, stage = divmod(index, self.num_stages)
        self._names[index] = self.name_of(f"replica-{replica}/stage-{stage}{part}")
        return remote_stage(
            stage,
            name=self._names[index],
            num_gpus=self.placement.num_gpus,
            strategy=strategy,
            replica=replica,
        )

    def introduce(self, *, but: Collection[int] = (), look: Look = nobody_is_lost) -> None:
        """Tell every actor who its neighbours are, and who the same stage of other replicas is;
        returns when all have heard it. `but` are replicas that are dead."""
        calls = []
        alive = [replica for replica in range(self.num_replicas) if replica not in but]
        for replica in alive:
            own = self.of(replica)
            calls += [handle.connect.remote(dict(enumerate(own))) for handle in own]
            calls += [
                handle.connect_fleet.remote(self.fleet_of(stage, alive))
                for stage, handle in enumerate(own)
            ]
        self._hear(dict.fromkeys(calls, GUEST), look)

    def fleet_of(self, stage: int, alive: Collection[int]) -> dict[int, Any]:
        """Whom a stage may write to."""
        fleet = {replica: self.of(replica)[stage] for replica in alive}
        return fleet if self.generator is None else {**fleet, GENERATOR: self.generator}

    def add(self, replica: int) -> None:
        """New actors for a replica: one that died, or the next after the last."""
        first = replica * self.num_stages
        places = range(first, first + self.num_stages)
        if first < len(self.handles):
            self.replace(list(places))
            return
        for place in places:
            # Beside the actor that it takes over from in all likelihood.
            home = self.placement.nodes[place % len(self.placement.nodes)]
            strategy = NodeAffinitySchedulingStrategy(home.id, soft=True)
            self.handles.append(self._start(place, strategy, part=""))

    def end(self, replica: int) -> None:
        """Kill what is left of a replica."""
        for handle in self.of(replica):
            ray.kill(handle)

    def __exit__(self, *exc: object) -> None:
        if self.generator is not None:
            ray.kill(self.generator)
            self.generator = None
        super().__exit__(*exc)
