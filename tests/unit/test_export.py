"""The trained model as plain weights, for `nn.Sequential(*blocks)`."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saved_runs import SavedRun

from ray_pipe.export import export, main, model_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return SavedRun(path=tmp_path_factory.mktemp("runs") / "demo", steps=4).train()


@pytest.mark.slow
def test_the_file_loads_into_the_whole_model(run: SavedRun, tmp_path: Path) -> None:
    out = io.StringIO()
    status = main([str(run.path), str(tmp_path / "model.safetensors")], out=out)

    work = run.arm.workload
    model = work.build(0, work.num_blocks)
    weights = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(weights)
    trained = {name: t for state in run.final for name, t in state.weights().items()}
    assert status == 0
    assert out.getvalue().endswith("model.safetensors: the weights of acsgd after 4 steps\n")
    assert trained.keys() == weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "4"


@pytest.mark.parametrize("ending", ["pt", "pth", "bin"])
def test_torchs_own_endings_are_written_in_torchs_own_format(
    run: SavedRun, tmp_path: Path, ending: str
) -> None:
    out = tmp_path / f"model.{ending}"
    export(str(run.path), str(out))

    weights = torch.load(out, weights_only=True)
    right = model_state(str(run.path))
    assert weights.keys() == right.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in right.items())


@pytest.mark.parametrize("name", ["model", "model.onnx", "model.safetensors.gz"])
def test_an_ending_of_no_known_format_is_refused_by_name(
    run: SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([str(run.path), str(tmp_path / name)]) == 2

    said = capsys.readouterr().err
    assert name in said
    assert "use .safetensors, or .pt, .pth or .bin" in said
    assert list(tmp_path.iterdir()) == []


def test_of_a_click_run_it_is_the_dense_network_and_says_where_the_rows_are(
    tmp_path: Path,
) -> None:
    clicks = SavedRun(path=tmp_path / "clicks", steps=2).train()
    (*_, newest) = clicks.store.checkpoints("acsgd")
    note = newest.folder.write("shard_0_of_1.safetensors", [b"rows"])
    with_rows = replace(newest.manifest, files=(*newest.manifest.files, note))
    newest.folder.replace("manifest.json", with_rows.to_json())
    out = io.StringIO()

    assert main([newest.path, str(tmp_path / "dense.safetensors")], out=out) == 0
    assert "The embedding rows are not in it" in out.getvalue()
    assert f"load({newest.path!r})" in out.getvalue()
    with safe_open(tmp_path / "dense.safetensors", "pt") as file:
        assert file.metadata()["embedding_rows"] == "not included"


def test_an_older_checkpoint_can_be_exported(run: SavedRun, tmp_path: Path) -> None:
    older = f"{run.path}/checkpoints/acsgd/checkpoint_000002"

    assert export(older, str(tmp_path / "m.safetensors")).step == 2
    before, after = model_state(older), model_state(str(run.path))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "weight" in name)


def test_several_arms_need_a_name(tmp_path: Path) -> None:
    for codec in ("acsgd", "fp32"):
        SavedRun(path=tmp_path / "demo", steps=2, settings={"codec__name": codec}).train()

    errors = []
    for words in ([], ["--arm", "directq"], ["--arm", "fp32"]):
        errors.append(
            main([str(tmp_path / "demo"), str(tmp_path / "m.pt"), *words], out=io.StringIO())
        )

    assert errors == [2, 2, 0]


def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "m.safetensors"]) == 2
    assert "there is no checkpoint in it" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SavedRun(path=tmp_path / "demo", steps=2).train()
    place = run.path / "checkpoints" / "acsgd" / "checkpoint_000002"
    raw = bytearray((place / "stage_0.safetensors").read_bytes())
    raw[-5] ^= 1
    (place / "stage_0.safetensors").write_bytes(bytes(raw))

    assert main([str(place), str(tmp_path / "m.safetensors")]) == 2
    assert "stage_0.safetensors has the right size but other content" in capsys.readouterr().err
