"""Bytes that must not change: frames on the wire, and codes of the quantisers.

Two ends of a link may run different releases, and checkpoints hold rows that were coded by an older
one. So `wire.hex` and `codes.hex` fix the bytes of a few frames and of every grid and bit width. If
a test here fails, either something broke, or the format has changed on purpose: then raise
`compressors.frame.VERSION`, say so in the changelog, and write the files again with

    python tests/golden/test_golden_bytes.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressors import kernels
from compressors.base import Packet, SampleKeys
from compressors.frame import VERSION, FrameHeader, pack, unpack
from compressors.quantize import Reference, Uniform
from compressors.registry import CodecSpec, make_codec

HERE = Path(__file__).parent
KEYS = SampleKeys(ids=(7, 300))
HEADER = FrameHeader(
    kind="activation", source=0, target=1, step=5, micro_batch=2, seq=9, attempt=1, generation=0
)
NORM = FrameHeader(
    kind="control", source=2, target=0, step=5, seq=3, body={"norm": [1.5, 0.25], "part": 1}
)


def values(shape: tuple[int, ...], visit: int = 0) -> Tensor:
    """Numbers that need no generator: multiples of 1/16 of both signs, a large one among them."""
    count = torch.arange(torch.Size(shape).numel())
    x = ((count * 37 + 11 * visit) % 101 - 50).float() / 16
    x[::29] *= 8
    return x.reshape(shape)


def sent(name: str, **options: object) -> Packet:
    """The second visit of two samples: with memory, a change."""
    codec = make_codec(CodecSpec(name=name, **options), namespace=("activation", "0->1", 0, "d"))  # type: ignore[arg-type]
    packet = codec.encode(values((2, 3, 40)), keys=KEYS)
    codec.commit()
    return packet if name in ("fp32", "bf16") else codec.encode(values((2, 3, 40), 1), keys=KEYS)


def frames() -> dict[str, bytes]:
    """A frame of each shape that the header can take."""
    return {
        "control": pack(NORM),
        "fp32": pack(HEADER, sent("fp32")),
        "bf16": pack(HEADER, sent("bf16")),
        "directq 4 bits": pack(HEADER, sent("directq")),
        "reference 4 bits": pack(HEADER, sent("reference")),
        "reference 2 bits, groups of 16": pack(
            HEADER, sent("reference", bits=2, reference_group=16)
        ),
        "topk": pack(HEADER, sent("topk", density=0.1)),
        "acsgd 2 bits": pack(HEADER, sent("acsgd", bits=2)),
        "acsgd 4 bits, checksum": pack(HEADER, sent("acsgd", checksum=True)),
    }


def codes() -> dict[str, bytes]:
    """Codes, then scales, of every grid and number of bits; 40 channels are no whole groups."""
    found = {}
    for grid, least in (("signed", 1), ("symmetric", 2)):
        for bits in range(least, 9):
            packet = Uniform(bits, grid=grid).encode(values((2, 3, 40)), keys=KEYS)
            found[f"{grid} {bits} bits"] = b"".join(map(bytes, packet.parts))
    for bits in (2, 4, 8):
        packet = Reference(bits).encode(values((2, 3, 40)), keys=KEYS)
        found[f"reference {bits} bits"] = b"".join(map(bytes, packet.parts))
    return found


def read(file: str) -> dict[str, bytes]:
    """Names at the margin, hex digits indented below them."""
    found: dict[str, str] = {}
    name = ""
    for line in (HERE / file).read_text(encoding="ascii").splitlines():
        if line.startswith(" "):
            found[name] += line.strip()
        else:
            name = line.removesuffix(":")
            found[name] = ""
    return {name: bytes.fromhex(digits) for name, digits in found.items()}


def write(file: str, made: dict[str, bytes]) -> None:
    lines = []
    for name, raw in made.items():
        lines += [f"{name}:", *(f"  {line}" for line in textwrap.wrap(raw.hex(), 96))]
    (HERE / file).write_text("\n".join(lines) + "\n", encoding="ascii")


@pytest.fixture(params=["native", "torch"])
def core(request: pytest.FixtureRequest) -> object:
    """Both cores make the same bytes."""
    with kernels.use(request.param):
        yield request.param


def test_frames_are_the_bytes_that_they_were(core: str) -> None:
    assert VERSION == 1
    golden = read("wire.hex")

    made = frames()

    assert made.keys() == golden.keys()
    for name, raw in golden.items():
        assert made[name].hex() == raw.hex(), name


def test_codes_are_the_bytes_that_they_were(core: str) -> None:
    golden = read("codes.hex")

    made = codes()

    assert made.keys() == golden.keys()
    for name, raw in golden.items():
        assert made[name].hex() == raw.hex(), name


def test_golden_frames_can_still_be_read() -> None:
    """What an older release sent is understood by this one, to the value."""
    for name, raw in read("wire.hex").items():
        header, packet = unpack(raw)
        if name == "control":
            assert packet is None
            assert header.body["norm"] == (1.5, 0.25)
            continue
        assert header == HEADER
        assert packet is not None
        if name == "fp32":
            codec = make_codec(CodecSpec(name="fp32"), namespace=("n",))
            assert torch.equal(codec.decode(packet), values((2, 3, 40)))


def test_mutant_a_changed_bit_is_seen() -> None:
    raw = bytearray(read("codes.hex")["signed 4 bits"])
    raw[3] ^= 1

    assert codes()["signed 4 bits"] != bytes(raw)


if __name__ == "__main__":
    write("wire.hex", frames())
    write("codes.hex", codes())
