"""The row store where it is crowded: keys of one home, rows that come and go a million times."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from stages.embedding.row_rules import RowAdagrad, Uniform
from stages.embedding.row_store import RowStore, RowTable
from stages.embedding.row_twin_rows import GOLDEN, mix, name_hash

MASK = (1 << 64) - 1


def unmixed(x: int) -> int:
    """The key whose hash this is: the finaliser of SplitMix64, backwards."""
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return x ^ x >> 30 ^ x >> 60


def key_of_hash(wanted: int, *, name: str, seed: int) -> int:
    salt = mix((seed * GOLDEN + name_hash(name)) & MASK)
    key = (unmixed(wanted) - salt) & MASK
    return key - (1 << 64) if key >> 63 else key


def small(name: str = "t", **options: object) -> tuple[RowStore, RowTable]:
    store = RowStore(capacity="32MiB", slab="64KiB", pages="4k", core="native")
    settings = {"dim": 2, "init": Uniform(0.5), "seed": 5} | options
    return store, store.table(name, **settings)  # type: ignore[arg-type]


def test_keys_that_all_want_the_same_bucket_lose_nobody() -> None:
    """Clusters at a load near growth, each of 200 keys with one home; a third is deleted again."""
    _, rows = small(expected_rows=20_000)
    random = np.random.default_rng(0)
    homes = random.integers(0, 1 << 63, 60, dtype=np.uint64).tolist()
    keys = np.array(
        [
            key_of_hash((home >> 20 << 20 | number * 2053) & MASK, name="t", seed=5)
            for home in homes
            for number in range(200)
        ],
        np.int64,
    )
    assert len(np.unique(keys)) == 12_000
    first, _ = rows.lookup(keys)

    again, found = rows.multi_get(keys)
    assert found.all()
    assert (again == first).all()
    rows.remove(np.ascontiguousarray(keys[::3]))
    for group in (1, 32):
        left, found = rows.multi_get(keys, group=group)
        assert (found == (np.arange(12_000) % 3 != 0)).all()
        assert (left[found == 1] == first[found == 1]).all()
        assert not left[found == 0].any()


def test_the_hash_that_this_test_turns_back_is_the_store_s() -> None:
    """Or the clusters above would be no clusters: they make reads look further than others do."""
    key = key_of_hash(0x0123456789ABCDEF, name="t", seed=5)
    salt = mix((5 * GOLDEN + name_hash("t")) & MASK)

    assert mix((key + salt) & MASK) == 0x0123456789ABCDEF


def test_short_and_odd_calls_read_what_long_ones_read() -> None:
    """Ends of the pipeline of reads: fewer keys than are under way, and any number beyond."""
    _, rows = small(expected_rows=500)
    keys = np.arange(400, dtype=np.int64)
    whole, _ = rows.lookup(keys[:300])

    for num in (0, 1, 2, 9, 10, 11, 29, 30, 31, 63, 64, 65, 400):
        for group in (2, 7, 32, 64, 1000):
            out, found = rows.multi_get(keys[:num], group=group)
            assert found.sum() == min(num, 300)
            assert (out[:300] == whole[:num]).all()
            assert not out[300:].any()


@pytest.mark.slow
def test_a_million_operations_neither_leak_nor_share_a_cell() -> None:
    """Inserts, evictions, prunes and steps: chunks are counted right, bytes stay flat."""
    store, rows = small(
        dim=8, chunks=4, optimizer=RowAdagrad(lr=0.1), max_rows=4000, evict="lru", decay=0.9
    )
    random = np.random.default_rng(1)
    model: OrderedDict[int, None] = OrderedDict()
    done, most = 0, []
    while done < 1_000_000:
        keys = np.unique((random.zipf(1.3, 1500) % 20_000).astype(np.int64))
        rows.lookup(keys)
        for key in keys.tolist():
            if key in model:
                model.move_to_end(key)
        for key in keys.tolist():
            if key not in model:
                if len(model) == 4000:
                    model.popitem(last=False)
                model[key] = None
        gradients = random.standard_normal((len(keys), 8)).astype(np.float32)
        rows.apply(keys, gradients, counts=np.ones(len(keys), np.float32))
        done += 2 * len(keys)
        if len(most) % 25 == 24:
            rows.prune(keep=float(random.uniform(0.3, 0.9)))
            done += 4 * rows.stats()["rows"]
            present = {int(key) for part in rows.scan() for key in part.keys}
            for key in [key for key in model if key not in present]:
                del model[key]  # rows without a chunk and without use were dropped
            store.compact()
        most.append(store.stats()["used_bytes"])
    parts = list(rows.scan())
    keys = np.concatenate([part.keys for part in parts])
    alive = sum(int(np.unpackbits(part.alive).sum()) for part in parts)

    assert len(np.unique(keys)) == len(keys) == rows.stats()["rows"]
    assert alive == rows.stats()["alive_chunks"]
    assert set(keys.tolist()) == set(model)  # exact order of use, or these would differ
    half = len(most) // 2
    assert max(most[half:]) <= 1.1 * max(most[:half])
