"""A stage: runs the action list of a step, receiving, computing and sending at the same time.

Path: stages.schedule -> stages.stage -> stages.actions

A plain class over an event loop, three lanes and some links. In an actor the loop is real and the
lanes are threads; in the simulator time is virtual and the lanes are costs. Neither is known here.

The end of a step is one exchange of small control messages: every stage passes the squared norms
of its gradients towards stage 0, which answers with the clip factor. That answer is also the
commit: whoever has it knows that all frames of the step were received by everybody. A step that
fails or is aborted before it leaves no trace. A stage that has sent its norms and is stopped
before the answer is in doubt: what the next plan says resolves it, see `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol

from compressors.frame import FrameError, FrameHeader
from stages.actions import Actions
from stages.background import Background
from stages.books import Books
from stages.compute import Compute
from stages.control import Control
from stages.embedding.feed import Feed
from stages.embedding.loaded import Inbox
from stages.ends import COLD, FRAMES, WireFormat, turn_of
from stages.keeper import Keeper
from stages.lanes import Recorder
from stages.optim import clip_factor, exact_sums
from stages.passes import Passes, Samples
from stages.plan import StepPlan, Turn
from stages.receiving import NEVER, Opened
from stages.record import StepRecord
from stages.state import StageState, gather_state, restore_state
from stages.wiring import Lanes, Wiring

SMALL_NBYTES = 4096
"""Frames up to this size are looked into on the loop, to see control messages at once."""

State = Literal["idle", "running", "prepared", "committing", "undoing"]
"""`prepared`: has sent its norms, only stage 0 knows what becomes of the step."""


class SyncSeat(Protocol):
    """A stage's place among the replicas, see `stages.sync.seat`."""

    async def step(self, plan: StepPlan) -> float | None: ...
    def on_word(self, header: FrameHeader) -> None: ...
    def numbers(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StageAborted(RuntimeError):
    """The driver ended the step because something failed elsewhere."""


class Stage:
    """One stage of one replica."""

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        compute: Compute,
        samples: Samples | None,
        wiring: Wiring,
        lanes: Lanes,
        recorder: Recorder,
        clip: float,
        replica: int = 0,
        wire: WireFormat = FRAMES,
        first_block: int = 0,
        first_node: int = 0,
    ) -> None:
        self.wire = wire
        self.index = index
        self.first_block = first_block
        self.num_stages = num_stages
        self.compute = compute
        self.wiring = wiring
        self.lanes = lanes
        self.recorder = recorder
        self.committed = -1
        """The last step that this stage has committed."""

        self.control = Control(
            index=index,
            links=wiring.links,
            on_request=self._on_request,
            replica=replica,
            wire=wire,
        )
        self._books = Books(index, wiring, recorder, first_node=first_node, replica=replica)
        self.passes = Passes(compute, samples, is_first=self.is_first, is_last=self.is_last)
        self._actions = Actions(
            index=index,
            num_stages=num_stages,
            passes=self.passes,
            wiring=wiring,
            lanes=lanes,
            recorder=recorder,
            on_point=self._pass,
        )
        self._clip = clip
        self._turn = NEVER
        self._min_attempt = 0
        self._state: State = "idle"
        self._doubt: StepPlan | None = None
        self._running: asyncio.Task[Any] | None = None
        self._why = ""
        self._is_stopped = False
        self._is_spoilt = False
        self._background = Background(f"stage {index}", self._on_lost)
        self.keeper: Keeper | None = None
        """Writes the stage's black box, if it has one."""

        self.feed: Feed | None = None
        """Rows of embedding tables for stage 0, if the model has any."""

        self.inbox: Inbox | None = None
        """Batches of a loader, if they are not read here."""

        self.loader: int | None = None
        """The node that sends them."""

        self.seat: SyncSeat | None = None
        """Its place among the replicas, if there are any."""

        self.on_point: Callable[[str, StepPlan], None] | None = None
        """Called where a test may want the stage to end; see `stages.mishap`."""

    @property
    def turn(self) -> Turn:
        """The newest turn that has begun."""
        return self._turn

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    # --- a step from begin to end -----------------------------------------------------------

    async def run(self, plan: StepPlan) -> StepRecord:
        """Run one step to its commit and tell what happened.

        After an abort the driver goes on with a higher `attempt`: with the same step if no stage
        has `committed` it, else with the next one; a stage in doubt then asks stage 0 for the
        answer that it missed.
        """
        if plan.attempt < self._min_attempt:
            raise StageAborted(
                f"stage {self.index} refuses {plan.turn}: attempt {self._min_attempt - 1} was "
                f"aborted ({self._why}); go on with attempt {self._min_attempt}"
            )
        self._running = task = asyncio.current_task()
        self._is_stopped = False
        start = asyncio.get_running_loop().time()
        try:
            await self.begin(plan)
            if plan.train and self.seat is not None:
                norm = await self.seat.step(plan)
            else:
                await self.act(plan)
                norm = await (self._flush(plan) if plan.train else self._see_off(plan))
        except BaseException as error:
            self._running = None
            await self._undo(plan)
            if isinstance(error, asyncio.CancelledError) and self._is_stopped:
                assert task is not None
                task.uncancel()
                raise StageAborted(f"stage {self.index} was told to stop: {self._why}") from None
            raise
        self._running = None
        record = self.record(plan, start, norm)
        if self.keeper is not None and plan.train:
            self.keeper.keep(record)
        return record

    async def begin(self, plan: StepPlan) -> None:
        """Open the step: frames of it may be decoded from now on."""
        while self._background:
            await self._background.wait()
        await self._resolve(plan)
        if plan.turn <= self._turn:
            raise ValueError(
                f"stage {self.index} was given {plan.turn} after {self._turn}; turns must rise: "
                "raise `attempt` to repeat a step, `part` to evaluate after it"
            )
        self._turn = plan.turn
        self._state = "running"
        self.passes.begin()
        self.control.begin(plan.turn)
        self.wiring.begin(plan)

    def abort(self, why: str) -> None:
        """End the running step and leave no trace of it (called on the loop; returns at once).

        Too late once the answer of stage 0 is here: that step will commit.
        """
        self._why = why
        self._min_attempt = max(self._min_attempt, self._turn.attempt + 1, 1)
        if self._state in ("committing", "undoing"):
            return
        if self._running is not None:
            if not self._is_stopped:  # a second cancellation would hit the cleaning up
                self._is_stopped = True
                self._running.cancel()
        elif self._state == "running":  # by hand: nobody runs who could clean up
            self._background.spawn(self._rollback())

    async def act(self, plan: StepPlan) -> None:
        """Both passes of every micro-batch."""
        if self.inbox is not None:
            await self.inbox.arrived(plan)
        await self._actions.run(plan)

    async def _resolve(self, plan: StepPlan) -> None:
        """End the doubt about an earlier step: the driver knows whether it was committed."""
        if self._doubt is None:
            return
        doubt = self._doubt
        if plan.step > doubt.step:
            answer = await self.control.hear(
                "go", doubt.turn, source=0, deadline_s=plan.deadline_s, ask_first=True
            )
            self._state = "committing"
            await self.commit(doubt, answer["factor"])
        else:
            await self._rollback()
        self._doubt = None

    async def _undo(self, plan: StepPlan) -> None:
        """After a failure: forget the step, unless only stage 0 knows what became of it."""
        if self._state == "idle":
            return  # it had not begun
        self._min_attempt = max(self._min_attempt, plan.attempt + 1)
        if self._state == "prepared":
            self._doubt = plan
            self._state = "idle"
        elif self._state == "running":
            await self._rollback()
        else:
            self._state = "idle"  # the update itself failed: only a saved state helps
            self._is_spoilt = True

    async def _rollback(self) -> None:
        """Each lane ends what it is doing, then forgets."""
        self._state = "undoing"
        self._background.cancel()
        for receiving in self.wiring.receiving():
            receiving.refuse_before(self._min_attempt)
        await self.lanes.compute.run("sync", "abort", -1, self.compute.abort)
        if self.feed is not None:
            await self.feed.abort()
        for sending in self.wiring.sending():
            await self.lanes.transmit.run("sync", "abort", -1, sending.codec.abort)
            sending.forget()
        for receiving in self.wiring.receiving():
            await self.lanes.receive.run("sync", "abort", -1, receiving.codec.abort)
        self.recorder.drain()
        self._state = "idle"

    # --- the end of a step ----------------------------------------------------------------

    async def _flush(self, plan: StepPlan) -> float:
        """Agree on the norm, update, commit; returns the global gradient norm."""
        norm, factor = await self.agree_on_norm(plan)
        await self.commit(plan, factor)
        return norm

    async def agree_on_norm(self, plan: StepPlan) -> tuple[float, float]:
        """The global gradient norm, and what every gradient is multiplied by. Then commit."""
        control, turn, deadline_s = self.control, plan.turn, plan.deadline_s
        loop = asyncio.get_running_loop()
        self._pass("norm", plan)
        own = await self.lanes.compute.run("update", "norm", -1, self.compute.squared_norms)
        start = loop.time()
        if self.keeper is not None:
            await self.keeper.settled()  # all boxes hold the step before when this one commits
        sums = exact_sums(own)
        if not self.is_last:
            answer = await control.hear("norms", turn, source=self.index + 1, deadline_s=deadline_s)
            sums = exact_sums([*sums, *answer["sums"]])
        if self.is_first:
            norm, factor = clip_factor(sums, clip=self._clip)
            self._state = "committing"
            for target in range(1, self.num_stages):
                control.tell(target, turn, {"op": "go", "norm": norm, "factor": factor})
        else:
            control.tell(self.index - 1, turn, {"op": "norms", "sums": sums})
            self._state = "prepared"
            self._pass("prepared", plan)
            answer = await control.hear("go", turn, source=0, deadline_s=deadline_s)
            self._state = "committing"
            norm, factor = answer["norm"], answer["factor"]
        self.recorder.add("sync", "norm", -1, start, loop.time())
        return float(norm), float(factor)

    async def _see_off(self, plan: StepPlan) -> None:
        """End an evaluation: the last stage has seen everything, so nothing need be kept."""
        if self.is_last:
            for target in range(self.index):
                self.control.tell(target, plan.turn, {"op": "seen"})
        else:
            await self.control.hear(
                "seen",
                plan.turn,
                source=self.num_stages - 1,
                deadline_s=plan.deadline_s,
                num_deadlines=len(plan.micro_batches),  # the last stage may wait for each of them
            )
        if self.feed is not None:
            self.feed.finish()
        self.close()

    async def commit(self, plan: StepPlan, factor: float) -> None:
        """Update by gradients times `factor`; by nothing if it is 0, they are only cleared."""
        await self._background.wait()  # a resend changes rows: it belongs to this step
        await self.lanes.compute.run("update", "update", -1, self.finish, plan, factor)
        if self.feed is not None:
            self.feed.commit(plan, factor)
        self.close()

    def finish(self, plan: StepPlan, factor: float) -> None:
        """Update and commit: from here on the step has happened (in the compute lane)."""
        self._pass("update", plan)
        self.compute.update(lr=plan.lr, factor=factor)
        self._pass("commit", plan)
        for end in self.wiring.ends():
            end.codec.commit()
        self.committed = plan.step
        self._pass("committed", plan)

    def skip(self, plan: StepPlan) -> None:
        """The step was not run, and the next one may come (replicas that are behind)."""
        self.committed = plan.step
        self.close()

    def close(self) -> None:
        """Let go of what was kept in case it had to be sent again."""
        self.wiring.forget_sent()
        self._state = "idle"

    def retire(self) -> None:
        """Nothing more will come of this stage: let go of tasks, links, rows and their files."""
        if self.feed is not None:
            self.feed.close()
        self.wiring.retire()

    def record(self, plan: StepPlan, start: float, norm: float | None) -> StepRecord:
        """What this stage did in the step that just ended; skipped if there is no norm."""
        is_skipped = plan.train and norm is None
        events, self.control.events = self.control.events, []
        if self.keeper is not None:
            events, self.keeper.events = [*events, *self.keeper.events], []
        if self.feed is not None:
            events, self.feed.events = [*events, *self.feed.events], []
        return self._books.record(
            plan,
            start=start,
            end=asyncio.get_running_loop().time(),
            loss=self.passes.loss if self.is_last and not is_skipped else None,
            num_tokens=self.passes.num_tokens,
            norm=norm,
            events=events,
            embedding={} if self.feed is None else self.feed.numbers(),
            sync=self.seat.numbers() if self.seat is not None and plan.train else None,
        )

    # --- between steps ----------------------------------------------------------------------

    async def save_state(self) -> StageState:
        """A copy of everything that the next step starts from; no step may run meanwhile."""
        self._check_between_steps()
        if self._doubt is not None:
            raise RuntimeError(
                f"stage {self.index} is in doubt about {self._doubt.turn}: stage 0 alone knows "
                "whether it was committed; run the next step first, or load an earlier state"
            )
        return await gather_state(self)

    async def load_state(self, state: StageState) -> None:
        """Go on after the commit that `state` was saved at, as if nothing had come since.

        Raises `StateError`, and changes nothing, if it is the state of another stage. Turns still
        rise: a stage that has run later steps needs a higher `attempt` to repeat them.
        """
        await self.settle()
        await restore_state(self, state)
        self.committed = state.step
        self._is_spoilt = False

    async def settle(self) -> None:
        """After an abort: end what is still going on, and a doubt as if nobody had committed."""
        while self._background:
            await self._background.wait()
        self._check_between_steps()
        if self._doubt is not None:
            await self._rollback()
            self._doubt = None

    @property
    def intact(self) -> int | None:
        """The step whose commit left this stage as it is; None if an update failed half-way."""
        return None if self._is_spoilt else self.committed

    def _check_between_steps(self) -> None:
        if self._state != "idle" or self._running is not None or self._background:
            raise RuntimeError(
                f"stage {self.index} is {self._state} in {self._turn}: its state can be saved and "
                "loaded only between steps"
            )

    # --- what comes in --------------------------------------------------------------------

    def on_frame(self, source: int, frame: Any) -> None:
        """A frame arrived (called on the loop; returns at once)."""
        if source >= self.num_stages:
            if source == self.loader and self.inbox is not None:
                self.inbox.on_frame(frame)
            elif self.feed is not None:  # from a shard of the embeddings
                self.feed.on_frame(frame)
            return
        if len(frame) <= SMALL_NBYTES:
            try:
                header, packet = self.wire.unpack(frame)
            except FrameError:
                pass  # the receiving end will say so and ask again
            else:
                if header.kind == "control":
                    self.control.on_message(header)
                    return
                frame = Opened(header, packet)
        end = self.wiring.activation_in if source < self.index else self.wiring.gradient_in
        if end is not None:
            end.on_frame(frame)

    def complain(self, kind: str, source: int, turn: Turn, body: dict[str, Any]) -> None:
        """Ask the sender of an edge to send something again."""
        self.control.request(source, turn, {**body, "kind": kind})

    def _on_request(self, header: FrameHeader) -> None:
        """A neighbour asks for a frame again."""
        body = header.body
        if body["op"] == "sync":
            if self.seat is not None:
                self.seat.on_word(header)
            return
        activation = body.get("kind") == "activation"
        end = self.wiring.activation_out if activation else self.wiring.gradient_out
        # Once the step commits everybody has everything: nothing may touch its rows any more.
        if end is not None and self._state in ("running", "prepared"):
            seq, micro_batch, cold = body.get("seq"), body.get("mb", -1), body.get("why") == COLD
            self._background.spawn(
                end.resend(turn_of(header), seq=seq, micro_batch=micro_batch, cold=cold)
            )

    def _pass(self, point: str, plan: StepPlan, micro_batch: int | None = None) -> None:
        if self.on_point is not None:
            self.on_point(point if micro_batch is None else f"{point}{micro_batch}", plan)

    def _on_lost(self, error: BaseException) -> None:
        self.abort(f"stage {self.index} could not send again: {error}")
