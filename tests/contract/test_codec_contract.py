"""Every registered codec keeps every promise, and a mutant of each promise is caught.

A new codec joins by one line in `NAMES`; a test fails if a name of the registry is missing there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from codec_checks import (
    CHECKS,
    Case,
    check_abort,
    check_damage_is_refused,
    check_determinism,
    check_empty_batch,
    check_estimate,
    check_evaluation,
    check_input_untouched,
    check_no_gradient,
    check_non_contiguous,
    check_output_is_the_callers,
    check_own_dtype,
    check_packet_tells_all,
    check_padding,
    check_shape_dtype_and_error,
    check_state,
    check_zero,
)
from torch import Tensor

from compressors.base import Compressor, Packet, SampleKeys, State, Stateless
from compressors.error_feedback import ErrorFeedback
from compressors.floating import Bf16
from compressors.identity import Identity, to_part
from compressors.registry import (
    CODECS,
    SUFFIXES,
    CodecSpec,
    decode_any,
    make_codec,
    needs_repeat_visits,
    split_name,
)
from compressors.topk import TopK

torch.set_num_threads(1)

NAMES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {},
    "bf16": {},
    "directq": {},
    "directq 2 bits stochastic": {"bits": 2, "rounding": "stochastic"},
    "directq 3 bits symmetric": {"bits": 3, "grid": "symmetric", "group": 8},
    "reference": {},
    "reference in groups, stochastic": {"reference_group": 8, "rounding": "stochastic"},
    "topk": {"density": 0.3},
    "acsgd": {},
    "acsgd int8 rows": {"rows": "int8"},
    "acsgd int4 rows": {"rows": "int4"},
    "acsgd int2 rows": {"rows": "int2"},
    # Evicts in the larger tensors; with first visits of as many bits the estimate holds all the
    # same.
    "acsgd under a cap": {"cap_bytes": 1000, "first_visit_bits": 4},
    "acsgd on disk": {"spill_dir": tempfile.gettempdir(), "spill_ram_bytes": 0},
    "acsgd half on disk, int8": {
        "spill_dir": tempfile.gettempdir(), "spill_ram_bytes": 300, "rows": "int8",
    },
    "acsgd with checksums": {"checksum": True},
    "acsgd with compressed evaluation": {"compressed_evaluation": True},
    "acsgd+zstd under a cap, with checksums": {
        "cap_bytes": 1000, "first_visit_bits": 4, "checksum": True,
    },
    "acsgd 2 bits fp32 first, fp32 rows": {"bits": 2, "first_visit_bits": 32, "rows": "fp32"},
    "acsgd stochastic": {"rounding": "stochastic"},
    "acsgd-reference": {},
    "acsgd-topk": {"density": 0.3},
    "fp32+zstd": {},
    "bf16+ef": {},
    "directq+ef": {},
    "directq+zstd": {},
    "topk+ef+zstd": {"density": 0.3},
    "acsgd+zstd": {},
    "acsgd-topk+zstd": {"density": 0.3},
}  # fmt: skip
"""What comes after a space only tells two settings of a codec apart."""


def case_of(label: str) -> Case:
    spec = CodecSpec(name=label.split(" ")[0], **NAMES[label])
    return Case(
        name=label,
        make=lambda: make_codec(spec, namespace=("edge", 0, "data")),
        exact="+zstd" not in spec.name,
        decode_any=None if needs_repeat_visits(spec.name) else decode_any,
        feedback="+ef" in spec.name,
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("label", NAMES)
def test_a_registered_codec_keeps(label: str, check: Callable[[Case], None]) -> None:
    case, made = case_of(label), []

    def make() -> Compressor:
        made.append(case.make())
        return made[-1]

    try:
        check(replace(case, make=make))
    finally:
        for codec in made:  # some have files and threads
            codec.close()


def test_the_cap_of_the_contract_evicts_and_its_disk_holds_rows() -> None:
    found = {}
    for label in ("acsgd under a cap", "acsgd on disk"):
        codec = case_of(label).make()
        codec.encode(torch.ones(4, 6, 32), keys=SampleKeys(ids=(1, 2, 3, 4)))
        codec.commit()
        found[label] = codec.stats()
        codec.close()

    assert found["acsgd under a cap"]["evictions"] == 2
    assert found["acsgd on disk"]["spilled_bytes"] == 4 * 6 * 32 * 2


def test_every_name_of_the_registry_is_in_the_contract() -> None:
    parsed = [split_name(label.split(" ")[0]) for label in NAMES]

    assert {base for base, _ in parsed} == set(CODECS)
    assert {suffix for _, suffixes in parsed for suffix in suffixes} == set(SUFFIXES)


@pytest.mark.parametrize(
    "label", [label for label in NAMES if "acsgd" not in label and "+ef" not in label]
)
def test_a_codec_without_rows_and_residuals_keeps_no_tensor(label: str) -> None:
    codec = case_of(label).make()
    codec.encode(torch.ones(2, 5), keys=SampleKeys(ids=(1, 2)))
    codec.commit()

    assert not any(isinstance(value, Tensor) for value in codec.state_dict().values())


# Mutants: each is a sound codec but for one promise


class Twist(Bf16):
    """Sound; the mutants below change one thing."""


class WrongShape(Twist):
    def decode(self, packet: Packet) -> Tensor:
        return super().decode(packet).flatten()


class WrongDtype(Twist):
    def decode(self, packet: Packet) -> Tensor:
        return super().decode(packet).to(torch.bfloat16)


class AlwaysSingle(Twist):
    def decode(self, packet: Packet) -> Tensor:
        return super().decode(packet).float()


class TooCoarse(Twist):
    def decode(self, packet: Packet) -> Tensor:
        return 0.1 * super().decode(packet)


class ShapeKeptAtTheSender(Twist):
    """Decodes only where it has encoded."""

    shape: tuple[int, ...] | None = None

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        packet = super().encode(tensor, keys=keys)
        self.shape = packet.shape
        return replace(packet, shape=(tensor.numel(),))

    def decode(self, packet: Packet) -> Tensor:
        return super().decode(packet).reshape(self.shape or packet.shape)


class MetaThatChangesOnTheWire(Twist):
    """A list arrives as a tuple."""

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        packet = super().encode(tensor, keys=keys)
        return replace(packet, meta={**packet.meta, "gain": [2.0]})

    def decode(self, packet: Packet) -> Tensor:
        out = super().decode(packet)
        return out if isinstance(packet.meta["gain"], list) else 2 * out


class EstimateOffByOne(Twist):
    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return super().estimate_nbytes(shape) + 1


class MidriseGrid(Twist):
    """Has no level at zero."""

    def decode(self, packet: Packet) -> Tensor:
        return super().decode(packet) + 2.0**-6


class GlobalRandomness(Twist):
    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        return super().encode(tensor * (1 + 0.02 * torch.rand(1)), keys=keys)


class ForgetsItsState(ErrorFeedback):
    def state_dict(self) -> State:
        return {"residuals": {}, "inner": {}}


class LeaksItsState(ErrorFeedback):
    """Hands out its own tensors, and then writes to them."""

    def state_dict(self) -> State:
        own = {f"|{slot}": tensor for (slot, _), tensor in self._residuals.items()}
        return {"residuals": own, "inner": {}}

    def commit(self) -> None:
        for key, tensor in self._staged.items():
            self._residuals.setdefault(key, torch.zeros_like(tensor)).copy_(tensor)
        self._staged = {}


class AbortCommits(ErrorFeedback):
    def abort(self) -> None:
        self.commit()


class EvaluationRemembers(ErrorFeedback):
    def encode(self, tensor: Tensor, *, keys: SampleKeys, slot: str = "") -> Packet:
        return super().encode(tensor, keys=replace(keys, remember=True), slot=slot)


class NeedsASample(Twist):
    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        padded = tensor if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
        return super().encode(padded, keys=keys)


class PaddingInTheScale(Stateless):
    """Eight bits with one scale for the whole tensor."""

    name = "scaled"

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        scale = tensor.detach().abs().nan_to_num(1e9).max() / 127
        codes = (tensor.detach() / scale).nan_to_num().round().to(torch.int8)
        meta = {"scale": scale.item()}
        return Packet(codec="scaled", shape=tuple(tensor.shape), meta=meta, parts=(to_part(codes),))

    def decode(self, packet: Packet) -> Tensor:
        codes = torch.frombuffer(bytearray(packet.parts[0]), dtype=torch.int8)
        return codes.reshape(packet.shape) * torch.tensor(packet.meta["scale"])

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel()


class IgnoresStrides(Twist):
    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).reshape(tensor.shape)
        return super().encode(flat, keys=keys)


class KeepsTheGraph(Identity):
    """Passes the tensor itself, beside the packet."""

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        GRAPH.append(tensor)
        return super().encode(tensor, keys=keys)

    def decode(self, packet: Packet) -> Tensor:
        return GRAPH[-1]


GRAPH: list[Tensor] = []


class ClampsInPlace(Twist):
    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        return super().encode(tensor.clamp_(-100, 100), keys=keys)


class HandsOutItsRow(Twist):
    """Adds half of the last value, and gives the row itself to the caller."""

    row: Tensor | None = None

    def decode(self, packet: Packet) -> Tensor:
        value = super().decode(packet)
        if self.row is not None:
            value = value + 0 * value + 0.01 * self.row
        self.row = value
        return value


class KeepsTheInput(Twist):
    """Sends the mean of this tensor and the last, of which it kept no copy."""

    last: Tensor | None = None

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        mixed = tensor if self.last is None else tensor + 0.01 * self.last
        self.last = tensor.detach()
        return super().encode(mixed, keys=keys)


class PadsWhatIsShort(Twist):
    """Makes up what a packet lacks, and drops what it has too much."""

    def decode(self, packet: Packet) -> Tensor:
        nbytes = 2 * torch.Size(packet.shape).numel()
        if nbytes > 1 << 20 or "dtype" not in packet.meta:
            return super().decode(packet)
        raw = b"".join(map(bytes, packet.parts))[:nbytes].ljust(nbytes, b"\0")
        return super().decode(replace(packet, parts=(raw,), inner=()))


class TrustsItsPackets(Twist):
    def decode(self, packet: Packet) -> Tensor:
        raw = torch.frombuffer(bytearray(packet.parts[0]), dtype=torch.bfloat16)
        return raw.reshape(packet.shape).float()


MUTANTS: list[tuple[Callable[[], Any], Callable[[Case], None]]] = [
    (WrongShape, check_shape_dtype_and_error),
    (WrongDtype, check_shape_dtype_and_error),
    (TooCoarse, check_shape_dtype_and_error),
    (AlwaysSingle, check_own_dtype),
    (ShapeKeptAtTheSender, check_packet_tells_all),
    (MetaThatChangesOnTheWire, check_packet_tells_all),
    (EstimateOffByOne, check_estimate),
    (MidriseGrid, check_zero),
    (GlobalRandomness, check_determinism),
    (lambda: ForgetsItsState(TopK(0.3)), check_state),
    (lambda: LeaksItsState(TopK(0.3)), check_state),
    (lambda: AbortCommits(TopK(0.3)), check_abort),
    (lambda: EvaluationRemembers(TopK(0.3)), check_evaluation),
    (NeedsASample, check_empty_batch),
    (PaddingInTheScale, check_padding),
    (IgnoresStrides, check_non_contiguous),
    (KeepsTheGraph, check_no_gradient),
    (ClampsInPlace, check_input_untouched),
    (HandsOutItsRow, check_output_is_the_callers),
    (KeepsTheInput, check_output_is_the_callers),
    (TrustsItsPackets, check_damage_is_refused),
    (PadsWhatIsShort, check_damage_is_refused),
]


@pytest.mark.parametrize(("make", "check"), MUTANTS)
def test_a_mutant_is_caught(make: Callable[[], Any], check: Callable[[Case], None]) -> None:
    with pytest.raises(AssertionError):
        check(Case(name="mutant", make=make))


def test_every_check_catches_a_mutant() -> None:
    assert {check for _, check in MUTANTS} == set(CHECKS)


@pytest.mark.parametrize("make", [Twist, lambda: ErrorFeedback(TopK(0.3))])
@pytest.mark.parametrize("check", CHECKS)
def test_what_the_mutants_are_made_of_is_sound(
    make: Callable[[], Any], check: Callable[[Case], None]
) -> None:
    check(Case(name="sound", make=make, feedback=True))
