"""CRC-32: the native core's is zlib's, whatever the length, place and start."""

from __future__ import annotations

import logging
import random
import zlib
from types import SimpleNamespace

import pytest
import ray_pipe_native
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import checksum
from compressors import native as cores
from compressors.checksum import SMALL_NBYTES, crc32

NOISE = random.Random(5).randbytes(3 * SMALL_NBYTES)


def by_core(data: bytes | memoryview, start: int = 0) -> int:
    """The native core's own answer, however short the buffer."""
    import numpy as np

    raw = np.frombuffer(data, dtype=np.uint8)
    return ray_pipe_native.crc32(raw.ctypes.data, raw.nbytes, start)


def test_the_check_value_of_the_standard() -> None:
    assert by_core(b"123456789") == 0xCBF43926
    assert crc32(b"123456789") == 0xCBF43926


@pytest.mark.parametrize("nbytes", range(200))
def test_every_short_length_is_zlibs(nbytes: int) -> None:
    assert by_core(NOISE[:nbytes]) == zlib.crc32(NOISE[:nbytes])


@settings(deadline=None)
@given(
    start=st.integers(0, 2**32 - 1),
    first=st.integers(0, 100),
    nbytes=st.integers(0, 2 * SMALL_NBYTES),
)
def test_any_stretch_from_any_start_is_zlibs(start: int, first: int, nbytes: int) -> None:
    stretch = memoryview(NOISE)[first : first + nbytes]

    assert by_core(stretch, start) == zlib.crc32(stretch, start)
    assert crc32(stretch, start) == zlib.crc32(stretch, start)


def test_large_buffers_go_to_the_native_core_where_it_folds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake(address: int, nbytes: int, start: int) -> int:
        return nbytes

    module = SimpleNamespace(crc32=fake, CRC32_FOLDS=True)
    monkeypatch.setattr(checksum, "native", lambda: module)
    monkeypatch.setattr(checksum, "core", lambda: "native")
    assert crc32(bytes(SMALL_NBYTES)) == SMALL_NBYTES
    assert crc32(NOISE[: SMALL_NBYTES - 1]) == zlib.crc32(NOISE[: SMALL_NBYTES - 1])

    module.CRC32_FOLDS = False
    assert crc32(NOISE) == zlib.crc32(NOISE)


def test_with_the_torch_core_it_is_zlibs() -> None:
    with cores.use("torch"):
        assert checksum._fast() is None
        assert crc32(NOISE) == zlib.crc32(NOISE)


def test_a_core_from_before_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checksum, "native", SimpleNamespace)
    monkeypatch.setattr(checksum, "core", lambda: "native")
    monkeypatch.setattr(checksum, "_has_warned", False)
    with caplog.at_level(logging.WARNING, logger="ray_pipe"):
        found = [crc32(NOISE), crc32(NOISE)]

    assert found == [zlib.crc32(NOISE)] * 2
    assert len(caplog.records) == 1
    assert "rebuild it" in caplog.text
