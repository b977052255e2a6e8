"""Shards from the driver's side, with fake actors: filling, dying, settling; no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_pipe import shard_pulse, shards
from ray_pipe.errors import TrainingError
from ray_pipe.planner.placement import Node
from ray_pipe.shards import Shards

BOOKS = {
    "rows": 5, "real_bytes": 0, "resident_bytes": 0, "prunes": 0, "alive_chunks": {},
    "spilled_rows": 0, "staleness_histogram": {}, "dropped_rows": 0, "lost_pushes": 0,
    "unsent_pushes": 0,
    "refused_pushes": 0, "replayed": 1, "evictions": 0, "recalled": 0,
}  # fmt: skip


class Ref:
    """Its value may be an exception."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def remote(self, *args: Any) -> Ref:
        return Ref(self._answer(*args))


class FakeShard:
    """Dies at its first fill or look, if it is told to; its successor lives."""

    def __init__(self, index: int, dies_at: str) -> None:
        self.index, self.dies_at = index, dies_at
        self.is_dead = False
        self.bases: list[int | None] = []
        self.counted: list[bool] = []
        self.setup = Call(lambda spec, place: {"pid": 7, "node": "n", "source": "s"})
        self.ping = Call(lambda: self._alive("ping") or index)
        self.fill_from = Call(self._fill)
        self.books = Call(lambda: self._alive("books") or BOOKS)
        self.sees_stopped = self.end_process = Call(lambda info: False)

    def _alive(self, what: str) -> Any:
        self.is_dead = self.is_dead or what == self.dies_at
        return ActorDiedError() if self.is_dead else None

    def _fill(self, num_shards: int, with_counts: bool, touch_base: int | None, *files: Any) -> Any:
        self.counted.append(with_counts)
        self.bases.append(touch_base)
        return self._alive("fill") or (100 + self.index, 40 if touch_base is None else touch_base)


class FakeRay:
    @staticmethod
    def get(refs: Any, timeout: float) -> Any:
        many = refs if isinstance(refs, list) else [refs]
        for ref in many:
            if isinstance(ref.value, Exception):
                raise ref.value
        return [ref.value for ref in refs] if isinstance(refs, list) else refs.value

    @staticmethod
    def wait(refs: Any, *, num_returns: int, timeout: float) -> Any:
        return list(refs), []

    @staticmethod
    def put(value: Any) -> Any:
        return value

    @staticmethod
    def kill(handle: Any) -> None:
        handle.is_dead = True


@contextmanager
def running(dies_at: str, *, max_failures: int = 3) -> Iterator[tuple[Shards, list[FakeShard]]]:
    """Two shards; the second dies."""
    made: list[FakeShard] = []

    def start(index: int, **options: Any) -> FakeShard:
        made.append(FakeShard(index, dies_at if len(made) == 1 else ""))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "remote_shard", start)
        patch.setattr(shards, "refuse_other_source", lambda infos: None)
        patch.setattr(shards, "WATCH_S", 0.005)
        for module in (shards, shard_pulse):
            patch.setattr(module, "ray", FakeRay)
        nodes = [Node(id="aa" * 28, ip="here")]
        with Shards(2, label="t", nodes=nodes, num_stages=2, max_failures=max_failures) as found:
            spec: Any = type("Spec", (), {"num_shards": 2})()
            found.set_up(spec, topology=None, generation=0)
            yield found, made


def test_what_went_wrong_in_a_shard_is_told_once() -> None:
    with running("") as (found, made):
        told: list[str] = []
        found.on_warning = told.append
        made[0].books = Call(lambda: BOOKS | {"troubles": ["OSError('no room')"]})
        for _ in range(3):
            found.look()
            found.settle()

        assert told == ["embedding shard 0, step 0: OSError('no room')"]


def test_a_shard_that_dies_before_the_second_arm_trains_has_no_rows_of_the_first() -> None:
    with running("") as (found, made):
        found.rows_from = lambda shard: [b"rows of the first arm"]
        spec: Any = type("Spec", (), {"num_shards": 2})()
        found.set_up(spec, topology=None, generation=1)
        found.handles[1].is_dead = True
        assert found._await_new(1, made[1])

        assert made[2].bases == []  # nobody filled it
        assert "begins with no rows" in str(found.failures[0])


def test_a_shard_that_dies_while_it_is_filled_is_filled_by_its_successor() -> None:
    with running("fill") as (found, made):
        assert found.fill([b"saved"]) == 100 + 101
        successor = made[2]

        assert [failure.kind for failure in found.failures] == ["died"]
        assert found.handles == [made[0], successor]
        assert made[0].bases == made[1].bases == successor.bases == [None]
        assert made[0].counted == made[1].counted == successor.counted == [True]
        assert found._touch_base == 40


@pytest.mark.parametrize(("filled", "base"), [(False, 0), (True, 40)])
def test_a_successor_counts_from_the_base_of_the_others(filled: bool, base: int) -> None:
    with running("books") as (found, made):
        if filled:
            found.fill([b"saved"])
        else:
            found.rows_from = lambda shard: [b"of this run"]
        found.settle()

        assert found.handles[1] is made[2]
        assert made[2].bases == [base]
        assert found.totals().rows == 10
        assert found.totals().replayed == 2


def test_too_many_deaths_end_the_run_with_their_number() -> None:
    with (
        running("fill", max_failures=0) as (found, _),
        pytest.raises(TrainingError, match="could not be replaced: 0 shards have died before it"),
    ):
        found.fill([b"saved"])
