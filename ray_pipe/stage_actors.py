"""The actors of a pipeline: started where the placement says, replaced when they die, ended."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ray_pipe.cluster import START_TIMEOUT_S, nodes
from ray_pipe.errors import ClusterError, Terminated
from ray_pipe.planner.placement import Node, Placement, move, place, spare_homes
from ray_pipe.pulse import PULSE_S
from ray_pipe.spares import Spares

CLOSE_TIMEOUT_S = 3.0
GUEST = -1
"""Stands for who is no stage of the pipeline."""

Look = Callable[[Collection[int]], Mapping[int, RayError]]
"""Of the stages that are waited for: who is lost, and why."""


def nobody_is_lost(waiting: Collection[int]) -> Mapping[int, RayError]:
    return {}


class NotIntroduced(ClusterError):
    """Actors that did not hear who the others are: `errors` says why, by stage."""

    def __init__(self, text: str, errors: dict[int, RayError]) -> None:
        super().__init__(text, errors)
        self.text = text
        self.errors = errors

    def __str__(self) -> str:
        return self.text


class StageActors:
    """The actors of one pipeline, each on its node. Leaving the block ends them.

    `placement` says where each stage is; Ray holds the places in a placement group, so that a run
    has all of them or waits.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        label: str | None = None,
        placement: Placement | None = None,
        spares: int = 0,
        spare_after_s: float = 0.0,
    ) -> None:
        """`label` names the actors on the dashboard: `ray_pipe/<label>/stage-0`. Each node gets
        `spares` warm spares, `spare_after_s` after the first call of `tend`."""
        self._label = f"{label or 'pipeline'}-{uuid.uuid4().hex[:4]}"
        self.placement = placement or place(num_stages, nodes())
        self.handles: list[Any] = []
        self.guests: dict[int, Any] = {}
        """Actors beside the stages that talk to stage 0, by their node in the topology."""

        self.may_leave_boxes = False
        """Whether they are of use to a later run, if the machine ends this one."""

        self.leaves_boxes = True
        """Whether black boxes of the stages may outlive them; known once they have ended."""

        self._num_replaced = 0
        self._num_spares = 0
        self.spares = Spares(self._start_spare, per_node=spares, after_s=spare_after_s)
        self._group = self._reserve()
        self._homes = [node.id for node in self.placement.nodes]
        """The node of each bundle of the group; a stage that moved has left its bundle behind."""

        self._bundles: dict[Any, int] = {}
        """The bundle that an actor runs in, if it runs in one."""

        try:
            for index in range(num_stages):
                handle = self._start(index, self._in_bundle(index), part="")
                self._bundles[handle] = index
                self.handles.append(handle)
            self.introduce()
        except BaseException:
            self.__exit__()
            raise

    def _reserve(self) -> Any:
        # A node's own resource costs nothing and is there even when all its CPUs are taken.
        bundles = [
            {f"node:{node.ip}": 0.001} | ({"GPU": 1.0} if self.placement.num_gpus else {})
            for node in self.placement.nodes
        ]
        group = placement_group(
            bundles,
            strategy=self.placement.strategy,
            name=f"ray_pipe/{self._label}",
            bundle_label_selector=[{"ray.io/node-id": node.id} for node in self.placement.nodes],
        )
        if not group.wait(START_TIMEOUT_S):
            remove_placement_group(group)
            where = ", ".join(dict.fromkeys(node.ip for node in self.placement.nodes))
            gpu = ", with a free GPU for each stage" if self.placement.num_gpus else ""
            raise ClusterError(
                f"no room for {len(bundles)} stages on {where}{gpu} within {START_TIMEOUT_S:.0f} s;"
                " `ray status` shows who holds what"
            )
        return group

    def _start(self, index: int, strategy: Any, *, part: str) -> Any:
        from stages.remote import remote_stage  # loads torch, which `connect` does not need

        name = f"ray_pipe/{self._label}/stage-{index}{part}"
        return remote_stage(index, name=name, num_gpus=self.placement.num_gpus, strategy=strategy)

    def _start_spare(self, node: Node) -> Any:
        from stages.remote import remote_stage
        from stages.stage_process import SPARE

        self._num_spares += 1
        name = f"ray_pipe/{self._label}/spare-{self._num_spares}"
        num_gpus = self.placement.num_gpus
        return self._settle(
            node,
            lambda home: remote_stage(SPARE, name=name, num_gpus=num_gpus, strategy=home),
        )

    def _settle(self, node: Node, start: Callable[[Any], Any]) -> Any:
        """Start an actor on a node: in a bundle there that nobody uses any more, else beside them.

        What a bundle holds is lent to no one outside it. On a node whose only GPU is that of a
        dead stage, an actor beside the bundle would wait for ever.
        """
        used = {self._bundles.get(handle) for handle in [*self.handles, *self.spares.handles]}
        for bundle, home in enumerate(self._homes):
            if home == node.id and bundle not in used:
                handle = start(self._in_bundle(bundle))
                self._bundles[handle] = bundle
                return handle
        return start(NodeAffinitySchedulingStrategy(node.id, soft=False))

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    def tend(self, warm_with: Any) -> None:
        """Between two steps: start the spares that are missing, and return at once.

        `warm_with` is the spec of any stage of the run.
        """
        if self.spares.is_due():
            self.spares.tend(spare_homes(self.placement, nodes()), warm_with)

    def introduce(self, *, look: Look = nobody_is_lost) -> None:
        """Tell every actor who the others are; returns when all have heard it.

        Raises `NotIntroduced` at the first that cannot or that `look` finds lost, or with all that
        are late.
        """
        peers = dict(enumerate(self.handles)) | self.guests
        calls = {handle.connect.remote(peers): index for index, handle in enumerate(self.handles)}
        guests = [guest.connect.remote(self.handles[0]) for guest in self.guests.values()]
        self._hear(calls | dict.fromkeys(guests, GUEST), look)

    def _hear(self, calls: dict[Any, int], look: Look) -> None:
        waiting, until_s = dict(calls), time.monotonic() + START_TIMEOUT_S
        errors: dict[int, RayError] = {}
        while waiting and not errors:
            left_s = max(0.0, until_s - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left_s, PULSE_S))
            if not ready:
                errors = dict(look(waiting.values()))
                if not errors and time.monotonic() >= until_s:
                    errors = {index: GetTimeoutError("no answer") for index in waiting.values()}
                continue
            index = waiting.pop(ready[0])
            try:
                ray.get(ready[0])
            except RayError as error:
                errors = {index: error}
        if errors:
            first = next(iter(errors.values()))
            raise NotIntroduced(
                f"{len(self.handles)} stage actors did not start within {START_TIMEOUT_S:.0f} s "
                f"({type(first).__name__}); does the cluster have room for them (`ray status`), "
                "and is ray_pipe installed on its nodes?",
                errors,
            ) from first

    def replace(self, stages: Collection[int], *, avoid: Collection[str] = ()) -> set[int]:
        """New actors for these stages, on their own node or where `placement.move` finds room.

        `avoid` holds ids of nodes that Ray may still take for alive. Call `introduce` next.
        Returns the stages that a warm spare has taken over.
        """
        warm, alive = set(), nodes()
        homes = {self.placement.nodes[stage].id for stage in stages} - {*avoid}
        silent = {node_id for node_id in homes if self.spares.are_silent(node_id)}
        if any(node.id not in {*avoid, *silent} for node in alive):
            avoid = {*avoid, *silent}
        for node_id in avoid:
            self.spares.forget(node_id)
        self.placement = move(self.placement, stages, alive, avoid=avoid)
        for stage in stages:
            ray.kill(self.handles[stage])
            self._bundles.pop(self.handles[stage], None)
        for stage in sorted(stages):
            # A spare that has not answered yet may be waiting for a GPU that is not to be had.
            home, any_spare = self.placement.nodes[stage], self.placement.num_gpus == 0
            spare = self.spares.take(home.id, loading=any_spare)
            if spare is not None:
                spare.handle.become.remote(stage)
                self.handles[stage] = spare.handle
                if spare.is_warm:
                    warm.add(stage)
                continue
            self._num_replaced += 1
            part = f"-again-{self._num_replaced}"  # the old name may be held a little longer
            start = partial(self._start, stage, part=part)
            self.handles[stage] = self._settle(home, start)
        return warm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.spares.end()
        for handle in self.handles:
            handle.abort.remote("the run has ended")
        if not (self.may_leave_boxes and any(isinstance(one, Terminated) for one in exc)):
            self._close()
        for handle in self.handles:
            ray.kill(handle)
        remove_placement_group(self._group)

    def _close(self) -> None:
        """Let the stages end: killed at once they would leave their black boxes behind."""
        calls = [handle.close.remote() for handle in self.handles]
        with contextlib.suppress(RayError):
            ready, late = ray.wait(calls, num_returns=len(calls), timeout=CLOSE_TIMEOUT_S)
            self.leaves_boxes = bool(late)
            for call in ready:
                ray.get(call)
            return
        self.leaves_boxes = True
