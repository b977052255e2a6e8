"""A pipeline that trains on a loader's batches: the click pipeline, fed one step at a time.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_arm -> ray_pipe.ctr_pipeline
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_pipe.calls import CallsFailed, Item, Records
from ray_pipe.ctr_pipeline import CtrPipeline
from ray_pipe.ctr_workload import CtrArm, last_of
from ray_pipe.errors import TrainingError
from ray_pipe.rec_batches import Loaded
from ray_pipe.rec_loader import Loader
from ray_pipe.recovery import Failure
from ray_pipe.shards import ShardFailure, Shards
from ray_pipe.stage_actors import StageActors
from stages.embedding.loaded import PART_BITS
from stages.optim import lr_at
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.state import StageState

KEPT_STEPS = 3
"""Of steps that have ended, as many are kept: after a failure the last one or two are run again."""


class OwnLoss:
    """A user's `function(output, label)`, the mean over samples. In an evaluation outputs are kept.

    One micro-batch is given to it as it is, so that the loss is a plain loop's to the bit; of
    several each counts by its samples.
    """

    def __init__(self, *, micro_batches: int) -> None:
        self.function: Callable[[Tensor, Tensor], Tensor] | None = None
        self._is_whole = micro_batches == 1
        self._kept: list[tuple[Tensor, Tensor]] = []

    def count(self, targets: Tensor) -> int:
        return 1 if self._is_whole else len(targets)

    def __call__(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        num = self.count(targets)
        if not torch.is_grad_enabled():
            self._kept.append((output.detach().clone(), targets.detach().clone()))
            return output.new_zeros(()), num
        assert self.function is not None
        loss = self.function(output, targets)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn(output, label) gives one number, the mean; got {what}")
        return (loss if self._is_whole else loss * num), num

    def scores(self, num: int) -> tuple[Any, Any]:
        """Outputs and labels of the last `num` samples."""
        kept, self._kept = last_of(self._kept, num), []
        sides = [[one.reshape(-1).float() for one in side] for side in zip(*kept, strict=True)]
        if not sides:
            return np.empty(0, np.float32), np.empty(0, np.float32)
        output, label = (torch.cat(side).numpy() for side in sides)
        return output, label


@dataclass(frozen=True, kw_only=True)
class LoadedArm(CtrArm):
    """Training on what a loader brings."""

    known: dict[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict, compare=False, hash=False
    )
    """Micro-batches of the steps that may be run again."""

    @property
    def loader(self) -> int:
        """Its node: behind the stages and the shards."""
        return self.topology.num_nodes - 1

    def specs(self, *, epoch_s: float = 0.0, generation: int = 0, run: str = "") -> list[StageSpec]:
        found = CtrArm.specs(self, epoch_s=epoch_s, generation=generation, run=run)
        return [
            replace(spec, loader=self.loader) if spec.index in (0, len(found) - 1) else spec
            for spec in found
        ]

    def plan(self, step: int, replica: int = 0) -> StepPlan:
        return self.plan_of(step, self.known.get(step, ()))

    def plan_of(self, step: int, micro_batches: tuple[tuple[int, ...], ...]) -> StepPlan:
        """What every stage is told about a training step."""
        optim = self.config.optim
        return StepPlan(
            step=step,
            micro_batches=micro_batches,
            schedule=self.config.pipeline.schedule,
            lr=lr_at(
                max(0, step),
                lr=optim.lr,
                warmup_steps=optim.warmup_steps,
                num_steps=self.num_steps,
                decay=optim.decay,
                min_ratio=optim.min_lr_ratio,
            ),
            deadline_s=self.deadline_s,
        )


class LoadedPipeline(CtrPipeline):
    """Stages, shards and the loader of one life of a user's pipeline.

    Batches are kept until no failure can lead back before them: a stage that takes the place of one
    that died has none, and a loader cannot be asked twice.
    """

    has_learned = False
    """Whether the stages hold more than their blocks had at the start."""

    def __init__(
        self, actors: StageActors, arm: LoadedArm, *, shards: Shards, epoch_s: float
    ) -> None:
        self._sent: dict[int, tuple[int, Sequence[Loaded]]] = {}  # by number: step, micro-batches
        self._loss: Any = None
        super().__init__(actors, arm, shards=shards, epoch_s=epoch_s)
        self.loader = Loader(
            node=arm.loader,
            topology=arm.topology,
            handles=self.handles,
            generation=self.specs[0].generation,
            seed=arm.config.seed,
        )
        self.own = arm

    @property
    def num_under_way(self) -> int:
        return len(self.queue)

    def submit(self, loaded: Sequence[Loaded], *, step: int) -> None:
        """Send a training step's batch, and have it run when its turn comes."""
        micro_batches = self._send(loaded, step=step)
        self.own.known[step] = micro_batches
        self.queue.append(Item(plan=self.own.plan_of(step, micro_batches)))
        self._launch()

    def _send(self, loaded: Sequence[Loaded], *, step: int) -> tuple[tuple[int, ...], ...]:
        micro_batches = self.loader.send(loaded, step=step)
        self._sent[_first(micro_batches)] = (step, loaded)
        return micro_batches

    def advance(self) -> Records:
        """Wait for the oldest step under way; its records, with what shards and loader sent."""
        try:
            records = self._next()
        except TrainingError:
            self.shards.raise_error()  # a stage that waits for a dead shard is not the cause
            raise
        first, *others = self._with_shards(records)
        self.has_learned = True
        for old in [step for step in self.own.known if step <= first.step - KEPT_STEPS]:
            self._sent.pop(_first(self.own.known.pop(old)), None)
        return [replace(first, sent={**first.sent, **self.loader.look()}), *others]

    def score_parts(self, loaded: Sequence[Loaded], *, step: int, part: int) -> tuple[Any, Any]:
        """Outputs and labels of some micro-batches, forward only, after a step."""
        micro_batches = self._send(loaded, step=-1)
        plan = replace(
            self.own.plan_of(step, micro_batches), schedule="forward", train=False, part=part
        )
        scores, _ = self.scored(plan)
        del self._sent[_first(micro_batches)]
        return scores

    def set_loss(self, loss: Any) -> None:
        """Another loss for the steps that are submitted from now on; none may be under way."""
        last = len(self.handles) - 1
        while True:
            self.settle()  # what is run again has the loss that it had
            try:
                self.results({self.handles[last].set_loss.remote(loss): last}, "taking a loss")
            except CallsFailed as failed:
                self._rescue(Item(plan=self.arm.plan(max(self.last_known, 0))), failed)
                continue
            self._loss = loss
            return

    def close(self) -> None:
        self.loader.close()

    # --- after a failure --------------------------------------------------------------------------

    def counted(self) -> list[Failure]:
        """Shards have a limit of their own."""
        return [one for one in self.failures if not isinstance(one, ShardFailure)]

    def load_states(self, states: Sequence[StageState]) -> None:
        super().load_states(states)
        self.has_learned = True

    def set_up(self, stages: range | tuple[int, ...], *, reborn: bool = False) -> dict[Any, int]:
        """As the first time only where nothing is lost by it."""
        if self.has_learned and not reborn:
            raise TrainingError("no black box holds what the stages have learned")
        return super().set_up(stages, reborn=reborn)

    def _rescue(self, item: Item, failed: CallsFailed) -> None:
        """New processes know neither the loss nor the batches that are under way; the others have
        let go of those that are run again."""
        super()._rescue(item, failed)
        last = len(self.handles) - 1
        if self._loss is not None:
            try:
                self.results(
                    {self.handles[last].set_loss.remote(self._loss): last}, "taking a loss"
                )
            except CallsFailed as again:
                self._rescue(item, again)
                return
        for first, (step, loaded) in self._sent.items():
            self.loader.send_again(loaded, step=step, first=first)


def _first(micro_batches: Sequence[Sequence[int]]) -> int:
    """The number of the first of them."""
    return micro_batches[0][0] >> PART_BITS
