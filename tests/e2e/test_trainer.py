"""The Python entry point with a user's own model, loss and dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray.cloudpickle
import torch
from torch import Tensor, nn

import ray_pipe
from ray_pipe import CodecConfig, NetworkConfig, PipelineConfig, RunConfig
from ray_pipe.errors import ConfigError
from ray_pipe.export import model_state

pytestmark = pytest.mark.ray


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Wave(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Regression on a sine: the same item for the same index, always."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 16) + index / 32
        return x, torch.sin(6.28 * x).mean(dim=0, keepdim=True)


def blocks() -> list[nn.Module]:
    return [
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1),
    ]  # fmt: skip


def config(tmp_path: Path, codec: str = "acsgd", **changes: object) -> RunConfig:
    return RunConfig(
        compare=(),
        epochs=6,
        out=str(tmp_path),
        codec=CodecConfig(name=codec),
        pipeline=PipelineConfig(stages=2, micro_batches=2, micro_batch_size=4),
        network=NetworkConfig(bandwidth_bps=float("inf")),
        **changes,
    )


def test_a_users_model_loss_and_dataset_train_and_come_back_as_weights(
    cluster: None, tmp_path: Path
) -> None:
    trainer = ray_pipe.PipelineTrainer(
        blocks,
        loss=nn.functional.mse_loss,
        dataset=Wave(),
        config=config(tmp_path),
        progress=False,
    )

    result = trainer.fit()

    losses = [loss for _, _, loss in result.metrics["losses"]]
    assert losses[-1] < losses[0] / 2
    model = nn.Sequential(*blocks())
    model.load_state_dict(result.model_state)
    items = [Wave()[index] for index in range(32)]
    inputs, targets = (torch.stack(side) for side in zip(*items, strict=True))
    final = float(nn.functional.mse_loss(model(inputs), targets).detach())
    assert final == pytest.approx(losses[-1], rel=0.5)
    assert (Path(result.path) / "report.html").exists()


def test_ray_train_style_objects_set_stages_name_and_folder(cluster: None, tmp_path: Path) -> None:
    class Scaling:
        num_workers = 3

    class Saving:
        num_to_keep = 1
        checkpoint_frequency = 5

    class Run:
        name = "named"
        storage_path = str(tmp_path / "elsewhere")
        checkpoint_config = Saving()

    trainer = ray_pipe.PipelineTrainer(
        blocks(),
        loss=nn.functional.mse_loss,
        dataset=Wave(),
        config=config(tmp_path, codec="fp32"),
        scaling_config=Scaling(),
        run_config=Run(),
        progress=False,
    )

    result = trainer.fit()

    assert Path(result.path) == tmp_path / "elsewhere" / "named"
    assert result.results["config"]["pipeline"]["stages"] == 3
    assert result.checkpoint is not None
    assert result.checkpoint.path.endswith("/named/checkpoints/fp32/checkpoint_000024")
    assert len(list(Path(result.checkpoint.path).parent.glob("checkpoint_*"))) == 1
    assert [(one.path, numbers["step"]) for one, numbers in result.best_checkpoints] == [
        (result.checkpoint.path, 24)
    ]
    assert result.results["own"]["dataset"] == "Wave"
    assert "command" not in result.results
    exported = model_state(result.path)
    assert exported.keys() == result.model_state.keys()
    assert all(torch.equal(exported[name], result.model_state[name]) for name in exported)


def test_more_stages_than_blocks_are_refused_with_both_numbers(tmp_path: Path) -> None:
    trainer = ray_pipe.PipelineTrainer(
        [nn.Linear(16, 1)],
        loss=nn.functional.mse_loss,
        dataset=Wave(),
        config=config(tmp_path),
        progress=False,
    )

    with pytest.raises(ConfigError, match="--stages 2: the model has 1 blocks"):
        trainer.fit()


def test_a_stream_is_refused_because_it_has_no_stable_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a map-style"):
        ray_pipe.PipelineTrainer(
            blocks(), loss=nn.functional.mse_loss, dataset=iter([1, 2]), config=config(tmp_path)
        )
