"""The stage's Ray face: what the driver and the other stages may call.

Path: ray_pipe.pipeline -> stages.actor -> stages.stage

The calls of a step are here; those that save, measure, or concern other replicas are in the files
that `StageActor` is made of. Frames above Ray's inline limit travel as object refs owned by this
actor. Which call runs in which thread is in `stages.remote`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.actor_probes import ProbeCalls
from stages.actor_replicas import ReplicaCalls
from stages.actor_saving import SavingCalls
from stages.courier import disclose
from stages.crowding import crowding
from stages.plan import StepPlan
from stages.record import StepRecord


class StageActor(SavingCalls, ReplicaCalls, ProbeCalls):
    """A process that can be a stage. Wrapped with `ray.remote` where it is used.

    No method may be `async`: one would make this an asyncio actor, whose calls Ray reorders.
    """

    def run_step(self, plan: StepPlan) -> StepRecord:
        """Run one step to its commit."""
        record = self._loop.submit(self.stage.run(plan)).result()
        return replace(record, crowding=crowding())

    def deliver(self, *parts: Any) -> None:
        """A frame of another stage: enqueue only. What is left of an earlier arm is dropped."""
        source, generation, frame = disclose(parts)
        if self._stage is not None and generation == self._spec.generation:
            self._loop.call_soon(self._stage.on_frame, source, frame)

    # --- the refs transport: the driver gives every order ---------------------------------
    # `after` is the token of the call before: a dependency, so that calls run in order.

    def begin_step(self, plan: StepPlan) -> None:
        """Open a step."""
        self.hand.begin(plan)

    def forward(self, micro_batch: int, frame: Any, after: Any) -> tuple[None, Any]:
        """One forward pass: (token, frame for the next stage)."""
        return None, self.hand.forward(micro_batch, frame)

    def backward(self, micro_batch: int, frame: Any, after: Any) -> tuple[None, Any]:
        """One backward pass: (token, frame for the previous stage)."""
        return None, self.hand.backward(micro_batch, frame)

    def carry(self, target: int, kind: str, frame: Any) -> Any:
        """The link: returns the frame when it has arrived."""
        return self.hand.carry(target, kind, frame)

    def squared_norms(self, after: Any) -> list[float]:
        """This stage's part of the global norm."""
        return self.hand.squared_norms()

    def finish_step(self, factor: float, norm: float, after: Any) -> StepRecord:
        """Update, commit, record."""
        return replace(self.hand.finish(factor, norm), crowding=crowding())

    # --- embeddings: stage 0 is the shards' client ----------------------------------------

    def settle_embeddings(self) -> dict[str, Any]:
        """Wait until every gradient has reached its shard; what happened so far."""
        feed = self.stage.feed
        assert feed is not None
        self._loop.submit(feed.drain()).result()
        return self._do(feed.numbers)

    def nudge(self, shard: int, node: int, actor: Any) -> None:
        """A shard has a new process: what the old one did not answer is asked again now."""
        self._peers[node] = actor
        if self._stage is not None and self._stage.feed is not None:
            self._loop.call_soon(self._stage.feed.nudge, shard)

    def scores(self, num: int) -> Any:
        """Logits and labels of the last evaluation, of so many samples, from the last stage."""
        collected: Any = self.stage.compute.loss
        return collected.scores(num)

    def set_loss(self, loss: Any) -> None:
        """Another function of output and label from the next step on, at the last stage."""
        own: Any = self.stage.compute.loss
        own.function = loss
