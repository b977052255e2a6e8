"""Costs measured on a copy that is thrown away."""

from __future__ import annotations

import pickle

import pytest
import torch
from local_pipeline import DIRECTQ, Bench, acsgd, fingerprint
from torch import nn

from stages.measure import Output, measure_stage


def test_each_stage_s_pieces_of_work_have_a_price() -> None:
    bench = Bench(num_stages=4, activation=acsgd(), gradient=DIRECTQ)
    source = None
    phases = []
    shapes = []
    for spec in bench.specs():
        costs, source = measure_stage(spec, bench.data(), (0, 1), source, device="cpu")
        phases.append(sorted(costs))
        shapes.append(None if source is None else tuple(source.shape))
        assert all(cost >= 0 for cost in costs.values())
        assert costs["forward"] > 0
        assert costs["backward"] > 0

    everything = ["backward", "decode", "encode", "forward", "update"]
    assert phases == [everything] * 4
    assert shapes == [(2, 8, 32)] * 3 + [None]


def test_a_single_stage_encodes_nothing() -> None:
    costs, output = measure_stage(
        Bench(num_stages=1).specs()[0], Bench().data(), (0, 1), None, device="cpu"
    )

    assert sorted(costs) == ["backward", "forward", "update"]
    assert output is None


def test_measuring_leaves_the_user_s_modules_and_random_numbers_alone() -> None:
    """A list of modules is built once: the stage in training may hold the very same ones."""
    module = nn.Sequential(
        nn.Embedding(256, 32), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(32, 256)
    )
    bench = Bench(num_stages=1, build=lambda blocks: module)
    before, random = fingerprint(module.state_dict()), torch.get_rng_state()

    measure_stage(bench.specs()[0], bench.data(), (0, 1), None, device="cpu")

    assert fingerprint(module.state_dict()) == before
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_output_of_any_float_reaches_the_next_stage_as_it_was(dtype: torch.dtype) -> None:
    output = torch.linspace(-1, 1, 12).view(2, 6).t().to(dtype)  # not contiguous

    sent = pickle.loads(pickle.dumps(Output.of(output)))

    assert sent.shape == (6, 2)
    assert fingerprint(sent.tensor()) == fingerprint(output)
