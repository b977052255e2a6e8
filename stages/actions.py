"""The actions of a step, carried out: take what came in, compute, give away what was made.

Path: stages.stage -> stages.actions -> stages.compute

Waiting for a frame stops the list, sending one does not: sends go on beside the actions after them.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from torch import Tensor

from stages.lanes import Recorder
from stages.passes import Passes, Source
from stages.plan import StepPlan
from stages.receiving import ReceivingEnd
from stages.schedule import actions_of
from stages.wiring import Lanes, Wiring


class OnPoint(Protocol):
    """Hears where in a step the stage is; see `stages.mishap`."""

    def __call__(self, point: str, plan: StepPlan, micro_batch: int | None = None) -> None: ...


class Actions:
    """What one stage does in the two passes. Lives on the stage's loop."""

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        passes: Passes,
        wiring: Wiring,
        lanes: Lanes,
        recorder: Recorder,
        on_point: OnPoint,
    ) -> None:
        self._index = index
        self._num_stages = num_stages
        self._is_last = index == num_stages - 1
        self._passes = passes
        self._wiring = wiring
        self._lanes = lanes
        self._recorder = recorder
        self._on_point = on_point
        self._forwards: set[asyncio.Task[None]] = set()  # that are being sent

    async def run(self, plan: StepPlan) -> None:
        """All actions of a step, in order, with everything sent when this returns."""
        if self._is_last:
            await self._lanes.compute.run("load", "data", -1, self._passes.load, plan)
        try:
            async with asyncio.TaskGroup() as sends:
                for action in actions_of(
                    plan.schedule,
                    stage=self._index,
                    num_stages=self._num_stages,
                    num_micro_batches=len(plan.micro_batches),
                ):
                    act = self._forward if action.kind == "F" else self._backward
                    await act(plan, action.micro_batch, sends)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _forward(self, plan: StepPlan, micro_batch: int, sends: asyncio.TaskGroup) -> None:
        source = None
        if self._wiring.activation_in is not None:
            self._on_point("recv F", plan, micro_batch)
            source = await self._take(self._wiring.activation_in, plan, micro_batch)
        if self._passes.feed is not None:
            await self._rows(self._passes.feed, plan, micro_batch)
        self._on_point("F", plan, micro_batch)
        output = await self._lanes.compute.run(
            "forward",
            f"F{micro_batch}",
            micro_batch,
            self._passes.forward,
            plan,
            micro_batch,
            source,
        )
        if self._wiring.activation_out is not None:
            assert output is not None
            self._on_point("send F", plan, micro_batch)
            keys = self._passes.keys(plan, micro_batch)
            task = sends.create_task(
                self._wiring.activation_out.send(plan.turn, micro_batch, output, keys)
            )
            self._forwards.add(task)
            task.add_done_callback(self._forwards.discard)

    async def _backward(self, plan: StepPlan, micro_batch: int, sends: asyncio.TaskGroup) -> None:
        gradient = None
        if self._passes.feed is not None:
            sends.create_task(self._idle(self._passes.feed))
        if self._wiring.gradient_in is not None:
            self._on_point("recv B", plan, micro_batch)
            gradient = await self._take(self._wiring.gradient_in, plan, micro_batch)
        self._on_point("B", plan, micro_batch)
        sent_back = await self._lanes.compute.run(
            "backward",
            f"B{micro_batch}",
            micro_batch,
            self._passes.backward,
            micro_batch,
            gradient,
        )
        if self._wiring.gradient_out is not None:
            assert sent_back is not None
            self._on_point("send B", plan, micro_batch)
            keys = self._passes.keys(plan, micro_batch, backward=True)
            sends.create_task(
                self._wiring.gradient_out.send(plan.turn, micro_batch, sent_back, keys)
            )

    async def _rows(self, feed: Source, plan: StepPlan, micro_batch: int) -> None:
        """Wait for the embedding rows of the step."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await feed.ready(plan)
        if micro_batch == 0:
            self._recorder.add("wait_forward", "rows", micro_batch, start, loop.time())

    async def _idle(self, feed: Source) -> None:
        """Nothing can be computed before a gradient comes: the feed's turn, once all is sent."""
        while self._forwards:
            await asyncio.wait(set(self._forwards))
        feed.idle()

    async def _take(self, end: ReceivingEnd, plan: StepPlan, micro_batch: int) -> Tensor:
        loop = asyncio.get_running_loop()
        start = loop.time()
        tensor, lengths = await end.take(plan.turn, micro_batch, deadline_s=plan.deadline_s)
        forward = end is self._wiring.activation_in
        if forward:
            self._passes.note_lengths(micro_batch, lengths)
        phase, letter = ("wait_forward", "F") if forward else ("wait_backward", "B")
        self._recorder.add(phase, f"{letter}{micro_batch}", micro_batch, start, loop.time())
        return tensor
