"""The log of rows: replayed to any step it gives the rows of that step, to the bit and in order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from compressors import row_log
from compressors.base import SampleKeys
from compressors.delta import Delta
from compressors.entropy import Entropy
from compressors.identity import Identity
from compressors.quantize import Uniform
from compressors.row_log import (
    Position,
    RowLog,
    RowLogError,
    row_store,
    state_without_rows,
)

ROW_KEYS = ("ids", "generations", "visits", "kept", "num_dims", "dims", "values")


def sender(**options: object) -> Delta:
    codec = Delta(Uniform(4), namespace="e", **options)
    codec.store.journal = []
    return codec


def visit(codec: Delta, ids: list[int], *, seed: int) -> None:
    values = torch.randn(len(ids), 3, 32, generator=torch.Generator().manual_seed(seed))
    codec.encode(values, keys=SampleKeys(ids=tuple(ids)))


def drain(codec: Delta) -> list:
    journal = codec.store.journal
    assert journal is not None
    codec.store.journal = []
    return journal


def same(state: dict, other: dict) -> bool:
    return all(torch.equal(state[key], other[key]) for key in ROW_KEYS)


def train(log: RowLog, codec: Delta, steps: int, *, seed: int = 0, samples: int = 12) -> list:
    """Random visits; returns (position, state_dict) after each commit."""
    source = random.Random(seed)
    seen = []
    for step in range(steps):
        visit(codec, [source.randrange(samples) for _ in range(4)], seed=seed * 1000 + step)
        codec.commit()
        position = log.append({"out": drain(codec)})
        seen.append((position, codec.state_dict()))
    return seen


def test_the_log_gives_back_the_rows_of_every_step(tmp_path: Path) -> None:
    log = RowLog(tmp_path)
    seen = train(log, sender(), 12)

    reader = RowLog(tmp_path)

    for position, state in seen:
        assert same(reader.rows_at(position)["out"], state)


def test_evictions_and_the_order_of_use_come_back(tmp_path: Path) -> None:
    row = 3 * 32 * 2
    log = RowLog(tmp_path)
    codec = sender(cap_bytes=5 * row)
    seen = train(log, codec, 30)

    assert codec.stats()["evictions"] > 10
    assert same(log.rows_at(seen[-1][0])["out"], seen[-1][1])
    assert same(log.rows_at(seen[-2][0])["out"], seen[-2][1])


def test_an_aborted_step_leaves_nothing_in_the_journal() -> None:
    codec = sender()
    visit(codec, [1, 2], seed=1)
    codec.abort()

    assert drain(codec) == []


def test_a_log_full_of_replaced_rows_is_written_anew_and_says_the_same(tmp_path: Path) -> None:
    log = RowLog(tmp_path, slack_nbytes=4096)
    seen = train(log, sender(), 40)
    numbers = sorted({position.number for position, _ in seen})

    assert len(numbers) > 2
    for position, state in seen:
        assert same(log.rows_at(position)["out"], state)  # old files stay until dropped
    log.drop_before(seen[-1][0].number)
    assert len(list(tmp_path.iterdir())) == 1
    assert same(log.rows_at(seen[-1][0])["out"], seen[-1][1])
    assert seen[-1][0].end < 4096 + 3 * 12 * 200


def test_a_log_rewound_goes_on_as_if_nothing_had_been_written_after(tmp_path: Path) -> None:
    log = RowLog(tmp_path, slack_nbytes=2048)
    codec = sender()
    seen = train(log, codec, 20)
    position, state = seen[9]

    log.rewind(position)
    again = sender()
    again.load_state_dict(state)
    assert drain(again) == []
    later = train(log, again, 10, seed=7)

    for where, then in later:
        assert same(log.rows_at(where)["out"], then)
    assert max(int(path.stem[5:]) for path in tmp_path.iterdir()) == log.position.number


def test_mutant_a_log_that_is_not_cut_off_after_a_rewind_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RowLog(tmp_path)
    codec = sender()
    seen = train(log, codec, 4)
    monkeypatch.setattr(RowLog, "rewind", lambda self, position: None)
    log.rewind(seen[1][0])
    again = sender()
    again.load_state_dict(seen[1][1])
    (where, then), *_ = train(log, again, 1, seed=7)

    assert not same(log.rows_at(where)["out"], then)


@pytest.mark.parametrize("at", [0, 5, 30, -1])
def test_a_damaged_log_is_refused(tmp_path: Path, at: int) -> None:
    log = RowLog(tmp_path)
    position = train(log, sender(), 3)[-1][0]
    path = tmp_path / "rows-0000.log"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)

    with pytest.raises(RowLogError, match="log of rows"):
        RowLog(tmp_path).rows_at(position)


def test_a_row_that_the_disk_has_changed_is_not_copied_to_a_new_file(tmp_path: Path) -> None:
    """A copy with a checksum of its own would make the damage look right for ever."""
    log = RowLog(tmp_path, slack_nbytes=4096)
    codec = sender()
    visit(codec, [99], seed=99)  # never visited again: every file must carry it along
    codec.commit()
    log.append({"out": drain(codec)})
    with (tmp_path / "rows-0000.log").open("r+b") as file:
        file.seek(log.position.end - 1)
        last = file.read(1)[0]
        file.seek(log.position.end - 1)
        file.write(bytes([last ^ 1]))

    with pytest.raises(RowLogError, match=r"has a row whose checksum is wrong; its stage goes"):
        train(log, codec, 40)
    assert log.position.number == 0


def test_a_row_larger_than_a_piece_is_copied_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_log, "COPY_NBYTES", 100)
    log = RowLog(tmp_path, slack_nbytes=4096)
    seen = train(log, sender(), 40)

    assert log.position.number > 2
    assert same(log.rows_at(seen[-1][0])["out"], seen[-1][1])


def test_a_log_that_is_too_short_is_refused(tmp_path: Path) -> None:
    position = train(RowLog(tmp_path), sender(), 2)[-1][0]

    with pytest.raises(RowLogError):
        RowLog(tmp_path).rows_at(Position(position.number, position.end + 100))


def test_the_state_without_rows_and_the_log_make_the_whole_state(tmp_path: Path) -> None:
    codec = Entropy(sender(cap_bytes=1000))
    store = row_store(codec)
    assert store is not None
    log = RowLog(tmp_path)
    for step in range(5):
        values = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(step))
        codec.encode(values, keys=SampleKeys(ids=(step, step + 1, step + 2, step + 3)))
        codec.commit()
        journal, store.journal = store.journal, []
        position = log.append({"out": journal or []})
    light = state_without_rows(codec)
    whole = codec.state_dict()

    assert not set(ROW_KEYS) & set(light)
    assert set(whole) == set(light) | set(ROW_KEYS)
    made = light | log.rows_at(position)["out"]
    assert {k: v for k, v in made.items() if k not in ROW_KEYS} == light
    assert same(made, whole)


def test_a_codec_without_rows_keeps_its_whole_state() -> None:
    assert row_store(Identity()) is None
    assert state_without_rows(Identity()) == {}
