"""The order of use of the native row store, against Python's own ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from stages.embedding.row_store import RowStore
from stages.embedding.row_table import RowTable

MAX_ROWS = 3000


def lru_table() -> RowTable:
    store = RowStore(capacity="64MiB", slab="64KiB", pages="4k", core="native")
    return store.table("user", dim=2, evict="lru", max_rows=MAX_ROWS)


@pytest.mark.slow
def test_a_million_uses_evict_in_exactly_the_order_of_an_ordered_dictionary() -> None:
    rows = lru_table()
    model: OrderedDict[int, int] = OrderedDict()  # key -> the step of its last use
    generator = np.random.default_rng(12)
    used = evicted = 0
    for step in range(1, 1_000_000 // 64 + 1):
        long_tail = generator.zipf(1.2, 64) % 20_000
        ids = np.array(list(dict.fromkeys(long_tail.tolist())), np.int64)
        generator.shuffle(ids)
        rows.lookup(ids, step=step)
        used += 64
        keys = ids.tolist()
        new = [key for key in keys if key not in model]
        for key in [key for key in keys if key in model] + new:
            model[key] = step
            model.move_to_end(key)
        while len(model) > MAX_ROWS:
            model.popitem(last=False)
            evicted += 1
        if step % 97 == 0:
            gone = generator.choice(list(model), 40).tolist()
            rows.remove(np.array(gone, np.int64))
            for key in gone:
                model.pop(key, None)
        if step % 1013 == 0:
            assert rows.evict(25) == 25
            for _ in range(25):
                model.popitem(last=False)
        if step % 500 == 0:
            order, touched = rows.order()
            assert order.tolist() == list(model)
            assert (touched >> np.uint64(24)).tolist() == list(model.values())

    assert used >= 999_000
    assert evicted == rows.evicted > 100_000
    order, _ = rows.order()
    assert order.tolist() == list(model)


def test_what_order_tells_rises_and_says_which_step_and_which_place() -> None:
    rows = lru_table()
    rows.lookup(np.array([7, 8, 9], np.int64), step=3)
    rows.lookup(np.array([8, 1], np.int64), step=5)

    keys, touched = rows.order()

    assert keys.tolist() == [7, 9, 8, 1]
    assert touched.tolist() == [3 << 24, (3 << 24) + 1, 5 << 24, (5 << 24) + 1]
