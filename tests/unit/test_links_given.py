"""What was said of the links counts, even if it says what the default is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from ray_pipe.config import ConfigError, NetworkConfig, RunConfig
from ray_pipe.flags import build_config, parse_flags
from ray_pipe.settings_file import show_settings


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--topology", "FILE", "--bandwidth", "100Mbps"], "bandwidth_bps"),  # the default's own
        (["--topology", "FILE", "--latency", "0ms"], "latency_s"),
        (["--topology", "FILE", "--set", "network.loss_rate=0"], "loss_rate"),
        (["--set", "network.topology=FILE", "--bandwidth", "100Mbps"], "bandwidth_bps"),
        (["--set", "network.topology=FILE", "--jitter", "0ms"], "jitter_s"),
        (["--task", "ctr", "--topology", "FILE", "--bandwidth", "1Gbps"], "bandwidth_bps"),
    ],
)
def test_what_is_said_beside_a_topology_is_refused_even_if_it_is_the_default(
    tmp_path: Path, words: list[str], name: str
) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("default: {bandwidth: 10Mbps}\n")
    config = build_config(parse_flags([word.replace("FILE", str(file)) for word in words]))

    with pytest.raises(ConfigError, match=f"network.{name} is .* describes all links"):
        config.validate()


def test_a_topology_over_a_whole_settings_file_takes_its_links_away(tmp_path: Path) -> None:
    file, settings = tmp_path / "net.yaml", tmp_path / "run.yaml"
    file.write_text("default: {bandwidth: 10Mbps}\n")
    settings.write_text(show_settings(RunConfig()))  # names the default bandwidth

    words = ["--config", str(settings), "--topology", str(file)]
    config = build_config(parse_flags(words))

    assert config.validate() == []
    assert config.network.said == {}


def test_a_run_with_a_topology_is_written_without_links_that_nobody_gave(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("default: {bandwidth: 10Mbps}\n")
    config = RunConfig(name="mine", network=NetworkConfig(topology=str(file)))

    assert config.to_dict()["network"] == {"topology": str(file)}
    assert yaml.safe_load(show_settings(config))["network"] == {"topology": str(file)}
    again = RunConfig.from_dict(config.to_dict())
    assert again == config
    assert again.validate() == []


def test_a_latency_alone_is_emulated_over_the_real_network_and_said_to_be() -> None:
    config, notes = RunConfig(network=NetworkConfig(latency_s=0.02, jitter_s=0.001)).on_nodes(4)

    assert math.isinf(config.network.bandwidth_bps)
    assert config.network.latency_s == 0.02
    assert "only latency_s 0.02, jitter_s 0.001 is emulated (" in notes[0]
