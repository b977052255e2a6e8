"""Options that would do nothing are refused by name; those that do something are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_pipe.config import CheckpointConfig, ConfigError, NetworkConfig, RunConfig
from ray_pipe.run import main


def config_of(*settings: str) -> RunConfig:
    return RunConfig().with_overrides(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["codec=fp32", "codec.fw_bits=2"], "codec.fw_bits is 2, but only fp32 is trained"),
        (["codec=fp16", "codec.bw_bits=8"], "codec.bw_bits is 8, but only fp16 is trained"),
        (["codec=topk+ef", "codec.fw_bits=2"], "no bits to choose; leave it out, or use --codec"),
        (["compare=fp32,bf16", "codec.fw_bits=2"], "only fp32, bf16 are trained"),
        (["codec=acsgd-topk", "codec.bw_bits=2"], "codec.bw_bits is 2"),
        (["codec=directq", "codec.memory_cap=1MB"], "codec.memory_cap is 1000000, but only direc"),
        (["codec=directq", "codec.rows=int8"], "codec.rows is int8"),
        (["codec=directq", "codec.first_visit_bits=4"], "remembers no activations; leave it out"),
        (["codec=fp32", "codec.spill_dir=x"], "codec.spill_dir is x"),
        (["codec=fp32", "codec.checksum=true"], "codec.checksum is True"),
        (["task=ctr", "codec.fw_bits=2"], "only fp16 is trained"),
        (["codec=fp32", "codec.grid=symmetric"], "codec.grid is symmetric, but only fp32 is train"),
        (["codec=reference", "codec.group=64"], "no groups of channels on a grid; leave it out"),
        (["codec=topk", "codec.rounding=stochastic"], "codec.rounding is stochastic, but only top"),
        (["codec=acsgd", "codec.reference_group=32"], "which has another grid; leave it out, or"),
        (["compare=fp32,acsgd", "codec.density=0.5"], "codec.density is 0.5, but only fp32, acsgd"),
        (["codec.compressed_eval=true"], "codec.compressed_eval is True, but nothing is evaluated"),
        (["optim.momentum=0.9"], "optim.momentum is 0.9, but optim.name is adamw, which has none;"),
        (["optim=sgd", "optim.beta2=0.99"], "leave it out, or use --set optim.name=adamw"),
        (["optim.min_lr_ratio=0.5"], "but the learning rate is constant; leave it out, or use"),
        (["network.bandwidth=unlimited", "network.loss_rate=1%"], "network.loss_rate is 0.01, but"),
        (["sync.replicas=2", "faults.spares=3"], "faults.spares is 3, but replicas keep neither"),
        (["sync.replicas=2", "faults.black_box=/x"], "faults.black_box is /x, but replicas keep"),
        (["faults.max_failures=0", "faults.spares=3"], "faults.spares is 3, but with --max-failur"),
        (["checkpoint.automatic=0s", "checkpoint.dir=x"], "checkpoint.dir is x, but nothing will"),
        (["checkpoint.automatic=0s", "checkpoint.keep=2"], "checkpoint.keep is 2, but nothing wi"),
        (["sync.replicas=2", "checkpoint.keep=2"], "saved; add --checkpoint-every 20, or leave it"),
        (["checkpoint.automatic=1min", "checkpoint.every=5"], "but every 5 steps are saved, so it"),
        (["sync.replicas=2", "checkpoint.automatic=1min"], "saved by steps only; use --checkpoint"),
    ],
)
def test_what_would_do_nothing_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(dict(one.split("=") for one in settings)).validate()

    assert message in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["codec.fw_bits=2", "codec.rows=int8"],
        ["codec=directq", "codec.fw_bits=2", "codec.bw_bits=8"],
        ["codec=reference", "codec.bw_bits=8"],
        ["codec=acsgd-topk", "codec.rows=int8", "codec.first_visit_bits=4"],
        ["compare=fp32,directq", "codec.fw_bits=2"],
        ["codec=fp32", "codec.fw_bits=4", "codec.rows=bf16"],
        ["network.loss_rate=1%"],
        ["codec=acsgd-topk", "codec.density=0.5", "codec.grid=symmetric"],
        ["codec=acsgd-reference", "codec.reference_group=32", "codec.rounding=stochastic"],
        ["compare=fp32,directq", "codec.group=64"],
        ["eval=true", "codec.compressed_eval=true"],
        ["codec=fp32", "sync.replicas=2", "sync.codec=directq", "codec.group=64"],
        ["optim=sgd", "optim.momentum=0.9"],
        ["optim.beta1=0.8", "optim.decay=linear", "optim.min_lr_ratio=0"],
        ["network.bandwidth=unlimited", "network.latency=1ms", "network.loss_rate=1%"],
        ["faults.max_failures=0", "faults.spares=0", "faults.black_box=off"],
        ["faults.max_failures=-1", "faults.spares=3"],
        ["checkpoint.keep=2"],
        ["checkpoint.keep=2", "checkpoint.automatic=1min"],
        ["checkpoint.keep=2", "checkpoint.every=5", "sync.replicas=2"],
        ["checkpoint.automatic=0s"],
        ["checkpoint.automatic=0s", "checkpoint.dir=x", "checkpoint.resume=auto"],
    ],
)
def test_what_does_something_is_not(settings: list[str]) -> None:
    config_of(*settings).validate()


def test_the_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--codec", "fp32", "--fw-bits", "2"]) == 2
    assert "error: --fw-bits: codec.fw_bits is 2, but only fp32" in capsys.readouterr().err
    assert main(["--bandwidth", "unlimited", "--loss-rate", "1%"]) == 2
    assert "error: --loss-rate: network.loss_rate is 0.01, but" in capsys.readouterr().err


def test_a_resumed_run_may_bring_the_options_of_its_other_arms(tmp_path: Path) -> None:
    config = config_of("codec=fp32", "codec.fw_bits=2")

    with pytest.raises(ConfigError):
        config.validate()
    RunConfig.from_dict(
        {**config.to_dict(), "checkpoint": vars(CheckpointConfig(resume=str(tmp_path)))}
    ).validate()


def test_losses_are_refused_where_a_real_network_makes_the_links_unlimited() -> None:
    config = RunConfig(network=NetworkConfig(loss_rate=0.01))

    assert config.on_nodes(1)[0] == config
    with pytest.raises(ConfigError, match=r"network\.loss_rate is 0\.01, but the links are unlim"):
        config.on_nodes(4)
