"""Codecs by name: the whole set on one page.

    base        what it is                          memory
    fp32        the bytes as they are               no      (also: none, identity)
    fp16, bf16  16-bit floats                       no
    directq     uniform quantiser                   no      the baseline of the paper
    reference   the paper's own grid                no
    topk        largest values of each sample       no
    acsgd       changes of activations, quantised   rows    AC-SGD
    acsgd-reference, acsgd-topk                     rows    the same with another inner codec

A name is a base and any of `+ef` (error feedback: what rounding lost is added to the next
tensor) and `+zstd` (lossless entropy stage, outermost): `acsgd+zstd`, `directq+ef+zstd`.
Both ends of an edge build their codec from the same `CodecSpec`. A packet of a codec without
memory needs not even that: `decode_any` reads it from the packet alone.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from torch import Tensor

from compressors.base import CodecError, Compressor, Packet
from compressors.delta import Delta
from compressors.entropy import Entropy, inflate
from compressors.error_feedback import ErrorFeedback
from compressors.floating import Bf16, Fp16
from compressors.identity import Identity
from compressors.quantize import Reference, Uniform
from compressors.spill import DEFAULT_RAM_BYTES, Spill
from compressors.topk import TopK

Namespace = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec as the user asks for it; each codec reads the fields that concern it."""

    name: str
    """One of the names above, suffixes included."""

    bits: int = 4
    """Of a quantised value."""

    grid: Literal["signed", "symmetric"] = "signed"
    group: int = 32
    """Neighbouring channels that share a scale."""

    reference_group: int | None = None
    """The same for the paper's own grid; None: one scale per channel for the whole micro-batch."""

    rounding: Literal["nearest", "stochastic"] = "nearest"

    first_visit_bits: int = 8
    """Of a sample that AC-SGD has no row for yet; 32 sends it as fp32."""

    rows: str = "bf16"
    """How AC-SGD stores its rows, the same at both ends."""

    density: float = 0.1
    """Share of values that top-k sends."""

    cap_bytes: int | None = None
    """Memory for rows at each end; the least recently used are given up beyond it."""

    spill_dir: str | None = None
    """Where rows go that memory does not hold; None keeps them in memory."""

    spill_ram_bytes: int = DEFAULT_RAM_BYTES
    """With `spill_dir`: bytes of rows that stay in memory at each end."""

    checksum: bool = False
    """Compare a checksum of the new rows at each visit."""

    compressed_evaluation: bool = False
    """Whether an edge encodes evaluation too; else it sends raw values past its codec."""

    seed: int = 0
    """Of stochastic rounding; each edge and direction makes its own of it."""


def _fp32(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return Identity()


def _fp16(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return Fp16()


def _bf16(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return Bf16()


def _directq(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return Uniform(
        spec.bits,
        grid=spec.grid,
        group=spec.group,
        rounding=spec.rounding,
        seed=_seed_of(spec, namespace),
    )


def _reference(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return Reference(
        spec.bits,
        group=spec.reference_group,
        rounding=spec.rounding,
        seed=_seed_of(spec, namespace),
    )


def _seed_of(spec: CodecSpec, namespace: Namespace) -> int:
    """Each edge and direction draws numbers of its own: equal ones would round alike everywhere,
    and the errors of all edges would add up in step."""
    text = "\0".join(map(str, (spec.seed, *namespace)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _topk(spec: CodecSpec, namespace: Namespace) -> Compressor:
    return TopK(spec.density)


def _delta_of(
    inner: Callable[[CodecSpec, Namespace], Compressor],
) -> Callable[[CodecSpec, Namespace], Compressor]:
    def build(spec: CodecSpec, namespace: Namespace) -> Compressor:
        if spec.first_visit_bits == 32:
            first_visit: Compressor = Identity()
        else:
            first_visit = Uniform(spec.first_visit_bits, grid=spec.grid, group=spec.group)
        return Delta(
            inner(spec, namespace),
            namespace=namespace,
            first_visit=first_visit,
            rows=spec.rows,
            cap_bytes=spec.cap_bytes,
            spill=_spill_of(spec),
            checksum=spec.checksum,
            compressed_evaluation=spec.compressed_evaluation,
        )

    return build


def _spill_of(spec: CodecSpec) -> Spill | None:
    if spec.spill_dir is None:
        return None
    return Spill(directory=spec.spill_dir, ram_bytes=spec.spill_ram_bytes)


CODECS: Final[dict[str, Callable[[CodecSpec, Namespace], Compressor]]] = {
    "fp32": _fp32,
    "fp16": _fp16,
    "bf16": _bf16,
    "directq": _directq,
    "reference": _reference,
    "topk": _topk,
    "acsgd": _delta_of(_directq),
    "acsgd-reference": _delta_of(_reference),
    "acsgd-topk": _delta_of(_topk),
}
ALIASES: Final[dict[str, str]] = {"none": "fp32", "identity": "fp32"}
SUFFIXES: Final[tuple[str, ...]] = ("ef", "zstd")


def make_codec(spec: CodecSpec, *, namespace: Namespace) -> Compressor:
    """One end of one edge in one direction; `namespace` keeps the rows of edges apart."""
    base, suffixes = split_name(spec.name)
    codec = CODECS[base](spec, namespace)
    if "ef" in suffixes:
        codec = ErrorFeedback(codec)
    if "zstd" in suffixes:
        codec = Entropy(codec)
    return codec


def sizing_codec(spec: CodecSpec, *, namespace: Namespace = ("sizing",)) -> Compressor:
    """A codec for estimates only: it opens no file and remembers nothing of use."""
    return make_codec(replace(spec, spill_dir=None, cap_bytes=None), namespace=namespace)


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Base and suffixes of a codec name, aliases resolved; ValueError if it names none."""
    base, *suffixes = name.split("+")
    base = ALIASES.get(base, base)
    if base not in CODECS:
        raise _unknown("codec", base, name, [*CODECS, *ALIASES])
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise _unknown("codec suffix", suffix, name, list(SUFFIXES))
    if len(set(suffixes)) != len(suffixes):
        raise ValueError(f"codec {name!r} names a suffix twice; write each once")
    if "ef" in suffixes and needs_repeat_visits(base):
        raise ValueError(
            f"codec {name!r}: {base} sends changes against what the receiver holds, so each visit "
            "already carries what rounding lost before; leave out '+ef'"
        )
    return base, tuple(sorted(suffixes))


def needs_repeat_visits(name: str) -> bool:
    """Whether the codec gains only when a sample comes again: true of AC-SGD."""
    base = name.split("+")[0]
    return split_name(base)[0].startswith("acsgd")


DECODERS: Final[dict[str, Callable[[Packet], Tensor]]] = {
    "fp32": Identity().decode,
    "fp16": Fp16().decode,
    "bf16": Bf16().decode,
    "uniform": Uniform(bits=4).decode,  # the packet says how many bits it has
    "reference": Reference(bits=4).decode,
    "topk": TopK().decode,
    "zstd": lambda packet: decode_any(inflate(packet)),
}


def decode_any(packet: Packet) -> Tensor:
    """The tensor of a packet that needs no memory, from the packet alone."""
    decode = DECODERS.get(packet.codec)
    if decode is None:
        raise CodecError(
            f"packet of codec {packet.codec!r:.40} cannot be decoded from the packet alone; "
            f"known are {', '.join(DECODERS)}, and a codec with memory decodes only with the "
            "receiver's own instance (make_codec with the sender's spec)"
        )
    return decode(packet)


def _unknown(what: str, part: str, name: str, known: list[str]) -> ValueError:
    near = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    where = "" if part == name else f" in {name!r}"
    return ValueError(f"unknown {what} {part!r}{where}; {guess}Known are {', '.join(known)}")
