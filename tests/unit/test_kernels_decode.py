"""Decoding by the native core: exact whatever the scale, and the same past the caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray_pipe_native
import torch
from torch import Tensor

from compressors import kernels
from compressors.base import CodecError
from compressors.kernels_rows import delta_decode_rows

ISAS = ray_pipe_native.isas()


@pytest.fixture(autouse=True)
def machine_as_it_was() -> Iterator[None]:
    before = ray_pipe_native.stream_beyond(0)
    ray_pipe_native.stream_beyond(before)
    yield
    ray_pipe_native.stream_beyond(before)
    ray_pipe_native.use_isa(ISAS[-1])


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_ints = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(as_ints), b.view(as_ints))


def packet(bits: int, *, grid: str, rows: int, channels: int, seed: int) -> tuple[Tensor, ...]:
    """Codes and scales that no encoder need have made, and rows as large as their values."""
    generator = torch.Generator().manual_seed(seed)
    nbytes, groups = channels * bits // 8, channels // 32
    codes = torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, groups, generator=generator).bfloat16()
    row = torch.randn(rows, channels, generator=generator).bfloat16()
    if grid == "symmetric":
        codes, scales = kernels.quantize(row.float(), bits=bits, grid=grid)
    return codes, scales, row


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_every_code_of_every_size_of_scale_is_exact_and_zeros_keep_their_sign(
    isa: str, bits: int
) -> None:
    patterns = torch.cat([torch.arange(0, 0x7F80, 7), torch.arange(-0x8000, -0x80, 7)])
    scales = patterns.to(torch.int16).view(torch.bfloat16)
    scales = scales[torch.isfinite(scales)][:, None].expand(-1, 8).contiguous()
    each = torch.arange(32 * bits, dtype=torch.uint8)
    codes = each.repeat(len(scales), 1) * 37 + torch.arange(len(scales), dtype=torch.uint8)[:, None]
    row = torch.where(torch.arange(256) % 2 == 0, -0.0, 1e-39).bfloat16().repeat(len(scales), 1)

    with kernels.use("torch"):
        wanted = kernels.dequantize(codes, scales, channels=256, bits=bits)
        wanted_new, wanted_row = kernels.delta_decode(codes, scales, row, bits=bits)
    ray_pipe_native.use_isa(isa)
    with kernels.use("native"):
        decoded = kernels.dequantize(codes, scales, channels=256, bits=bits)
        new, new_row = kernels.delta_decode(codes, scales, row, bits=bits)

    assert same_bits(decoded, wanted)
    assert same_bits(new, wanted_new)
    assert same_bits(new_row, wanted_row)


@pytest.mark.parametrize("isa", ISAS)
def test_new_rows_round_ties_to_even_and_up_into_the_next_binade(isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4, 1)  # -128..127 times 2**-8 and less
    scales = torch.tensor([0.5, 0.25, -0.5, 2.0**-9])[:, None].repeat(1, 8).bfloat16()
    row = torch.tensor([1.0, -1.0, 1.9921875, 255.0]).repeat_interleave(64).repeat(4, 1).bfloat16()

    with kernels.use("torch"):
        wanted = kernels.delta_decode(codes, scales, row, bits=8)
    ray_pipe_native.use_isa(isa)
    with kernels.use("native"):
        found = kernels.delta_decode(codes, scales, row, bits=8)

    lower = wanted[0].view(torch.int32) & 0xFFFF
    assert int((lower == 0x8000).sum()) > 100, "ties are what this is about"
    assert same_bits(found[0], wanted[0])
    assert same_bits(found[1], wanted[1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("grid", ["signed", "symmetric"])
@pytest.mark.parametrize("row_dtype", [torch.bfloat16, torch.float32])
def test_past_the_caches_go_the_same_bits(
    isa: str, bits: int, grid: str, row_dtype: torch.dtype
) -> None:
    if grid == "symmetric" and bits == 1:
        pytest.skip("there is no such grid")
    codes, scales, row = packet(bits, grid=grid, rows=7, channels=160, seed=bits)
    row = row.to(row_dtype)
    with kernels.use("torch"):
        wanted = kernels.dequantize(codes, scales, channels=160, bits=bits, grid=grid)
        wanted_new, wanted_row = kernels.delta_decode(codes, scales, row, bits=bits, grid=grid)

    ray_pipe_native.use_isa(isa)
    ray_pipe_native.stream_beyond(0)
    with kernels.use("native"):
        decoded = kernels.dequantize(codes, scales, channels=160, bits=bits, grid=grid)
        new, new_row = kernels.delta_decode(codes, scales, row, bits=bits, grid=grid)

    assert same_bits(decoded, wanted)
    assert same_bits(new, wanted_new)
    assert same_bits(new_row, wanted_row)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [96, 40])
def test_outputs_that_no_vector_fits_are_not_written_past_the_caches(
    isa: str, channels: int
) -> None:
    group = 32
    h = torch.randn(3, channels, generator=torch.Generator().manual_seed(1))
    row = torch.zeros(3, channels, dtype=torch.bfloat16)
    codes, scales, _, _ = kernels.delta_encode(h, row, bits=8)
    wanted, _ = kernels.delta_decode(codes, scales, row, bits=8)

    ray_pipe_native.use_isa(isa)
    ray_pipe_native.stream_beyond(0)
    for shift in range(5):  # an aligned store faults where it is not
        out = torch.empty(3 * channels + shift)[shift:].view(3, channels)
        delta_decode_rows(codes, scales, [row], [out], bits=8, group=group, grid="signed")

        assert same_bits(out, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [32, 64])
def test_a_scale_that_is_not_finite_is_found_wherever_it_is(isa: str, group: int) -> None:
    codes, scales = kernels.quantize(torch.randn(1, 37 * 64), bits=8, group=group)
    ray_pipe_native.use_isa(isa)
    for at in range(scales.shape[1]):
        for value in (float("inf"), float("-inf"), float("nan")):
            broken = scales.clone()
            broken[0, at] = value

            with pytest.raises(CodecError, match="scale is not finite"):
                kernels.dequantize(codes, broken, channels=37 * 64, bits=8, group=group)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("streamed", [False, True])
def test_a_touch_reads_every_line_and_writes_every_byte(
    isa: str, bits: int, streamed: bool
) -> None:
    ray_pipe_native.use_isa(isa)
    codes, scales = torch.zeros(64, 4 * bits, dtype=torch.uint8), torch.zeros(64, 1).bfloat16()
    row = torch.zeros(64, 32).bfloat16()
    out, new_row = torch.zeros(64, 32), torch.zeros(64, 32).bfloat16()

    def touch(with_row: bool) -> int:
        at = [codes, scales, row, out, new_row] if with_row else [codes, scales, None, out, None]
        addresses = [0 if each is None else each.data_ptr() for each in at]
        return ray_pipe_native.touch(*addresses, 64, 32, bits, streamed)

    assert touch(with_row=False) == 0
    assert set(out.view(torch.int16).flatten().tolist()) == {0x3F80}
    assert not new_row.any()
    out.zero_()
    assert touch(with_row=True) == 0
    assert set(out.view(torch.int16).flatten().tolist()) == {0x3F80}
    assert set(new_row.view(torch.int16).flatten().tolist()) == {0x3F80}
    for source in (codes, scales, row):
        as_bytes = source.view(torch.uint8).view(-1)
        for line in range(0, len(as_bytes), 64):
            as_bytes[line : line + 64] = 1
            assert touch(with_row=True) != 0
            as_bytes.zero_()
