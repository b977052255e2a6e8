"""The kernels: native equals its torch twin to the bit, packing is exact, misuse is refused."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray_pipe_native
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import Tensor

from compressors import kernels, kernels_torch
from compressors import native as cores
from compressors.base import CodecError
from compressors.kernels import NonFinite

torch.set_num_threads(1)

BF16_MAX = 3.3895313892515355e38


@pytest.fixture(autouse=True)
def fastest_isa() -> Iterator[None]:
    yield
    ray_pipe_native.use_isa(ray_pipe_native.isas()[-1])


def bits_of(x: Any) -> Any:
    """A value in which -0.0 is not 0.0."""
    if isinstance(x, Tensor):
        return (
            str(x.dtype),
            tuple(x.shape),
            bytes(x.contiguous().view(torch.uint8).flatten().tolist()),
        )
    return x


def outcome(call: Callable[[], tuple[Any, ...]]) -> Any:
    try:
        return [bits_of(x) for x in call()]
    except NonFinite as error:
        return error.what, error.rows


def everything(h: Tensor, row: Tensor, **grid: Any) -> list[Any]:
    """All that the four entry points give for one tensor, as bits."""

    def plain() -> tuple[Any, ...]:
        codes, scales = kernels.quantize(h, **grid)
        return codes, scales, kernels.dequantize(codes, scales, channels=h.shape[1], **grid)

    def delta() -> tuple[Any, ...]:
        codes, scales, new_row, _ = kernels.delta_encode(h, row, **grid)
        new, there = kernels.delta_decode(codes, scales, row, **grid)
        assert bits_of(new_row) == bits_of(there)
        return codes, scales, new_row, new

    return [outcome(plain), outcome(delta)]


def on_all_cores(h: Tensor, row: Tensor, **grid: Any) -> dict[str, list[Any]]:
    results = {}
    with kernels.use("torch"):
        results["torch"] = everything(h, row, **grid)
    with kernels.use("native"):
        for isa in ray_pipe_native.isas():
            ray_pipe_native.use_isa(isa)
            results[isa] = everything(h, row, **grid)
    return results


grids = st.one_of(
    st.tuples(st.just("signed"), st.integers(1, 8)),
    st.tuples(st.just("symmetric"), st.integers(2, 8)),
)
special = st.sampled_from(
    [
        *(0.0, -0.0, 1.0, -1.0, 0.5, 1.00390625, 1.01171875, 65504.0, 1e30, -1e30),
        *(1e-45, -1e-45, 1e-40, 1e-38, 3.4e38, -3.4e38),
        *(float("inf"), float("-inf"), float("nan")),
    ]
)


@settings(max_examples=examples(150), deadline=None)
@given(
    grid=grids,
    group=st.sampled_from([32, 32, 32, 1, 7, 16, 64, 96, 128]),
    rows=st.integers(0, 5),
    channels=st.sampled_from([0, 1, 5, 31, 32, 33, 64, 96, 100, 192, 256, 257, 300]),
    row_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    exponent=st.sampled_from([0, 0, 0, -40, -45, -20, 20, 30, 38]),
    specials=st.lists(st.tuples(st.integers(0, 10**6), special), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_native_gives_the_same_bits_as_torch(
    grid, group, rows, channels, row_dtype, exponent, specials, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, channels, generator=generator) * float(f"1e{exponent}")
    row = (h + 0.3 * float(f"1e{exponent}") * torch.randn(h.shape, generator=generator)).to(
        row_dtype
    )
    row = row.nan_to_num()
    for where, value in specials if h.numel() else []:
        h.view(-1)[where % h.numel()] = value

    results = on_all_cores(h, row, bits=grid[1], group=group, grid=grid[0])

    assert all(result == results["torch"] for result in results.values())


@pytest.mark.parametrize("bits", range(1, 9))
def test_native_rounds_ties_and_equal_extremes_as_torch_does(bits: int) -> None:
    eighths = torch.randint(-8, 9, (64, 96), generator=torch.Generator().manual_seed(1)) / 8
    row = torch.randint(-8, 9, (64, 96), generator=torch.Generator().manual_seed(2)) / 8

    for grid in ("signed", "symmetric")[: 1 if bits == 1 else 2]:
        for group in (32, 96):
            results = on_all_cores(eighths, row.bfloat16(), bits=bits, grid=grid, group=group)
            assert all(result == results["torch"] for result in results.values())


@pytest.mark.slow
def test_native_divides_exactly_at_every_size_of_scale() -> None:
    scales = torch.arange(0x0001, 0x7F80, 3, dtype=torch.int16).view(torch.bfloat16).float()
    x = scales[:, None] * torch.rand(len(scales), 32, generator=torch.Generator().manual_seed(3))
    x[:, 5] = scales
    row = torch.zeros(x.shape)

    for bits in (4, 8):
        results = on_all_cores(x, row, bits=bits)
        assert all(result == results["torch"] for result in results.values())


def last_extreme(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.shape[dim] - 1 - torch.argmax(x.flip(dim), dim=dim, keepdim=keepdim)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("round_", lambda z: z.add_(0.5).floor_()),
        ("div", lambda x, y: x * (1 / y)),
        ("argmax", last_extreme),
    ],
)
def test_a_core_that_rounds_divides_or_chooses_otherwise_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: str, wrong: Callable[..., Tensor]
) -> None:
    sixteenths = torch.randint(-16, 17, (512, 32), generator=torch.Generator().manual_seed(4)) / 16
    x = 41 * sixteenths  # ties on a scale of 41, whose reciprocal times 41 is not 1
    monkeypatch.setattr(Tensor, method, wrong)

    results = on_all_cores(x, torch.zeros(x.shape), bits=4)

    assert results["torch"] != results["baseline"]


def test_subnormal_results_do_not_depend_on_the_threads_float_mode() -> None:
    h = torch.full((1, 32), 3e-42)
    expected = everything(h, torch.zeros(1, 32), bits=4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with kernels.use("native"):
            flushed = everything(h, torch.zeros(1, 32), bits=4)
    finally:
        torch.set_flush_denormal(False)

    assert flushed == expected


def test_signed_codes_are_lsb_first_and_offset_by_the_full_scale() -> None:
    codes, scales = kernels.quantize(torch.tensor([[4.0, -2.0, 0.0, 1.0, -4.0]]), bits=4)

    assert scales.tolist() == [[-4.0]]
    # x/s*8 = -8, 4, 0, -2, 8 (clipped to 7); code+8 = 0, 12, 8, 6, 15
    assert codes.tolist() == [[0xC0, 0x68, 0x0F]]
    assert kernels.dequantize(codes, scales, channels=5, bits=4).tolist() == [
        [4.0, -2.0, -0.0, 1.0, -3.5]
    ]


def test_symmetric_codes_have_no_lowest_level() -> None:
    codes, scales = kernels.quantize(torch.tensor([[3.0, -3.0, 1.0]]), bits=3, grid="symmetric")

    assert scales.tolist() == [[3.0]]
    # 7, 1, 5 in three bits each: 111 001 10 | 1
    assert codes.tolist() == [[0b01001111, 0b1]]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("channels", [1, 7, 8, 31, 32, 33, 100, 1600])
def test_packing_wastes_no_byte(bits: int, channels: int) -> None:
    codes, scales = kernels.quantize(torch.ones(3, channels), bits=bits)

    assert codes.shape == (3, -(-channels * bits // 8))
    assert scales.shape == (3, -(-channels // 32))
    assert kernels.packed_nbytes(3, channels, bits=bits) == (codes.numel(), 2 * scales.numel())


@pytest.mark.parametrize("bits", range(1, 9))
def test_unpack_undoes_pack(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 77), dtype=torch.uint8)

    assert torch.equal(kernels_torch.unpack(kernels_torch.pack(codes, bits), 77, bits), codes)


@pytest.mark.parametrize("core", ["native", "torch"])
def test_the_remembered_row_is_the_decoded_value_rounded_once(core: str) -> None:
    h = torch.randn(16, 96)
    row = (h + 0.1 * torch.randn(16, 96)).bfloat16()

    with kernels.use(core):
        codes, scales, new_row, _ = kernels.delta_encode(h, row, bits=4)
        decoded = kernels.dequantize(codes, scales, channels=96, bits=4)

    assert torch.equal(new_row, (row.float() + decoded).bfloat16())
    assert not torch.equal(new_row, h.bfloat16())  # the mutant that stores h


@pytest.mark.parametrize("core", ["native", "torch"])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e30])
@pytest.mark.parametrize("group", [32, 20, 64])
def test_stats_are_sums_of_squares(core: str, scale: float, group: int) -> None:
    h = torch.randn(8, 100) * scale
    row = h + 0.1 * scale * torch.randn(8, 100)

    with kernels.use(core):
        _, _, new_row, stats = kernels.delta_encode(h, row, bits=2, group=group)

    def square(x: Tensor) -> float:
        return float(x.double().square().sum())

    expected = square(h - row), square(h), square(h - new_row)
    assert stats == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("core", ["native", "torch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group", [32, 20])
def test_non_finite_values_are_refused_by_row(core: str, bad: float, group: int) -> None:
    x = torch.randn(5, 70)
    x[1, 69] = x[3, 0] = bad

    with kernels.use(core):
        with pytest.raises(NonFinite, match="not finite in 2 rows") as plain:
            kernels.quantize(x, bits=4, group=group)
        with pytest.raises(NonFinite) as delta:
            kernels.delta_encode(x, torch.zeros(5, 70), bits=4, group=group)

    assert plain.value.rows == delta.value.rows == (1, 3)


@pytest.mark.parametrize("core", ["native", "torch"])
def test_a_difference_or_a_row_that_overflows_is_refused(core: str) -> None:
    h, row = torch.ones(3, 32), torch.zeros(3, 32, dtype=torch.bfloat16)
    h[1], row[1] = 3e38, -3e38
    too_high = torch.zeros(2, 32), torch.zeros(2, 32, dtype=torch.bfloat16)
    too_high[0][1], too_high[1][1] = 3.4e38, BF16_MAX

    with kernels.use(core):
        with pytest.raises(NonFinite, match="h - row") as difference:
            kernels.delta_encode(h, row, bits=4)
        with pytest.raises(NonFinite, match="new row") as sum_:
            kernels.delta_encode(*too_high, bits=8)

    assert difference.value.rows == (1,)
    assert sum_.value.rows == (1,)


@pytest.mark.parametrize("core", ["native", "torch"])
@pytest.mark.parametrize("group", [32, 20, 64])
def test_a_scale_that_is_not_finite_is_refused_in_decoding(core: str, group: int) -> None:
    codes, scales = kernels.quantize(torch.randn(4, 64), bits=4, group=group)
    scales[2, -1] = float("nan")

    with kernels.use(core):
        with pytest.raises(CodecError, match="scale is not finite"):
            kernels.dequantize(codes, scales, channels=64, bits=4, group=group)
        with pytest.raises(CodecError, match="scale is not finite"):
            kernels.delta_decode(codes, scales, torch.zeros(4, 64), bits=4, group=group)


def test_1e5_and_the_largest_floats_survive() -> None:
    x = torch.tensor([[1e5] * 32 + [3.4028234e38] * 32])

    codes, scales = kernels.quantize(x, bits=8)
    decoded = kernels.dequantize(codes, scales, channels=64, bits=8)

    assert decoded[0, 0].item() == pytest.approx(1e5, rel=0.004)
    assert decoded[0, 63].item() == BF16_MAX


def test_strided_input_is_accepted() -> None:
    wide = torch.randn(64, 40)
    row = torch.zeros(64, 40, dtype=torch.bfloat16)

    strided = kernels.delta_encode(wide.t(), row.t(), bits=3)
    dense = kernels.delta_encode(wide.t().contiguous(), row.t().contiguous(), bits=3)

    assert [bits_of(x) for x in strided[:3]] == [bits_of(x) for x in dense[:3]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels.quantize(x, bits=9), "signed grid takes 1 to 8 bits, got 9"),
        (lambda x: kernels.quantize(x, bits=1, grid="symmetric"), "takes 2 to 8 bits, got 1"),
        (lambda x: kernels.quantize(x, bits=4, grid="log"), "grid is one of .* got 'log'"),
        (lambda x: kernels.quantize(x, bits=4, group=0), "at least 1, got 0"),
        (lambda x: kernels.quantize(x[0], bits=4), r"x must be a float32 matrix .* \(32,\)"),
        (lambda x: kernels.quantize(x.double(), bits=4), "got torch.float64"),
        (lambda x: kernels.delta_encode(x, x.half(), bits=4), "bfloat16 or float32 matrix"),
        (lambda x: kernels.delta_encode(x, x[:1], bits=4), "a changed shape is a cold visit"),
    ],
)
def test_misuse_is_refused_with_the_limit(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 32))


def test_packets_of_the_wrong_size_are_refused() -> None:
    codes, scales = kernels.quantize(torch.zeros(2, 32), bits=4)

    with pytest.raises(CodecError, match=r"32 channels of 5 bits are uint8 codes \[rows, 20\]"):
        kernels.dequantize(codes, scales, channels=32, bits=5)
    with pytest.raises(CodecError, match=r"bfloat16 scales \(2, 2\)"):
        kernels.dequantize(codes, scales, channels=32, bits=4, group=16)
    with pytest.raises(CodecError, match="codes are for 2 rows, the remembered rows are 3"):
        kernels.delta_decode(codes, scales, torch.zeros(3, 32), bits=4)


def test_the_native_core_is_in_use_here() -> None:
    assert kernels.core() == "native"
    assert kernels.build_info()["isa"] == ray_pipe_native.isas()[-1]
    with kernels.use("torch"):
        assert kernels.core() == "torch"
    assert kernels.core() == "native"


def unloaded(monkeypatch: pytest.MonkeyPatch, chosen: str | None, module: Any) -> None:
    """As at the start of a process in which the native module is `module`."""

    def find(name: str) -> Any:
        if module is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return module

    monkeypatch.setattr(cores, "_loaded", cores._UNTRIED)
    monkeypatch.setattr(cores, "_chosen", chosen)
    monkeypatch.setattr(importlib, "import_module", find)


def test_a_missing_native_core_is_logged_once_and_the_twin_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unloaded(monkeypatch, None, None)

    with caplog.at_level(logging.WARNING, logger="ray_pipe"):
        assert kernels.core() == "torch"
        kernels.quantize(torch.ones(1, 32), bits=4)
        assert kernels.build_info() == {}

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "native core not in use" in caplog.text


def test_a_native_core_of_another_abi_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unloaded(monkeypatch, None, SimpleNamespace(ABI=cores.NATIVE_ABI + 1))

    assert kernels.core() == "torch"
    assert "rebuild it" in caplog.text


def test_a_forced_native_core_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    unloaded(monkeypatch, "native", None)

    with pytest.raises(ImportError, match="pip install -e"):
        kernels.core()
    with pytest.raises(ImportError, match="ray_pipe_native"):
        kernels.use("native")


def test_a_core_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got 'cuda'"):
        kernels.use("cuda")
    unloaded(monkeypatch, "fast", ray_pipe_native)
    with pytest.raises(ValueError, match=r"RAY_PIPE_CORE is .* got 'fast'"):
        kernels.core()


def test_threads_encode_at_the_same_time_and_get_the_same_bits() -> None:
    h, row = torch.randn(256, 128), torch.zeros(256, 128, dtype=torch.bfloat16)
    expected = [bits_of(x) for x in kernels.delta_encode(h, row, bits=4)[:3]]
    results: list[Any] = []

    def work() -> None:
        for _ in range(10):
            results.append([bits_of(x) for x in kernels.delta_encode(h, row, bits=4)[:3]])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 40
    assert all(result == expected for result in results)
