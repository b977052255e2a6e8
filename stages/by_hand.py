"""A stage moved one action at a time by the driver: the dull twin of `Stage.run`.

In the `refs` transport the driver calls every forward and backward pass itself and hands the
frames on as object refs, so Ray's timeline shows each of them. Codecs, frames, links and
arithmetic are those of the stage; only who gives the orders differs, so losses agree to the bit.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

from netsim.loop_thread import LoopThread
from stages.ends import LETTER, SendingEnd, Sent, StageTimeout
from stages.lanes import Lane
from stages.plan import StepPlan
from stages.receiving import ReceivingEnd
from stages.record import StepRecord
from stages.stage import Stage


class StageByHand:
    """Calls may come from any thread; each does one thing and returns."""

    def __init__(self, stage: Stage, loop: LoopThread) -> None:
        self._stage = stage
        self._loop = loop
        self._plan: StepPlan | None = None
        self._start = 0.0
        self._carried: dict[int, concurrent.futures.Future[None]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Open a step."""
        self._plan = plan
        self._start = self._loop.loop.time()
        self._loop.submit(self._stage.begin(plan)).result()
        if self._stage.is_last:
            self._run(self._stage.lanes.compute, "load", "data", -1, self._stage.passes.load, plan)

    def forward(self, micro_batch: int, frame: Any) -> Any:
        """Decode, compute, encode; the frame for the next stage, or None at the end."""
        stage, plan = self._stage, self.plan
        source = self._decode(stage.wiring.activation_in, micro_batch, frame)
        output = self._run(
            stage.lanes.compute, "forward", f"F{micro_batch}", micro_batch,
            stage.passes.forward, plan, micro_batch, source,
        )  # fmt: skip
        return self._encode(stage.wiring.activation_out, micro_batch, output)

    def backward(self, micro_batch: int, frame: Any) -> Any:
        """Decode, compute, encode; the frame for the previous stage, or None at the start."""
        stage = self._stage
        gradient = self._decode(stage.wiring.gradient_in, micro_batch, frame)
        sent_back = self._run(
            stage.lanes.compute, "backward", f"B{micro_batch}", micro_batch,
            stage.compute.backward, micro_batch, gradient,
        )  # fmt: skip
        return self._encode(stage.wiring.gradient_out, micro_batch, sent_back)

    def carry(self, target: int, kind: str, frame: Any) -> Any:
        """Let the link to `target` carry a frame; returns it when it would have arrived."""
        arrived: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._carried[id(frame)] = arrived
        self._loop.call_soon(lambda: self._stage.wiring.links[target].send(frame, kind=kind))
        try:
            arrived.result(self.plan.deadline_s)
        except TimeoutError:
            self._carried.pop(id(frame), None)
            raise StageTimeout(
                f"stage {self._stage.index} waited {self.plan.deadline_s:.1f} s for its link to "
                f"carry the {kind} of {self.plan.turn} to stage {target}; if the link is that "
                "slow, raise `deadline_s`"
            ) from None
        return frame

    def arrived(self, frame: Any) -> None:
        """The link's end: wakes the `carry` of that frame."""
        waiting = self._carried.pop(id(frame), None)
        if waiting is not None:
            waiting.set_result(None)

    def squared_norms(self) -> list[float]:
        """This stage's part of the global gradient norm."""
        return self._stage.compute.squared_norms()

    def finish(self, factor: float, norm: float | None) -> StepRecord:
        """Update, commit, and tell what happened."""
        stage, plan = self._stage, self.plan
        if plan.train:
            self._run(stage.lanes.compute, "update", "update", -1, stage.finish, plan, factor)

        async def record() -> StepRecord:
            stage.close()
            made = stage.record(plan, self._start, norm if plan.train else None)
            if stage.keeper is not None and plan.train:
                stage.keeper.keep(made)
                await stage.keeper.settled()
            return made

        return self._loop.submit(record()).result()

    @property
    def plan(self) -> StepPlan:
        assert self._plan is not None
        return self._plan

    def _decode(self, end: ReceivingEnd | None, micro_batch: int, frame: Any) -> Any:
        if end is None:
            return None
        received = self._run(
            self._stage.lanes.receive, "decode", LETTER[end.edge.kind], micro_batch,
            end.decode, frame,
        )  # fmt: skip
        tensor, lengths = received
        if end is self._stage.wiring.activation_in:
            self._stage.passes.note_lengths(micro_batch, lengths)
        return tensor

    def _encode(self, end: SendingEnd | None, micro_batch: int, tensor: Any) -> Any:
        if end is None:
            return None
        backward = end is self._stage.wiring.gradient_out
        keys = self._stage.passes.keys(self.plan, micro_batch, backward=backward)
        item = Sent(self.plan.turn, micro_batch, tensor, keys)
        name = f"{LETTER[end.edge.kind]}{micro_batch}"
        lane = self._stage.lanes.transmit
        return self._run(lane, "encode", name, micro_batch, end.encode, item)[1]

    def _run(self, lane: Lane, *args: Any) -> Any:
        return self._loop.submit(lane.run(*args)).result()
