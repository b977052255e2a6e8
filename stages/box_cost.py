"""What a stage's black box costs, in CPU seconds: one of the prices that the simulator needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compressors.buffers import Change, Mark
from compressors.registry import CodecSpec, sizing_codec
from compressors.row_log import row_store
from stages.black_box import Image
from stages.compute import Compute
from stages.spec import StageSpec
from stages.state import compute_parts

BOX, BOX_ROWS = "box", "box_rows"
"""Of what each step writes, and of the rows that one micro-batch changes."""

SAMPLE_NBYTES = 32 << 20
"""Of weights that are written to see what it takes; of a larger stage a part."""

Trial = Callable[[Image], float]


def box_costs(
    spec: StageSpec,
    compute: Compute,
    *,
    before: Any,
    behind: Tensor | None,
    ids: tuple[int, ...],
    trial_s: Trial,
) -> dict[str, float]:
    """`compute` has made a step: its optimizer holds all that it will hold. `before` and `behind`
    are a micro-batch's tensors at the two cuts, None at the ends of the pipeline. `trial_s` writes
    an image and says what it took."""
    arrays, _ = compute_parts(compute, spec.first_block, live=True)
    some = first_of(arrays, SAMPLE_NBYTES)
    share = sum(each.nbytes for each in some.values()) / sum(a.nbytes for a in arrays.values())
    changes: dict[str, list[Change]] = {}
    for cut, tensor in (("before", before), ("behind", behind)):
        if tensor is None:
            continue
        for kind, codec in (
            ("activation", spec.activation_codec),
            ("gradient", spec.gradient_codec),
        ):
            if rows := rows_of(codec, tuple(tensor.shape[1:]), ids):
                changes[f"{kind} {cut}"] = rows
    return {
        BOX: trial_s(Image(step=0, arrays=some, notes={})) / share,
        BOX_ROWS: trial_s(Image(step=0, arrays={}, notes={}, changes=changes)) if changes else 0.0,
    }


def first_of(arrays: Mapping[str, Tensor], nbytes: int) -> dict[str, Tensor]:
    """As many of the arrays as that many bytes hold, at least one."""
    some: dict[str, Tensor] = {}
    for name, tensor in arrays.items():
        some[name] = tensor
        nbytes -= tensor.nbytes
        if nbytes <= 0:
            break
    return some


def rows_of(spec: CodecSpec, shape: tuple[int, ...], ids: tuple[int, ...]) -> list[Change]:
    """What a commit would change in the rows of a codec that has some, values all zero."""
    store = row_store(sizing_codec(spec))
    if store is None:
        return []
    nbytes = store.row_format.nbytes(shape)
    return [
        Change(sample, Mark(0, 1, shape), torch.zeros(nbytes, dtype=torch.uint8)) for sample in ids
    ]
