"""A pipeline whose first stage gets its input from embedding shards.

Path: ray_pipe.ctr_run -> ray_pipe.ctr_pipeline -> ray_pipe.pipeline
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from ray_pipe.calls import CallsFailed, Item, Records
from ray_pipe.checkpoint_files import Checkpoint, CheckpointError, shard_file
from ray_pipe.ctr_metrics import ScoreCounts
from ray_pipe.ctr_workload import CtrArm
from ray_pipe.deadlines import transfer_s
from ray_pipe.errors import TrainingError
from ray_pipe.pipeline import Pipeline
from ray_pipe.recovery import Failure
from ray_pipe.saving import Save
from ray_pipe.shards import Shards
from ray_pipe.stage_actors import StageActors
from stages.box_places import BRIEF
from stages.embedding.shard_folders import saved_shards
from stages.plan import StepPlan

SEE_S = 60.0


class CtrPipeline(Pipeline):
    """Dense stages in step, rows on shards that are not."""

    box_prefix = BRIEF  # they lack the shards' rows: after the driver's death there is a checkpoint

    def __init__(
        self,
        actors: StageActors,
        arm: CtrArm,
        *,
        shards: Shards,
        epoch_s: float,
        failures: list[Failure] | None = None,
    ) -> None:
        self.shards = shards
        self.shard_infos: list[Any] = []
        self._num_excused = 0
        super().__init__(actors, arm, epoch_s=epoch_s, failures=failures)
        shards.arm = arm.name
        shards.on_replaced = self._on_replaced

    def set_up(self, stages: range | tuple[int, ...], *, reborn: bool = False) -> dict[Any, int]:
        """Shards first, once; a dense failure leaves the rows as they are."""
        if not self.shard_infos:
            embedding = self.specs[0].embedding
            assert embedding is not None
            self.shard_infos = self.shards.set_up(
                embedding, topology=self.arm.topology, generation=self.specs[0].generation
            )
            self.actors.guests = self.shards.nodes_of_topology()
            self.actors.introduce()
        return super().set_up(stages, reborn=reborn)

    def train(self, steps: range | None = None) -> Generator[Records, None, None]:
        """Steps with what the shards sent meanwhile, on the books of stage 0."""
        try:
            for records in super().train(steps):
                yield self._with_shards(records)
        except TrainingError:
            self.shards.raise_error()  # a stage that waits for a dead shard is not the cause
            raise

    def settle_embeddings(self) -> dict[str, Any]:
        """Wait for the gradients that are on their way; stage 0's counts so far."""
        while True:
            self.settle()
            call = {self.handles[0].settle_embeddings.remote(): 0}
            try:
                numbers: dict[str, Any] = self.results(call, "waiting for its gradients")[0]
            except CallsFailed as failed:
                self._rescue(Item(plan=self.arm.plan(max(self.last_known, 0))), failed)
                continue
            return numbers

    def score(self, step: int) -> tuple[ScoreCounts, Records]:
        """Logits of all held-out samples after a step, and the records of the last of them."""
        assert isinstance(self.arm, CtrArm)
        parts: list[ScoreCounts] = []
        records: Records = []
        for plan in self.arm.evaluations(step):
            scores, records = self.scored(plan)
            parts.append(ScoreCounts.of(*scores))
        return parts[0].merge(*parts[1:]), records

    def scored(self, plan: StepPlan) -> tuple[tuple[Any, Any], Records]:
        """Logits and labels of one evaluation, and its records; run again if they are lost with the
        last stage."""
        num, last = sum(map(len, plan.micro_batches)), len(self.handles) - 1
        while True:
            records = self.evaluate(plan)
            try:
                call = {self.handles[last].scores.remote(num): last}
                scores: tuple[Any, Any] = self.results(call, "telling its scores")[last]
            except CallsFailed as failed:
                self._rescue(Item(plan=plan), failed)
                continue
            return scores, records

    # --- checkpoints ------------------------------------------------------------------------------

    def check_in(self) -> None:
        """Shards too, and first: a stage may wait for one that is lost."""
        self.shards.check()
        super().check_in()

    def file_of(self, index: int) -> str:
        """Stages, then shards."""
        if index < len(self.handles):
            return super().file_of(index)
        return shard_file(index - len(self.handles), len(self.shards.handles))

    def see(self, folder: str, name: str, token: bytes) -> bool:
        """Whether all stages and shards see a file of the driver."""
        calls = [shard.sees.remote(folder, name, token) for shard in self.shards.handles]
        if not super().see(folder, name, token):
            return False
        try:
            return all(ray.get(calls, timeout=SEE_S))
        except RayError:  # the watch sees to it; until then nobody knows what it sees
            return False

    def patience_s(self) -> float:
        """With the shards' rows on their way, too."""
        nbytes = self.shards.totals().real_bytes
        return super().patience_s() + transfer_s(nbytes, self.arm.topology.slowest_bps)

    def start_save(self, key: str, step: int, folder: str | None) -> Save:
        """Stages and shards copy their state after `step`: stage 0 waits for its gradients, has
        the shards copy theirs, and only then goes on."""
        for handle in self.handles:
            handle.keep_state.remote(key, step)
        shards = list(self.shards.handles)
        handles = dict(enumerate([*self.handles, *shards]))

        def let_go(place: int, why: BaseException) -> None:
            """Stage 0 may have died before it gave the shards their order."""
            if place == 0:
                for shard in shards:
                    shard.keep_not.remote(key, str(why))

        return Save(
            handles,
            lambda index: handles[index].write_kept.remote(key, folder, self.file_of(index)),
            patience_s=self.patience_s(),
            on_failed=let_go,
        )

    def load_shards(self, checkpoint: Checkpoint) -> int:
        """Deal the rows of a checkpoint out to the shards; returns how many there are."""
        names = checkpoint.shard_files()
        if not names:
            raise CheckpointError(f"{checkpoint.path} holds no embedding rows.")
        return self.shards.fill(saved_rows(checkpoint, self.shards.handles))

    def _with_shards(self, records: Records) -> Records:
        """A step is done: what shards sent, and whoever was lost before it excuses nobody more."""
        first, *others = records
        self.shards.step, self._num_excused = first.step, len(self.shards.failures)
        sent = {**first.sent, **self.shards.look()}
        totals = self.shards.totals()
        embedding = {
            **first.embedding,
            "rows": totals.rows,
            "row_bytes": totals.real_bytes,
            "resident_bytes": totals.resident_bytes,
        }
        return [replace(first, sent=sent, embedding=embedding), *others]

    def _on_replaced(self, shard: int, failure: Failure) -> None:
        """Stage 0 asks the new process what the old one left open."""
        self.actors.guests = self.shards.nodes_of_topology()
        node = len(self.handles) + shard
        ray.get(self.actors.guests[node].connect.remote(self.handles[0]), timeout=SEE_S)
        # Not by `introduce`: stage 0 is busy with the step that waits for this shard.
        self.handles[0].nudge.remote(shard, node, self.actors.guests[node])
        self.failures.append(failure)
        self.on_failure(failure)

    def _rescue(self, item: Item, failed: CallsFailed) -> None:
        """Shards first: a stage that waits for one is not the cause."""
        self.shards.check()
        super()._rescue(item, failed)

    def excuses(self, failure: Failure) -> bool:
        """Whether stages waited in vain because a shard was lost meanwhile."""
        return failure.kind == "timeout" and len(self.shards.failures) > self._num_excused

    def _check_replay(self, step: int, records: Records) -> None:
        """Rows have moved on since: a step that is run again need not give the same loss."""
        self.on_replay(records)


def saved_rows(checkpoint: Checkpoint, shards: Sequence[Any]) -> list[Any]:
    """The files with rows, checked: as paths if these shards see them too, else as bytes."""
    notes, folder = checkpoint.shard_notes(), checkpoint.folder
    sizes = {f"{folder.path}/{note.name}": note.nbytes for note in notes}
    if folder.is_local and _see(shards, sizes):
        checkpoint.check(notes)
        return list(sizes)
    return [np.frombuffer(checkpoint.read(note.name), dtype=np.uint8) for note in notes]


def rows_of(folder: Path, shards: Sequence[Any]) -> list[Any]:
    """The same of any folder that `saved_shards` reads."""
    saved = saved_shards(folder.absolute())
    files = [np.frombuffer(one.read(), dtype=np.uint8) for one in saved]  # where they lie
    sizes = {str(one.folder / one.file): one.nbytes for one in saved}
    return list(sizes) if _see(shards, sizes) else files


def _see(shards: Sequence[Any], sizes: dict[str, int]) -> bool:
    try:
        found = ray.get([shard.sizes.remote(list(sizes)) for shard in shards], timeout=SEE_S)
    except RayError:
        return False
    return all(one == list(sizes.values()) for one in found)
