"""Recommenders on Ray from Python: tables on shards, your own modules as dense stages, any loader.

Path: ray_pipe.driver -> ray_pipe.rec_pipeline -> ray_pipe.rec_arm

    emb = rec.EmbeddingStage(tables, shards=2, max_staleness=8)
    with ray_pipe.Pipeline([emb, BottomMLP(), TopMLP()], link=ray_pipe.Link("100Mbit")) as pipe:
        for batch in loader:
            loss = pipe.step(batch, loss_fn)

The first block gets a dict: a vector for each feature, and "dense". Every block gives one tensor,
which is the next one's input; the last one's output goes to `loss_fn(output, label)`.

`step` returns before the step has ended, as a GPU does: the loss is a number once somebody looks
at it. A loop that does not look at every loss runs ahead of the stages by as many batches as the
bound on staleness can use, and only so can rows be pulled early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from ray import cloudpickle
from torch import Tensor, nn

from ray_pipe import rec_rows, rec_saves
from ray_pipe.checkpoint_files import Checkpoint, open_checkpoint
from ray_pipe.cluster import connect, nodes
from ray_pipe.config import OptimConfig
from ray_pipe.ctr_pipeline import saved_rows
from ray_pipe.ctr_workload import EVAL_SAMPLES
from ray_pipe.errors import ConfigError, TrainingError
from ray_pipe.ledger import Ledger
from ray_pipe.planner.placement import place
from ray_pipe.rec_arm import LoadedPipeline
from ray_pipe.rec_batches import Batches, Loaded, num_samples
from ray_pipe.rec_link import Link
from ray_pipe.rec_loss import StepLoss, told_in_python
from ray_pipe.rec_plan import arm_of, config_of, named_weights, taken_apart, workload_of
from ray_pipe.rec_stage import EmbeddingStage, check_shards
from ray_pipe.recovery import Failure
from ray_pipe.shards import Shards
from ray_pipe.stage_actors import StageActors
from stages.embedding.feed import LOOKAHEAD
from stages.embedding.loaded_feed import REFUSAL
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.row_export import Increment, publish
from stages.storage import Folder

LossOf = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """An embedding stage and dense stages on Ray. Leaving the block, or `close`, ends them."""

    def __init__(
        self,
        stages: Sequence[EmbeddingStage | nn.Module],
        *,
        link: Link | None = None,
        num_stages: int | None = None,
        micro_batches: int = 1,
        optim: OptimConfig | None = None,
        codec: str = "fp32",
        seed: int = 0,
        address: str | None = None,
        deadline_s: float = 60.0,
        max_shard_failures: int = 3,
        max_stage_failures: int = 3,
        name: str = "pipeline",
    ) -> None:
        """`stages`: an `EmbeddingStage`, then modules that feed each other; each is a dense stage
        of its own unless `num_stages` says how many share them. `optim` is of the dense network
        (default: AdamW, lr 1e-3, no decay, no clipping); tables have their own. `codec` is how
        activations travel between stages. `address` is of a Ray cluster; without it, and without
        a Ray that runs already, one is started. Nothing starts before it is needed.

        Shards and stages that die are replaced, so often; -1: always, 0: never. A stage goes on
        with the weights of its last step, from its black box; a shard with the rows of the last
        `save` or `load`.
        """
        self.emb, self.blocks = taken_apart(stages)
        self._num_stages = len(self.blocks) if num_stages is None else num_stages
        self._link = link or Link()
        self._config = config_of(
            optim=optim,
            stages=self._num_stages,
            micro_batches=micro_batches,
            codec=codec,
            seed=seed,
            deadline_s=deadline_s,
            max_failures=max_stage_failures,
        )
        self._address, self._name = address, name
        self._max_shard_failures = max_shard_failures
        self._num_shards = self.emb.shards
        self._workload = workload_of(
            self.emb,
            self.blocks,
            stages=self._num_stages,
            micro_batches=micro_batches,
            name=name,
        )
        self._stack = ExitStack()
        self._is_connected = False
        self._life = ExitStack()
        self._pipeline: LoadedPipeline | None = None
        self._broken: TrainingError | None = None
        self._is_closed = False
        self._loss: tuple[Any, bytes] | None = None
        self._losses: dict[int, float] = {}
        self._next_step = 0
        self._part = 0
        self._ledger = Ledger()
        self._book = rec_rows.ClientBook()
        self.failures: list[Failure] = []
        """Of shards and stages that were replaced: what happened, and where it went on."""

        self.emb.attach(self)

    # --- training ---------------------------------------------------------------------------------

    def step(self, batch: Any, loss_fn: LossOf) -> StepLoss:
        """One optimizer step on a batch: feature -> int64 tensor or `rec.Jagged`, "dense", "label".

        A batch that cannot be trained on is refused here by name. What goes wrong in a step is
        raised by a later call, or by whoever looks at a loss; a call that raises has not sent its
        own batch. A step whose gradients are not finite is skipped and raised as
        `NonFiniteGradientError`; the pipeline may go on after it.
        """
        loaded = self._batches().read(batch, micro_batches=self._config.pipeline.micro_batches)
        pipeline = self._running()
        self._use(loss_fn)
        while pipeline.num_under_way >= self.emb.bound + LOOKAHEAD + 1:
            self._advance()
        step, self._next_step = self._next_step, self._next_step + 1
        self._part = 0
        pipeline.submit(loaded, step=step)
        return StepLoss(step, self.loss_of)

    def fit(self, batches: Iterable[Any], loss_fn: LossOf) -> list[float]:
        """Steps on all batches, as far ahead as the bound allows; the loss of each."""
        losses = [self.step(batch, loss_fn) for batch in batches]
        return [float(loss) for loss in losses]

    def drain(self) -> None:
        """Wait for the steps under way, and for their gradients to reach the shards."""
        pipeline = self._running()
        while pipeline.num_under_way:
            self._advance()
        _refuse(self._settle())

    def loss_of(self, step: int) -> float:
        """The loss of a step, once it has ended."""
        while step not in self._losses:
            if not self._running().num_under_way:
                raise TrainingError(f"step {step} never ended: a checkpoint was loaded before it")
            self._advance()
        return self._losses[step]

    def scores(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Outputs and labels, for `rec.evaluate`: no row is created, moved or touched."""
        reader = self._batches()
        self.drain()
        waiting: list[Loaded] = []
        for batch in batches:
            waiting += reader.read(batch, train=False)
            if num_samples(waiting) >= EVAL_SAMPLES:
                yield self._score(waiting)
                waiting = []
        if waiting:
            yield self._score(waiting)

    def _score(self, loaded: list[Loaded]) -> tuple[Any, Any]:
        self._part += 1
        with self._breaking():
            return self._running().score_parts(loaded, step=self._next_step - 1, part=self._part)

    def _advance(self) -> None:
        """Wait for the oldest step under way; raise what was refused, once all that is known."""
        refusals, is_skipped = self._note()
        if is_skipped and not refusals:  # which rows it was about is told with its push
            while self._running().num_under_way:
                refusals += self._note()[0]
            refusals += self._settle()
            refusals = refusals or [
                f"step {max(self._losses)} or before: the gradients of the dense network are not "
                "finite, the step was skipped; look at the loss and the learning rate"
            ]
        _refuse(refusals)

    def _note(self) -> tuple[list[str], bool]:
        """Take down a step that has ended: what was refused, and whether it was skipped."""
        with self._breaking():
            records = self._running().advance()
        loss, norm = records[-1].loss, records[0].grad_norm
        assert loss is not None
        self._losses[records[-1].step] = loss
        self._ledger.add(records)
        refusals = [event for record in records for event in record.events if REFUSAL in event]
        return refusals, norm is not None and not np.isfinite(norm)

    def _settle(self) -> list[str]:
        """Wait until every gradient has reached its shard; what was refused on the way."""
        with self._breaking():
            told = self._running().settle_embeddings()
        self._book.note(told)
        refusals: list[str] = told["refusals"]
        return refusals

    def _use(self, loss_fn: LossOf) -> None:
        """Have the last stage use this loss; the same one is sent once."""
        if self._loss is not None and self._loss[0] is loss_fn:
            return
        dumps: Any = cloudpickle.dumps  # untyped in ray
        packed = dumps(loss_fn)
        if self._loss is None or self._loss[1] != packed:
            pipeline = self._running()
            while pipeline.num_under_way:
                self._advance()
            with self._breaking():
                pipeline.set_loss(loss_fn)
        self._loss = (loss_fn, packed)

    # --- whole models -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Weights for `nn.Sequential(*blocks).load_state_dict(...)`."""
        return {name: value for name, value in self._weights() if not name.startswith("replicated")}

    def replicated_state(self) -> dict[str, Tensor]:
        """Replicated tables, for `rec.Embeddings(...).load_state_dict(..., strict=False)`."""
        return {name: value for name, value in self._weights() if name.startswith("replicated")}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        self.drain()
        with self._breaking():
            states = self._running().state_dicts()
        return named_weights(self._workload.cuts(self._num_stages), states)

    def save(self, folder: str | Path) -> None:
        """All weights, optimizer states and rows after the steps so far, as one checkpoint.

        Who dies meanwhile is replaced as in a step, and it is written anew. Until it is whole, an
        older one of that name is.
        """
        pipeline = self._running()
        with self._breaking(so=f"{folder} was not written"):
            rec_saves.save(pipeline, self.emb, folder, steps=self._next_step, settle=self.drain)
        self._keep(open_checkpoint(Folder(str(folder))))

    def load(self, folder: str | Path, *, shards: int | None = None) -> None:
        """Go on from a checkpoint, on this or another number of shards.

        One that does not fit is refused, and leaves everything as it was. Stages and shards are
        started anew; steps that were under way are dropped. A pipeline that an error has ended
        goes on too.
        """
        if self._is_closed:
            raise TrainingError("this Pipeline is closed; make another, and load that one")
        checkpoint = rec_saves.open_saved(folder, self.emb, num_stages=self._num_stages)
        num_shards = self._num_shards if shards is None else check_shards(shards)
        self.emb.spec(num_shards)
        rec_saves.check_blocks(self._pipeline or self._running(), checkpoint)
        self._life.close()
        self._pipeline = self._broken = self._loss = None
        self._book = rec_rows.ClientBook()
        self._num_shards = num_shards
        with self._breaking():
            pipeline = self._running()
            pipeline.load_states(checkpoint.states())
            pipeline.load_shards(checkpoint)
        self._next_step, self._part = checkpoint.step, 0
        self._losses = {step: loss for step, loss in self._losses.items() if step < checkpoint.step}
        self._ledger.rewind(checkpoint.step)
        self._keep(checkpoint)

    def _keep(self, checkpoint: Checkpoint) -> None:
        """A shard that dies begins with these rows."""
        self._running().shards.rows_from = lambda shard: saved_rows(checkpoint, [shard])

    # --- of the embedding stage -------------------------------------------------------------------

    def embedding_stats(self) -> dict[str, Any]:
        """See `EmbeddingStage.stats`."""
        self.drain()
        return rec_rows.stats_of(self._running(), self._ledger, self._book.numbers())

    def export(self, folder: str | Path, *, full: bool = False) -> list[Increment]:
        """See `EmbeddingStage.export`."""
        self.drain()
        Path(folder).mkdir(parents=True, exist_ok=True)
        increments: list[Increment] = rec_rows.ask(
            self._running(), "export", str(Path(folder).resolve()), full
        )
        publish(Path(folder), num_shards=len(increments))
        return increments

    def rows(self, table: str) -> tuple[Any, Any]:
        """See `EmbeddingStage.rows`."""
        known = sorted({f.table for f in self.emb.features if f.sharded})
        if table not in known:
            raise ConfigError(f"sharded tables are {known}, got {table!r}.")
        self.drain()
        return rec_rows.rows_of(self._running(), table)

    # --- starting, ending -------------------------------------------------------------------------

    def start(self) -> Self:
        """Start Ray, shards and stages, if they do not run yet."""
        self._running()
        return self

    def close(self) -> None:
        """End the stages and shards, and a Ray that was started for them; rows are gone then."""
        self._is_closed = True
        self._pipeline = None
        with self._stack:
            self._life.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _running(self) -> LoadedPipeline:
        if self._is_closed:
            raise TrainingError("this Pipeline is closed; make another, and `load` a checkpoint")
        if self._broken is not None:
            raise TrainingError(f"this Pipeline ended: {self._broken}") from self._broken
        if self._pipeline is None:
            self._begin()
        assert self._pipeline is not None
        return self._pipeline

    def _begin(self) -> None:
        """Ray, if it does not run yet, and a life of the pipeline on actors of its own."""
        if not self._is_connected:
            self._stack.enter_context(connect(self._address, job_name=self._name))
            self._is_connected = True
        life = self._life
        try:
            actors = life.enter_context(
                StageActors(
                    self._num_stages,
                    label=self._name,
                    placement=place(self._num_stages, nodes()),
                )
            )
            shards = life.enter_context(
                Shards(
                    self._num_shards,
                    label=self._name,
                    nodes=nodes(),
                    num_stages=self._num_stages,
                    max_failures=self._max_shard_failures,
                )
            )
            arm = arm_of(
                self.emb, self._config, self._workload, self._link, shards=self._num_shards
            )
            self._pipeline = LoadedPipeline(actors, arm, shards=shards, epoch_s=time.time())
            self._pipeline.on_failure = self.failures.append
            life.callback(self._pipeline.close)
        except BaseException:
            life.close()
            raise

    def _batches(self) -> Batches:
        return Batches(self.emb, shards=self._num_shards)

    @contextmanager
    def _breaking(self, *, so: str = "") -> Iterator[None]:
        """What ends a step inside ends this life of the pipeline, and says how to go on."""
        try:
            yield
        except TrainingError as error:
            if self._broken is None:
                self._broken = told_in_python(error, so=so)
                raise self._broken from error
            raise


def _refuse(refusals: list[str]) -> None:
    if refusals:
        raise NonFiniteGradientError("; ".join(refusals))
