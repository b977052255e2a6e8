"""Tables in one process: they are nn.EmbeddingBag where they can be, and more where it cannot."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ray_pipe import rec
from stages.embedding.row_errors import NonFiniteGradientError, StoreFullError
from stages.embedding.shard_files import ShardFileError
from stages.embedding.shard_terms import CapacityError

STORE: dict[str, Any] = {"capacity": "8MiB", "slab": "64KiB", "pages": "4k"}


def bag(name: str = "user", *, delay: int = 0, shards: int = 1, **options: Any) -> rec.EmbeddingBag:
    settings = {"dim": 4, "optimizer": rec.Sgd(lr=0.1), "init": rec.Uniform(0.5)} | options
    return rec.EmbeddingBag(
        rec.Table(name, **settings), seed=7, delay=delay, shards=shards, **STORE
    )


def twin(embedding: rec.EmbeddingBag, num_ids: int, mode: str = "sum") -> nn.EmbeddingBag:
    """torch's own, with the rows that ours begins with."""
    (table,) = embedding.tables
    start = embedding.shards[0].store[table].initial(np.arange(num_ids, dtype=np.int64))
    weight = torch.from_numpy(start)
    return nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode=mode)


def trained(embedding: rec.EmbeddingBag, ids: Any, *, steps: int = 1) -> None:
    for _ in range(steps):
        (embedding(ids) ** 2).sum().backward()
        embedding.step()


# --- as torch's EmbeddingBag ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("shards", [1, 3])
def test_duplicates_and_empty_bags_are_nn_embedding_bag_s(mode: str, shards: int) -> None:
    ours = bag(pooling={"user": mode}, shards=shards)
    theirs = twin(ours, 10, mode)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    ids = torch.tensor([3, 3, 1, 3, 9, 1])
    offsets = torch.tensor([0, 2, 2, 5])  # [3, 3], [], [1, 3, 9], [1]

    for _ in range(5):
        for module in (ours, theirs):
            out = module(ids, offsets)
            ((out - 1) ** 2).mean().backward()
        ours.step()
        sgd.step()
        sgd.zero_grad()
    ours.eval()
    found = ours(torch.arange(10))
    touched = [1, 3, 9]
    assert torch.allclose(found[touched], theirs.weight[touched], atol=1e-6, rtol=0)
    assert found[[0, 2, 4]].abs().sum() == 0  # never seen: no row, and so zeros
    assert torch.equal(ours(ids, offsets)[1], torch.zeros(4))


def test_square_root_pooling_divides_by_the_root_of_the_bag_s_size() -> None:
    ours = bag(pooling={"user": "sqrtn"})
    theirs = twin(ours, 5)

    bags = rec.Jagged(ids=torch.tensor([1, 2, 3, 4]), offsets=torch.tensor([0, 4, 4]))
    expected = theirs.weight[1:5].sum(0) / 2
    assert torch.allclose(ours(bags)[0], expected)
    assert ours(bags)[1].abs().sum() == 0


def test_raw_rows_of_fixed_width_keep_their_places() -> None:
    ours = bag(pooling={"user": "none"})
    ids = torch.tensor([[1, 2], [2, 1]])

    out = ours(ids)
    assert out.shape == (2, 2, 4)
    assert torch.equal(out[0], out[1].flip(0))
    with pytest.raises(ValueError, match="same number of ids"):
        ours(rec.Jagged(ids=torch.tensor([1]), offsets=torch.tensor([0, 1, 1])))


def test_several_passes_before_a_step_are_one_version_and_the_sum_of_their_gradients() -> None:
    once, twice = bag(), bag()
    ids = torch.tensor([1, 2, 2, 3])

    trained(once, ids)
    for part in (ids[:2], ids[2:]):
        (twice(part) ** 2).sum().backward()
    twice.step()
    for module in (once, twice):
        module.eval()
    assert torch.allclose(once(ids), twice(ids), atol=1e-7, rtol=0)
    assert once.stats()["version"] == twice.stats()["version"] == 1


def test_evaluation_creates_touches_and_counts_nothing() -> None:
    ours = bag(max_rows=64, evict="lru")
    trained(ours, torch.tensor([1, 2]))
    before = ours.stats()

    with torch.no_grad():
        assert ours(torch.tensor([7])).abs().sum() == 0
    ours.eval()
    assert ours(torch.tensor([1, 7]))[1].abs().sum() == 0
    assert ours.stats() == before
    assert before["rows"] == 2


def test_one_table_serves_several_features_and_small_ones_are_parameters() -> None:
    ours = rec.Embeddings(
        [
            rec.Table("item", dim=4, features=("clicked", "history"), pooling={"history": "mean"}),
            rec.Table("gender", dim=2, placement="replicated", num_ids=3),
        ],
        **STORE,
    )
    batch = {
        "clicked": torch.tensor([5, 6]),
        "history": rec.Jagged(ids=torch.tensor([5, 5, 9]), offsets=torch.tensor([0, 2, 3])),
        "gender": torch.tensor([0, 2]),
        "label": torch.tensor([0.0, 1.0]),
    }

    out = ours(batch)
    assert {name: tuple(part.shape) for name, part in out.items()} == {
        "clicked": (2, 4),
        "history": (2, 4),
        "gender": (2, 2),
    }
    assert torch.equal(out["clicked"][0], out["history"][0])  # the mean of a row and itself
    assert [tuple(p.shape) for p in ours.parameters()] == [(3, 2)]
    assert ours.stats()["rows"] == 3
    with pytest.raises(ValueError, match=r"no ids for features \['history'\]"):
        ours({"clicked": torch.tensor([1]), "gender": torch.tensor([1])})


def test_a_gradient_that_is_not_finite_is_refused_and_no_shard_moves() -> None:
    ours = bag(shards=2)
    ids = torch.arange(8)
    trained(ours, ids)

    (ours(ids) * torch.tensor([[float("nan")] * 4] + [[1.0] * 4] * 7)).sum().backward()
    with pytest.raises(NonFiniteGradientError, match=r"table 'user': the gradients of 1 of"):
        ours.step()
    assert [shard.version for shard in ours.shards] == [1, 1]


def test_a_forward_without_backward_is_no_step() -> None:
    ours = bag()
    ours(torch.tensor([1]))
    ours.step()
    assert ours.stats()["version"] == 0
    (ours(torch.tensor([1])) ** 2).sum().backward()
    ours.drop()
    ours.step()
    assert ours.stats()["version"] == 0


def test_what_cannot_be_is_refused_with_reasons() -> None:
    with pytest.raises(TypeError, match=r"int64 of shape \[B\] or \[B, L\], got torch\.int32"):
        bag()(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"int64 tensor or rec\.Jagged, got list"):
        bag()([1])
    with pytest.raises(ValueError, match="offsets go from 0 to 1"):
        bag()(rec.Jagged(ids=torch.tensor([1]), offsets=torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="pooling is one of"):
        rec.Table("user", dim=4, pooling={"user": "max"})
    with pytest.raises(ValueError, match="`pooling` speaks of 'item'"):
        rec.Table("user", dim=4, pooling={"item": "sum"})
    with pytest.raises(ValueError, match="EmbeddingBag has one"):
        rec.EmbeddingBag(rec.Table("user", dim=4, features=("a", "b")))
    with pytest.raises(ValueError, match="feature 'a' is of tables 'x' and 'y'"):
        rec.Embeddings([rec.Table(name, dim=4, features=("a",)) for name in "xy"], **STORE)


# --- delay ----------------------------------------------------------------------------------------


def test_updates_are_late_by_exactly_the_delay() -> None:
    ours, now = bag(delay=2), bag()
    ids = torch.tensor([1])
    for _ in range(5):
        trained(ours, ids)

    assert ours.stats()["staleness_histogram"] == {0: 1, 1: 1, 2: 1}
    assert ours.stats()["version"] == 3
    ours.eval()
    ours(ids)  # evaluation applies what is under way
    assert ours.stats()["version"] == 5
    trained(now, ids)
    now.eval()
    assert not torch.equal(now(ids), ours(ids))


def test_without_delay_shards_and_one_table_train_the_same_bits() -> None:
    one, many = bag(), bag(shards=4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(0, 40, (8, 3), generator=generator)
        for module in (one, many):
            trained(module, ids)

    for module in (one, many):
        module.eval()
    assert torch.equal(one(torch.arange(40)), many(torch.arange(40)))


# --- admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prune", [None, rec.ChunkPrune(chunk=8, ratio=0.1, warmup=1000)])
def test_a_row_exists_after_the_nth_sighting_and_reads_zeros_before(prune: Any) -> None:
    ours = bag(dim=32, admit=rec.MinCount(3), prune=prune)
    seen = []
    for _ in range(4):
        out = ours(torch.tensor([5, 5]))
        seen.append(bool(out.abs().sum() > 0))
        (out**2).sum().backward()
        ours.step()

    assert seen == [False, False, True, True]
    assert ours.stats()["rows"] == 1
    assert ours.stats()["dropped_rows"] == 0  # gradients of strangers are no accident
    assert ours.stats()["unadmitted_share"] == {"user": 0.5}


@pytest.mark.parametrize("shards", [1, 2])
def test_micro_batches_of_one_step_are_one_sighting(shards: int) -> None:
    ours = bag(admit=rec.MinCount(2), shards=shards)
    seen = []
    for _ in range(3):  # steps, of two passes each; id 6 comes in the second only
        for ids in ([5, 7], [5, 6]):
            out = ours(torch.tensor(ids))
            seen.append((out.abs().sum(1) > 0).tolist())
            (out**2).sum().backward()
        ours.step()

    assert seen == [[False, False]] * 2 + [[True, True]] * 4
    assert ours.stats()["rows"] == 3
    assert ours.stats()["dropped_rows"] == 0


def test_every_pass_of_a_step_whose_rows_are_admitted_is_learned_from() -> None:
    once, twice = bag(admit=rec.MinCount(2)), bag(admit=rec.MinCount(2))
    for _ in range(2):
        trained(once, torch.tensor([5, 5]))
        for _ in range(2):
            (twice(torch.tensor([5])) ** 2).sum().backward()
        twice.step()

    for module in (once, twice):
        module.eval()
    assert once(torch.tensor([5])).abs().sum() > 0
    assert torch.allclose(once(torch.tensor([5])), twice(torch.tensor([5])), atol=1e-7, rtol=0)


def test_counters_are_bounded_and_forget_who_was_not_seen_for_longest() -> None:
    ours = bag(admit=rec.MinCount(2, remember=10))
    trained(ours, torch.tensor([1]))
    trained(ours, torch.arange(100, 110))  # ten others: id 1 is forgotten
    trained(ours, torch.tensor([1]))
    assert ours.stats()["rows"] == 0

    trained(ours, torch.tensor([1]))
    assert ours.stats()["rows"] == 1
    admission = ours.shards[0].rows["user"].admission
    assert admission is not None
    trained(ours, torch.arange(1000, 1500))  # in one step, too
    assert admission.counters.stats()["rows"] <= 10


def test_a_table_that_admits_hardly_anybody_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.embedding.admission.LOUD_AFTER", 100)
    ours = bag(admit=rec.MinCount(9))
    for start in range(0, 500, 50):
        trained(ours, torch.arange(start, start + 50))

    assert len([r for r in caplog.records if "had no row" in r.getMessage()]) == 1


# --- capacity and disk ----------------------------------------------------------------------------


def run_capped(tmp_path: Path | None, *, delay: int = 0, **options: Any) -> tuple[Tensor, Any]:
    options |= {} if tmp_path is None else {"spill": str(tmp_path)}
    ours = bag(optimizer=rec.Adam(lr=0.05), delay=delay, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        trained(ours, torch.randint(0, 300, (12,), generator=generator))
    stats = ours.stats()
    ours.eval()
    return ours(torch.arange(300)), stats


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_a_tenth_of_the_rows_in_memory_and_a_disk_train_as_if_all_were(
    tmp_path: Path, delay: int
) -> None:
    whole, _ = run_capped(None, delay=delay)
    on_disk, stats = run_capped(tmp_path, delay=delay, max_rows=30)
    assert torch.equal(whole, on_disk)
    assert stats["recalled"] > 100
    assert stats["dropped_rows"] == 0

    dropped, stats = run_capped(None, max_rows=60, evict="lru")  # the cap was active
    assert not torch.equal(whole, dropped)
    assert stats["evictions"] > 100
    assert 0 < stats["hit_rate"]["user"] < 0.9


@pytest.mark.slow
def test_mutant_a_row_that_went_down_between_pull_and_push_loses_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.embedding.row_spill import SpillingTable

    whole, _ = run_capped(None, delay=2)
    apply = rec.Embeddings._settle

    def without_recall(self: Any, parts: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SpillingTable, "announce", lambda *_: 0)
            apply(self, parts)

    monkeypatch.setattr(rec.Embeddings, "_settle", without_recall)
    broken, stats = run_capped(tmp_path, delay=2, max_rows=30)
    assert stats["dropped_rows"] > 0
    assert not torch.equal(whole, broken)


def test_a_capacity_in_bytes_is_a_number_of_rows_of_real_bytes() -> None:
    ours = bag(dim=16, optimizer=rec.RowAdagrad(lr=0.1), capacity=100 * 116, evict="lru")

    assert ours.shards[0].rows["user"].max_rows == 100  # 96 a row, 12 of index, 8 of order
    assert rec.Table("x", dim=16, capacity="1KiB", max_rows=3).rows_within(100, 2) == 3
    with pytest.raises(ValueError, match="holds no row"):
        rec.Table("x", dim=4, capacity=0)


def test_a_delay_that_the_capacity_cannot_hold_is_refused_and_no_gradient_is_lost() -> None:
    ours = bag(delay=2, max_rows=20, evict="lru")
    trained(ours, torch.arange(6))

    with pytest.raises(CapacityError, match="of 7 distinct ids, with up to 3 steps under way"):
        ours(torch.arange(10, 17))
    ours.drop()
    ours(torch.arange(10, 14))
    with pytest.raises(CapacityError, match="of 8 distinct ids"):  # of one step, in two passes
        ours(torch.arange(12, 18))
    ours.drop()
    for start in range(0, 60, 6):
        trained(ours, torch.arange(start, start + 6))
    ours.drain()
    assert ours.stats()["evictions"] > 0
    assert ours.stats()["dropped_rows"] == 0


def test_a_table_gets_the_capacity_it_asks_for() -> None:
    def store(*tables: rec.Table, **options: Any) -> int:
        return rec.Embeddings(tables, **options).shards[0].store.capacity

    six, unlimited = rec.Table("a", dim=4, capacity="6GiB"), rec.Table("b", dim=4)
    assert store(six) >= 6 << 30
    assert store(six, shards=3) >= 2 << 30
    assert store(six, unlimited) >= 7 << 30
    assert store(rec.Table("c", dim=64, max_rows=10_000_000)) > 10_000_000 * 64 * 4
    assert store(unlimited) == 1 << 30
    assert store(six, capacity="8GiB") == 8 << 30  # as it was said
    with pytest.raises(ValueError, match=r"'a': 64\d+\} bytes on each of 1 shards.* of 1073741824"):
        store(six, capacity="1GiB")
    two = [rec.Table(name, dim=4, capacity="6GiB") for name in "ab"]
    with pytest.raises(ValueError, match="raise that, leave it out, or lower theirs"):
        store(*two, capacity="8GiB")


@pytest.mark.parametrize("optimizer", [rec.Sgd(lr=0.1), rec.Adam(lr=0.1)])
def test_a_table_s_capacity_can_be_used_to_the_last_row(optimizer: Any) -> None:
    table = rec.Table("user", dim=8, optimizer=optimizer, capacity="24MiB")
    ours = rec.EmbeddingBag(table)
    most = ours.shards[0].rows["user"].max_rows

    for start in range(0, most, 20_000):
        trained(ours, torch.arange(start, min(most, start + 20_000)))
    assert ours.stats()["rows"] == most > 100_000
    with pytest.raises(StoreFullError, match=f"`max_rows`={most}"):
        ours(torch.arange(most, most + 5))


# --- whole tables ---------------------------------------------------------------------------------


def admitting(**options: Any) -> rec.EmbeddingBag:
    return bag(
        optimizer=rec.Adam(lr=0.05),
        dim=8,
        prune=rec.ChunkPrune(chunk=4, ratio=0.2, warmup=10, every=10),
        admit=rec.MinCount(2),
        **options,
    )


def same_future(a: rec.EmbeddingBag, b: rec.EmbeddingBag) -> bool:
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        ids = torch.randint(0, 80, (10,), generator=generator)
        trained(a, ids)
        trained(b, ids)
    a.eval(), b.eval()
    return torch.equal(a(torch.arange(80)), b(torch.arange(80)))


def history(embedding: rec.EmbeddingBag) -> rec.EmbeddingBag:
    generator = torch.Generator().manual_seed(1)
    for _ in range(9):  # before the first prune: shards prune their own part
        trained(embedding, torch.randint(0, 80, (10,), generator=generator))
    return embedding


def test_saved_rows_loaded_into_other_shards_go_on_to_the_bit(tmp_path: Path) -> None:
    ours = history(bag(optimizer=rec.Adam(lr=0.05), admit=rec.MinCount(2)))
    ours.save(tmp_path)
    other = bag(optimizer=rec.Adam(lr=0.05), admit=rec.MinCount(2))

    assert other.load(tmp_path, shards=3) == ours.stats()["rows"]
    assert len(other.shards) == 3
    assert same_future(ours, other)


def test_the_order_of_use_over_all_shards_survives_another_number_of_them(tmp_path: Path) -> None:
    """Ranks within a shard cannot tell which of two shards' rows was used first: steps can."""
    ours = bag(evict="lru", max_rows=100, shards=3)
    used = [40, 7, 93, 12, 65, 3, 88, 21, 54, 39, 76, 17]
    for id_ in used:
        trained(ours, torch.tensor([id_]))
    one = bag(evict="lru", max_rows=100)
    for folder, model in ((tmp_path / "first", ours), (tmp_path / "then", one)):
        model.save(folder)
        one.load(folder, shards=1)
        trained(one, torch.tensor([7 if model is ours else 93]))  # steps of a new life go on

    order = one.shards[0].rows["user"].rows.order()[0].tolist()
    assert order == [40, *used[3:], 7, 93]


def test_mutant_a_checkpoint_without_sightings_does_not_go_on_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = history(bag(optimizer=rec.Adam(lr=0.05), admit=rec.MinCount(3)))
    ours.save(tmp_path)
    other = bag(optimizer=rec.Adam(lr=0.05), admit=rec.MinCount(3))
    other.load(tmp_path)
    counters = other.shards[0].rows["user"].admission
    assert counters is not None
    counters.counters.remove(np.arange(80, dtype=np.int64))
    assert not same_future(ours, other)


def test_a_state_dict_is_the_whole_model_pruned_rows_and_all() -> None:
    ours = history(admitting())
    trained(ours, torch.arange(20), steps=5)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    other = admitting()

    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert same_future(ours, other)


def test_a_capped_table_loads_what_memory_does_not_hold(tmp_path: Path) -> None:
    whole = bag(optimizer=rec.Adam(lr=0.05))
    trained(whole, torch.arange(200), steps=3)
    whole.save(tmp_path / "saved")
    capped = bag(optimizer=rec.Adam(lr=0.05), max_rows=20, spill=str(tmp_path / "disk"))

    assert capped.load(tmp_path / "saved") == 200
    assert capped.stats()["spilled_rows"] == 180
    whole.eval(), capped.eval()
    assert torch.equal(whole(torch.arange(200)), capped(torch.arange(200)))
    assert capped.stats()["recalled"] == 0  # evaluation reads the disk, and moves nothing
    capped.save(tmp_path / "again")
    assert bag(optimizer=rec.Adam(lr=0.05)).load(tmp_path / "again") == 200


@pytest.mark.quick(1)
@pytest.mark.parametrize("spill", [False, True])
def test_a_checkpoint_that_is_refused_leaves_the_rows_as_they_were(
    tmp_path: Path, spill: bool
) -> None:
    limits: dict[str, Any] = {"max_rows": 20, "spill": str(tmp_path / "disk")} if spill else {}
    ours = bag(optimizer=rec.Adam(lr=0.05), shards=2, delay=1, **limits)
    same = bag(optimizer=rec.Adam(lr=0.05), shards=2, delay=1)
    for start in (0, 20, 40, 10):
        for module in (ours, same):
            trained(module, torch.arange(start, start + 20))
    bag(optimizer=rec.Adam(lr=0.05), dim=8).save(tmp_path / "other")
    damaged = bag(optimizer=rec.Adam(lr=0.05), shards=2)
    trained(damaged, torch.arange(200), steps=3)
    damaged.save(tmp_path / "damaged")
    file = next((tmp_path / "damaged").glob("shard-00001*"))
    file.write_bytes(file.read_bytes()[:-1])

    for name, why in (("none", "is no checkpoint"), ("other", "dim 8"), ("damaged", "truncated")):
        with pytest.raises(ShardFileError, match=why):
            ours.load(tmp_path / name, shards=3)
    with pytest.raises(ShardFileError, match="dim 8"):
        ours.load_state_dict(bag(optimizer=rec.Adam(lr=0.05), dim=8).state_dict())
    assert len(ours.shards) == 2
    for module in (ours, same):
        trained(module, torch.arange(55, 75))  # what is held back is still there, too
        module.eval()
    assert torch.equal(ours(torch.arange(100)), same(torch.arange(100)))
    same.save(tmp_path / "whole")
    assert ours.load(tmp_path / "whole") == ours.load(tmp_path / "whole", shards=1) == 75
    assert torch.equal(ours(torch.arange(100)), same(torch.arange(100)))
    if spill:  # the folders of the shards that are no more are empty
        left = sorted(path.parent.name for path in (tmp_path / "disk").glob("*/data.mdb"))
        assert left in (["user-00000"], ["user-00000-b"])


def test_no_shards_at_all_are_refused(tmp_path: Path) -> None:
    """They were taken, and every row read from then on was whatever lay in memory."""
    ours = bag()
    ours(torch.tensor([1, 2, 3]))
    ours.save(tmp_path)
    with pytest.raises(ValueError, match="shards is 0; rows need at least 1"):
        ours.load(tmp_path, shards=0)

    assert len(ours.shards) == 1
    assert ours.load(tmp_path, shards=2) == 3


def test_a_checkpoint_that_finds_no_room_leaves_the_rows_as_they_were(tmp_path: Path) -> None:
    large = bag()
    trained(large, torch.arange(1000))
    large.save(tmp_path)
    ours = rec.EmbeddingBag(
        rec.Table("user", dim=4, optimizer=rec.Sgd(lr=0.1)),
        **{**STORE, "capacity": "16KiB", "slab": "4KiB", "core": "twin"},
    )
    trained(ours, torch.arange(10))
    ours.eval()
    before = ours(torch.arange(20))

    with pytest.raises(StoreFullError):
        ours.load(tmp_path)
    assert torch.equal(ours(torch.arange(20)), before)


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_gives_auc_and_leaves_the_model_training() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = bag()

        def forward(self, batch: Any) -> Tensor:
            assert not self.tables.training
            return batch["score"] + self.tables(batch["user"]).sum(1)

    model = Scores()
    batches = [
        {"user": torch.tensor([1, 2]), "score": torch.tensor(score), "label": torch.tensor(label)}
        for score, label in (([2.0, -1.0], [1.0, 0.0]), ([1.0, 0.0], [0.0, 1.0]))
    ]

    found = rec.evaluate(model, batches)
    assert (found.auc, found.num_samples) == (0.75, 4)
    assert model.training
    assert model.tables.training
    assert model.tables.stats()["rows"] == 0
    with pytest.raises(ValueError, match="no batches"):
        rec.evaluate(model, [])
    with pytest.raises(ValueError, match="neither `labels` nor"):
        rec.evaluate(lambda batch: batch["score"], [{"score": torch.zeros(2)}])


# --- pruning --------------------------------------------------------------------------------------


def alive_of(ours: rec.EmbeddingBag, ids: Any) -> float:
    bits = ours.shards[0].store["user"].alive(np.asarray(ids, np.int64))
    return float(np.unpackbits(bits).sum()) / (4 * len(bits))


def switched(
    monkeypatch: pytest.MonkeyPatch, *, static: bool = False, **options: float
) -> tuple[float, float, float]:
    """Ids 0-63 are used until most of 64-127 is pruned, then only 64-127: who is alive?

    There are bytes for 0.84 of their chunks.
    """
    rule = rec.ChunkPrune(chunk=8, ratio=0.34, warmup=20, every=20, decay=0.5, **options)
    ours = bag(dim=32, optimizer=rec.RowAdagrad(lr=0.1), prune=rule)
    first, second = torch.arange(64), torch.arange(64, 128)
    trained(ours, torch.arange(128))
    trained(ours, first, steps=59)
    before = alive_of(ours, second)
    if static:
        monkeypatch.setattr("stages.embedding.chunk_prune.prune", lambda *_: None)
    # Pruned chunks read as zeros and have a gradient all the same: a loss that is not at its end.
    for _ in range(40):
        ((ours(second) - 1) ** 2).sum().backward()
        ours.step()
    return before, alive_of(ours, second), alive_of(ours, first)


@pytest.mark.parametrize("options", [{}, {"taper": 0.0}, {"taper": 3.0}])
def test_when_other_ids_become_hot_their_chunks_are_back_within_two_prunes(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    before, hot, cold = switched(monkeypatch, **options)

    assert before < 0.3
    assert hot > 0.8
    assert cold < 0.1


def test_mutant_an_advance_that_never_ends_leaves_last_chunks_of_hot_ids_to_cold_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stages.embedding.row_taper.HALF", 1e-9)
    _, hot, cold = switched(monkeypatch, taper=3.0)

    assert hot < 0.8
    assert cold < 0.2


def test_mutant_a_mask_that_was_chosen_once_keeps_hot_ids_pruned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, hot, _ = switched(monkeypatch, static=True)

    assert hot == before < 0.3


def test_a_copy_is_a_model_of_its_own_with_the_same_future() -> None:
    ours = history(admitting(delay=2, shards=2))
    ours.marks = [1]  # type: ignore[assignment]
    (ours(torch.arange(3)) ** 2).sum()  # a pass under way stays with the one that made it
    other = copy.deepcopy(ours)

    assert other.marks == [1]
    assert other.marks is not ours.marks
    ours.drop()
    before = ours.stats()
    trained(other, torch.arange(5))
    assert ours.stats() == before  # the copy's steps are its own
    again = copy.deepcopy(ours)
    assert again.stats()["staleness_histogram"] == before["staleness_histogram"]
    assert same_future(ours, again)


def test_a_copy_of_what_is_replicated_is_trained_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = rec.Embeddings(
                [
                    rec.Table("a", dim=2),
                    rec.Table("b", dim=2, placement="replicated", num_ids=3),
                ],
                **STORE,
            )

    ours = Model()
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for part in other.parameters():
            part += 1

    (mine,), (theirs,) = ours.parameters(), other.parameters()
    assert torch.equal(mine + 1, theirs)


def test_a_model_whose_rows_are_on_disk_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="with a spill folder cannot be copied"):
        copy.deepcopy(bag(max_rows=20, spill=str(tmp_path)))


def test_a_model_with_embeddings_can_be_moved_like_any_other() -> None:
    ours = rec.Embeddings(
        [rec.Table("a", dim=2), rec.Table("b", dim=2, placement="replicated", num_ids=3)], **STORE
    )
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2])}

    ours.to(torch.float64)
    assert ours(batch)["b"].dtype == torch.float64
    assert ours(batch)["a"].dtype == torch.float32  # rows are what the store keeps


@pytest.mark.slow
def test_rows_that_were_replaced_give_their_memory_back_at_once(tmp_path: Path) -> None:
    ours = bag(spill=str(tmp_path / "below"), max_rows=20)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            ours(torch.arange(20)).sum().backward()
            ours.step()
            ours.save(tmp_path / "saved")
            old = weakref.ref(ours.shards[0].store)
            ours.load(tmp_path / "saved")

            assert old() is None
    finally:
        gc.enable()
