"""Native and twin through the same random life: every answer and every row the same, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from properties import examples

from stages.embedding.row_answers import Snapshot
from stages.embedding.row_errors import RowStoreError
from stages.embedding.row_rules import RowAdagrad, Uniform
from stages.embedding.row_store import RowStore, RowTable

DIM, CHUNKS, MAX_ROWS = 8, 4, 24
keys_of = st.lists(st.integers(-3, 40), min_size=1, max_size=12).map(
    lambda keys: np.array(keys, np.int64)
)
rates = st.sampled_from([0.1, 1.0, 1e-3])


def table(core: str, evict: str | None, max_rows: int) -> tuple[RowStore, RowTable]:
    store = RowStore(capacity="4MiB", slab="16KiB", pages="4k", core=core)
    options: dict[str, Any] = {"optimizer": RowAdagrad(lr=0.1), "init": Uniform(0.1)}
    rows = store.table(
        "t", dim=DIM, chunks=CHUNKS, evict=evict, max_rows=max_rows, seed=3, **options
    )
    return store, rows


def bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


class Lives(RuleBasedStateMachine):
    """The two cores under one sequence of calls."""

    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [table(core, "lru", MAX_ROWS) for core in ("native", "twin")]

    def alike(self, call: Any) -> Any:
        """Both give the same, or both refuse with the same words."""
        results = []
        for store, rows in self.pairs:
            try:
                answer = call(store, rows)
                results.append([bits(part) for part in answer])
            except RowStoreError as error:
                results.append([type(error).__name__, str(error)])
        assert results[0] == results[1]
        return results[0]

    @rule(keys=keys_of)
    def look_up(self, keys: Any) -> None:
        self.alike(lambda _, rows: rows.lookup(keys))

    @rule(keys=keys_of)
    def evaluate(self, keys: Any) -> None:
        self.alike(lambda _, rows: rows.lookup(keys, train=False))

    @rule(keys=keys_of, lr=rates, seed=st.integers(0, 99))
    def apply(self, keys: Any, lr: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        gradients = random.standard_normal((len(keys), DIM)).astype(np.float32)
        counts = random.integers(1, 9, len(keys)).astype(np.float32)
        self.alike(lambda _, rows: rows.apply(keys, gradients, lr=lr, counts=counts))

    @rule(
        name=st.sampled_from(["get", "add", "put", "evict", "delta_step", "optimize", "prune"]),
        keys=keys_of,
        seed=st.integers(0, 99),
        interleave=st.booleans(),
    )
    def run(self, name: str, keys: Any, seed: int, interleave: bool) -> None:
        # One transaction, or its keys one by one: which of several commits first is not defined.
        random = np.random.default_rng(seed)
        distinct = np.unique(keys)
        payload = random.standard_normal((len(distinct), DIM)).astype(np.float32)
        one_by_one = bool(seed % 2)
        last = len(distinct)
        offsets = np.arange(last + 1) if one_by_one else np.array([0, last])
        modes = random.integers(0, 16, last).astype(np.uint8) if name == "prune" else None

        def call(_: RowStore, rows: RowTable) -> Any:
            given = (name, offsets, distinct, payload)
            result = rows.run(*given, modes=modes, interleave=interleave, batch=4)
            return result.statuses, result.out, result.seen

        self.alike(call)

    @rule(keep=st.floats(0.1, 1.0))
    def prune(self, keep: float) -> None:
        self.alike(lambda _, rows: rows.prune(keep=keep))

    @rule()
    def compact(self) -> None:
        for store, _ in self.pairs:
            store.compact()

    @rule(keys=keys_of)
    def remove(self, keys: Any) -> None:
        self.alike(lambda _, rows: [rows.remove(keys)])

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        self.alike(lambda _, rows: [rows.evict(count)])

    @rule(target=snapshots)
    def take_snapshot(self) -> list[Snapshot]:
        return [store.snapshot() for store, _ in self.pairs]

    @rule(pair=snapshots, keys=keys_of, group=st.sampled_from([1, 2, 32]))
    def read_snapshot(self, pair: list[Snapshot], keys: Any, group: int) -> None:
        both = iter(pair)
        self.alike(lambda _, rows: rows.multi_get(keys, snapshot=next(both), group=group))

    @rule(pair=consumes(snapshots))
    def close_snapshot(self, pair: list[Snapshot]) -> None:
        for snapshot in pair:
            snapshot.close()

    @invariant()
    def every_row_is_the_same(self) -> None:
        def everything(_: RowStore, rows: RowTable) -> Any:
            parts = list(rows.scan(limit=5))
            return [x for part in parts for x in (part.keys, part.raw)]

        self.alike(everything)
        self.alike(
            lambda _, rows: [rows.stats()[name] for name in ("rows", "alive_chunks", "epoch")]
        )


Lives.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase
