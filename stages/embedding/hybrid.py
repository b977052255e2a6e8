"""The client of the embedding shards: Persia's hybrid of asynchronous rows and a synchronous net.

Path: ray_pipe.data -> stages.embedding.hybrid -> stages.embedding.routing

    ahead = hybrid.announce({"user": ids, ...})   ids leave at once, long before they are needed
    step = await hybrid.pull(ahead)               a permit first, then rows from every shard
    loss(step.rows["user"][step.index["user"]]).backward()
    hybrid.push_soon(step)                        the permit returns with the last acknowledgement

`rows` are leaf tensors of distinct rows: their gradients add up over duplicates and micro-batches
in autograd, as they would in one process, and are pushed once. With tau = 0 and an fp32 wire the
run is a single process's run to the bit. Every step goes to every shard, if only as an empty part:
so a version counts the same step everywhere, and Adam's bias correction too.

Every letter may be lost, and is then sent again; shards take it once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compressors.base import Packet
from compressors.frame import FrameHeader
from netsim.link import LinkLike
from stages.embedding import letters
from stages.embedding.asking import Asking, ShardRefused, ShardTimeout
from stages.embedding.auto_staleness import AutoStaleness
from stages.embedding.letters import Wire
from stages.embedding.permits import Permits
from stages.embedding.routing import Ahead, Router, Step
from stages.embedding.shard_terms import StalenessError
from stages.embedding.tables import Table, check_tables


@dataclass(slots=True, kw_only=True)
class ClientCounts:
    """What happened so far, as this client saw it."""

    pushed: int = 0
    voided: int = 0
    lost_pushes: int = 0
    """Parts of pushes that a restarted shard could not take."""

    lost_versions: int = 0
    """Versions that shards had acknowledged and came back without."""

    staleness: Counter[int] = field(default_factory=Counter)
    bound: int = 0
    """The largest bound of the steps that were pushed; whoever has told it sets it to 0."""


class Hybrid:
    """One dense worker's view of all shards. Belongs to the event loop."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        *,
        permits: Permits,
        links: Sequence[LinkLike],
        wire: Wire | None = None,
        client: int = 0,
        session: int = 0,
        deadline_s: float = 30.0,
        num_tries: int = 5,
        auto: AutoStaleness | None = None,
    ) -> None:
        """`auto` chooses the bound as it goes; shards then allow `auto.cap`."""
        check_tables(tables)
        self.tables = {table.name: table for table in tables if table.placement == "sharded"}
        self.permits = permits
        self.counts = ClientCounts()
        self._asking = Asking(
            links, client=client, session=session, deadline_s=deadline_s, num_tries=num_tries
        )
        self.on_frame = self._asking.on_frame
        self._router = Router(self.tables, num_shards=len(links), wire=wire or Wire())
        self._version = [0] * len(self._asking.links)
        self._pushes: set[asyncio.Task[None]] = set()
        self._announced: set[int] = (
            set()
        )  # tickets whose ids went ahead and that have no permit yet
        self._failure: BaseException | None = None
        self.auto = auto
        if auto is not None:
            permits.resize(auto.tau)

    # --- a step -----------------------------------------------------------------------------------

    def announce(self, ids: Mapping[str, Any]) -> Ahead:
        """Number a step and send its ids ahead. Any shape of int64; no permit is needed yet."""
        ahead = self._router.split(self.permits.next_ticket(), ids)
        for shard, part in enumerate(ahead.parts):
            self._asking.send(shard, ahead.ticket, "ids", letters.ids_packet(part))
        self._announced.add(ahead.ticket)
        return ahead

    async def forget(self, tickets: Iterable[int]) -> None:
        """Steps that will not be pulled: shards need not keep the ids that went ahead."""
        left = [ticket for ticket in tickets if ticket in self._announced]
        self._announced.difference_update(left)
        await asyncio.gather(*(self._void(ticket, counts=False) for ticket in left))

    async def pull(self, ahead: Ahead) -> Step:
        """Take a permit, then the rows. Raises what went wrong in an earlier `push_soon`."""
        self._raise_failure()
        await self.permits.acquire(ahead.ticket)
        return await self._fetch(ahead)

    async def _fetch(self, ahead: Ahead) -> Step:
        """The rows of a step that has its permit."""
        self._announced.discard(ahead.ticket)
        floor = list(self._version)
        asked_s = asyncio.get_running_loop().time()
        try:
            answers = await _all(
                self._asking.ask(shard, ahead.ticket, "pull", again=ahead.parts[shard])
                for shard in range(len(self._asking.links))
            )
            pulled = [letters.read_rows(packet, self.tables) for _, packet in answers]
            versions = [
                self._note_version(shard, header, floor[shard])
                for shard, (header, _) in enumerate(answers)
            ]
            rows = {name: self._router.join(name, ahead, pulled) for name in ahead.ids}
        except BaseException:
            await asyncio.shield(self._void(ahead.ticket))
            raise
        return Step(
            ahead=ahead,
            rows=rows,
            pulled=pulled,
            v_read=versions,
            pull_s=asyncio.get_running_loop().time() - asked_s,
        )

    async def push(self, step: Step) -> None:
        """Send the gradients and wait until every shard has settled them; the permit goes home.

        A gradient that is not finite is refused by table and id before anything is sent, and the
        step is void on every shard.
        """
        asked_s = step.ended_s or asyncio.get_running_loop().time()
        try:
            packets = [
                self._router.gradients(step, shard) for shard in range(len(self._asking.links))
            ]
        except BaseException:
            await asyncio.shield(self._void(step.ticket))
            raise
        try:
            number: dict[str, Any] = {} if step.number is None else {"number": step.number}
            answers = await _all(
                self._asking.ask(
                    shard, step.ticket, "push", packet, v_read=step.v_read[shard], **number
                )
                for shard, packet in enumerate(packets)
            )
        finally:
            self.counts.bound = max(self.counts.bound, self.permits.bound_of(step.ticket))
            self.permits.release(step.ticket)
        self.counts.pushed += 1
        for shard, (header, _) in enumerate(answers):
            self._note_ack(shard, header)
        self._note_times(step, asked_s)

    def push_soon(self, step: Step) -> None:
        """`push` beside whatever comes next; its error is raised by the next `pull` or `drain`."""
        task = asyncio.get_running_loop().create_task(self._push_beside(step))
        self._pushes.add(task)
        task.add_done_callback(self._pushes.discard)

    def refuse_nonfinite(self, step: Step) -> None:
        """Raise `NonFiniteGradientError` by table and ids, as `push` would; sends nothing."""
        self._packets(step)

    def _packets(self, step: Step) -> list[Packet]:
        return [self._router.gradients(step, shard) for shard in range(len(self._asking.links))]

    def fail(self, error: BaseException) -> None:
        """Something beside went wrong: raised by the next `pull` or `drain`."""
        self._failure = self._failure or error

    def nudge(self, shard: int) -> None:
        """A shard has begun anew: what it was asked and has not answered is asked again now."""
        self._asking.nudge(shard)

    async def void(self, step: Step) -> None:
        """The step failed: nothing of it is applied, nobody waits for it."""
        await self._void(step.ticket)

    async def read(self, ids: Mapping[str, Any]) -> Step:
        """Rows for evaluation, after all that is under way: no permit, no new rows, no recency."""
        await self.drain()
        ahead = self._router.split(self.permits.next_ticket(), ids)
        answers = await _all(
            self._asking.ask(shard, ahead.ticket, "read", letters.ids_packet(part))
            for shard, part in enumerate(ahead.parts)
        )
        pulled = [letters.read_rows(packet, self.tables) for _, packet in answers]
        versions = [int(header.body["version"]) for header, _ in answers]
        rows = {name: self._router.join(name, ahead, pulled).detach() for name in ahead.ids}
        return Step(ahead=ahead, rows=rows, pulled=pulled, v_read=versions)

    async def drain(self) -> None:
        """Wait until no step of anybody is under way; raise what went wrong beside."""
        while self._pushes:
            await asyncio.wait(set(self._pushes))
        await self.permits.all_home()
        self._raise_failure()

    async def run(
        self,
        batches: Iterable[Mapping[str, Any]],
        train: Callable[[int, Step], Any],
        *,
        lookahead: int = 4,
    ) -> None:
        """Persia's loops: ids go ahead, rows are pulled, steps are trained in order, pushed beside.

        `train(number, step)` runs forward and backward, and may be a coroutine. If it raises, its
        step and all that were pulled after it are voided, the permits are home, and it is raised.
        """
        ready: asyncio.Queue[asyncio.Task[Step] | None] = asyncio.Queue()
        puller = asyncio.get_running_loop().create_task(
            self._pull_all(iter(batches), ready, lookahead)
        )
        number = 0
        step: Step | None = None
        try:
            while (fetched := await ready.get()) is not None:
                step = await fetched
                began_s = asyncio.get_running_loop().time()
                result = train(number, step)
                if asyncio.iscoroutine(result):
                    await result
                step.step_s = asyncio.get_running_loop().time() - began_s
                self.push_soon(step)
                step = None
                number += 1
            await puller
            await self.drain()
        except BaseException:
            puller.cancel()
            await asyncio.gather(puller, return_exceptions=True)
            left = [] if step is None else [step]
            while not ready.empty():
                task = ready.get_nowait()
                if task is not None:
                    (done,) = await asyncio.gather(task, return_exceptions=True)
                    left += [done] if isinstance(done, Step) else []
            for unfinished in left:
                await self._void(unfinished.ticket)
            await self.forget(list(self._announced))
            while self._pushes:
                await asyncio.wait(set(self._pushes))
            raise

    async def _pull_all(
        self, batches: Any, ready: asyncio.Queue[asyncio.Task[Step] | None], lookahead: int
    ) -> None:
        """Announce ahead; fetch each step as soon as it has a permit, several at a time."""
        line: deque[Ahead] = deque()
        try:
            while True:
                while batches is not None and len(line) <= lookahead:
                    batch = next(batches, None)
                    if batch is None:
                        batches = None
                    else:
                        line.append(self.announce(batch))
                if not line:
                    return
                self._raise_failure()
                ahead = line.popleft()
                await self.permits.acquire(ahead.ticket)
                ready.put_nowait(asyncio.get_running_loop().create_task(self._fetch(ahead)))
        finally:
            ready.put_nowait(None)  # the end, or an error that `await puller` raises

    @property
    def num_resent(self) -> int:
        """Letters that were sent again, for want of an answer."""
        return self._asking.num_resent

    async def _void(self, ticket: int, *, counts: bool = True) -> None:
        self.counts.voided += counts
        try:
            await _all(
                self._asking.ask(shard, ticket, "void") for shard in range(len(self._asking.links))
            )
        except ShardTimeout as error:
            self._failure = self._failure or error
        finally:
            self.permits.release(ticket)

    async def _push_beside(self, step: Step) -> None:
        try:
            await self.push(step)
        except Exception as error:
            self._failure = self._failure or error

    def _note_version(self, shard: int, header: FrameHeader, floor: int) -> int:
        """A version below what was known before the question: the shard has lost the rest."""
        version = int(header.body["version"])
        if version < floor and version < self._version[shard]:
            self.counts.lost_versions += self._version[shard] - version
            self._version[shard] = version
        self._version[shard] = max(self._version[shard], version)
        return version

    def _note_ack(self, shard: int, header: FrameHeader) -> None:
        outcome = header.body["outcome"]
        if outcome == "lost":
            self.counts.lost_pushes += 1
            return
        self._version[shard] = max(self._version[shard], int(header.body["version"]))
        if outcome == "applied":
            self.counts.staleness[header.body["staleness"]] += 1
        elif outcome == "refused":
            why = header.body["why"]
            raise (StalenessError if "StalenessError" in why else ShardRefused)(why)

    def _note_times(self, step: Step, asked_s: float) -> None:
        if self.auto is None:
            return
        now_s = asyncio.get_running_loop().time()
        tau = self.auto.observe(
            pull_s=step.pull_s, step_s=step.step_s, push_s=now_s - asked_s, now_s=now_s
        )
        if tau is not None:
            self.permits.resize(tau)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


async def _all(asked: Iterable[Any]) -> list[Any]:
    """All answers in order; an error only after everybody has finished."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
