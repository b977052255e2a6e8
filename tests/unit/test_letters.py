"""Letters between clients and shards: what a pruned row weighs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compressors.base import CodecError, Packet
from compressors.row_values import FORMATS
from stages.embedding.letters import read_rows, rows_packet
from stages.embedding.row_rules import Sgd
from stages.embedding.shard_table import Rows
from stages.embedding.tables import ChunkPrune, Table


def table_of(chunks: int) -> dict[str, Table]:
    rule = ChunkPrune(chunk=4, ratio=0.1)
    return {"t": Table(name="t", dim=4 * chunks, optimizer=Sgd(lr=0.1), prune=rule)}


def pruned_rows(chunks: int, num: int) -> Rows:
    random = np.random.default_rng(chunks)
    alive = random.integers(0, 1 << chunks, num, dtype=np.uint8)
    alive[0] = 0
    bits = (alive[:, None] >> np.arange(chunks, dtype=np.uint8)) & 1
    weights = random.integers(-64, 64, (num, 4 * chunks)).astype(np.float32)
    return Rows(weights=weights * np.repeat(bits, 4, axis=1), alive=alive, epoch=3)


def bitmaps_nbytes(packet: Packet) -> int:
    return memoryview(packet.parts[0]).nbytes


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("chunks", range(2, 9))
def test_pruned_rows_come_back_with_their_bitmaps(chunks: int, values: str) -> None:
    tables, rows = table_of(chunks), pruned_rows(chunks, num=13)
    back = read_rows(rows_packet({"t": rows}, tables, values), tables)["t"]

    assert rows.alive is not None
    assert back.alive is not None
    assert back.alive.tolist() == rows.alive.tolist()
    assert np.allclose(back.weights, rows.weights, atol=0.0 if values != "int8" else 0.26)
    assert back.epoch == 3


def test_a_bitmap_has_a_bit_for_each_chunk() -> None:
    packet = rows_packet({"t": pruned_rows(4, num=13)}, table_of(4), "fp32")

    assert bitmaps_nbytes(packet) == 7  # 52 bits


def test_whole_rows_have_no_bitmaps() -> None:
    weights, alive = np.ones((3, 16), np.float32), np.full(3, 0b1111, np.uint8)
    packet = rows_packet({"t": Rows(weights=weights, alive=alive, epoch=0)}, table_of(4), "fp32")

    assert bitmaps_nbytes(packet) == 0
    back = read_rows(packet, table_of(4))["t"].alive
    assert back is not None
    assert back.tolist() == [0b1111] * 3


@pytest.mark.parametrize("bitmaps", [b"\0" * 6, b"\0" * 8, b"\0" * 6 + b"\x10"])
def test_bitmaps_of_more_or_fewer_rows_are_refused(bitmaps: bytes) -> None:
    packet = rows_packet({"t": pruned_rows(4, num=13)}, table_of(4), "fp32")

    with pytest.raises(CodecError, match="bitmaps do not fit 13 rows"):
        read_rows(replace(packet, parts=(bitmaps,)), table_of(4))
