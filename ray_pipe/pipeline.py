"""A pipeline of stage actors: give it an arm, get the records of each step.

Path: ray_pipe.driver -> ray_pipe.pipeline -> stages.actor

`push` ships each stage one plan a step, a step ahead, so that the driver's distance never sits in
the critical path. `refs` is its dull twin: the driver orders every pass and hands frames on as
object refs. Both train to the same bits. The driver watches every call; on the first failure it
aborts the survivors, hears them out, and says who failed and why.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from compressors import kernels
from ray_pipe.checkpoint_files import stage_file
from ray_pipe.cluster import StageActors
from ray_pipe.errors import ClusterError, StageDied, TrainingError
from ray_pipe.plans import Arm
from stages.digest import source_digest
from stages.optim import clip_factor
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.schedule import Action, actions_of
from stages.stage import StageAborted
from stages.state import StageState

AHEAD = 2
"""Steps in flight: the running one and the next."""

ABORT_TIMEOUT_S = 3.0
PATIENCE_S = 600.0
PATIENCE_DEADLINES = 20
_generations = itertools.count(1)
Records = list[StepRecord]


class Pipeline:
    """The stages of one arm, ready to train, stages pushing to each other."""

    transport = "push"

    def __init__(self, actors: StageActors, arm: Arm, *, epoch_s: float) -> None:
        self.arm = arm
        self.handles = actors.handles
        self._running: deque[tuple[int, dict[Any, int]]] = deque()
        self.on_sent: Callable[[int], None] | None = None
        """Told each step once it was sent to the stages: what is sent next comes after it."""

        samples = ray.put(arm.workload.samples)
        last = len(self.handles) - 1
        specs = arm.specs(epoch_s=epoch_s, generation=next(_generations))
        calls = {
            handle.setup.remote(
                spec, samples if spec.index in (0, last) else None, self.transport
            ): spec.index
            for handle, spec in zip(self.handles, specs, strict=True)
        }
        self.infos: list[dict[str, Any]] = self.gather(calls, doing="being set up")
        refuse_other_source(self.infos)

    def train(self, steps: range | None = None) -> Generator[Records, None, None]:
        """Run the arm's steps (or some more); yields the records of each step, in order.

        Whoever stops early calls `settle`, because a step may be in flight.
        """
        for step in range(self.arm.num_steps) if steps is None else steps:
            self._running.append((step, self._start(self.arm.plan(step))))
            if self.on_sent is not None:
                self.on_sent(step)
            if len(self._running) == AHEAD:
                yield self._collect(*self._running.popleft())
        while self._running:
            yield self._collect(*self._running.popleft())

    def settle(self) -> None:
        """Let the steps that are in flight end."""
        while self._running:
            self._collect(*self._running.popleft())

    def evaluate(self, plan: StepPlan) -> Records:
        """Forward passes only, uncompressed; nothing that training remembers is touched."""
        return self._collect(plan.step, self._start(plan))

    def state_dicts(self) -> list[dict[str, Any]]:
        """Weights and optimizer of each stage."""
        calls = {handle.state_dict.remote(): i for i, handle in enumerate(self.handles)}
        return self.gather(calls, doing="telling its weights")

    def load_states(self, states: Sequence[StageState]) -> None:
        """Make each stage what it was; between steps."""
        calls = {
            handle.load_state.remote(np.frombuffer(state.to_bytes(), dtype=np.uint8)): index
            for index, (handle, state) in enumerate(zip(self.handles, states, strict=True))
        }
        self.gather(calls, doing="loading its state")

    def see(self, folder: str, name: str, token: bytes) -> bool:
        """Whether all stages see a file of the driver: then they write to that folder too."""
        calls = {
            handle.sees.remote(folder, name, token): index
            for index, handle in enumerate(self.handles)
        }
        return all(self.gather(calls, doing="looking for the checkpoints' folder"))

    def start_save(self, key: str, folder: str | None) -> dict[Any, int]:
        """Have every stage copy its state after the steps sent so far, then write it beside
        the next ones; without a folder it sends its bytes."""
        return {
            handle.write_kept.remote(
                handle.keep_state.remote(key), folder, stage_file(index)
            ): index
            for index, handle in enumerate(self.handles)
        }

    def saved(self, calls: dict[Any, int], *, wait: bool) -> list[Any] | None:
        """What each stage wrote, an exception for one that could not; None while some write."""
        refs = sorted(calls, key=lambda ref: calls[ref])
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=PATIENCE_S if wait else 0)
        if len(ready) < len(refs) and not wait:
            return None
        results: list[Any] = []
        for ref in refs:
            try:
                results.append(ray.get(ref, timeout=0))
            except RayError as error:
                results.append(_cause(error))
        return results

    def _start(self, plan: StepPlan) -> dict[Any, int]:
        name = f"{self.arm.name} {'step' if plan.train else 'evaluation'}"  # on the dashboard
        return {
            handle.run_step.options(name=name).remote(plan): index
            for index, handle in enumerate(self.handles)
        }

    def _collect(self, step: int, calls: dict[Any, int]) -> Records:
        return self.gather(calls, doing=f"in step {step}", step=step)

    def gather(self, calls: dict[Any, int], *, doing: str, step: int = 0) -> list[Any]:
        """The results of one call to each stage, in stage order; raises the first failure.

        A stage that waits for another gives up by itself after its deadline; this one is longer,
        for a stage that hangs in its own work.
        """
        timeout_s = max(PATIENCE_S, PATIENCE_DEADLINES * self.arm.deadline_s)
        results: dict[int, Any] = {}
        waiting = dict(calls)
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
            if not ready:
                raise TrainingError(
                    f"stages {sorted(waiting.values())} did not answer for {timeout_s:.0f} s "
                    f"{doing}; their logs are in Ray's session folder, and `deadline_s` can be "
                    "raised if they are that slow"
                )
            index = waiting.pop(ready[0])
            try:
                results[index] = ray.get(ready[0])
            except RayError as error:
                raise self._failure(step, {index: error}, waiting, doing) from error
        return [results[index] for index in sorted(results)]

    def _failure(
        self, step: int, errors: dict[int, RayError], waiting: dict[Any, int], doing: str
    ) -> TrainingError:
        first = next(iter(errors))
        for handle in self.handles:
            handle.abort.remote(f"stage {first} failed {doing}")
        if waiting:
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=ABORT_TIMEOUT_S)
            for ref in ready:
                try:
                    ray.get(ref)
                except RayError as error:
                    errors[waiting[ref]] = error
        return name_failure(step, errors, doing)


class RefsPipeline(Pipeline):
    """The dull twin: the driver orders each pass and passes the frames on."""

    transport = "refs"

    def train(self, steps: range | None = None) -> Generator[Records, None, None]:
        for step in range(self.arm.num_steps) if steps is None else steps:
            records = self.run_step(self.arm.plan(step))
            if self.on_sent is not None:
                self.on_sent(step)
            yield records

    def evaluate(self, plan: StepPlan) -> Records:
        return self.run_step(plan)

    def run_step(self, plan: StepPlan) -> Records:
        """Every pass of one step, then norm, clip, update."""
        num_stages = len(self.handles)
        token: list[Any] = [handle.begin_step.remote(plan) for handle in self.handles]
        frames: dict[tuple[int, Action], Any] = {}
        for stage, action in _in_order(plan, num_stages):
            handle = self.handles[stage]
            method = handle.forward if action.kind == "F" else handle.backward
            frame = frames.pop((stage, action), None)
            name = f"{action} s{stage}"
            token[stage], out = method.options(num_returns=2, name=name).remote(
                action.micro_batch, frame, token[stage]
            )
            target = stage + 1 if action.kind == "F" else stage - 1
            if 0 <= target < num_stages:
                kind = "activation" if action.kind == "F" else "gradient"
                carry = handle.carry.options(name=f"{action} {stage}->{target}")
                frames[target, action] = carry.remote(target, kind, out)
        factor, norm = 1.0, 0.0
        if plan.train:
            calls = {
                handle.squared_norms.remote(token[index]): index
                for index, handle in enumerate(self.handles)
            }
            parts = self.gather(calls, doing=f"in step {plan.step}", step=plan.step)
            squares = [square for own in parts for square in own]
            norm, factor = clip_factor(squares, clip=self.arm.config.optim.clip)
        ends = {
            handle.finish_step.remote(factor, norm, token[i]): i
            for i, handle in enumerate(self.handles)
        }
        return self._collect(plan.step, ends)


def _in_order(plan: StepPlan, num_stages: int) -> Iterator[tuple[int, Action]]:
    """All actions of a step, each after what it needs: an order in which calls can be given."""
    rows = [
        actions_of(
            plan.schedule,
            stage=stage,
            num_stages=num_stages,
            num_micro_batches=len(plan.micro_batches),
        )
        for stage in range(num_stages)
    ]
    done: set[tuple[int, Action]] = set()
    cursor = [0] * num_stages
    while any(cursor[stage] < len(row) for stage, row in enumerate(rows)):
        for stage, row in enumerate(rows):
            if cursor[stage] == len(row):
                continue
            action = row[cursor[stage]]
            source = stage - 1 if action.kind == "F" else stage + 1
            if 0 <= source < num_stages and (source, action) not in done:
                continue
            done.add((stage, action))
            cursor[stage] += 1
            yield stage, action


TRANSPORTS: dict[str, type[Pipeline]] = {"push": Pipeline, "refs": RefsPipeline}


def refuse_other_source(infos: list[dict[str, Any]]) -> None:
    """Every worker must run the driver's code and the same core, or bits would differ."""
    own, core = source_digest(), kernels.core()
    strangers = [(index, info) for index, info in enumerate(infos) if info["source"] != own]
    if strangers:
        raise ClusterError(
            f"{_where(strangers, 'source')} run other source than the driver (digest {own} here); "
            "install the same version of ray_pipe on every node and start the job again; "
            "`python -m ray_pipe.doctor --address auto` shows every node's version"
        )
    slow = [(index, info) for index, info in enumerate(infos) if info["core"] != core]
    if slow:
        raise ClusterError(
            f"{_where(slow, 'core')} run another core than the driver ({core} here); install the "
            "same wheel everywhere, or set RAY_PIPE_CORE=torch on all nodes"
        )


def _where(infos: list[tuple[int, dict[str, Any]]], key: str) -> str:
    """`stage 1 on node 10.0.0.11 (digest 0af3), stage 2 ...`."""
    listed: Any = ray.nodes  # untyped in ray
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in listed()}
    what = "digest " if key == "source" else ""
    return ", ".join(
        f"stage {index} on node {nodes.get(info['node'], str(info['node'])[:8])} "
        f"({what}{info[key]})"
        for index, info in infos
    )


def name_failure(step: int, errors: dict[int, RayError], doing: str) -> TrainingError:
    """The root of several failures: a death before an error, an error before an abort."""

    def rank(item: tuple[int, RayError]) -> int:
        if isinstance(item[1], RayActorError):
            return 0
        return 2 if isinstance(_cause(item[1]), StageAborted) else 1

    index, error = min(errors.items(), key=rank)
    if isinstance(error, RayActorError):
        return StageDied(index, step, _death(error))
    cause = _cause(error)
    return TrainingError(f"stage {index} failed {doing}: {type(cause).__name__}: {cause}")


def _cause(error: RayError) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error


def _death(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    if "unexpectedly" in text or "SYSTEM_ERROR" in text:
        return "its process ended unexpectedly (killed from outside, crashed, or out of memory)"
    return text[:300]
