"""What a user's blocks hand on: one floating-point tensor, its first dimension the samples.

Anything else is refused here, by the block's place and class: behind the cut a codec would meet it
as a tuple without a shape, or as rows of samples that do not exist.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

EXPECTED = "expected one floating-point tensor whose first dimension is the micro-batch's samples"


def run_blocks(module: nn.Module, source: Tensor, *, first_block: int) -> Any:
    """The output of a stage's blocks, one after another.

    Between blocks of one stage anything may pass that the next one takes; if it does not, who gave
    it is named.
    """
    blocks = list(module) if type(module) is nn.Sequential else [module]
    value: Any = source
    for place, block in enumerate(blocks):
        try:
            value = block(value)
        except (TypeError, AttributeError) as error:
            if place == 0 or isinstance(value, Tensor):
                raise
            giver = name_of(blocks[place - 1], first_block + place - 1)
            raise ValueError(f"{giver} returned {describe(value)}, {EXPECTED}") from error
    return value


def check_output(
    output: Any, module: nn.Module, *, first_block: int, num_samples: int | None
) -> Tensor:
    """The output of a stage, if it can be sent; `num_samples` None: it goes to the loss instead,
    whose affair its shape is."""
    if (
        isinstance(output, Tensor)
        and output.is_floating_point()
        and (num_samples is None or (output.ndim > 0 and output.shape[0] == num_samples))
    ):
        return output
    blocks = list(module) if type(module) is nn.Sequential else [module]
    last = name_of(blocks[-1], first_block + len(blocks) - 1) if blocks else "the stage"
    of = "" if num_samples is None else f" of {num_samples} samples"
    raise ValueError(f"{last} returned {describe(output)} for a micro-batch{of}, {EXPECTED}")


def name_of(block: nn.Module, place: int) -> str:
    """`block 3 (LSTM)`."""
    return f"block {place} ({type(block).__name__})"


def describe(value: Any) -> str:
    """A value in a few words: `a tuple of 2`, `a torch.int64 tensor of shape (4, 8)`."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
