"""Evaluation over the codec of training, if asked: compressed, and still without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local_pipeline import DIRECTQ, Bench, Run, acsgd, state_of

from compressors.registry import CodecSpec

TOPK = CodecSpec(name="topk", density=0.1)
CODECS = pytest.mark.parametrize(
    "codec", [acsgd(), DIRECTQ, TOPK, acsgd(name="acsgd+zstd")], ids=lambda codec: codec.name
)


def evaluated(codec: CodecSpec, *, compressed: bool) -> Run:
    """Two steps, then an evaluation of samples that training has seen."""
    bench = Bench(num_stages=4, activation=replace(codec, compressed_evaluation=compressed))
    evaluation = bench.plan(0, train=False, schedule="forward", part=1)
    plans = [bench.plan(0), bench.plan(1), replace(evaluation, step=1)]
    return bench.run(plans=plans)


def sent(run: Run) -> int:
    return run.records[-1][0].sent["0->1"]["activation"]


@CODECS
def test_compressed_evaluation_sends_less_and_sees_the_codecs_error(codec: CodecSpec) -> None:
    raw, packed = (evaluated(codec, compressed=each) for each in (False, True))

    assert raw.losses[:2] == packed.losses[:2]
    assert raw.losses[2] != packed.losses[2]
    assert raw.losses[2] == pytest.approx(packed.losses[2], rel=0.1)
    assert sent(packed) < 0.5 * sent(raw)


@pytest.mark.quick(1)
@CODECS
def test_compressed_evaluation_leaves_no_trace(codec: CodecSpec) -> None:
    own = replace(codec, compressed_evaluation=True)
    bench = Bench(num_stages=4, activation=own)
    train = [bench.plan(step) for step in range(4)]
    evaluation = replace(bench.plan(0, train=False, schedule="forward", part=1), step=1)

    plain = bench.run(plans=train)
    mixed = bench.run(plans=[*train[:2], evaluation, *train[2:]])

    assert [*mixed.losses[:2], *mixed.losses[3:]] == plain.losses
    assert state_of(mixed.stages) == state_of(plain.stages)
