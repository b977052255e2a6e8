"""Embedding tables for recommenders: what a user imports.

    from ray_pipe import rec

    emb = rec.Embeddings([
        rec.Table("user", dim=32, admit=rec.MinCount(2), capacity="6GiB", spill="spill"),
        rec.Table("item", dim=32, features=("item_id", "history"), pooling={"history": "mean"}),
        rec.Table("gender", dim=4, placement="replicated", num_ids=3),
    ])
    for batch in loader:                      # feature -> int64 tensor or rec.Jagged
        loss = loss_fn(net(emb(batch)), batch["label"])
        loss.backward()
        emb.step()
    print(rec.evaluate(model, test_batches))  # creates no row, touches no order of use
    emb.save("ckpt"); emb.load("ckpt", shards=4); emb.export("serving"); emb.stats()

One process, no Ray, any loss; the rows are those that `--task ctr` trains on sharded actors. They
go both ways: `load` reads a run's checkpoint, with `--set embedding.rows=ckpt` a run begins with
what `save` wrote. `EmbeddingStage` puts the same tables on Ray, for `ray_pipe.Pipeline`.
`docs/embeddings.md` has the whole story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ray_pipe.ctr_data import Bags as Jagged
from ray_pipe.ctr_metrics import ScoreCounts
from ray_pipe.rec_stage import EmbeddingStage
from stages.embedding.auto_staleness import AutoStaleness
from stages.embedding.in_process import EmbeddingBag, Embeddings
from stages.embedding.letters import Wire
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.row_export import ExportReader, Increment
from stages.embedding.row_rules import Adagrad, Adam, Constant, Normal, RowAdagrad, Sgd, Uniform
from stages.embedding.tables import ChunkPrune, MinCount, Probability, Table

__all__ = [
    "Adagrad",
    "Adam",
    "AutoStaleness",
    "ChunkPrune",
    "Constant",
    "EmbeddingBag",
    "EmbeddingStage",
    "Embeddings",
    "Evaluation",
    "ExportReader",
    "Increment",
    "Jagged",
    "MinCount",
    "NonFiniteGradientError",
    "Normal",
    "Probability",
    "RowAdagrad",
    "Sgd",
    "Table",
    "Uniform",
    "Wire",
    "evaluate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good scores are on held-out samples."""

    auc: float
    log_loss: float
    normalized_entropy: float
    num_samples: int


@runtime_checkable
class Scores(Protocol):
    """A pipeline: gives outputs and labels for batches, some at a time."""

    def step(self, batch: Any, loss_fn: Any) -> Any: ...
    def scores(self, batches: Iterable[Any]) -> Iterable[tuple[Any, Any]]: ...


def evaluate(
    model: nn.Module | Callable[[Any], Tensor] | Scores,
    batches: Iterable[Any],
    *,
    label: Callable[[Any], Tensor] | None = None,
) -> Evaluation:
    """AUC and log-loss of the logits that a model gives for batches.

    Labels are the batch's `labels`, or its "label". The model is put in evaluation for the time,
    so its embeddings apply what is under way, read unknown ids as zeros and create nothing. A
    `ray_pipe.Pipeline` is asked for the outputs of its last stage.
    """
    if isinstance(model, Scores):
        if label is not None:
            raise ValueError('a Pipeline reads labels from the batch\'s "label"; leave `label` out')
        return _evaluation([ScoreCounts.of(*scores) for scores in model.scores(batches)])
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    were_training = [module for module in modules if module.training]
    for module in modules:
        module.training = False
    try:
        with torch.no_grad():
            parts = [
                ScoreCounts.of(model(batch), _labels(batch) if label is None else label(batch))
                for batch in batches
            ]
    finally:
        for module in were_training:
            module.training = True
    return _evaluation(parts)


def _evaluation(parts: list[ScoreCounts]) -> Evaluation:
    if not parts:
        raise ValueError("there are no batches to evaluate")
    found = parts[0].merge(*parts[1:])
    return Evaluation(
        auc=found.auc(),
        log_loss=found.log_loss(),
        normalized_entropy=found.normalized_entropy(),
        num_samples=len(found),
    )


def _labels(batch: Any) -> Tensor:
    found = batch.get("label") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if found is None:
        raise ValueError('a batch has neither `labels` nor a "label"; say where they are: `label=`')
    return torch.as_tensor(found)
