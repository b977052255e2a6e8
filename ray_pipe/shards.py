"""The embedding shards of a run, from the driver's side: start, count, watch, replace.

Path: ray_pipe.ctr_run -> ray_pipe.shards -> stages.embedding.shard_actor

A shard that dies takes its rows along. A thread watches all of them (`shard_pulse`); a new process
takes the place of one that is dead or does not answer, with the rows of the last checkpoint if
there is one, and stage 0 asks it what the old one did not answer. Gradients of steps that the old
one had served are lost, and counted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_pipe.cluster import START_TIMEOUT_S
from ray_pipe.errors import ClusterError, TrainingError
from ray_pipe.failures import cause_of, is_death
from ray_pipe.ledger import Sent
from ray_pipe.planner.placement import Node
from ray_pipe.recovery import Failure
from ray_pipe.same_source import refuse_other_source
from ray_pipe.shard_pulse import Lost, Pulse
from ray_pipe.shard_totals import ShardTotals
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.shard_actor import ShardPlace, remote_shard

_log = logging.getLogger("ray_pipe")

WATCH_S = 0.5
_WORDS = {"died": "died", "hung": "did not answer"}
SETTLE_S = 120.0
FILL_S = 600.0
CHECK_S = 60.0
"""Until every shard has given a sign of life, or was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailure(Failure):
    """A shard died, and another process has taken its place."""

    def __str__(self) -> str:
        return f"{self.cause}; training goes on after {self.recovery_s or 0.0:.1f} s"


class Shards:
    """The actors that hold embedding rows. Leaving the block ends them."""

    def __init__(
        self,
        num_shards: int,
        *,
        label: str,
        nodes: Sequence[Node],
        num_stages: int,
        max_failures: int = 3,
    ) -> None:
        """Shards go round the nodes, after the stages. After `max_failures` deaths none is replaced
        any more; -1: no limit."""
        self._max_failures = max_failures
        self._label = f"{label}-{uuid.uuid4().hex[:4]}"
        self._num_stages = num_stages
        self._homes = [nodes[(num_stages + index) % len(nodes)] for index in range(num_shards)]
        self._num_started = 0
        self.handles: list[Any] = [self._start(index) for index in range(num_shards)]
        self.failures: list[Failure] = []
        self.on_replaced: Callable[[int, Failure], None] = lambda shard, failure: None
        """Told of a new process: stage 0 must learn of it."""

        self.rows_from: Callable[[Any], Sequence[Any]] = lambda shard: ()
        """What a new process begins with: the shards of the last checkpoint, as bytes or paths."""

        self.on_warning: Callable[[str], None] = _log.warning
        """Told what went wrong in a shard beside its answers."""

        self._num_told: dict[int, int] = {}
        self._spec: EmbeddingSpec | None = None
        self._places: list[ShardPlace] = []
        self._infos: list[Any] = []
        self._filled: dict[int, int] = {}
        self._touch_base: int | None = 0
        self._with_counts = False
        """Whether shard 0 took over counters of a checkpoint that no book of it has told yet."""

        self._pulse = Pulse()
        self._changed = threading.Condition()
        self._books: list[dict[str, Any]] = []
        self._gone: list[dict[str, Any]] = []
        self._counted: Sent = {}
        self._asked: dict[Any, int] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._watch = threading.Thread(target=self._watch_all, name="shards", daemon=True)
        self._watch.start()
        self.step = 0
        """For the words about a failure."""

        self.arm = ""

    def _start(self, index: int) -> Any:
        self._num_started += 1
        again = f"-again-{self._num_started}" if self._num_started > len(self._homes) else ""
        home = NodeAffinitySchedulingStrategy(self._homes[index].id, soft=True)
        name = f"ray_pipe/{self._label}/shard-{index}{again}"
        return remote_shard(index, name=name, strategy=home)

    def nodes_of_topology(self) -> dict[int, Any]:
        """The actors by their node behind the stages."""
        return {self._num_stages + index: handle for index, handle in enumerate(self.handles)}

    def set_up(self, spec: EmbeddingSpec, *, topology: Any, generation: int) -> list[Any]:
        """Empty shards for an arm."""
        with self._lock:
            self._spec, self._counted, self._gone = spec, {}, []
            self._touch_base = 0
            self.rows_from = lambda shard: ()  # not those of the arm before
            self._places = [
                ShardPlace(
                    index=index,
                    num_stages=self._num_stages,
                    topology=topology,
                    generation=generation,
                )
                for index in range(spec.num_shards)
            ]
            self._books = [{} for _ in self.handles]
            self._asked, self._with_counts = {}, False
            calls = [
                handle.setup.remote(spec, place)
                for handle, place in zip(self.handles, self._places, strict=True)
            ]
            try:
                infos: list[Any] = ray.get(calls, timeout=START_TIMEOUT_S)
            except RayError as error:
                raise ClusterError(f"the embedding shards did not start: {error}") from error
            refuse_other_source(infos)
            self._infos = list(infos)
            return infos

    def fill(self, files: Sequence[Any], *, with_counts: bool = True) -> int:
        """Give every shard its rows of a checkpoint: its files as bytes, or as paths.

        `with_counts`: of this very run. A shard that dies meanwhile is replaced, and its successor
        begins with the same files.
        """
        refs = [file if isinstance(file, str) else ray.put(file) for file in files]
        with self._lock:
            self.rows_from = lambda shard: refs
            self._filled, self._with_counts = {}, with_counts
            self._touch_base = None  # all shards find it in the files, a new one too
            handles = list(self.handles)
            calls = [
                handle.fill_from.remote(len(handles), with_counts, None, *refs)
                for handle in handles
            ]
        total, base = 0, 0
        for index, call in enumerate(calls):
            try:
                num_rows, base = ray.get(call, timeout=FILL_S)
                total += num_rows
            except RayError as error:
                if not is_death(error) or not self._await_new(index, handles[index]):
                    self.raise_error()
                    raise TrainingError(
                        f"the shards could not be filled: {cause_of(error)}"
                    ) from error
                total += self._filled[index]
        self._touch_base = base or self._touch_base
        return total

    # --- counting ---------------------------------------------------------------------------------

    def look(self) -> Sent:
        """Bytes that shards sent since the last look, as far as they are known; never waits."""
        self.raise_error()
        with self._lock:
            ready = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0]
            for ref in ready if self._asked else ():
                self._note(self._asked.pop(ref), ref)
            for index, handle in enumerate(self.handles):
                if index not in self._asked.values():
                    self._asked[handle.books.remote()] = index
            return self._fresh()

    def settle(self) -> Sent:
        """The same, after waiting for every shard."""
        until_s = time.monotonic() + SETTLE_S
        for index in range(len(self.handles)):
            while time.monotonic() < until_s and not self._settled(index):
                self.raise_error()
        with self._lock:
            return self._fresh()

    def _settled(self, index: int) -> bool:
        """Without the lock while it waits: the watch needs it to replace who does not answer."""
        with self._lock:
            handle = self.handles[index]
            self._asked = {ref: who for ref, who in self._asked.items() if who != index}
        try:
            books = ray.get(handle.books.remote(), timeout=SETTLE_S)
        except RayError as error:
            return not is_death(error) or not self._await_new(index, handle)
        with self._lock:
            if self.handles[index] is handle:
                self._heed(index, books)
        return True

    def _heed(self, index: int, books: dict[str, Any]) -> None:
        self._books[index] = books
        troubles = books.get("troubles", [])
        for text in troubles[self._num_told.get(index, 0) :]:
            self.on_warning(f"embedding shard {index}, step {self.step}: {text}")
        self._num_told[index] = len(troubles)

    def _await_new(self, index: int, old: Any) -> bool:
        """Whether the watch has put a new process in the place of one that died."""
        with self._changed:
            return (
                self._changed.wait_for(
                    lambda: self.handles[index] is not old or self._error is not None,
                    timeout=CHECK_S + START_TIMEOUT_S,
                )
                and self._error is None
            )

    def totals(self) -> ShardTotals:
        """As of the last look."""
        with self._lock:
            return ShardTotals.of(self._books, self._gone)

    def _note(self, index: int, ref: Any) -> None:
        with contextlib.suppress(RayError):  # the watch sees to it
            self._heed(index, ray.get(ref, timeout=SETTLE_S))

    def _fresh(self) -> Sent:
        sent: Sent = {}
        for books in (*self._gone, *self._books):
            for link, kinds in books.get("sent", {}).items():
                into = sent.setdefault(link, {})
                for kind, nbytes in kinds.items():
                    into[kind] = into.get(kind, 0) + nbytes
        fresh = {
            link: {
                kind: more
                for kind, nbytes in kinds.items()
                if (more := nbytes - self._counted.get(link, {}).get(kind, 0))
            }
            for link, kinds in sent.items()
        }
        self._counted = sent
        return {link: kinds for link, kinds in fresh.items() if kinds}

    # --- watching ---------------------------------------------------------------------------------

    def raise_error(self) -> None:
        """Raise what the watch could not mend."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Return when every shard has given a sign of life, or was replaced; raise what could not
        be mended. For whoever waits in vain and wonders whether a shard is the cause."""
        now = time.monotonic()

        def all_heard() -> bool:
            heard = self._pulse.heard_s
            return self._error is not None or all(
                heard.get(index, 0.0) >= now for index in range(len(self.handles))
            )

        with self._changed:
            self._changed.wait_for(all_heard, timeout=CHECK_S)
        self.raise_error()

    def _watch_all(self) -> None:
        while not self._stop.wait(WATCH_S):
            lost = self._pulse.beat(list(self.handles), list(self._infos), wait_s=WATCH_S)
            for index, one in lost.items():
                if self._stop.is_set() or not self._places:
                    return
                try:
                    self._replace(index, one)
                except Exception as trouble:
                    self._error = TrainingError(
                        f"embedding shard {index} {_WORDS[one.kind]} and could not be replaced: "
                        f"{trouble}"
                    )
            with self._changed:
                self._changed.notify_all()
            if self._error is not None:
                return

    def _replace(self, index: int, lost: Lost) -> None:
        start = time.monotonic()
        if 0 <= self._max_failures <= len(self.failures):
            raise TrainingError(
                f"{len(self.failures)} shards have died before it, and --max-failures is "
                f"{self._max_failures}; if memory is short, lower --capacity or add nodes"
            )
        with self._lock:
            assert self._spec is not None
            self._pulse.end(index, self.handles, self._infos)
            old = self._places[index]
            place = ShardPlace(
                index=index,
                num_stages=old.num_stages,
                topology=old.topology,
                generation=old.generation,
                life=old.life + 1,
            )
            self._places[index] = place
            handle = self._start(index)
            saved = self.rows_from(handle)
            info = ray.get(handle.setup.remote(self._spec, place), timeout=START_TIMEOUT_S)
            num_rows = 0
            if saved:
                call = handle.fill_from.remote(
                    len(self.handles), self._is_uncounted(index), self._touch_base, *saved
                )
                num_rows, _ = ray.get(call, timeout=FILL_S)
            self.handles[index] = handle
            self._num_told.pop(index, None)
            self._infos[index], self._filled[index] = info, num_rows
            self._pulse.born(index)
            self._gone.append(self._books[index])
            self._books[index] = {}
            self._asked = {ref: who for ref, who in self._asked.items() if who != index}
        rows = f"{num_rows:,} rows of the last checkpoint" if saved else "no rows"
        failure = ShardFailure(
            kind=lost.kind,
            stage=self._num_stages + index,
            step=self.step,
            arm=self.arm,
            cause=(
                f"embedding shard {index} {_WORDS[lost.kind]} after step {self.step} ({lost.why}); "
                f"its new process begins with {rows}, gradients that were under way to the old "
                "one are lost and counted"
            ),
            replaced=(self._num_stages + index,),
            resumed_from=self.step,
            source="checkpoint" if saved else "fresh",
            recovery_s=time.monotonic() - start,
        )
        self.failures.append(failure)
        self.on_replaced(index, failure)

    def _is_uncounted(self, index: int) -> bool:
        """What was counted is in the last books of the old process, and in the others'; unless it
        died before it told any."""
        self._with_counts &= index != 0 or not self._books[index]
        return self._with_counts

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._watch.join(timeout=5.0)
        for handle in self.handles:
            with contextlib.suppress(Exception):
                ray.kill(handle)
