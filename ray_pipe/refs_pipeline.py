"""The dull twin of the pipeline: the driver orders each pass and hands the frames on.

Every forward and backward pass is a call of its own and every frame an object ref, so that Ray's
timeline shows them; both transports train to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray_pipe.calls import Item
from ray_pipe.pipeline import Pipeline
from stages.optim import clip_factor
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.schedule import Action, actions_of


class RefsPipeline(Pipeline):
    """One step at a time, driven from here."""

    transport = "refs"

    def _launch(self) -> None:
        """Nothing runs ahead: each call is given when its turn comes."""

    def finish(self, item: Item) -> None:
        """Every pass of one step, then norm, clip, update."""
        if len(item.results) < len(self.handles):  # else it is done: black boxes had its records
            item.results |= self._run_step(item)
        item.calls = {}
        self.tell_sent(item)

    def _run_step(self, item: Item) -> dict[int, StepRecord]:
        plan, num_stages = self.current(item.plan), len(self.handles)
        doing = f"in step {plan.step}"
        token: list[Any] = [handle.begin_step.remote(plan) for handle in self.handles]
        item.calls = dict(zip(token, range(num_stages)))  # who must be heard out after a failure
        frames: dict[tuple[int, Action], Any] = {}
        for stage, action in _in_order(plan, num_stages):
            handle = self.handles[stage]
            method = handle.forward if action.kind == "F" else handle.backward
            frame = frames.pop((stage, action), None)
            name = f"{action} s{stage}"
            token[stage], out = method.options(num_returns=2, name=name).remote(
                action.micro_batch, frame, token[stage]
            )
            item.calls[token[stage]] = stage
            target = stage + 1 if action.kind == "F" else stage - 1
            if 0 <= target < num_stages:
                kind = "activation" if action.kind == "F" else "gradient"
                carry = handle.carry.options(name=f"{action} {stage}->{target}")
                frames[target, action] = carry.remote(target, kind, out)
                item.calls[frames[target, action]] = stage
        factor, norm = 1.0, 0.0
        if plan.train:
            calls = {
                handle.squared_norms.remote(token[index]): index
                for index, handle in enumerate(self.handles)
            }
            item.calls |= calls
            squares = [square for own in self.results(calls, doing).values() for square in own]
            norm, factor = clip_factor(squares, clip=self.arm.config.optim.clip)
        ends = {
            handle.finish_step.remote(factor, norm, token[i]): i
            for i, handle in enumerate(self.handles)
        }
        item.calls |= ends
        return self.results(ends, doing)


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
