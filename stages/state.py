"""All that a stage needs to go on after a commit, as flat tensors and plain notes.

    save:  stage -> StageState -> bytes (safetensors, no pickle)
    load:  the same way back, into a stage of the same blocks; continuing is then bit-identical to
           never having stopped

Weights and optimizer are named by the block's place in the whole model, so that a pipeline cut
elsewhere can load them (`stages.recut`); codec state is named by the end of the wiring it belongs
to. What is saved is a copy: the stage may train on while it is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from stages.compute import Compute
from stages.ends import SendingEnd
from stages.receiving import ReceivingEnd
from stages.state_tree import copy_of, from_tree, to_tree, under
from stages.wiring import Wiring

if TYPE_CHECKING:
    from stages.stage import Stage

FORMAT = 1
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""

MAX_HEADER_NBYTES = 100_000_000
ENDS = ("activation_in", "activation_out", "gradient_in", "gradient_out")


class StateError(ValueError):
    """A saved state that does not fit this stage, or is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """One stage after a commit."""

    arrays: dict[str, Tensor]
    """`weights/3.attn.weight`, `optimizer/3.attn.weight/exp_avg`, `codec/activation_out/values`,
    `random/0`."""

    notes: dict[str, Any]
    """What JSON can hold: `step`, `blocks`, `codec` (trees whose leaves may be arrays), …"""

    @property
    def step(self) -> int:
        """The step whose commit this is; -1 before the first."""
        return int(self.notes["step"])

    @property
    def attempt(self) -> int:
        """Of that step: whoever goes on uses this one, or a higher one."""
        return int(self.notes["attempt"])

    @property
    def blocks(self) -> range:
        """Places of the stage's blocks in the whole model."""
        return range(*self.notes["blocks"])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def weights(self) -> dict[str, Tensor]:
        """By name in the whole model, as in `nn.Sequential(*blocks).state_dict()`."""
        return under(self.arrays, "weights/")

    def chunks(self) -> Iterator[bytes | memoryview]:
        """A safetensors file piece by piece, without a copy; the notes lie in its header."""
        ordered = sorted(self.arrays.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header: dict[str, Any] = {"__metadata__": {"notes": json.dumps(self.notes)}}
        end = 0
        for name, array in ordered:
            start, end = end, end + array.nbytes
            header[name] = {
                "dtype": DTYPES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for _, array in ordered:
            if array.numel():
                yield array.contiguous().reshape(-1).view(torch.uint8).numpy().data

    def to_bytes(self) -> bytes:
        """The file as a whole."""
        return b"".join(self.chunks())

    @classmethod
    def from_bytes(cls, raw: bytes) -> StageState:
        """What `to_bytes` wrote; anything else is refused."""
        try:
            return cls(arrays=load_tensors(raw), notes=read_notes(raw))
        except StateError:
            raise
        except Exception as error:  # the reader raises its own kind for each kind of damage
            raise StateError(f"no saved stage: {error}") from error


def read_notes(raw: bytes | memoryview) -> dict[str, Any]:
    """The notes of a saved stage, from its first bytes."""
    length = int.from_bytes(bytes(raw[:8]), "little")
    if not 2 <= length <= min(MAX_HEADER_NBYTES, len(raw) - 8):
        raise StateError(f"no saved stage: a header of {length} bytes in a file of {len(raw)}")
    header = json.loads(bytes(raw[8 : 8 + length]))
    notes = json.loads(header.get("__metadata__", {}).get("notes", "null"))
    if not isinstance(notes, dict) or notes.get("format") != FORMAT:
        found = notes.get("format") if isinstance(notes, dict) else None
        raise StateError(
            f"a safetensors file of state format {found}, this version reads {FORMAT}; use the "
            "version of ray_pipe that wrote it"
        )
    return notes


# --- a stage's parts --------------------------------------------------------------------------


async def gather_state(stage: Stage) -> StageState:
    """Copy everything, each part in the lane that owns it."""
    arrays, notes = await stage.lanes.compute.run(
        "sync", "save", -1, compute_parts, stage.compute, stage.first_block
    )
    notes |= notes_of(stage)
    for name, end in ends_of(stage.wiring).items():
        lane = stage.lanes.transmit if isinstance(end, SendingEnd) else stage.lanes.receive
        state = await lane.run("sync", "save", -1, end.codec.state_dict)
        notes["codec"][name] = {
            "name": end.codec.name,
            "state": to_tree(state, f"codec/{name}", arrays),
        }
    if stage.seat is not None:
        notes["sync"] = to_tree(stage.seat.state_dict(), "sync", arrays)
    return StageState(arrays=arrays, notes=notes)


def notes_of(stage: Stage) -> dict[str, Any]:
    """Which stage it is and how far it came; its codecs are still to be added."""
    return {
        "format": FORMAT,
        "step": stage.committed,
        "attempt": max(0, stage.turn.attempt),
        "stage": stage.index,
        "num_stages": stage.num_stages,
        "codec": {},
    }


async def restore_state(stage: Stage, state: StageState) -> None:
    """Make the stage what it was; refuses a state of another stage before anything is touched."""
    check_fits(stage, state)
    await stage.lanes.compute.run("sync", "load", -1, _load_compute, stage.compute, state)
    for name, end in ends_of(stage.wiring).items():
        saved = state.notes["codec"].get(name)
        if saved is None:
            continue  # a new edge (`stages.recut`): its codec is as new
        lane = stage.lanes.transmit if isinstance(end, SendingEnd) else stage.lanes.receive
        tree = from_tree(saved["state"], state.arrays)
        await lane.run("sync", "load", -1, end.codec.load_state_dict, tree)
    if stage.seat is not None and "sync" in state.notes:
        stage.seat.load_state_dict(from_tree(state.notes["sync"], state.arrays))


def as_newcomer(state: StageState) -> StageState:
    """The state of another replica's stage, for one that begins: weights and optimizer are the
    same, what its codecs remember of samples that the newcomer never sent is not."""
    notes = {**state.notes, "codec": {}, "fresh": list(state.notes["codec"])}
    del notes["sync"]
    arrays = {
        name: tensor
        for name, tensor in state.arrays.items()
        if name.startswith(("weights/", "optimizer/", "random/"))
    }
    return StageState(arrays=arrays, notes=notes)


def ends_of(wiring: Wiring) -> dict[str, SendingEnd | ReceivingEnd]:
    """The ends that a stage has, by name."""
    return {name: end for name in ENDS if (end := getattr(wiring, name)) is not None}


def check_fits(stage: Stage, state: StageState) -> None:
    """Raise `StateError` unless the state is one of just these blocks and codecs."""
    who, notes = f"stage {stage.index}", state.notes
    own = range(stage.first_block, stage.first_block + len(block_list(stage.compute.module)))
    if state.blocks != own:
        raise StateError(
            f"{who} has blocks {_show(own)} of the model, the saved state has "
            f"{_show(state.blocks)}; resume with the same number of stages, or let "
            "`stages.recut` deal them out anew"
        )
    _check_weights(who, _global_names(stage.compute.module, stage.first_block), state.weights())
    kind = type(stage.compute.optimizer).__name__
    if notes["optimizer"] != kind:
        raise StateError(
            f"{who} is trained by {kind}, the saved state by {notes['optimizer']}; resume with "
            "the same optim.name"
        )
    ends, saved = ends_of(stage.wiring), notes["codec"]
    fresh = set(notes.get("fresh", ()))
    if set(ends) != set(saved) | fresh:
        raise StateError(
            f"{who} has the ends {', '.join(ends) or 'none'}, the saved state has "
            f"{', '.join(sorted(saved)) or 'none'}; it is of another place in the pipeline"
        )
    if fresh and stage.committed >= 0:
        raise StateError(f"{who} has run before: a state of another cut needs new stages")
    for name, end in ends.items():
        if name in saved and saved[name]["name"] != end.codec.name:
            raise StateError(
                f"{who} sends {name} by {end.codec.name}, the saved state by "
                f"{saved[name]['name']}; resume with the same codec"
            )


def compute_parts(
    compute: Compute, first_block: int, *, live: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimizer and random numbers: copies, or `live` what changes at the next update."""
    module = compute.module
    blocks = block_list(module)
    keep = Tensor.detach if live else copy_of
    parameters = _parameters(module, first_block)
    arrays = {
        # A buffer (of a batch norm) changes in the forward pass already.
        f"weights/{name}": keep(tensor) if name in parameters else copy_of(tensor)
        for name, tensor in _global_names(module, first_block).items()
    }
    values: dict[str, Any] = {}  # what an optimizer keeps beside tensors
    for name, parameter in parameters.items():
        for key, value in compute.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                arrays[f"optimizer/{name}/{key}"] = keep(value)
            else:
                values.setdefault(name, {})[key] = value
    for index, numbers in enumerate(compute.random_state):
        arrays[f"random/{index}"] = copy_of(numbers)
    notes = {
        "blocks": [first_block, first_block + len(blocks)],
        "optimizer": type(compute.optimizer).__name__,
        "optimizer_values": values,
    }
    return arrays, notes


def _load_compute(compute: Compute, state: StageState) -> None:
    first = state.blocks.start
    compute.abort()
    own = _global_names(compute.module, first)
    with torch.no_grad():
        for name, tensor in state.weights().items():
            own[name].copy_(tensor)
    saved: dict[str, dict[str, Any]] = {}
    for name, tensor in under(state.arrays, "optimizer/").items():
        parameter_name, _, key = name.rpartition("/")
        saved.setdefault(parameter_name, {})[key] = tensor.clone()
    for name, values in state.notes["optimizer_values"].items():
        saved.setdefault(name, {}).update(values)
    compute.optimizer.state.clear()
    for name, parameter in _parameters(compute.module, first).items():
        if name in saved:
            compute.optimizer.state[parameter] = {
                # A counter of steps stays where the optimizer made it: on the CPU.
                key: value.to(parameter.device)
                if isinstance(value, Tensor) and value.dim()
                else value
                for key, value in saved[name].items()
            }
    numbers = [tensor.clone() for tensor in under(state.arrays, "random/").values()]
    if numbers:  # none after a new cut: the seed's own
        compute.random_state = (*numbers, *compute.random_state[len(numbers) :])


# --- names and trees --------------------------------------------------------------------------


def block_digests(module: nn.Module, first_block: int) -> dict[int, str]:
    """What each block is made of, by its place in the model: names, kinds and shapes of weights."""
    found = {}
    for place, block in enumerate(block_list(module), start=first_block):
        parts = [f"{name} {_kind(tensor)}" for name, tensor in block.state_dict().items()]
        found[place] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return found


def block_list(module: nn.Module) -> list[nn.Module]:
    """The blocks of a stage's module."""
    if not isinstance(module, nn.Sequential):
        raise StateError(
            f"a stage is an nn.Sequential of its blocks, got {type(module).__name__}; its weights "
            "have no names in the whole model"
        )
    return list(module)


def _global_names(module: nn.Module, first_block: int) -> dict[str, Tensor]:
    return {_globally(name, first_block): t for name, t in module.state_dict().items()}


def _parameters(module: nn.Module, first_block: int) -> dict[str, nn.Parameter]:
    """All names of all parameters: a tied one has several, and any cut must find it."""
    named = module.named_parameters(remove_duplicate=False)
    return {_globally(name, first_block): parameter for name, parameter in named}


def _globally(name: str, first_block: int) -> str:
    place, _, rest = name.partition(".")
    return f"{first_block + int(place)}.{rest}"


def _check_weights(who: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        parts = [
            f"{len(names)} weights {where}, as {names[0]}"
            for names, where in ((missing, "are missing"), (extra, "are unknown here"))
            if names
        ]
        raise StateError(f"{who}: the saved state is of another model, {' and '.join(parts)}")
    for name, tensor in own.items():
        there = saved[name]
        if (tensor.shape, tensor.dtype) != (there.shape, there.dtype):
            raise StateError(
                f"{who}: the saved state is of another model, {name} is {_kind(there)} there and "
                f"{_kind(tensor)} here"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _show(blocks: range) -> str:
    return f"{blocks.start} to {blocks.stop - 1}"
