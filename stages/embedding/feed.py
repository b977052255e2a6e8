"""The embeddings' end in stage 0: rows in before a step, gradients out behind it.

Path: ray_pipe.data -> stages.embedding.feed -> stages.embedding.hybrid

    await feed.ready(plan)         the rows of the step are here; those of later ones are coming
    feed.source(plan, 0)           dense features and pooled rows of a micro-batch, packed
    feed.idle()                    the network waits for later stages: time for letters
    feed.take(0, gradient)         of that input; adds up over micro-batches
    feed.commit(plan, factor)      the dense net has moved: the gradients leave, nobody waits
    await feed.abort()             the step failed: void on every shard

Steps are pulled ahead as far as permits allow. If the rows of a step are here before it begins,
the forward pass goes first, on the wire too: gradients of the step before and ids of later ones
are written and sent when the network waits (`idle`), which they would otherwise delay.

Whatever breaks the order (an evaluation, a step that is run again, a checkpoint) voids what was
pulled ahead, so that no row is older than it may be. `ready`, `idle`, `commit`, `abort` and
`drain` belong to the event loop, the rest to the compute lane.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netsim.link import LinkLike
from stages.embedding.auto_staleness import AutoStaleness
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.hybrid import Hybrid
from stages.embedding.permits import Permits
from stages.embedding.routing import Step
from stages.embedding.row_errors import NonFiniteGradientError
from stages.embedding.shard_terms import TICKETS_OF_A_SESSION
from stages.embedding.step_clicks import ClickSamples, StepClicks
from stages.plan import StepPlan

LOOKAHEAD = 2
"""Steps whose ids are sent beyond those whose rows may be pulled."""


@dataclass(slots=True, kw_only=True)
class _Coming:
    """A step whose ids are on their way, and perhaps its rows."""

    batch: StepClicks
    ticket: int
    pull: asyncio.Task[Step]


class Feed:
    """One dense worker's rows and gradients."""

    def __init__(
        self,
        spec: EmbeddingSpec,
        *,
        samples: ClickSamples,
        links: Sequence[LinkLike],
        client: int = 0,
        session: int = 0,
    ) -> None:
        self.spec = spec
        self.session = session
        self.permits = Permits(spec.tau or 0, first_ticket=session * TICKETS_OF_A_SESSION + 1)
        self.hybrid = Hybrid(
            spec.tables,
            permits=self.permits,
            links=links,
            wire=spec.wire,
            client=client,
            session=session,
            deadline_s=spec.deadline_s,
            num_tries=spec.num_tries,
            auto=AutoStaleness(cap=spec.bound, window=spec.auto_window)
            if spec.tau is None
            else None,
        )
        self.events: list[str] = []
        self.num_refused = 0
        """Steps whose gradients were not finite."""

        self._samples = samples
        self._coming: dict[int, _Coming] = {}
        self._step: Step | None = None
        self._batch: StepClicks | None = None
        self._number = -1
        self._graphs: dict[int, list[Tensor]] = {}
        self._began_s = 0.0
        self._num_changes = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._unpushed: list[Callable[[], None]] = []
        self._ask_after: int | None = None
        self._told: Counter[int] = Counter()
        self._told_lost = 0
        self._is_closed = False

    def on_frame(self, frame: Any) -> None:
        """A letter from a shard."""
        self.hybrid.on_frame(frame)

    # --- a step, on the loop ----------------------------------------------------------------------

    async def ready(self, plan: StepPlan) -> None:
        """Have the rows of a step; asked again in the same step, they are here."""
        if self._step is not None and self._number == plan.step:
            return
        loop = asyncio.get_running_loop()
        if not plan.train:
            await self.drain()
            batch = self._read(plan.micro_batches)
            self._step, self._batch = await self.hybrid.read(batch.ids), batch
        else:
            if plan.step not in self._coming:
                await self._let_go()
                self._ask(plan.step, plan.micro_batches)
            coming = self._coming.pop(plan.step)
            self._ask_after = plan.step
            if not coming.pull.done():
                self.idle()
            self._step, self._batch = await coming.pull, coming.batch
            self._step.number = plan.step
        self._number, self._began_s = plan.step, loop.time()

    def commit(self, plan: StepPlan, factor: float) -> None:
        """The step has happened: push its gradients. A factor of 0 skipped the dense update, and
        the rows' update with it."""
        step, self._step = self._step, None
        self._graphs.clear()
        if step is None or not plan.train:
            return
        step.ended_s = asyncio.get_running_loop().time()
        step.step_s = step.ended_s - self._began_s
        self._unpushed.append(partial(self._push_beside, step, plan, skipped=factor == 0.0))
        following = self._coming.get(plan.step + 1)
        if following is None or not following.pull.done():
            self.idle()

    def idle(self) -> None:
        """The network has nothing to do: do what was put off for its sake."""
        self._push_all()
        after, self._ask_after = self._ask_after, None
        if after is not None:
            self._pull_ahead(after)

    def finish(self) -> None:
        """An evaluation is over."""
        self._step = None
        self._graphs.clear()

    async def abort(self) -> None:
        """The step failed; it and all that was pulled after it is void, permits are home."""
        step, self._step = self._step, None
        self._graphs.clear()
        self._push_all()
        if step is not None and step.ticket in self.permits.held:
            await self.hybrid.void(step)
        await self._let_go()

    async def drain(self) -> None:
        """Wait until every gradient has arrived; nothing is under way then."""
        self._push_all()
        await self._let_go()
        while self._beside:
            await asyncio.wait(set(self._beside))
        await self.hybrid.drain()

    def close(self) -> None:
        """Nothing more will come: let go of all tasks."""
        self._is_closed = True
        for one in self._coming.values():
            one.pull.cancel()
            one.pull.add_done_callback(_forget)
        for task in self._beside:
            task.cancel()
        self._coming.clear()
        self._unpushed.clear()

    def nudge(self, shard: int) -> None:
        """A shard has a new process: ask it now what the old one did not answer."""
        self.hybrid.nudge(shard)

    # --- a micro-batch, in the compute lane -------------------------------------------------------

    def source(self, plan: StepPlan, micro_batch: int) -> Tensor:
        """The input of the first block: dense features, then one pooled vector a feature."""
        assert self._step is not None
        assert self._batch is not None
        with torch.set_grad_enabled(plan.train):
            dense, pooled = self._batch.pooled(
                micro_batch, self.spec.features, self._step.rows, self._step.index
            )
        if plan.train:
            self._graphs[micro_batch] = pooled
        return torch.cat([dense, *(vector.detach() for vector in pooled)], dim=1)

    def take(self, micro_batch: int, gradient: Tensor) -> None:
        """The gradient of `source`, into the rows."""
        pooled = self._graphs.pop(micro_batch)
        widths = [vector.shape[1] for vector in pooled]
        dense = gradient.shape[1] - sum(widths)
        parts = torch.split(gradient.detach().cpu().float(), [dense, *widths], dim=1)[1:]
        # Bags that are all empty are zeros of no row's making.
        made = [number for number, vector in enumerate(pooled) if vector.requires_grad]
        if made:
            torch.autograd.backward([pooled[n] for n in made], [parts[n] for n in made])

    # --- numbers ----------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """What happened since the last call, for the step's record."""
        counts = self.hybrid.counts
        fresh = counts.staleness - self._told
        self._told = Counter(counts.staleness)
        numbers = {
            "session": self.session,
            "tau": max(self.permits.tau, counts.bound),
            "in_use": self.permits.in_use,
            "staleness": {str(key): num for key, num in sorted(fresh.items())},
            "lost_pushes": counts.lost_pushes,
            "new_lost_pushes": counts.lost_pushes - self._told_lost,
            "lost_versions": counts.lost_versions,
            "voided": counts.voided,
            "refused": self.num_refused,
            "resent": self.hybrid.num_resent,
        }
        self._told_lost, counts.bound = counts.lost_pushes, 0
        return numbers

    # --- ahead of the step ------------------------------------------------------------------------

    def _pull_ahead(self, step: int) -> None:
        """Send the ids of the steps after this one, and stand in line for their permits."""
        if self._is_closed:
            return
        last = min(step + self.permits.tau + LOOKAHEAD, self.spec.num_steps - 1)
        for number in range(step + 1, last + 1):
            if number not in self._coming:
                self._ask(number, self.spec.order.at(number))

    def _ask(self, number: int, micro_batches: Sequence[Sequence[int]]) -> None:
        batch = self._read(micro_batches)
        ahead = self.hybrid.announce(batch.ids)
        pull = asyncio.get_running_loop().create_task(self.hybrid.pull(ahead))
        self._coming[number] = _Coming(batch=batch, ticket=ahead.ticket, pull=pull)

    def _read(self, micro_batches: Sequence[Sequence[int]]) -> StepClicks:
        return StepClicks.read(self._samples, micro_batches, self.spec.features)

    async def _let_go(self) -> None:
        """Void what was pulled ahead."""
        self._ask_after = None
        coming, self._coming = self._coming, {}
        for one in coming.values():
            one.pull.cancel()
        for one in coming.values():
            (done,) = await asyncio.gather(one.pull, return_exceptions=True)
            if isinstance(done, Step):
                await self.hybrid.void(done)
        await self.hybrid.forget([one.ticket for one in coming.values()])

    def _push_all(self) -> None:
        """The gradients of steps that have ended leave now."""
        unpushed, self._unpushed = self._unpushed, []
        for push in unpushed:
            push()

    def _push_beside(self, step: Step, plan: StepPlan, *, skipped: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._push(step, plan, skipped=skipped))
        self._beside.add(task)
        task.add_done_callback(self._ended)

    async def _push(self, step: Step, plan: StepPlan, *, skipped: bool) -> None:
        try:
            if skipped:
                self.hybrid.refuse_nonfinite(step)
                await self.hybrid.void(step)
            else:
                await self.hybrid.push(step)
        except NonFiniteGradientError as error:
            self.num_refused += 1
            self.events.append(f"step {plan.step}: {error}")
            if skipped:
                await self.hybrid.void(step)
        self._tell_changes()

    def _tell_changes(self) -> None:
        changes = [] if self.hybrid.auto is None else self.hybrid.auto.changes
        for change in changes[self._num_changes :]:
            self.events.append(
                f"staleness auto: {change.why}, so {change.tau + 1} steps may be under way "
                f"(tau = {change.tau})"
            )
        self._num_changes = len(changes)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.hybrid.fail(error)


def _forget(task: asyncio.Task[Step]) -> None:
    """An error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
