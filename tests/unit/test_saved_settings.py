"""`--resume` brings the settings of the run along, below what the command says itself."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saved_runs import SavedRun, make_config

from ray_pipe.checkpoint_files import CheckpointError, Manifest
from ray_pipe.checks import check_links
from ray_pipe.config import RunConfig
from ray_pipe.flags import build_config, parse_flags
from ray_pipe.unfinished import RunRecord


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return SavedRun(path=tmp_path_factory.mktemp("runs") / "demo", steps=2).train()


def config_of(*words: str) -> RunConfig:
    return build_config(parse_flags(words))


def test_a_path_is_enough(run: SavedRun) -> None:
    config = config_of("--resume", str(run.path))

    assert config.to_dict() == {
        **run.config.to_dict(),
        "checkpoint": {**run.config.to_dict()["checkpoint"], "resume": str(run.path)},
    }


def test_a_run_of_old_with_a_topology_and_the_default_links_beside_it_can_be_resumed(
    run: SavedRun, tmp_path: Path
) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("default: {bandwidth: 10Mbps}\n")
    links = {"bandwidth_bps": 1e8, "latency_s": 0.0, "jitter_s": 0.0, "loss_rate": 0.0}
    folder = tmp_path / "old"
    shutil.copytree(run.path, folder)
    for path in folder.rglob("manifest.json"):
        manifest = Manifest.from_json(path.read_bytes(), where="here")
        old = {**manifest.config, "network": {**links, "topology": str(file)}}
        path.write_bytes(dataclasses.replace(manifest, config=old).to_json())

    config = config_of("--resume", str(folder))

    assert config.network.topology == str(file)
    assert config.network.said == {}
    check_links(config)


def test_a_run_of_old_with_the_default_codec_beside_a_comparison_without_it_can_be_resumed(
    run: SavedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(run.path, folder)
    for path in folder.rglob("manifest.json"):
        manifest = Manifest.from_json(path.read_bytes(), where="here")
        codec = {**manifest.config["codec"], "name": "acsgd"}
        old = {**manifest.config, "codec": codec, "compare": ["fp32", "directq"]}
        path.write_bytes(dataclasses.replace(manifest, config=old).to_json())

    config = config_of("--resume", str(folder))

    assert [arm.name for arm in config.arms] == ["fp32", "directq"]


def test_what_the_command_says_wins(run: SavedRun) -> None:
    config = config_of("--resume", str(run.path), "--steps", "9", "--set", "optim.lr=0.5")

    assert (config.steps, config.optim.lr, config.model.width) == (9, 0.5, 16)
    assert (config.name, config.out) == ("demo", str(run.path.parent))


def test_alone_it_takes_the_newest_run_of_the_folder(run: SavedRun) -> None:
    config = config_of("--out", str(run.path.parent), "--resume")

    assert config.name == "demo"
    assert config.model.width == 16
    assert config.checkpoint.resume == "auto"


def test_with_a_name_it_takes_that_run_or_none(run: SavedRun) -> None:
    found = config_of("--out", str(run.path.parent), "--name", "demo", "--resume", "auto")
    fresh = config_of("--out", str(run.path.parent), "--name", "other", "--resume", "auto")

    assert found.model.width == 16
    assert fresh.model.width is None
    assert fresh.name == "other"


def test_a_run_that_was_moved_is_found_where_it_is(run: SavedRun, tmp_path: Path) -> None:
    (run.path).rename(tmp_path / "moved")
    try:
        config = config_of("--resume", str(tmp_path / "moved"))
        assert (config.out, config.name) == (str(tmp_path), "moved")
    finally:
        (tmp_path / "moved").rename(run.path)


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in it"):
        config_of("--resume", str(tmp_path))


def test_settings_in_a_file_are_heard_too(run: SavedRun, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"checkpoint:\n  resume: {run.path}\n")

    assert config_of("--config", str(file)).model.width == 16


def test_neither_torch_nor_ray_is_loaded_for_it(run: SavedRun) -> None:
    code = (
        "import sys\n"
        "from ray_pipe.flags import build_config, parse_flags\n"
        f"build_config(parse_flags(['--resume', {str(run.path)!r}]))\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_a_run_without_a_checkpoint_whose_driver_was_killed_brings_its_settings_too(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, "killed", steps=9, every=None, optim__lr=0.25)
    (tmp_path / "killed").mkdir()
    RunRecord(tmp_path / "killed", config=config.to_dict(), code={}, epoch_s=0.0).save([])

    by_path = config_of("--resume", str(tmp_path / "killed"))
    by_name = config_of("--out", str(tmp_path), "--name", "killed", "--resume", "auto")
    alone = config_of("--out", str(tmp_path), "--resume")

    for found in (by_path, by_name, alone):
        assert (found.name, found.steps, found.optim.lr) == ("killed", 9, 0.25)
    (tmp_path / "killed").rename(tmp_path / "moved")
    moved = config_of("--resume", str(tmp_path / "moved"))
    assert (moved.out, moved.name) == (str(tmp_path), "moved")
