"""The Python entry point, in the manner of Ray's own libraries: configuration in, `Result` out.

trainer = PipelineTrainer(blocks, loss=torch.nn.functional.mse_loss, dataset=dataset)
result = trainer.fit()
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ray_pipe.checkpoint_files import Checkpoint, locate
from ray_pipe.config import RunConfig
from ray_pipe.data import DatasetSamples
from ray_pipe.driver import Outcome, run
from ray_pipe.errors import ConfigError, lost_checkpoints
from ray_pipe.export import weights_of
from ray_pipe.planner.partition import partition
from ray_pipe.progress import Observer, make_progress
from ray_pipe.workload import (
    BlocksFn,
    Workload,
    blocks_workload,
    gpt_workload,
    held_out_samples,
)
from stages.loss import LossFn, cross_entropy, from_mean


class Silent:
    """An observer that shows nothing."""

    def on_start(self, plan: Mapping[str, Any]) -> None: ...
    def on_phase(self, text: str) -> None: ...
    def on_arm(self, name: str, index: int, num_arms: int, steps: int) -> None: ...
    def on_step(self, arm: str, row: Mapping[str, Any]) -> None: ...
    def on_arm_end(self, arm: Mapping[str, Any]) -> None: ...
    def on_note(self, text: str) -> None: ...
    def on_warning(self, text: str) -> None: ...
    def on_end(self, results: Mapping[str, Any], path: str | Path | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found. Named as in `ray.train.Result` where the meaning is the same."""

    metrics: dict[str, Any]
    """The last arm: final_loss, tokens_per_s, step_s, bytes_per_step, …"""

    path: str
    """The run's folder: results.json, report.html, trace.json, metrics.jsonl, the figure."""

    results: dict[str, Any]
    """All arms, as in results.json."""

    model_state: dict[str, Tensor]
    """Weights of the last arm for `nn.Sequential(*blocks).load_state_dict(...)`."""

    checkpoint: Checkpoint | None = None
    """The newest of the last arm, if `config.checkpoint` led to any; has a `path`."""

    error: Exception | None = None
    """Set if the state after the last step should have been saved and could not: a
    `CheckpointsLost`. What else fails is raised."""

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Those of the last arm that were kept, oldest first, with the numbers of their steps:
        `step` (how many were done), `loss`, `wall_s`. The last one is `checkpoint`."""
        if self.checkpoint is None:
            return []
        newest = self.checkpoint.manifest
        numbers = {step + 1: (wall_s, loss) for wall_s, step, loss in self.metrics["losses"]}
        found = []
        for one in locate(self.checkpoint.path)[0].checkpoints(newest.arm):
            if one.manifest.serial <= newest.serial and one.step in numbers:
                wall_s, loss = numbers[one.step]
                found.append((one, {"step": one.step, "loss": loss, "wall_s": wall_s}))
        return found

    @property
    def metrics_dataframe(self) -> Any:
        """metrics.jsonl as a pandas DataFrame; needs pandas (`pip install ray_pipe[train]`)."""
        import pandas

        return pandas.read_json(Path(self.path) / "metrics.jsonl", lines=True)


class PipelineTrainer:
    """Trains a model cut into pipeline stages, one Ray actor each, over slow links."""

    def __init__(
        self,
        blocks: Sequence[nn.Module] | BlocksFn | None = None,
        *,
        loss: LossFn | Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        dataset: Any = None,
        config: RunConfig | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        dataset_digest: str | None = None,
        progress: bool | Observer = True,
    ) -> None:
        """`blocks`: modules that feed each other, or a function that makes them (then each stage
        builds only its own copy); None trains the GPT of `config.model` on `config.data`. A block
        takes and returns one floating-point tensor (the first one takes the dataset's input) whose
        first dimension is the micro-batch's samples: a cut may lie behind any of them. Where
        samples differ in length, the second is the position for as long as it keeps its size.

        `loss(output, target)` returns a mean over samples, or the pair (sum, count); the default
        is the next-token cross-entropy. `dataset` is a map-style `torch.utils.data.Dataset` of
        (input, target) pairs whose index is the stable sample id. `scaling_config.num_workers`
        and `run_config.name`, `.storage_path`, `.checkpoint_config` (`num_to_keep`,
        `checkpoint_frequency`), `.failure_config` (`max_failures`; Ray Train's default of 0, which
        it fills in itself, leaves `config.faults.max_failures`) are read from Ray Train's objects
        if given.
        `config.checkpoint.resume` goes on from a checkpoint.
        """
        self.config = _with_ray_train(config or RunConfig(compare=()), scaling_config, run_config)
        if self.config.task != "text":
            raise ConfigError(
                f"task is {self.config.task!r}, but PipelineTrainer trains text or blocks of one's "
                "own; click models are trained by `python -m ray_pipe.run --task ctr`, or from "
                "Python by ray_pipe.Pipeline."
            )
        self._progress = progress
        self._blocks = blocks
        if blocks is None:
            if dataset is not None:
                raise ConfigError(
                    "a dataset was given without blocks; give both, or set config.data.source"
                )
            self.workload: Workload | None = None
            return
        if dataset is None:
            raise ConfigError("blocks were given without a dataset; give dataset=...")
        summed = _summed(loss)
        samples = DatasetSamples(dataset, digest=dataset_digest, may_pad=hasattr(summed, "count"))
        self.workload = blocks_workload(
            blocks,
            loss=summed,
            samples=samples,
            seed=self.config.seed,
            held_out=held_out_samples(len(samples)) if self.config.eval else 0,
        )

    def fit(self) -> Result:
        """Train; raises a `RayPipeError` that says what went wrong and what to do."""
        config = self.config
        num_blocks = self.workload.num_blocks if self.workload else None
        workload = self.workload or gpt_workload(config)
        warnings = config.validate(num_blocks=num_blocks)
        masks = workload.fresh_masks
        memories = [arm.name for arm in config.arms if arm.has_memory]
        if masks and memories:
            warnings.append(
                f"blocks {', '.join(masks[:3])} draw a fresh dropout mask on each visit, which "
                f"{memories[0]} must send as a change; use p=0, or "
                "ray_pipe.SampleDropout, whose mask belongs to the sample."
            )
        with self._display() as observer:
            for text in warnings:
                observer.on_warning(text)
            outcome = run(config, observer, workload, want_states=True)
        arms = outcome.results["arms"]
        return Result(
            metrics=dict(arms[-1]),
            path=str(outcome.path),
            results=outcome.results,
            model_state=_weights(outcome, workload, config.pipeline.stages),
            checkpoint=outcome.checkpoint,
            error=lost_checkpoints(outcome.results),
        )

    def _display(self) -> AbstractContextManager[Observer]:
        """Bars move only inside this context; on leaving it the terminal is as it was."""
        if self._progress is True:
            return make_progress(sys.stderr)
        return nullcontext(Silent() if self._progress is False else self._progress)


def _weights(outcome: Outcome, workload: Workload, num_stages: int) -> dict[str, Tensor]:
    if not outcome.states and outcome.checkpoint is not None:  # all was done before it was resumed
        return weights_of(outcome.checkpoint)
    return whole_model(outcome.states, workload, num_stages)


def whole_model(
    states: Sequence[Mapping[str, Any]], workload: Workload, num_stages: int
) -> dict[str, Tensor]:
    """The weights of all stages under the names they have in `nn.Sequential(*blocks)`."""
    whole: dict[str, Tensor] = {}
    for blocks, state in zip(partition(workload.costs, num_stages), states, strict=True):
        for name, tensor in state["module"].items():
            place, _, rest = name.partition(".")
            whole[f"{blocks.start + int(place)}.{rest}"] = tensor
    return whole


def _summed(loss: Callable[..., Any]) -> LossFn:
    return cross_entropy if loss is cross_entropy else from_mean(loss)


def _with_ray_train(config: RunConfig, scaling_config: Any, run_config: Any) -> RunConfig:
    """Read what Ray Train's objects say, without importing them."""
    changes: dict[str, Any] = {}
    num_workers = getattr(scaling_config, "num_workers", None)
    if num_workers is not None:
        changes["pipeline"] = dataclasses.replace(config.pipeline, stages=int(num_workers))
    name = getattr(run_config, "name", None)
    if name:
        changes["name"] = name
    storage_path = getattr(run_config, "storage_path", None)
    if storage_path:
        changes["out"] = str(storage_path)
    saving = getattr(run_config, "checkpoint_config", None)
    wishes = {
        "keep": getattr(saving, "num_to_keep", None),
        "every": getattr(saving, "checkpoint_frequency", None) or None,
    }
    given: dict[str, Any] = {key: int(value) for key, value in wishes.items() if value is not None}
    if given:
        changes["checkpoint"] = dataclasses.replace(config.checkpoint, **given)
    max_failures = _max_failures(getattr(run_config, "failure_config", None))
    if max_failures is not None:
        changes["faults"] = dataclasses.replace(config.faults, max_failures=max_failures)
    return dataclasses.replace(config, **changes) if changes else config


def _max_failures(wish: Any) -> int | None:
    """Of Ray Train's `FailureConfig`; None where nobody asked: Ray Train fills in its default."""
    limit = getattr(wish, "max_failures", None)
    if limit is None or (
        dataclasses.is_dataclass(wish) and limit == _default(wish, "max_failures")
    ):
        return None
    return int(limit)


def _default(wish: Any, name: str) -> Any:
    return next(one.default for one in dataclasses.fields(wish) if one.name == name)
