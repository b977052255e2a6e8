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


class Funnel(nn.Sequential):
    """Weights of bf16, an activation in place behind the cut, cuts of different width."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 128), nn.ReLU(inplace=True), nn.Linear(128, 8), nn.ReLU(inplace=True),
            nn.Linear(8, 1),
        )  # fmt: skip
        self.to(torch.bfloat16)


class NarrowWave(Wave):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x.to(torch.bfloat16), y.to(torch.bfloat16)


def test_blocks_as_people_write_them_train_with_every_setting_at_its_default(
    cluster: None, tmp_path: Path
) -> None:
    blocks = list(Funnel())
    run = RunConfig(
        compare=(),
        epochs=3,
        out=str(tmp_path),
        pipeline=PipelineConfig(stages=5, micro_batches=2, micro_batch_size=4),
        network=NetworkConfig(bandwidth_bps=100e6),
    )

    result = ray_pipe.PipelineTrainer(
        blocks, loss=nn.functional.mse_loss, dataset=NarrowWave(), config=run, progress=False
    ).fit()

    arm = result.results["arms"][0]
    assert arm["name"] == "acsgd"
    assert arm["final_loss"] is not None
    assert {weight.dtype for weight in result.model_state.values()} == {torch.bfloat16}
    assert arm["links"]["0->1"]["activation"] > 3 * arm["links"]["2->3"]["activation"]


def test_a_model_that_the_settings_name_is_told_by_them(cluster: None, tmp_path: Path) -> None:
    run = RunConfig(
        compare=(),
        steps=3,
        out=str(tmp_path),
        model=ray_pipe.ModelConfig(name="gpt-nano"),
        codec=CodecConfig(name="fp32"),
        pipeline=PipelineConfig(stages=2, micro_batches=2, micro_batch_size=4),
        network=NetworkConfig(bandwidth_bps=float("inf")),
    )

    result = ray_pipe.PipelineTrainer(config=run, progress=False).fit()

    assert "own" not in result.results
    assert result.results["config"]["model"]["name"] == "gpt-nano"
    assert result.results["config"]["data"]["source"] == "pydoc"
    assert "gpt-nano · 2 stages" in (Path(result.path) / "report.html").read_text()
    assert result.model_state


def test_a_click_model_is_refused_with_where_it_is_trained(tmp_path: Path) -> None:
    config = RunConfig.from_dict({"task": "ctr", "out": str(tmp_path)})

    with pytest.raises(ConfigError, match=r"task is 'ctr', but .*ray_pipe.run --task ctr`, or"):
        ray_pipe.PipelineTrainer(
            blocks(), loss=nn.functional.mse_loss, dataset=Wave(), config=config
        )


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
