"""Shards on disk: another number of them goes on to the bit; what is cut short is refused."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from stages.embedding import shard_folders
from stages.embedding.row_errors import SnapshotExpiredError
from stages.embedding.row_rules import Adam, RowAdagrad, Sgd, Uniform
from stages.embedding.row_table import RowTable
from stages.embedding.shard import Shard
from stages.embedding.shard_files import ShardFileError, fill_shard, pack_shard
from stages.embedding.shard_folders import save_shards, saved_shards
from stages.embedding.shard_stream import keep_shard
from stages.embedding.shard_terms import SUMS, TICKETS_OF_A_SESSION, IdSet, touch_of
from stages.embedding.tables import ChunkPrune, Table, shard_of

CORE = "twin"


@pytest.fixture(params=["native", "twin"], autouse=True)
def on_both_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CORE", request.param)


def shards(num: int, **options: Any) -> list[Shard]:
    fields = {"name": "user", "dim": 16, "optimizer": Adam(lr=0.1), "init": Uniform(0.5)} | options
    store = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k", "core": CORE}
    return [Shard((Table(**fields),), index=i, tau=0, seed=7, **store) for i in range(num)]


def train(group: list[Shard], first: int, num: int) -> None:
    for ticket in range(first, first + num):
        generator = np.random.default_rng(ticket)
        ids = np.unique(generator.integers(0, 40, 12))
        gradients = generator.standard_normal((len(ids), 16)).astype(np.float32)
        places = shard_of(ids, len(group))
        for index, shard in enumerate(group):
            mine = places == index
            counts = np.ones(int(mine.sum()), np.float32)
            v_read = shard.pull(ticket, {"user": IdSet(ids=ids[mine], counts=counts)}).version
            (settled,) = shard.push(ticket, v_read, {"user": gradients[mine]})
            assert settled.outcome == "applied"


def rows_of(group: list[Shard]) -> dict[int, bytes]:
    """Every row, whole: weights, state, utilities, chunks."""
    return {
        key: raw.tobytes()
        for shard in group
        for part in shard.store["user"].scan()
        for key, raw in zip(part.keys.tolist(), part.raw, strict=True)
    }


def written(group: list[Shard], folder: Path) -> Path:
    save_shards(group, folder)
    return folder


def load_shard(shard: Shard, folder: Path, *, num_shards: int) -> int:
    return fill_shard(shard, (one.read() for one in saved_shards(folder)), num_shards=num_shards)


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1), RowAdagrad(lr=0.1), Adam(lr=0.1)])
@pytest.mark.parametrize("prune", [None, ChunkPrune(chunk=4, ratio=0.2, warmup=8, every=500)])
def test_with_another_number_of_shards_the_next_hundred_steps_are_the_same_to_the_bit(
    optimizer: Any, prune: Any, tmp_path: Path
) -> None:
    before = shards(2, optimizer=optimizer, prune=prune)
    train(before, 0, 10)
    after = shards(3, optimizer=optimizer, prune=prune)
    for shard in after:
        load_shard(shard, written(before, tmp_path), num_shards=3)
    assert rows_of(after) == rows_of(before)
    assert [len(shard.cuts) for shard in before] == [0 if prune is None else 1] * 2

    train(before, 10, 100)
    train(after, 10, 100)

    assert [shard.version for shard in after] == [110] * 3
    assert rows_of(after) == rows_of(before)


PRUNED = ChunkPrune(chunk=4, ratio=0.2, warmup=8, every=20)


def test_prunes_within_the_hundred_steps_are_the_same_to_the_bit_on_as_many_shards(
    tmp_path: Path,
) -> None:
    before, after = (shards(2, optimizer=RowAdagrad(lr=0.1), prune=PRUNED) for _ in range(2))
    train(before, 0, 10)
    for shard in after:
        load_shard(shard, written(before, tmp_path), num_shards=2)

    train(before, 10, 100)
    train(after, 10, 100)

    assert [len(shard.cuts) for shard in after] == [5] * 2
    assert [one.stats()["prunes"] for one in after] == [one.stats()["prunes"] for one in before]
    assert rows_of(after) == rows_of(before)


def test_on_another_number_of_shards_each_makes_its_own_cut_and_the_sum_keeps_the_target(
    tmp_path: Path,
) -> None:
    """The limit that docs/embeddings.md states: which chunks go is decided shard by shard."""
    before, after = (shards(num, optimizer=RowAdagrad(lr=0.1), prune=PRUNED) for num in (2, 3))
    train(before, 0, 10)
    for shard in after:
        load_shard(shard, written(before, tmp_path), num_shards=3)
    assert rows_of(after) == rows_of(before)

    train(before, 10, 100)
    train(after, 10, 100)

    assert rows_of(after) != rows_of(before)
    assert set(rows_of(after)) == set(rows_of(before))
    for group in (before, after):
        cuts = [shard.cuts[-1] for shard in group]
        assert sum(cut.bytes_after for cut in cuts) <= sum(cut.target_bytes for cut in cuts)


def test_mutant_a_checkpoint_without_adam_s_step_count_does_not_go_on_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = shards(1), shards(1)
    train(before, 0, 10)
    monkeypatch.setattr(RowTable, "restore_progress", lambda *_, **__: None)
    load_shard(after[0], written(before, tmp_path), num_shards=1)

    train(before, 10, 5)
    train(after, 10, 5)

    assert rows_of(after) != rows_of(before)


def test_the_order_of_use_survives(tmp_path: Path) -> None:
    before, after = (shards(1, evict="lru", max_rows=40) for _ in range(2))
    train(before, 0, 10)
    load_shard(after[0], written(before, tmp_path), num_shards=1)

    for shard in (*before, *after):
        shard.store["user"].evict(15)
    assert rows_of(after) == rows_of(before)


def oldest_first(group: list[Shard]) -> list[int]:
    """Keys by last use, as one order over all shards."""
    orders = [shard.rows["user"].rows.order() for shard in group]
    keys = np.concatenate([keys for keys, _ in orders])
    touched = np.concatenate([touched for _, touched in orders])
    return keys[np.argsort(touched, kind="stable")].tolist()


@pytest.mark.parametrize("core", ["twin", "native"])
def test_the_order_of_use_is_exact_over_two_then_three_then_one_shard(
    core: str, tmp_path: Path
) -> None:
    """Which step used a row last, of all rows of all shards; a rank in a shard cannot tell."""
    used_last: dict[int, int] = {}

    def train_on(group: list[Shard], first: int, num: int, skew: bool) -> None:
        for ticket in range(first, first + num):
            generator = np.random.default_rng(ticket)
            ids = np.unique(generator.integers(0, 400, 12))
            if skew:  # nearly all of it on shard 0: ranks in the shards mean different steps
                places = shard_of(ids, len(group))
                ids = ids[(places == 0) | (generator.random(len(ids)) < 0.1)]
            places = shard_of(ids, len(group))
            for index, shard in enumerate(group):
                wanted = {"user": IdSet(ids=ids[places == index], counts=None)}
                v_read = shard.pull(ticket, wanted).version
                gradients = np.zeros((int((places == index).sum()), 16), np.float32)
                shard.push(ticket, v_read, {"user": gradients})
            used_last.update(dict.fromkeys(ids.tolist(), next(clock)))

    clock = itertools.count()
    options: dict[str, Any] = {"evict": "lru", "max_rows": 1000}
    store = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k", "core": core}
    table = Table(name="user", dim=16, optimizer=Sgd(lr=0.1), **options)

    def made(num: int) -> list[Shard]:
        return [
            Shard((table,), index=i, tau=0, seed=7, num_shards=num, **store) for i in range(num)
        ]

    group = made(2)
    train_on(group, 1, 60, skew=True)
    for num in (3, 1):
        folder = tmp_path / str(num)
        folder.mkdir()
        written(group, folder)
        group = made(num)
        for shard in group:
            load_shard(shard, folder, num_shards=num)
        assert [used_last[key] for key in oldest_first(group)] == sorted(used_last.values())
        train_on(group, 1, 20, skew=False)  # tickets of a new life begin anew

    order = oldest_first(group)
    assert [used_last[key] for key in order] == sorted(used_last.values())
    (one,) = group
    one.store["user"].evict(100)
    assert set(rows_of(group)) == set(order[100:])


def use(shard: Shard, session: int, *keys: int) -> None:
    """Steps of one row each, of a stage 0 that began so many milliseconds into the run."""
    for number, key in enumerate(keys, 1):
        ticket = session * TICKETS_OF_A_SESSION + number
        wanted = {"user": IdSet(ids=np.array([key]))}
        v_read = shard.pull(ticket, wanted, touch=touch_of(session, ticket)).version
        shard.push(ticket, v_read, {"user": np.zeros((1, 16), np.float32)})


def test_the_order_of_use_is_exact_however_late_stage_0_began() -> None:
    before, again, after = (shards(1, evict="lru", max_rows=100)[0] for _ in range(3))
    minute = 60_000
    use(before, 15 * minute, *range(10))
    use(before, 20 * minute, *range(10, 20))  # tickets above 2 ** 40
    fill_shard(again, [pack_shard(before)], num_shards=1)
    use(again, 600 * 24 * 60 * minute, *range(20, 30))  # 600 days
    fill_shard(after, [pack_shard(again)], num_shards=1)

    assert before.store["user"].order()[0].tolist() == list(range(20))
    assert after.store["user"].order()[0].tolist() == list(range(30))
    steps = after.store["user"].order()[1] >> np.uint64(24)
    assert (np.diff(steps.astype(np.int64)) > 0).all()


def test_mutant_tickets_as_touches_are_refused_before_they_spoil_the_order() -> None:
    (one,) = shards(1, evict="lru", max_rows=100)

    with pytest.raises(ValueError, match=r"step \d+ is beyond 2 \*\* 40"):
        one.pull(20 * 60_000 << 20, {"user": IdSet(ids=np.array([1]))})


def test_a_file_that_counted_tickets_is_read_in_its_order_and_goes_on_above_it() -> None:
    """As files were written before `touches`."""
    before, after = (shards(1, evict="lru", max_rows=100)[0] for _ in range(2))
    for number, key in enumerate((5, 3, 9, 4)):
        session = (1 + number // 2) * 60_000
        before.pull((session << 20) + number, {"user": IdSet(ids=np.array([key]))})
    old = pack_shard(before).replace(b'\\"touches\\": 16', b'\\"no_such\\": 16')
    fill_shard(after, [old], num_shards=1)
    use(after, 10, 7)

    assert after.touch_base < 1 << 30
    assert after.store["user"].order()[0].tolist() == [5, 3, 9, 4, 7]


def test_a_shard_that_takes_the_place_of_a_dead_one_counts_steps_as_the_others_do() -> None:
    """Its tickets go on, those of a run that was resumed begin anew: they need another base."""
    options: dict[str, Any] = {"evict": "lru", "max_rows": 40, "optimizer": Sgd(lr=0.1)}
    group = shards(2, **options)
    train(group, 1, 10)
    files = [pack_shard(shard) for shard in group]
    heir, resumed = shards(2, **options)[1], shards(2, **options)[1]
    fill_shard(heir, files, num_shards=2, touch_base=group[0].touch_base)
    fill_shard(resumed, files, num_shards=2)

    assert [shard.touch_base for shard in (group[0], heir, resumed)] == [0, 0, 10]
    train([group[0], heir], 11, 5)
    steps = [int(touched[-1]) >> 24 for _, touched in (s.rows["user"].rows.order() for s in group)]
    assert steps[0] == int(heir.rows["user"].rows.order()[1][-1]) >> 24 == 15


@pytest.mark.parametrize("core", ["twin", "native"])
def test_a_shard_is_written_as_it_was_kept_while_training_goes_on(core: str) -> None:
    options = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k", "core": core}
    table = Table(name="user", dim=16, optimizer=Adam(lr=0.1), evict="lru", max_rows=1000)
    before, after = (
        Shard((table,), index=0, tau=0, seed=7, num_shards=1, **options) for _ in range(2)
    )
    train([before], 0, 10)
    rows, order = rows_of([before]), oldest_first([before])

    with keep_shard(before) as kept:
        chunks = kept.chunks()
        header = bytes(next(chunks))
        train([before], 10, 30)
        assert rows_of([before]) != rows
        assert oldest_first([before]) != order
        data = header + b"".join(chunks)
        assert len(data) == kept.nbytes
    fill_shard(after, [data], num_shards=1)

    assert rows_of([after]) == rows
    assert oldest_first([after]) == order
    assert after.version == 10
    assert load(data)["user/rows"].shape == (len(rows), 16 + before.store["user"].core.record_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("spill", [False, True])
def test_a_full_shard_is_saved_while_training_goes_on(spill: bool, tmp_path: Path) -> None:
    table = Table(name="user", dim=16, optimizer=RowAdagrad(lr=0.1), evict="lru")
    size = 1000 if CORE == "native" else 50  # a step; the twin is slow
    options = {"capacity": 2200 * size, "slab": "16KiB", "pages": "4k", "core": CORE}
    folder = tmp_path / "below" if spill else None
    one = Shard((table,), index=0, tau=0, num_shards=1, spill=folder, **options)
    generator = np.random.default_rng(4)
    ticket, most = 0, size

    def steps(num: int, size: int) -> None:
        nonlocal ticket
        for _ in range(num):
            ticket += 1
            ids = np.unique(generator.integers(0, 24 * most, size))
            one.pull(ticket, {"user": IdSet(ids=ids)})
            settled = one.push(ticket, one.version, {"user": np.ones((len(ids), 16), np.float32)})
            assert settled[0].outcome == "applied"

    def whole(shard: Shard) -> dict[int, bytes]:
        parts = shard.rows["user"].scan()
        return {int(k): raw.tobytes() for p in parts for k, raw in zip(p.keys, p.raw, strict=True)}

    steps(60, size)
    rows = one.rows["user"].rows
    assert rows.stats()["spilled_rows"] if spill else rows.evicted  # it is full
    before = whole(one)
    with keep_shard(one) as kept:
        steps(3, size // 10)
        saved = kept.to_bytes()  # at capacity there is room for a checkpoint
    other = Shard((table,), index=0, tau=0, num_shards=1, **{**options, "capacity": "64MiB"})
    fill_shard(other, [saved], num_shards=1)
    assert whole(other) == before

    with keep_shard(one) as kept:
        steps(60, size)  # far more than that room: the snapshot goes, training does not end
        if CORE == "native":  # the twin pins whatever there is
            with pytest.raises(SnapshotExpiredError, match="raise `snapshot_budget` or `capacity`"):
                kept.to_bytes()
    steps(10, size)

    stats = rows.stats()
    assert len(rows.order()[0]) == stats["rows"] - stats["spilled_rows"]
    assert one.counts.refused_pushes == 0


@pytest.mark.slow
def test_writing_and_reading_take_the_same_memory_whatever_the_number_of_rows(
    tmp_path: Path,
) -> None:
    def peak(num: int) -> int:
        options = {"capacity": "256MiB", "slab": "2MiB", "pages": "4k", "core": "native"}
        table = Table(name="user", dim=16, optimizer=Sgd(lr=0.1))
        before, after = (Shard((table,), tau=0, num_shards=1, **options) for _ in range(2))
        ids = np.arange(num, dtype=np.int64)
        before.store["user"].lookup(ids)
        folder = tmp_path / str(num)
        folder.mkdir()
        del ids
        gc.collect()
        tracemalloc.start()
        try:
            written([before], folder)
            load_shard(after, folder, num_shards=1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(100_000), peak(400_000)

    assert many < 1.3 * few
    assert many < 400_000 * 64 / 4  # the rows alone are 64 bytes each


def test_a_checkpoint_that_was_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    group = shards(2)
    train(group, 0, 3)
    (empty,) = shards(1)
    with pytest.raises(ShardFileError, match=r"has no embedding\.json: it is no checkpoint"):
        load_shard(empty, tmp_path, num_shards=1)

    save_shards(group, tmp_path)
    path = tmp_path / "shard-00001-of-00002.00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(
        ShardFileError, match=r"00001-of-00002\.00001\.safetensors has \d+ bytes, .* trunc"
    ):
        load_shard(empty, tmp_path, num_shards=1)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ShardFileError, match="is damaged"):
        load_shard(empty, tmp_path, num_shards=1)
    path.unlink()
    with pytest.raises(ShardFileError, match="is missing; the marker names it"):
        load_shard(empty, tmp_path, num_shards=1)
    assert empty.stats()["rows"] == 0
    assert not list(tmp_path.glob("*.part"))


class Crash(Exception):
    pass


@pytest.mark.parametrize("then", [2, 3])
def test_wherever_a_save_over_a_checkpoint_is_cut_one_of_the_two_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    first, second = shards(2), shards(then)
    train(first, 0, 3)
    train(second, 5, 5)
    write, sync = shard_folders.write_aside, shard_folders._sync
    found = []
    for calls in range(20):
        folder = tmp_path / str(calls)
        folder.mkdir()
        save_shards(first, folder)
        left = [calls]

        def tick(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Crash

        def cut(path: Path, data: Any, tick: Any = tick) -> None:
            whole = b"".join([data] if isinstance(data, bytes) else data)
            with_half = path.with_name(path.name + ".part")
            with_half.write_bytes(whole[: len(whole) // 2])
            tick()
            write(path, whole)

        with monkeypatch.context() as patch:
            patch.setattr(shard_folders, "write_aside", cut)
            patch.setattr(shard_folders, "_sync", lambda folder, tick=tick: (tick(), sync(folder)))
            try:
                save_shards(second, folder)
                ended = True
            except Crash:
                ended = False
        loaded = shards(1)
        load_shard(loaded[0], folder, num_shards=1)
        found.append((rows_of(loaded) == rows_of(first), rows_of(loaded) == rows_of(second)))
        save_shards(second, folder)  # the next one takes away what was left
        assert len(list(folder.iterdir())) == then + 1
        if ended:
            break

    # Before each file and the marker: the old one. After the marker, and at the end: the new one.
    assert found == [(True, False)] * (then + 1) + [(False, True)] * 2


def test_a_shard_that_replaces_a_dead_one_takes_rows_and_leaves_the_counts_to_the_others() -> None:
    before = shards(2)
    train(before, 0, 10)
    files = [pack_shard(shard) for shard in before]
    resumed, replaced = shards(2), shards(2)

    for shard in resumed:
        fill_shard(shard, files, num_shards=2)
    taken = fill_shard(replaced[0], files, num_shards=2, with_counts=False)
    assert taken == before[0].stats()["rows"]
    assert [shard.stats()["staleness_histogram"] for shard in resumed] == [{0: 20}, {}]
    assert replaced[0].stats()["staleness_histogram"] == {}
    assert replaced[0].version == 10


def test_what_shards_counted_goes_on_in_those_that_are_filled_from_them() -> None:
    """Twice over; else a resumed run would tell what the driver happened to know."""
    told = ("lost_pushes", "refused_pushes", "replayed", "unsent_pushes", "dropped_rows")
    told += ("evictions", "recalled")
    before = shards(2)
    train(before, 0, 2)
    for number, name in enumerate(SUMS, start=1):
        setattr(before[number % 2].counts, name, number)
    for num in (3, 1):
        after = shards(num)
        files = [pack_shard(shard) for shard in before]
        for shard in after:
            fill_shard(shard, files, num_shards=num)
        before = after

    (last,) = before
    assert [last.stats()[name] for name in told] == list(range(1, len(SUMS) + 1))
    last.counts.add_saved({"dropped_rows": 5, "version": 3})  # a file before there were sums
    assert last.stats()["dropped_rows"] == 10


def test_the_rows_in_the_checkpoint_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    from stages.storage import Folder

    before = shards(2)
    train(before, 0, 5)
    folder = tmp_path / "checkpoint_000005"
    notes = [Folder(folder).write("stage_0.safetensors", [b"dense"])]
    for shard in before:
        name = f"shard_{shard.index}_of_2.safetensors"
        notes.append(Folder(folder).write(name, [pack_shard(shard)]))
    files = [{"name": n.name, "nbytes": n.nbytes, "sha256": n.sha256} for n in notes]
    (folder / "manifest.json").write_text(json.dumps({"files": files}))

    after = shards(3)
    assert sum(load_shard(shard, folder, num_shards=3) for shard in after) == len(rows_of(before))
    assert rows_of(after) == rows_of(before)
    path = folder / "shard_1_of_2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ShardFileError, match=r"shard_1_of_2\.safetensors is damaged"):
        load_shard(shards(1)[0], folder, num_shards=1)
    (folder / "manifest.json").write_text(json.dumps({"files": files[:1]}))
    with pytest.raises(ShardFileError, match="a run without embedding shards"):
        saved_shards(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ShardFileError, match="or it was cut off"):
        saved_shards(folder)


def test_a_table_may_have_spaces_in_its_name(tmp_path: Path) -> None:
    before, after = shards(1, name="the user"), shards(1, name="the user")
    before[0].pull(1, {"the user": IdSet(ids=np.arange(9, dtype=np.int64))})

    assert load_shard(after[0], written(before, tmp_path), num_shards=1) == 9


def test_other_settings_are_refused_with_both_numbers(tmp_path: Path) -> None:
    group = shards(1)
    train(group, 0, 1)
    folder = written(group, tmp_path)

    with pytest.raises(ShardFileError, match="was saved with dim 16, this run has 8"):
        load_shard(shards(1, dim=8)[0], folder, num_shards=1)
    with pytest.raises(ShardFileError, match="saved with state 2, this run has 0"):
        load_shard(shards(1, optimizer=Sgd(lr=0.1))[0], folder, num_shards=1)
