"""A shard's promises: order, bound, once only, exact optimizers, pruned chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.embedding.chunk_prune import fold_pruned, index_bytes, real_bytes, row_bytes
from stages.embedding.row_rules import Adam, RowAdagrad, Sgd, Uniform
from stages.embedding.row_store import RowStore
from stages.embedding.shard import Shard
from stages.embedding.shard_table import ShardTable
from stages.embedding.shard_terms import CapacityError, IdSet, UnknownTicketError
from stages.embedding.tables import ChunkPrune, Table, check_tables, shard_of

CORE = "twin"


@pytest.fixture(params=["native", "twin"], autouse=True)
def on_both_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CORE", request.param)


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def shard(tau: int = 0, **options: Any) -> Shard:
    fields = {"name": "user", "dim": 2, "optimizer": Sgd(lr=1.0), "init": Uniform(0.1)} | options
    return Shard(
        (Table(**fields),), tau=tau, seed=7, capacity="8MiB", slab="64KiB", pages="4k", core=CORE
    )


def wanted(*values: int, counts: Any = None) -> dict[str, IdSet]:
    counted = None if counts is None else np.array(counts, np.float32)
    return {"user": IdSet(ids=ids(*values), counts=counted)}


def ones(num: int, dim: int = 2) -> dict[str, Any]:
    return {"user": np.ones((num, dim), np.float32)}


def outcomes(settled: Any) -> list[tuple[int, str]]:
    return [(one.ticket, one.outcome) for one in settled]


def test_a_pull_gives_rows_that_depend_on_seed_table_and_id_only() -> None:
    first = shard().pull(1, wanted(3, 9)).tables["user"].weights
    second = shard().pull(1, wanted(5, 9)).tables["user"].weights

    assert first[1].tolist() == second[1].tolist()
    assert first[0].tolist() != first[1].tolist()


def test_pushes_are_applied_in_the_order_of_the_pulls_and_early_ones_are_held() -> None:
    one = shard(tau=2)
    for ticket in (1, 2, 3):
        one.pull(ticket, wanted(ticket))

    assert one.push(3, 0, ones(1)) == []
    assert one.push(2, 0, ones(1)) == []
    assert one.version == 0
    settled = one.push(1, 0, ones(1))

    assert outcomes(settled) == [(1, "applied"), (2, "applied"), (3, "applied")]
    assert [part.staleness for part in settled] == [0, 1, 2]
    assert one.counts.max_held == 2
    assert one.stats()["staleness_histogram"] == {0: 1, 1: 1, 2: 1}


def test_a_voided_step_lets_the_others_pass_and_is_no_version() -> None:
    one = shard(tau=1)
    one.pull(1, wanted(1))
    one.pull(2, wanted(2))
    one.push(2, 0, ones(1))

    assert outcomes(one.void(1)) == [(1, "void"), (2, "applied")]
    assert one.version == 1


def test_a_push_counts_once_however_often_it_comes() -> None:
    one = shard()
    before = one.pull(1, wanted(4)).tables["user"].weights.copy()
    one.push(1, 0, ones(1))

    assert outcomes(one.push(1, 0, ones(1))) == [(1, "repeated")]
    assert one.version == 1
    assert (one.read({"user": ids(4)})["user"].weights == before - 1).all()


def test_a_step_that_the_dense_net_runs_again_is_applied_once_and_counted() -> None:
    one = shard()
    for number in (0, 1):
        v_read = one.pull(number + 1, wanted(4)).version
        one.push(number + 1, v_read, ones(1), number)
    before = one.read({"user": ids(4)})["user"].weights.copy()
    v_read = one.pull(100, wanted(4)).version  # all stages went back behind step 1: a new ticket

    assert outcomes(one.push(100, v_read, ones(1), 1)) == [(100, "repeated")]
    assert one.version == 2
    assert (one.read({"user": ids(4)})["user"].weights == before).all()
    assert one.stats()["replayed"] == 1
    one.pull(101, wanted(4))
    assert outcomes(one.push(101, 2, ones(1), 2)) == [(101, "applied")]


def test_mutant_without_the_number_of_the_step_it_is_applied_twice() -> None:
    one = shard()
    for ticket in (1, 100):
        one.push(ticket, one.pull(ticket, wanted(4)).version, ones(1), None)

    assert one.version == 2


def test_a_pull_that_is_asked_again_has_the_same_answer_even_after_other_pushes() -> None:
    one = shard(tau=1)
    one.pull(1, wanted(4))
    first = one.pull(2, wanted(4))
    one.push(1, 0, ones(1))

    assert one.pull(2) is first
    assert outcomes(one.push(2, first.version, ones(1))) == [(2, "applied")]


def test_ids_may_come_ahead_or_with_the_pull_and_without_them_it_is_refused() -> None:
    one = shard()
    one.announce(5, wanted(1, 2))
    one.announce(5, wanted(1, 2))

    assert one.stats()["rows"] == 0  # announced is not read
    assert len(one.pull(5).tables["user"].weights) == 2
    with pytest.raises(UnknownTicketError, match="no ids for step 6"):
        one.pull(6)


def test_a_push_from_before_a_restart_is_lost_counted_and_acknowledged() -> None:
    one = shard()

    assert outcomes(one.push(8, 3, ones(1))) == [(8, "lost")]
    assert one.counts.lost_pushes == 1
    assert outcomes(one.push(8, 3, ones(1))) == [(8, "repeated")]
    assert one.counts.lost_pushes == 1


def test_gradients_beyond_the_bound_are_refused_by_name() -> None:
    one = shard(tau=1)
    for ticket in (1, 2, 3):  # one more than tau + 1: somebody had permits of his own
        one.pull(ticket, wanted(ticket))
    one.push(1, 0, ones(1))
    one.push(2, 0, ones(1))

    (settled,) = one.push(3, 0, ones(1))

    assert settled.outcome == "refused"
    assert "read at version 0, this is version 2 and the bound is 1" in settled.why
    assert one.version == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_refused_by_table_and_id(bad: float) -> None:
    one = shard()
    before = one.pull(1, wanted(4, 77)).tables["user"].weights.copy()
    gradients = ones(2)
    gradients["user"][1, 0] = bad

    (settled,) = one.push(1, 0, gradients)

    assert settled.outcome == "refused"
    assert "table 'user': the gradients of 1 of 2 ids are not finite (77)" in settled.why
    assert one.version == 0
    assert (one.read({"user": ids(4, 77)})["user"].weights == before).all()


def two_tables(folder: Path, num_steps: int) -> Shard:
    """The rows of `spilled` that the first steps pulled are on disk by now."""
    plain = {"dim": 2, "optimizer": Sgd(lr=1.0), "init": Uniform(0.1)}
    tables = (Table("kept", **plain), Table("spilled", max_rows=8, spill=str(folder), **plain))
    one = Shard(tables, tau=4, seed=7, capacity="4MiB", slab="16KiB", pages="4k", core=CORE)
    for ticket in range(1, num_steps + 1):
        there = np.arange(100 * ticket, 100 * ticket + 6)
        one.pull(ticket, {"kept": IdSet(ids=ids(1, 2)), "spilled": IdSet(ids=there)})
    return one


def refuse(*args: Any) -> None:
    raise OSError("cannot spill to /tmp: MDB_MAP_FULL")


def test_a_push_that_the_disk_refuses_is_refused_as_a_whole_counted_and_told(
    tmp_path: Path,
) -> None:
    one = two_tables(tmp_path, 2)
    gradients = {"kept": np.ones((2, 2), np.float32), "spilled": np.ones((6, 2), np.float32)}
    before = one.read({"kept": ids(1, 2)})["kept"].weights.tolist()
    tier: Any = one.rows["spilled"].spilling.tier  # type: ignore[union-attr]
    real, tier.write_batch = tier.write_batch, refuse
    (settled,) = one.push(1, 0, gradients)
    tier.write_batch = real
    (again,) = one.push(1, 0, gradients)  # its acknowledgement was lost
    (later,) = one.push(2, 0, gradients)

    assert settled.outcome == again.outcome == "refused"
    assert "shard 0, step 1: OSError: cannot spill to /tmp: MDB_MAP_FULL" in settled.why
    assert one.counts.refused_pushes == 1
    assert (later.outcome, one.version) == ("applied", 1)
    moved = one.read({"kept": ids(1, 2)})["kept"].weights - np.array(before, np.float32)
    assert moved == pytest.approx(-1)  # of the second step alone


def test_mutant_tables_that_are_called_up_one_by_one_are_half_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardTable, "call_up", lambda *_: None)
    one = two_tables(tmp_path, 2)
    tier: Any = one.rows["spilled"].spilling.tier  # type: ignore[union-attr]
    tier.write_batch = refuse
    gradients = {"kept": np.ones((2, 2), np.float32), "spilled": np.ones((6, 2), np.float32)}
    before = one.read({"kept": ids(1, 2)})["kept"].weights.tolist()
    (settled,) = one.push(1, 0, gradients)

    assert one.read({"kept": ids(1, 2)})["kept"].weights.tolist() != before
    assert "tables ['kept'] have taken this step, 'spilled' has not" in settled.why


def test_an_id_evicted_between_pull_and_push_takes_no_neighbour_s_gradient() -> None:
    one = shard(tau=0, evict="lru", max_rows=3)
    before = one.pull(1, wanted(1, 2, 3)).tables["user"].weights.copy()
    one.store["user"].remove(ids(2))
    gradients = {"user": np.array([[1, 1], [50, 50], [3, 3]], np.float32)}

    one.push(1, 0, gradients)

    after = one.read({"user": ids(1, 2, 3)})["user"].weights
    assert (after[[0, 2]] == before[[0, 2]] - gradients["user"][[0, 2]]).all()
    assert after[1].tolist() == [0, 0]
    assert one.counts.dropped_rows == 1


def test_evaluation_of_unknown_ids_reads_zeros_and_leaves_no_trace() -> None:
    one = shard()

    assert one.read({"user": ids(5)})["user"].weights.tolist() == [[0.0, 0.0]]
    assert one.stats()["rows"] == 0


def test_a_capacity_below_the_steps_under_way_is_explained() -> None:
    one = shard(tau=3, evict="lru", max_rows=11)

    with pytest.raises(CapacityError, match=r"up to 4 steps under way, needs 12 rows, max_rows is"):
        one.pull(1, wanted(1, 2, 3))


def test_a_step_without_ids_here_still_counts_for_adam() -> None:
    one = shard(optimizer=Adam(lr=0.1))
    one.pull(1, wanted())
    one.push(1, 0, {"user": np.zeros((0, 2), np.float32)})

    assert one.version == 1
    assert one.store["user"].version == 1


# --- pruning --------------------------------------------------------------------------------------


def pruned(ratio: float, *, every: int = 10, tau: int = 0, optimizer: Any = None) -> Shard:
    rule = ChunkPrune(chunk=8, ratio=ratio, warmup=every, every=every, taper=0.0)
    return shard(tau, dim=32, prune=rule, optimizer=optimizer or RowAdagrad(lr=0.1))


def train(one: Shard, ticket: int, keys: list[int], columns: slice, size: float = 1.0) -> None:
    pulled = one.pull(ticket, wanted(*keys, counts=[1] * len(keys)))
    gradients = np.full((len(keys), 32), 1e-4, np.float32)
    gradients[:, columns] = size
    alive = pulled.tables["user"].alive
    assert alive is not None
    folded = fold_pruned(gradients, alive, chunks=4)
    (settled,) = one.push(ticket, pulled.version, {"user": folded})
    assert settled.outcome == "applied", settled.why


def test_pruning_meets_its_target_of_real_bytes() -> None:
    one = pruned(0.4)
    keys = list(range(64))
    for ticket in range(10):
        train(one, ticket, keys, slice(0, 8))

    (cut,) = one.cuts
    rows = one.store["user"]
    assert cut.bytes_after == real_bytes(rows) <= cut.target_bytes
    assert cut.bytes_after >= cut.target_bytes - 8 * 4
    assert (row_bytes(rows), cut.full_bytes) == (172, 64 * 172)
    if not one.store.native:  # the twin counts what it uses, the core whole slabs
        assert one.store.stats()["used_bytes"] == cut.bytes_after


@pytest.mark.parametrize("num_rows", [1000, 5000, 23_000, 50_000])
def test_the_index_that_is_counted_is_the_index_that_is_there(num_rows: int) -> None:
    store = RowStore(capacity="64MiB", slab="128KiB", pages="4k", core="native")
    rows = store.table("rows", dim=1)
    for part in np.array_split(np.random.default_rng(1).integers(0, 1 << 62, num_rows), 8):
        rows.lookup(part)

    assert index_bytes(num_rows) == pytest.approx(rows.stats()["index_bytes"], rel=0.08)


def test_the_useful_chunks_survive_and_the_others_read_as_zeros() -> None:
    one = pruned(0.45)
    for ticket in range(10):
        train(one, ticket, [1, 2, 3, 4], slice(8, 16))

    read = one.read({"user": ids(1, 2, 3, 4)})["user"]
    assert read.alive is not None
    assert all(bits & 0b0010 for bits in read.alive.tolist())
    gone = (read.alive[:, None] >> np.arange(4)) & 1 == 0
    assert gone.any()
    assert (read.weights.reshape(4, 4, 8)[gone] == 0).all()
    assert read.epoch == 1


def test_chunks_that_become_hot_regrow_and_others_give_way() -> None:
    one = pruned(0.45)
    for ticket in range(10):
        train(one, ticket, [1, 2], slice(0, 8))
    before = one.read({"user": ids(1, 2)})["user"].alive
    for ticket in range(10, 30):
        train(one, ticket, [1, 2], slice(24, 32), size=50.0)

    after = one.read({"user": ids(1, 2)})["user"]
    assert before is not None
    assert after.alive is not None
    assert not (before & 0b1000).any()
    assert (after.alive & 0b1000).all()
    assert one.cuts[1].regrown == 2
    assert (after.weights[:, 24:] != 0).all()  # it learns again, from zero


def test_a_pull_before_a_prune_and_a_push_after_it_move_alive_chunks_only() -> None:
    one = pruned(0.45, tau=1, optimizer=Sgd(lr=1.0))
    for ticket in range(9):
        train(one, ticket, [1, 2], slice(0, 8))
    counts = [1, 1]
    tenth = one.pull(9, wanted(1, 2, counts=counts))
    late = one.pull(10, wanted(1, 2, counts=counts))
    one.push(9, tenth.version, {"user": np.zeros((2, 32), np.float32)})
    now = one.read({"user": ids(1, 2)})["user"]
    one.push(10, late.version, {"user": np.full((2, 32), 0.5, np.float32)})

    after = one.read({"user": ids(1, 2)})["user"]
    assert (late.tables["user"].epoch, now.epoch) == (0, 1)
    assert now.alive is not None
    alive = np.repeat((now.alive[:, None] >> np.arange(4)) & 1, 8, axis=1) == 1
    assert (after.weights[alive] == now.weights[alive] - 0.5).all()
    assert (after.weights[~alive] == 0).all()


def test_a_chunk_that_regrew_between_pull_and_push_is_not_moved_by_the_norm_it_was_sent() -> None:
    one = pruned(0.45, tau=1, optimizer=Sgd(lr=1.0))
    for ticket in range(10):
        train(one, ticket, [1, 2], slice(0, 8))
    for ticket in range(10, 19):
        train(one, ticket, [1, 2], slice(24, 32), size=50.0)
    last, late = (one.pull(t, wanted(1, 2, counts=[1, 1])) for t in (19, 20))
    then = late.tables["user"].alive
    assert then is not None
    hot = np.zeros((2, 32), np.float32)
    hot[:, 24:] = 50.0
    folded = {"user": fold_pruned(hot, then, chunks=4)}

    one.push(19, last.version, folded)
    between = one.read({"user": ids(1, 2)})["user"]
    one.push(20, late.version, folded)

    after = one.read({"user": ids(1, 2)})["user"]
    assert between.alive is not None
    assert not (then & 0b1000).any()
    assert (between.alive & 0b1000).all()
    assert folded["user"][0, 24] > 100  # the norm, which is no gradient
    assert (after.weights[:, 24:] == 0).all()


def test_a_ratio_that_headers_alone_exceed_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"the 183 bytes of a whole row, 71 .* must be below 0\.61"
    ):
        pruned(0.7)


def test_utility_counts_occurrences() -> None:
    one = pruned(0.45, every=2)
    for ticket in range(2):
        one.pull(ticket, wanted(1, 2, counts=[1000, 1]))
        one.push(ticket, ticket, {"user": np.ones((2, 32), np.float32)})

    alive = one.read({"user": ids(1, 2)})["user"].alive
    assert alive is not None
    assert alive.tolist() == [0b0011, 0]


# --- tables ---------------------------------------------------------------------------------------


def test_ids_spread_evenly_and_always_alike() -> None:
    places = shard_of(np.arange(-5000, 5000, dtype=np.int64), 3)

    assert np.bincount(places).min() > 3200
    # Checkpoints, exports and machines depend on it: these never change.
    assert shard_of(ids(0, 1, 2, -1, 2**63 - 1), 4).tolist() == [2, 1, 0, 3, 3]
    assert (shard_of(ids(7, 8), 1) == 0).all()


def test_tables_are_refused_with_reasons() -> None:
    rule = Sgd(lr=0.1)
    with pytest.raises(ValueError, match=r"is 1\.5 chunks"):
        Table(name="a", dim=12, optimizer=rule, prune=ChunkPrune(chunk=8, ratio=0.5))
    with pytest.raises(ValueError, match="num_ids 0; at least 1"):
        Table(name="a", dim=4, optimizer=rule, placement="replicated", num_ids=0)
    with pytest.raises(ValueError, match=r"\['a'\] are given twice"):
        check_tables(
            (Table(name="a", dim=1, optimizer=rule), Table(name="a", dim=2, optimizer=rule))
        )
    with pytest.raises(ValueError, match="share of bytes"):
        ChunkPrune(ratio=1.0)
    with pytest.raises(ValueError, match=r"decay is in \(0, 1\], got 0"):
        ChunkPrune(ratio=0.5, decay=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "user_id"}, r"write features=\['user_id'\]"),  # not u, s, e, r, ...
        ({"dim": 0}, "dim 0"),
        ({"max_rows": -1}, "max_rows -1"),
        ({"evict": "lfu"}, "\"lru\" or None, got 'lfu'"),
    ],
)
def test_a_table_that_cannot_be_is_refused_where_it_is_written(
    options: dict[str, Any], words: str
) -> None:
    """Not in an actor, by an error of Ray's."""
    with pytest.raises(ValueError, match=words):
        Table(**{"name": "user", "dim": 4, **options})
