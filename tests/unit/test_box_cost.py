"""The price of a black box: what it is measured on, and that measuring leaves the box alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from local_pipeline import DIRECTQ, Bench, acsgd

from compressors.buffers import Change, Mark
from stages.black_box import BlackBox, Image
from stages.box_cost import BOX, BOX_ROWS, first_of
from stages.measure import measure_stage

IDS = (3, 5)


def test_a_step_s_weights_and_a_micro_batch_s_rows_are_priced_apart() -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)
    source = None
    for spec in bench.specs():
        tried: list[Image] = []

        def trial_s(image: Image, tried: list[Image] = tried) -> float:
            tried.append(image)
            return 1.0 if image.changes else 0.25

        costs, source = measure_stage(
            spec, bench.data(), IDS, source, device="cpu", repeats=1, box_trial_s=trial_s
        )
        assert (costs[BOX], costs[BOX_ROWS]) == (0.25, 1.0)
        weights, rows = tried
        module = spec.build()
        moments = [name for name in weights.arrays if name.endswith("/exp_avg_sq")]
        assert len(moments) == len(list(module.parameters()))  # not what Adam has at first: nothing
        cuts = 2 if spec.index in (1, 2) else 1
        assert [len(own) for own in rows.changes.values()] == [len(IDS)] * cuts
        sizes = {
            row.value.nbytes
            for own in rows.changes.values()
            for row in own
            if row.value is not None
        }
        assert sizes == {8 * 32 * 2}  # bf16


def test_a_codec_without_rows_writes_none() -> None:
    bench = Bench(num_stages=2, activation=DIRECTQ, gradient=DIRECTQ)
    costs, _ = measure_stage(
        bench.specs()[0],
        bench.data(),
        IDS,
        None,
        device="cpu",
        repeats=1,
        box_trial_s=lambda _: 2.0,
    )
    assert (costs[BOX], costs[BOX_ROWS]) == (2.0, 0.0)


def test_of_a_large_stage_a_part_is_written() -> None:
    arrays = {str(i): torch.zeros(100) for i in range(5)}
    assert list(first_of(arrays, 800)) == ["0", "1"]
    assert list(first_of(arrays, 801)) == ["0", "1", "2"]
    assert list(first_of(arrays, 1)) == ["0"]
    assert list(first_of(arrays, 10_000)) == list(arrays)


def test_the_price_of_a_part_is_raised_to_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial that costs what it writes costs the same, however little of it is written."""
    bench = Bench(num_stages=2, activation=DIRECTQ, gradient=DIRECTQ)
    prices = []
    for limit in (1 << 20, 1):
        monkeypatch.setattr("stages.box_cost.SAMPLE_NBYTES", limit)
        costs, _ = measure_stage(
            bench.specs()[0], bench.data(), IDS, None, device="cpu", repeats=1, box_trial_s=by_bytes
        )
        prices.append(costs[BOX])
    assert prices[1] == pytest.approx(prices[0])


def by_bytes(image: Image) -> float:
    return float(sum(array.nbytes for array in image.arrays.values()))


def test_a_trial_leaves_the_box_as_it_was(tmp_path: Path) -> None:
    row = Change(1, Mark(0, 1, (4,)), torch.ones(4))
    box = BlackBox(tmp_path / "box", rows=tmp_path / "rows")
    box.write(Image(step=7, arrays={"w": torch.ones(3)}, notes={}, changes={"out": [row]}))
    before = contents(tmp_path)

    took_s = box.trial_s(
        Image(step=0, arrays={"w": torch.zeros(100_000)}, notes={}, changes={"out": [row] * 9})
    )

    assert took_s > 0
    assert contents(tmp_path) == before
    assert box.steps() == [7]
    assert box.read(7).rows["out"]["ids"].tolist() == [1]
    box.remove()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
