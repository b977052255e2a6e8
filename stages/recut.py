"""The saved state of a pipeline, dealt out to another number of stages.

Weights and optimizer go with their blocks, to the bit. What codecs remember belongs to a place
between two blocks: where the new pipeline is cut at that place too, it goes there; where it is
not, it is dropped, and at a new cut the codec begins as new (AC-SGD: every sample cold once).
Random numbers of dropout begin anew, since they belong to a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stages.state import ENDS, StageState, StateError
from stages.state_tree import ARRAY

AFTER = ("activation_out", "gradient_in")
"""Ends at the cut behind a stage; the others are at the cut before it."""


def recut(
    states: Sequence[StageState], cuts: Sequence[range]
) -> tuple[list[StageState], list[int]]:
    """The states of stages with the blocks `cuts`, and the old cuts whose codec state is dropped.

    A cut is named by the block behind it.
    """
    states = sorted(states, key=lambda state: state.blocks.start)
    _check_whole(states, cuts)
    arrays = {name: array for state in states for name, array in state.arrays.items()}
    codecs = {
        (_place(state.blocks, end), end): (state, saved)
        for state in states
        for end, saved in state.notes["codec"].items()
    }
    result = []
    for index, blocks in enumerate(cuts):
        own = {
            name: array
            for name, array in arrays.items()
            if name.startswith(("weights/", "optimizer/")) and _block(name) in blocks
        }
        notes = {
            **copy.deepcopy(states[0].notes),
            "stage": index,
            "num_stages": len(cuts),
            "blocks": [blocks.start, blocks.stop],
            "optimizer_values": {
                name: values
                for state in states
                for name, values in state.notes["optimizer_values"].items()
                if int(name.partition(".")[0]) in blocks
            },
            "codec": {},
            "fresh": [],
        }
        for end in ENDS:
            neighbour = index + 1 if end in AFTER else index - 1
            if not 0 <= neighbour < len(cuts):
                continue
            found = codecs.get((_place(blocks, end), end))
            if found is None:
                notes["fresh"].append(end)
                continue
            state, saved = found
            saved = copy.deepcopy(saved)
            outward = end.endswith("_out")
            _rename(saved["state"], (index, neighbour) if outward else (neighbour, index))
            own |= {name: state.arrays[name] for name in _array_names(saved["state"])}
            notes["codec"][end] = saved
        result.append(StageState(arrays=own, notes=notes))
    kept = {blocks.start for blocks in cuts}
    dropped = [state.blocks.start for state in states if state.blocks.start not in kept]
    return result, dropped


def _check_whole(states: Sequence[StageState], cuts: Sequence[range]) -> None:
    steps = {state.step for state in states}
    if len(steps) > 1:
        raise StateError(f"the stages were saved after different steps, {sorted(steps)}")
    have = [block for state in states for block in state.blocks]
    want = [block for blocks in cuts for block in blocks]
    if have != want:
        raise StateError(
            f"the saved stages hold {len(have)} blocks in a row, the model here has {len(want)}; "
            "it is another model"
        )


def _place(blocks: range, end: str) -> int:
    return blocks.stop if end in AFTER else blocks.start


def _block(name: str) -> int:
    return int(name.split("/")[1].partition(".")[0])


def _rename(tree: Any, edge: tuple[int, int]) -> None:
    """Rows know the edge they serve by its stages' numbers: (kind, edge, replica, dataset)."""
    if isinstance(tree, dict) and isinstance(tree.get("namespace"), list):
        tree["namespace"][1] = f"{edge[0]}->{edge[1]}"


def _array_names(tree: Any) -> list[str]:
    if isinstance(tree, Mapping):
        if set(tree) == {ARRAY}:
            return [tree[ARRAY]]
        return [name for item in tree.values() for name in _array_names(item)]
    if isinstance(tree, list):
        return [name for item in tree for name in _array_names(item)]
    return []


def whole_model(states: Sequence[StageState]) -> dict[str, Tensor]:
    """The weights of all stages, named as in `nn.Sequential(*blocks).state_dict()`."""
    ordered = sorted(states, key=lambda state: state.blocks.start)
    return {name: tensor for state in ordered for name, tensor in state.weights().items()}
