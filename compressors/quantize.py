"""Uniform quantisers: the codecs that send a few bits for each value, without memory.

Path: compressors.base -> compressors.quantize -> compressors.kernels

`Uniform` has a bf16 scale for each group of channels of each token: the signed-scale grid (the
default, all 2^bits levels serve) or the symmetric one. `Reference` is the paper's own codec, one
fp16 scale for each channel (or, to tell the grid from the scales, for each group as above), kept
as a baseline with its faults: it is neither odd nor idempotent and damages tensors below 1e-5.

Tensors are read as matrices [rows, last dimension]. Padded positions are neither sent nor enter a
scale; they decode to zero. Infinities and NaNs fit no grid: encoding raises `kernels.NonFinite`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from compressors import kernels, kernels_torch
from compressors.base import CodecError, Compressor, Packet, SampleKeys, check_parts
from compressors.identity import dtype_name, dtype_of, from_part, to_part
from compressors.padding import join_valid, lengths_of, num_valid_rows, split_valid
from compressors.rounding import Rounding

SAFE_CONTRACTION: Final = math.sqrt(0.5)
"""AC-SGD's theorem asks of a codec that ‖x - Q(x)‖ stays below this times ‖x‖."""


class Uniform(Rounding):
    """Groups of channels on a uniform grid: `bits` for a value, 16 for the scale of a group."""

    name = "uniform"

    def __init__(
        self,
        bits: int,
        *,
        grid: str = "signed",
        group: int = 32,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        kernels.check_grid(bits, group, grid)
        super().__init__(rounding, seed)
        self.bits = bits
        self.grid = grid
        self.group = group

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        matrix, lengths = split_valid(_floats(tensor, self.name), keys)
        codes, scales = self._quantize(matrix, keys)
        meta: dict[str, object] = {
            "bits": self.bits,
            "grid": self.grid,
            "group": self.group,
            "dtype": dtype_name(tensor.dtype),
        }
        if lengths is not None:
            meta["lengths"] = lengths
        parts = to_part(codes), to_part(scales)
        return Packet(codec=self.name, shape=tuple(tensor.shape), meta=meta, parts=parts)

    def decode(self, packet: Packet) -> Tensor:
        bits, group, grid = _whole(packet, "bits"), _whole(packet, "group"), packet.meta.get("grid")
        if not isinstance(grid, str):
            raise CodecError(f"{packet.codec} packet has grid {grid!r:.40}, not a name")
        try:
            kernels.check_grid(bits, group, grid)
        except ValueError as error:
            raise CodecError(f"{packet.codec} packet: {error}") from None
        dtype, lengths = dtype_of(packet), lengths_of(packet)
        rows, channels = num_valid_rows(packet.shape, lengths)
        code_part, scale_part = _two_parts(packet)
        stride, num_groups = -(-channels * bits // 8), -(-channels // group)
        codes = from_part(code_part, torch.uint8, (rows, stride), codec=packet.codec)
        scales = from_part(scale_part, torch.bfloat16, (rows, num_groups), codec=packet.codec)
        matrix = kernels.dequantize(
            codes, scales, channels=channels, bits=bits, group=group, grid=grid
        )
        return join_valid(matrix, packet.shape, lengths).to(dtype)

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        rows, channels = num_valid_rows(shape, None)
        return sum(kernels.packed_nbytes(rows, channels, bits=self.bits, group=self.group))

    @property
    def contraction(self) -> float:
        """‖x - Q(x)‖/‖x‖, the worst of Gaussian, Laplace and Student-3 values; measured."""
        return _uniform_contraction(self.bits, self.grid, self.group, self.rounding)

    @property
    def safe(self) -> bool:
        """Whether the contraction is within what AC-SGD's theorem asks."""
        return self.contraction < SAFE_CONTRACTION

    def _quantize(self, matrix: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        generator = self._draw(keys)
        if generator is None:
            return kernels.quantize(matrix, bits=self.bits, group=self.group, grid=self.grid)
        coded = kernels_torch.quantize(
            matrix, bits=self.bits, group=self.group, grid=self.grid, generator=generator
        )
        if coded is None:
            raise kernels.non_finite("x", matrix)
        return coded


class Reference(Rounding):
    """The grid of AC-SGD's published code: one fp16 scale per channel for the whole micro-batch.

    With a `group`, the same grid and scales for groups of channels of each token, as `Uniform` has
    them: what of the paper's codec is the grid, and what its long columns.
    """

    name = "reference"

    def __init__(
        self, bits: int, *, group: int | None = None, rounding: str = "nearest", seed: int = 0
    ) -> None:
        kernels.check_grid(bits, 1 if group is None else group, "signed")
        super().__init__(rounding, seed)
        self.bits = bits
        self.group = group

    def encode(self, tensor: Tensor, *, keys: SampleKeys) -> Packet:
        matrix, lengths = split_valid(_floats(tensor, self.name), keys)
        if not bool(torch.isfinite(matrix).all()):
            raise kernels.non_finite("x", matrix)
        full = 1 << (self.bits - 1)
        scales = self._scales(matrix)
        z = matrix.div(_spread(scales, matrix.shape, self.group) + 1e-6).mul_(full)
        generator = self._draw(keys)
        if generator is None:
            z.round_()
        else:
            noise = torch.rand(z.shape, generator=generator, device=generator.device)
            z.add_(noise.to(z.device)).floor_()
        unsigned = z.clamp_(-full, full - 1).add_(full).to(torch.uint8)
        codes = kernels_torch.pack(unsigned.reshape(1, -1), self.bits)
        meta: dict[str, object] = {"bits": self.bits, "dtype": dtype_name(tensor.dtype)}
        if self.group is not None:
            meta["group"] = self.group
        if lengths is not None:
            meta["lengths"] = lengths
        parts = to_part(codes), to_part(scales)
        return Packet(codec=self.name, shape=tuple(tensor.shape), meta=meta, parts=parts)

    def _scales(self, matrix: Tensor) -> Tensor:
        rows, channels = matrix.shape
        if matrix.numel() == 0:
            largest = matrix.new_zeros(_num_scales(rows, channels, self.group))
        elif self.group is None:
            largest = matrix.abs().amax(dim=0)
        else:
            width = min(self.group, channels)
            padded = torch.nn.functional.pad(matrix.abs(), (0, -channels % width))
            largest = padded.view(rows, -1, width).amax(dim=-1)
        return largest.clamp_(max=torch.finfo(torch.float16).max).to(torch.float16)

    def decode(self, packet: Packet) -> Tensor:
        bits = _whole(packet, "bits")
        group = _whole(packet, "group") if "group" in packet.meta else None
        if not 1 <= bits <= 8:
            raise CodecError(f"{packet.codec} packet has {bits} bits, not 1 to 8")
        if group is not None and group < 1:
            raise CodecError(f"{packet.codec} packet has groups of {group}, not 1 or more")
        dtype, lengths = dtype_of(packet), lengths_of(packet)
        rows, channels = num_valid_rows(packet.shape, lengths)
        code_part, scale_part = _two_parts(packet)
        nbytes = -(-rows * channels * bits // 8)
        codes = from_part(code_part, torch.uint8, (1, nbytes), codec=packet.codec)
        shape = _num_scales(rows, channels, group)
        scales = from_part(scale_part, torch.float16, shape, codec=packet.codec)
        if not bool(torch.isfinite(scales).all()):
            raise CodecError(f"{packet.codec} packet has a scale that is not finite")
        full = 1 << (bits - 1)
        unsigned = kernels_torch.unpack(codes, rows * channels, bits)
        value = unsigned.to(torch.float32).sub_(full).div_(full).view(rows, channels)
        value *= _spread(scales, value.shape, group)
        return join_valid(value, packet.shape, lengths).to(dtype)

    def estimate_nbytes(self, shape: tuple[int, ...]) -> int:
        rows, channels = num_valid_rows(shape, None)
        num_scales = math.prod(_num_scales(rows, channels, self.group))
        return -(-rows * channels * self.bits // 8) + 2 * num_scales

    @property
    def contraction(self) -> float:
        """‖x - Q(x)‖/‖x‖, the worst of Gaussian, Laplace and Student-3 values; measured.

        For 1024 tokens in a micro-batch; without groups it grows with their number, as the scale
        does.
        """
        return _reference_contraction(self.bits, self.group, self.rounding)

    @property
    def safe(self) -> bool:
        """Whether the contraction is within what AC-SGD's theorem asks."""
        return self.contraction < SAFE_CONTRACTION


def _num_scales(rows: int, channels: int, group: int | None) -> tuple[int, ...]:
    """Shape of the reference grid's scales; no row, no scale."""
    if group is None:
        return (channels if rows else 0,)
    return rows, -(-channels // group)


def _spread(scales: Tensor, shape: torch.Size, group: int | None) -> Tensor:
    """The scale of each value of a matrix, in fp32."""
    wide = scales.float()
    if group is not None:
        return wide.repeat_interleave(min(group, max(shape[1], 1)), dim=-1)[:, : shape[1]]
    return wide if shape[0] else wide.new_ones(shape[1])


def gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def laplace(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def student_3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Heavy tails: three degrees of freedom."""
    chi2 = torch.randn((3, *shape), generator=generator).square().sum(dim=0)
    return torch.randn(shape, generator=generator) / (chi2 / 3).sqrt()


Distribution = Callable[[tuple[int, ...], torch.Generator], Tensor]
DISTRIBUTIONS: Final[tuple[Distribution, ...]] = (gaussian, laplace, student_3)


def measure_contraction(codec: Compressor, distribution: Distribution, *, seed: int = 0) -> float:
    """‖x - Q(x)‖/‖x‖ for 1024 tokens of 256 channels."""
    x = distribution((1, 1024, 256), torch.Generator().manual_seed(seed))
    decoded = codec.decode(codec.encode(x, keys=SampleKeys(ids=(0,))))
    return float((x - decoded).norm() / x.norm())


@functools.cache
def _uniform_contraction(bits: int, grid: str, group: int, rounding: str) -> float:
    codec = Uniform(bits, grid=grid, group=group, rounding=rounding)
    return max(measure_contraction(codec, each) for each in DISTRIBUTIONS)


@functools.cache
def _reference_contraction(bits: int, group: int | None, rounding: str) -> float:
    codec = Reference(bits, group=group, rounding=rounding)
    return max(measure_contraction(codec, each) for each in DISTRIBUTIONS)


def _floats(tensor: Tensor, codec: str) -> Tensor:
    if not tensor.is_floating_point():
        raise CodecError(
            f"{codec} quantises floating-point tensors, got {dtype_name(tensor.dtype)}; "
            "use fp32, which sends any dtype as it is"
        )
    return tensor.detach().to(torch.float32)


def _whole(packet: Packet, name: str) -> int:
    value = packet.meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CodecError(f"{packet.codec} packet has {name} {value!r:.40}, not a whole number")
    return value


def _two_parts(packet: Packet) -> tuple[memoryview, memoryview]:
    check_parts(packet, 2)
    return memoryview(packet.parts[0]), memoryview(packet.parts[1])
