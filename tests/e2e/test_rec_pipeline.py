"""Recommenders on Ray from Python, against rec's own modules in a plain torch loop."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import ray.cloudpickle
import rec_bench
import torch
from rec_bench import Plain, batches, blocks, tables
from torch.nn.functional import binary_cross_entropy_with_logits

import ray_pipe
from ray_pipe import rec

pytestmark = [pytest.mark.ray, pytest.mark.slow]
for module in (sys.modules[__name__], rec_bench):
    ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import tests


def assert_same(plain: Plain, pipe: ray_pipe.Pipeline) -> None:
    """Every weight and every row, to the bit."""
    dense = pipe.state_dict()
    assert dense.keys() == plain.net.state_dict().keys()
    assert all(torch.equal(dense[name], w) for name, w in plain.net.state_dict().items())
    small = pipe.replicated_state()
    assert small.keys() == plain.small().keys()
    assert all(torch.equal(small[name], value) for name, value in plain.small().items())
    for name in ("user", "item"):
        ids, rows = pipe.emb.rows(name)
        (shard,) = plain.emb.shards
        assert len(ids) == shard.rows[name].stats()["rows"]
        assert np.array_equal(rows, shard.rows[name].read(ids).weights)


def pipeline(own: list[rec.Table], **options: Any) -> ray_pipe.Pipeline:
    stage = {"shards": 2, "max_staleness": 0, "wire": rec.Wire(values="fp32")}
    for name in [*stage, "capacity", "spill"]:
        if name in options:
            stage[name] = options.pop(name)
    emb = rec.EmbeddingStage(own, **({"capacity": "64MiB"} | stage))
    return ray_pipe.Pipeline([emb, *blocks()], **options)


def test_tau_zero_on_two_shards_and_two_stages_is_a_plain_loop_to_the_bit(cluster: None) -> None:
    made, plain = batches(12), Plain(tables())
    with pipeline(tables()) as pipe:
        losses = [float(pipe.step(batch, binary_cross_entropy_with_logits)) for batch in made]
        expected = [plain.step(batch) for batch in made]

        assert losses == expected
        assert_same(plain, pipe)
        stats = pipe.emb.stats()
        assert stats["staleness_histogram"] == {0: 2 * len(made)}
        assert stats["lost_pushes"] == 0
        links = stats["bytes_by_link"]
        assert set(links["loader->0"]) == {"embedding"}
        assert set(links["loader->1"]) == {"activation"}
