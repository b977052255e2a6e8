"""What one stage's single pieces of work cost on this machine, in CPU seconds.

Measured on a copy of the stage that is thrown away, so training is not touched. CPU time, not
wall time: other stages may be using the same cores, and the simulator shares cores by itself.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compressors.base import SampleKeys
from compressors.frame import FrameHeader, pack, unpack
from compressors.identity import DTYPES, dtype_name, from_part, to_part
from compressors.registry import CodecSpec, sizing_codec
from stages.box_cost import Trial, box_costs
from stages.compute import Compute
from stages.loss import count_targets
from stages.spec import StageSpec

WARM_UP = 2
"""Rounds that do not count: they touch fresh memory and fill caches."""


class Output(NamedTuple):
    """A stage's output on its way to the next one's measurement: numpy knows no bf16."""

    raw: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(np.asarray(to_part(tensor)), dtype_name(tensor.dtype), tuple(tensor.shape))

    def tensor(self) -> Tensor:
        return from_part(self.raw.data, DTYPES[self.dtype], self.shape, codec="measured")


SKIP = {"forward": WARM_UP, "backward": WARM_UP, "update": 2 * WARM_UP}
"""Measurements to leave out, by phase; the codecs leave theirs out themselves."""


def measure_stage(
    spec: StageSpec,
    samples: Any,
    ids: tuple[int, ...],
    source: Tensor | None,
    *,
    device: str,
    repeats: int = 4,
    box_trial_s: Trial | None = None,
) -> tuple[dict[str, float], Tensor | None]:
    """Cost by phase for a micro-batch of `ids`, and this stage's output for the next one.

    `box_trial_s` says what it takes to write an image into the stage's black box, if it has one.
    """
    compute = Compute(
        copy.deepcopy(spec.build()),  # a user's modules may be the very ones in training
        optim=spec.optim,
        loss=spec.loss,
        recompute=spec.recompute,
        precision=spec.precision,
        device=device,
        first_block=spec.first_block,
    )
    inputs = samples.batch(ids).inputs if source is None else source
    last = spec.index == spec.num_stages - 1
    times: dict[str, list[float]] = {}
    output: Tensor | None = None
    gradient: Tensor | None = None

    def timed(phase: str, work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = work()
        times.setdefault(phase, []).append(time.thread_time() - start)
        return result

    def forward() -> Tensor | None:
        if not last:
            return compute.forward(
                0, samples.batch(ids).inputs if source is None else inputs, ids=ids
            )
        targets = samples.batch(ids).targets
        assert spec.loss is not None
        num_items = count_targets(spec.loss, targets)
        compute.forward_loss(0, inputs, targets, ids=ids, num_items=num_items)
        return None

    for _ in range(WARM_UP + repeats):
        output = timed("forward", forward)
        back = None if output is None else torch.full_like(output, 1e-4)
        gradient = timed("backward", partial(compute.backward, 0, back))
        timed("update", compute.squared_norms)
        timed("update", partial(compute.update, lr=0.0, factor=1.0))

    if not last:
        assert output is not None
        _measure_codec(times, spec.activation_codec, output, ids, repeats)
    if spec.index > 0 and gradient is not None:
        _measure_codec(times, spec.gradient_codec, gradient, ids, repeats)
    # The norm and the update are two pieces of one phase, so the phase's mean stands for both.
    costs = {phase: mean(values[SKIP.get(phase, 0) :]) for phase, values in times.items()}
    if box_trial_s is not None:
        costs |= box_costs(
            spec, compute, before=source, behind=output, ids=ids, trial_s=box_trial_s
        )
    return costs, output


def _measure_codec(
    times: dict[str, list[float]],
    spec: CodecSpec,
    tensor: Tensor,
    ids: tuple[int, ...],
    repeats: int,
) -> None:
    sender = sizing_codec(spec)
    receiver = sizing_codec(spec)
    header = FrameHeader(kind="activation", source=0, target=1, step=0)
    keys = SampleKeys(ids=ids)
    for repeat in range(1 + WARM_UP + repeats):
        start = time.thread_time()
        frame = pack(header, sender.encode(tensor, keys=keys))
        encoded = time.thread_time()
        packet = unpack(frame)[1]
        assert packet is not None
        receiver.decode(packet)
        decoded = time.thread_time()
        sender.commit()
        receiver.commit()
        if repeat > WARM_UP:  # the first visit is cold
            times.setdefault("encode", []).append(encoded - start)
            times.setdefault("decode", []).append(decoded - encoded)
