"""Names of codecs: what they build, what they promise about memory, what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from compressors.base import CodecError, Packet, SampleKeys
from compressors.delta import Delta
from compressors.entropy import Entropy
from compressors.error_feedback import ErrorFeedback
from compressors.floating import Bf16, Fp16
from compressors.identity import Identity
from compressors.quantize import Reference, Uniform
from compressors.registry import (
    ALIASES,
    CODECS,
    CodecSpec,
    decode_any,
    make_codec,
    needs_repeat_visits,
    split_name,
)
from compressors.topk import TopK

torch.set_num_threads(1)
EDGE = ("0->1", 0, "data")


def build(name: str, **options: object) -> object:
    return make_codec(CodecSpec(name=name, **options), namespace=EDGE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fp32", Identity), ("none", Identity), ("identity", Identity), ("fp16", Fp16),
        ("bf16", Bf16), ("directq", Uniform), ("reference", Reference), ("topk", TopK),
        ("acsgd", Delta), ("acsgd-reference", Delta), ("acsgd-topk", Delta),
        ("bf16+zstd", Entropy), ("topk+ef", ErrorFeedback),
    ],
)  # fmt: skip
def test_a_name_builds_its_codec(name: str, kind: type) -> None:
    assert type(build(name)) is kind


def test_options_reach_the_codec_they_concern() -> None:
    quantiser = build("directq", bits=3, grid="symmetric", group=16, rounding="stochastic", seed=5)
    assert isinstance(quantiser, Uniform)
    assert (quantiser.bits, quantiser.grid, quantiser.group) == (3, "symmetric", 16)
    assert quantiser.rounding == "stochastic"

    reference = build("reference", bits=2, reference_group=8, rounding="stochastic")
    assert isinstance(reference, Reference)
    assert (reference.bits, reference.group, reference.rounding) == (2, 8, "stochastic")
    assert getattr(build("reference", group=8), "group", "") is None

    topk = build("topk", density=0.25)
    assert isinstance(topk, TopK)
    assert topk.density == 0.25


def test_acsgd_wraps_the_inner_codec_and_names_its_edge() -> None:
    codec = build("acsgd-topk", density=0.25, first_visit_bits=32, checksum=True)

    assert isinstance(codec, Delta)
    assert isinstance(codec.inner, TopK)
    assert isinstance(codec.first_visit, Identity)
    assert codec.namespace == EDGE
    packet = codec.encode(torch.ones(1, 40), keys=SampleKeys(ids=(1,)))
    assert packet.rows is not None
    assert packet.rows.checksum is not None


def test_a_first_visit_takes_eight_bits_unless_asked_otherwise() -> None:
    codec = build("acsgd", bits=2)

    assert isinstance(codec, Delta)
    assert isinstance(codec.inner, Uniform)
    assert isinstance(codec.first_visit, Uniform)
    assert (codec.inner.bits, codec.first_visit.bits) == (2, 8)


def test_the_entropy_stage_is_outermost_whatever_the_order_of_suffixes() -> None:
    for name in ("topk+ef+zstd", "topk+zstd+ef"):
        codec = build(name)

        assert isinstance(codec, Entropy)
        assert isinstance(codec.inner, ErrorFeedback)
        assert isinstance(codec.inner.inner, TopK)
    outer = build("acsgd+zstd")
    assert isinstance(outer, Entropy)
    assert isinstance(outer.inner, Delta)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "acsdg",
            r"unknown codec 'acsdg'; did you mean 'acsgd'\? Known are fp32, fp16, bf16, dire",
        ),
        ("fp23", r"did you mean 'fp32'\?"),
        ("direct-q", r"did you mean 'directq'\?"),
        ("", "unknown codec ''"),
        ("qqqqqq", "unknown codec 'qqqqqq'; Known are"),
        ("ACSGD", "unknown codec 'ACSGD'"),
        ("acsgd+zst", r"unknown codec suffix 'zst' in 'acsgd\+zst'; did you mean 'zstd'\? Known"),
        ("acsgd+", "unknown codec suffix ''"),
        ("topk+ef+ef", "names a suffix twice"),
        ("acsgd+ef", r"already carries what rounding lost before; leave out '\+ef'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_right_one(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name)


def test_memory_is_known_by_name() -> None:
    assert {name for name in CODECS if needs_repeat_visits(name)} == {
        "acsgd",
        "acsgd-reference",
        "acsgd-topk",
    }
    assert needs_repeat_visits("acsgd+zstd")
    assert not needs_repeat_visits("directq+ef")
    with pytest.raises(ValueError, match="did you mean 'acsgd'"):
        needs_repeat_visits("acsdg")


def test_aliases_lead_to_codecs() -> None:
    assert set(ALIASES.values()) <= set(CODECS)
    assert split_name("none+zstd") == ("fp32", ("zstd",))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "directq", "reference", "topk"])
@pytest.mark.parametrize("suffix", ["", "+ef", "+zstd", "+ef+zstd"])
def test_a_packet_without_memory_is_read_from_itself_alone(name: str, suffix: str) -> None:
    codec = make_codec(CodecSpec(name=name + suffix, bits=3, density=0.5), namespace=EDGE)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))

    packet = codec.encode(x, keys=SampleKeys(ids=(1, 2, 3)))

    assert torch.equal(decode_any(packet), codec.decode(packet))


def test_a_packet_that_needs_memory_says_so() -> None:
    codec = make_codec(CodecSpec(name="acsgd+zstd"), namespace=EDGE)
    packet = codec.encode(torch.ones(1, 40), keys=SampleKeys(ids=(1,)))

    with pytest.raises(CodecError, match="'delta' cannot be decoded from the packet alone"):
        decode_any(packet)
    with pytest.raises(CodecError, match="'nonsense'"):
        decode_any(Packet(codec="nonsense", shape=(1,)))


@pytest.mark.parametrize("name", ["directq", "reference", "acsgd"])
def test_stochastic_rounding_draws_other_numbers_on_each_edge_and_direction(name: str) -> None:
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    keys = SampleKeys(ids=(1, 2))
    spec = CodecSpec(name=name, bits=2, rounding="stochastic", first_visit_bits=8)

    def sent(kind: str, edge: str, replica: int = 0, seed: int = 0) -> tuple[bytes, ...]:
        codec = make_codec(replace(spec, seed=seed), namespace=(kind, edge, replica, "data"))
        codec.encode(0.5 * x, keys=keys)  # the first visit of acsgd
        packet = codec.encode(x, keys=keys)
        while packet.inner:
            packet = packet.inner[0]
        return tuple(bytes(part) for part in packet.parts)

    ends = [
        sent("activation", "0->1"),
        sent("activation", "1->2"),
        sent("gradient", "1->0"),
        sent("activation", "0->1", replica=1),
        sent("activation", "0->1", seed=1),
    ]

    assert len(set(ends)) == len(ends)
    assert sent("activation", "0->1") == ends[0]


def test_a_spec_is_frozen_and_has_the_defaults_of_the_specification() -> None:
    spec = CodecSpec(name="acsgd")

    with pytest.raises(FrozenInstanceError):
        spec.bits = 2  # type: ignore[misc]
    assert {f.name: f.default for f in fields(CodecSpec) if f.name != "name"} == {
        "bits": 4, "grid": "signed", "group": 32, "reference_group": None,
        "rounding": "nearest", "first_visit_bits": 8,
        "rows": "bf16", "density": 0.1, "cap_bytes": None, "spill_dir": None,
        "spill_ram_bytes": 256 * 2**20, "checksum": False,
        "compressed_evaluation": False, "seed": 0,
    }  # fmt: skip
