"""The log of rows: replayed to any step it gives the rows of that step, to the bit and in order."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from properties import examples
from torch import Tensor

from compressors.base import SampleKeys
from compressors.buffers import Change, Mark
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


def test_the_log_gives_back_the_rows_of_the_last_two_steps_at_any_time(tmp_path: Path) -> None:
    log, codec = RowLog(tmp_path), sender()
    before = None
    for step in range(12):
        ((position, state),) = train(log, codec, 1, seed=step)
        reader = RowLog(tmp_path)

        assert same(reader.rows_at(position)["out"], state)
        if before is not None:
            assert same(reader.rows_at(before[0])["out"], before[1])
        before = position, state


def test_values_take_the_places_of_values_that_nobody_can_go_back_to(tmp_path: Path) -> None:
    log = RowLog(tmp_path)
    row, samples = 3 * 32 * 2, 12

    train(log, sender(), 200, samples=samples)

    assert (tmp_path / "rows.values").stat().st_size <= (samples + 2 * 4) * row


class InPlace(RowLog):
    """Mutant: a new value may take the place of the one that it replaces."""

    def append(self, changes: Mapping[str, Sequence[Change]]) -> Position:
        for name, own in changes.items():
            for change in own:
                if (row := self._index.get(name, {}).get(change.sample)) is not None:
                    self._room.give_back(row.offset, row.nbytes)
        return super().append(changes)


def test_mutant_a_value_written_over_its_predecessor_loses_the_step_before(tmp_path: Path) -> None:
    log = InPlace(tmp_path)
    older = train(log, sender(), 8, samples=4)[-2][0]

    with pytest.raises(RowLogError, match="row whose checksum"):
        log.rows_at(older)


class Logged(RuleBasedStateMachine):
    """A log against a plain dictionary: whatever happens, the last two steps can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.log = RowLog(self.folder, slack_nbytes=500)
        self.kept: list[tuple[Position, dict[int, Tensor]]] = [(Position(0, 0), {})]
        self.visit = 0

    @rule(samples=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0, 3, 70, 5000]))))
    def commit(self, samples: list[tuple[int, int]]) -> None:
        rows = dict(self.kept[-1][1])
        changes = []
        for sample, length in samples:
            rows.pop(sample, None)
            self.visit += 1
            if not length:
                changes.append(Change(sample, None, None))
                continue
            rows[sample] = torch.full((length,), self.visit % 251, dtype=torch.uint8)
            changes.append(Change(sample, Mark(1, self.visit, (length,)), rows[sample]))
        self.kept = [self.kept[-1], (self.log.append({"in": changes}), rows)]
        self.log.drop_before(min(position.number for position, _ in self.kept))

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = RowLog(self.folder, slack_nbytes=500)
        before = self.kept[-2][0] if len(self.kept) > 1 else None
        self.log.rewind(self.kept[-1][0], before=before)

    @rule()
    def go_back(self) -> None:
        self.kept = self.kept[:1]
        self.log.rewind(self.kept[-1][0])

    @invariant()
    def the_last_two_can_be_read(self) -> None:
        for position, rows in self.kept:
            state = self.log.rows_at(position).get("in") if position.end else None
            found = {} if state is None else rows_of(state)
            assert list(found) == list(rows)
            assert all(torch.equal(found[sample], row) for sample, row in rows.items())

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)


def rows_of(state: dict) -> dict[int, Tensor]:
    lengths = state["dims"].tolist()
    return dict(zip(state["ids"].tolist(), state["values"].split(lengths), strict=True))


TestLogged = Logged.TestCase
TestLogged.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


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


def test_a_log_full_of_replaced_marks_is_written_anew_and_says_the_same(tmp_path: Path) -> None:
    log = RowLog(tmp_path, slack_nbytes=256)
    seen = train(log, sender(), 60)
    numbers = sorted({position.number for position, _ in seen})

    assert len(numbers) > 2
    for position, state in seen[-2:]:
        assert same(log.rows_at(position)["out"], state)  # old logs stay until dropped
    log.drop_before(seen[-1][0].number)
    assert len(list(tmp_path.iterdir())) == 2
    assert same(log.rows_at(seen[-1][0])["out"], seen[-1][1])
    assert seen[-1][0].end < 256 + 3 * 12 * 48


def test_a_log_rewound_goes_on_as_if_nothing_had_been_written_after(tmp_path: Path) -> None:
    log = RowLog(tmp_path, slack_nbytes=256)
    codec = sender()
    position, state = train(log, codec, 20)[-2]

    log.rewind(position)
    again = sender()
    again.load_state_dict(state)
    assert drain(again) == []
    later = train(log, again, 10, seed=7)

    for where, then in later[-2:]:
        assert same(log.rows_at(where)["out"], then)
    numbers = [int(path.stem[5:]) for path in tmp_path.glob("rows-*.log")]
    assert max(numbers) == log.position.number


def test_a_log_opened_again_can_still_go_back_one_step(tmp_path: Path) -> None:
    (older, state), (newest, _) = train(RowLog(tmp_path), sender(), 12)[-2:]

    log = RowLog(tmp_path)
    log.rewind(newest, before=older)

    assert same(log.rows_at(older)["out"], state)


def test_mutant_a_log_opened_without_regard_for_the_step_before_loses_it(tmp_path: Path) -> None:
    (older, _), (newest, _) = train(RowLog(tmp_path), sender(), 12, samples=4)[-2:]

    log = RowLog(tmp_path)
    log.rewind(newest)
    train(log, sender(), 1, samples=4)

    with pytest.raises(RowLogError):
        log.rows_at(older)


def test_a_full_disk_loses_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, codec = RowLog(tmp_path), sender()
    ((position, state),) = train(log, codec, 1)
    visit(codec, [1, 2, 3, 4], seed=9)
    codec.commit()
    journal, room = drain(codec), log._room.end
    with monkeypatch.context() as full:
        full.setattr(log, "_write_entry", no_space)
        with pytest.raises(OSError, match="No space"):
            log.append({"out": journal})

    assert same(log.rows_at(position)["out"], state)
    after = log.append({"out": journal})
    assert same(log.rows_at(after)["out"], codec.state_dict())
    assert log._room.end <= room + 4 * 3 * 32 * 2


def no_space(listed: object) -> None:
    raise OSError(28, "No space left on device")


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


def test_a_damaged_value_is_refused(tmp_path: Path) -> None:
    position = train(RowLog(tmp_path), sender(), 3)[-1][0]
    path = tmp_path / "rows.values"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    raw[0] ^= 1
    path.write_bytes(raw)

    with pytest.raises(RowLogError, match="row whose checksum"):
        RowLog(tmp_path).rows_at(position)


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
