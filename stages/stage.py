"""A stage: runs the action list of a step, receiving, computing and sending at the same time.

Path: stages.schedule -> stages.stage -> stages.compute

A plain class over an event loop, three lanes and some links. In an actor the loop is real and the
lanes are threads; in the simulator time is virtual and the lanes are costs. Neither is known here.

The end of a step is one exchange of small control messages: every stage passes the squared norms
of its gradients towards stage 0, which answers with the clip factor. That answer is also the
commit: whoever has it knows that all frames of the step were received by everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compressors.base import SampleKeys
from compressors.frame import FrameError, FrameHeader
from netsim.link import LinkLike
from stages.compute import Compute
from stages.ends import FRAMES, Received, ReceivingEnd, SendingEnd, StageTimeout, WireFormat
from stages.lanes import Lane, Recorder
from stages.loss import count_targets
from stages.optim import clip_factor
from stages.plan import StepPlan
from stages.record import Span, StepRecord
from stages.schedule import actions_of

SMALL_NBYTES = 4096
"""Frames up to this size are looked into on the loop, to see control messages at once."""


class StageAborted(RuntimeError):
    """The driver ended the step because something failed elsewhere."""


class Samples(Protocol):
    """What the first and the last stage need of the data."""

    def batch(self, ids: tuple[int, ...]) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Wiring:
    """What joins a stage to its neighbours; None where there is no neighbour."""

    links: Mapping[int, LinkLike]
    """By target stage; control messages go to any stage, tensors to neighbours."""

    activation_in: ReceivingEnd | None = None
    activation_out: SendingEnd | None = None
    gradient_in: ReceivingEnd | None = None
    gradient_out: SendingEnd | None = None

    def receiving(self) -> list[ReceivingEnd]:
        return [end for end in (self.activation_in, self.gradient_in) if end is not None]

    def ends(self) -> list[ReceivingEnd | SendingEnd]:
        return [*self.receiving(), *self.sending()]

    def sending(self) -> list[SendingEnd]:
        return [end for end in (self.activation_out, self.gradient_out) if end is not None]


@dataclass(slots=True, kw_only=True)
class Lanes:
    """The three places where a stage's work runs."""

    receive: Lane
    compute: Lane
    transmit: Lane


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
    ) -> None:
        self.wire = wire
        self.index = index
        self.num_stages = num_stages
        self.compute = compute
        self.wiring = wiring
        self.lanes = lanes
        self.recorder = recorder
        self.replica = replica
        self._samples = samples
        self._clip = clip
        self._lengths: dict[int, tuple[int, ...] | None] = {}
        self._control: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._running: asyncio.Task[StepRecord] | None = None
        self._repairs: set[asyncio.Task[bool]] = set()
        self._counted: dict[str, dict[str, int]] = {}
        self._loss = 0.0
        self._num_items = 0
        self._num_tokens = 0

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    async def run(self, plan: StepPlan) -> StepRecord:
        """Run one step to its commit and tell what happened."""
        self._running = asyncio.current_task()
        start = asyncio.get_running_loop().time()
        try:
            self.begin(plan)
            async with asyncio.TaskGroup() as sends:
                for action in actions_of(
                    plan.schedule,
                    stage=self.index,
                    num_stages=self.num_stages,
                    num_micro_batches=len(plan.micro_batches),
                ):
                    act = self._forward if action.kind == "F" else self._backward
                    await act(plan, action.micro_batch, sends)
            norm = await self._flush(plan) if plan.train else None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._running = None
        return self.record(plan, start, norm)

    def begin(self, plan: StepPlan) -> None:
        """Open the step: frames of it may be decoded from now on."""
        self._loss = 0.0
        self._num_tokens = self._num_items = 0
        if self.is_last and self.compute.loss is not None:
            assert self._samples is not None
            for ids in plan.micro_batches:
                targets = self._samples.batch(ids).targets
                self._num_items += count_targets(self.compute.loss, targets)
            self._num_tokens = self._num_items
        for receiving in self.wiring.receiving():
            receiving.begin(plan.step)
        for end in self.wiring.ends():
            prefetch = getattr(end.codec, "prefetch", None)
            if prefetch is not None and plan.coming:
                prefetch(plan.coming)

    def abort(self, why: str) -> None:
        """End the running step and leave no trace of it (called on the loop)."""
        error = StageAborted(f"stage {self.index} was told to stop: {why}")
        for receiving in self.wiring.receiving():
            receiving.fail(error)
        for future in self._control.values():
            if not future.done():
                future.set_exception(error)
                future.exception()
        if self._running is not None:
            self._running.cancel(str(error))
        for end in self.wiring.ends():
            end.abort()
        self._control.clear()
        self.compute.abort()

    def on_frame(self, source: int, frame: Any) -> None:
        """A frame arrived (called on the loop; returns at once)."""
        if len(frame) <= SMALL_NBYTES:
            try:
                header, _ = self.wire.unpack(frame)
            except FrameError:
                pass  # the receiving end will say so and ask again
            else:
                if header.kind == "control":
                    self.on_control(header)
                    return
        end = self.wiring.activation_in if source < self.index else self.wiring.gradient_in
        if end is not None:
            end.on_frame(frame)

    def on_control(self, header: FrameHeader) -> None:
        """A small message of another stage: a request to resend, or part of the flush."""
        body = dict(header.body)
        op = body["op"]
        if op in ("nack", "want"):
            end = self.wiring.activation_out if body["kind"] == "activation" else None
            end = end or self.wiring.gradient_out
            assert end is not None
            repair = asyncio.create_task(
                end.resend(
                    seq=body.get("seq"), step=body.get("step", -1), micro_batch=body.get("mb", -1)
                )
            )
            self._repairs.add(repair)
            repair.add_done_callback(self._repairs.discard)
            return
        future = self._expect(op, header.step)
        if not future.done():
            future.set_result(body)

    def complain(self, end_kind: str, source: int, body: dict[str, Any]) -> None:
        """Ask the sender of an edge to send something again."""
        self._tell(source, step=-1, body={**body, "kind": end_kind})

    # --- the two passes -----------------------------------------------------------------

    async def _forward(self, plan: StepPlan, micro_batch: int, sends: asyncio.TaskGroup) -> None:
        source = None
        if self.wiring.activation_in is not None:
            source = await self._take(self.wiring.activation_in, plan, micro_batch)
        output = await self.lanes.compute.run(
            "forward", f"F{micro_batch}", micro_batch, self.forward, plan, micro_batch, source
        )
        if self.wiring.activation_out is not None:
            assert output is not None
            keys = self.keys(plan, micro_batch)
            sends.create_task(self.wiring.activation_out.send(plan.step, micro_batch, output, keys))

    async def _backward(self, plan: StepPlan, micro_batch: int, sends: asyncio.TaskGroup) -> None:
        gradient = None
        if self.wiring.gradient_in is not None:
            gradient = await self._take(self.wiring.gradient_in, plan, micro_batch)
        sent_back = await self.lanes.compute.run(
            "backward", f"B{micro_batch}", micro_batch, self.compute.backward, micro_batch, gradient
        )
        if self.wiring.gradient_out is not None:
            assert sent_back is not None
            keys = self.keys(plan, micro_batch)
            sends.create_task(
                self.wiring.gradient_out.send(plan.step, micro_batch, sent_back, keys)
            )

    def forward(self, plan: StepPlan, micro_batch: int, source: Tensor | None) -> Tensor | None:
        """Compute the forward pass of a micro-batch; the last stage adds up the loss instead."""
        ids = plan.micro_batches[micro_batch]
        batch = None
        if self.is_first or self.is_last:
            assert self._samples is not None
            batch = self._samples.batch(ids)
        if self.is_first:
            assert batch is not None
            source = batch.inputs
            self._lengths[micro_batch] = batch.lengths
        assert source is not None
        if not self.is_last:
            return self.compute.forward(micro_batch, source, ids=ids, train=plan.train)
        assert batch is not None
        self._loss += self.compute.forward_loss(
            micro_batch,
            source,
            batch.targets,
            ids=ids,
            num_items=self._num_items,
            train=plan.train,
        )
        return None

    def keys(self, plan: StepPlan, micro_batch: int) -> SampleKeys:
        """Who the rows of a micro-batch's tensors are."""
        return SampleKeys(
            ids=plan.micro_batches[micro_batch],
            lengths=self._lengths.get(micro_batch),
            remember=plan.train,
        )

    def note_lengths(self, end: ReceivingEnd, micro_batch: int, received: Received) -> Tensor:
        """Padding is known to the first stage only; it travels with the activations."""
        tensor, lengths = received
        if end is self.wiring.activation_in:
            self._lengths[micro_batch] = lengths
        return tensor

    async def _take(self, end: ReceivingEnd, plan: StepPlan, micro_batch: int) -> Tensor:
        loop = asyncio.get_running_loop()
        start = loop.time()
        received = await end.take(plan.step, micro_batch, deadline_s=plan.deadline_s)
        tensor = self.note_lengths(end, micro_batch, received)
        forward = end is self.wiring.activation_in
        phase, letter = ("wait_forward", "F") if forward else ("wait_backward", "B")
        self.recorder.add(phase, f"{letter}{micro_batch}", micro_batch, start, loop.time())
        return tensor

    # --- the end of a step ----------------------------------------------------------------

    async def _flush(self, plan: StepPlan) -> float:
        """Agree on the norm, update, commit; returns the global gradient norm."""
        run = self.lanes.compute.run
        loop = asyncio.get_running_loop()
        squares = await run("update", "norm", -1, self.compute.squared_norms)
        start = loop.time()
        if not self.is_last:
            answer = await self._hear("norms", plan, self.index + 1)
            squares = [*squares, *answer["values"]]
        if self.is_first:
            norm, factor = clip_factor(squares, clip=self._clip)
            for target in range(1, self.num_stages):
                self._tell(target, plan.step, {"op": "go", "norm": norm, "factor": factor})
        else:
            self._tell(self.index - 1, plan.step, {"op": "norms", "values": squares})
            answer = await self._hear("go", plan, 0)
            norm, factor = answer["norm"], answer["factor"]
        self.recorder.add("sync", "norm", -1, start, loop.time())
        await run("update", "update", -1, self.finish, plan, factor)
        return float(norm)

    def finish(self, plan: StepPlan, factor: float) -> None:
        """Update and commit: from here on the step has happened."""
        self.compute.update(lr=plan.lr, factor=factor)
        for end in self.wiring.ends():
            end.commit()

    def record(self, plan: StepPlan, start: float, norm: float | None) -> StepRecord:
        """What this stage did in the step that just ended."""
        spans, seconds = self.recorder.drain()
        spans += self._wire_spans()
        offset = self.recorder.offset_s
        events = [event for end in self.wiring.receiving() for event in end.events]
        for end in self.wiring.receiving():
            end.events.clear()
        if norm is not None and norm == float("inf"):
            events.append(f"step {plan.step}: the gradient is not finite, the update was skipped")
        return StepRecord(
            stage=self.index,
            step=plan.step,
            loss=self._loss if self.is_last else None,
            num_tokens=self._num_tokens,
            start_s=start + offset,
            end_s=asyncio.get_running_loop().time() + offset,
            seconds=seconds,
            sent=self._bytes_since_last_record(),
            codec=self._codec_stats(),
            grad_norm=norm,
            spans=spans,
            events=tuple(events),
        )

    def _wire_spans(self) -> tuple[Span, ...]:
        offset = self.recorder.offset_s
        return tuple(
            Span(
                lane="wire",
                name=f"{link.name} {span.kind}",
                start_s=span.start + offset,
                end_s=span.depart + offset,
            )
            for link in self.wiring.links.values()
            for span in link.drain_spans()
        )

    def _bytes_since_last_record(self) -> dict[str, dict[str, int]]:
        sent: dict[str, dict[str, int]] = {}
        for target, link in self.wiring.links.items():
            name = f"{self.index}->{target}"
            before = self._counted.get(name, {})
            now = dict(link.sent)
            self._counted[name] = now
            change = {kind: count - before.get(kind, 0) for kind, count in now.items()}
            if any(change.values()):
                sent[name] = {kind: count for kind, count in change.items() if count}
        return sent

    def _codec_stats(self) -> dict[str, dict[str, float]]:
        stats: dict[str, dict[str, float]] = {}
        for sending in self.wiring.sending():
            stats[sending.edge.name] = {
                **sending.codec.stats(),
                "resent": float(sending.num_resent),
            }
        for receiving in self.wiring.receiving():
            if receiving.num_nacks:
                stats.setdefault(receiving.edge.name, {})["nacks"] = float(receiving.num_nacks)
        return stats

    # --- control messages -------------------------------------------------------------------

    def _tell(self, target: int, step: int, body: dict[str, Any]) -> None:
        header = FrameHeader(
            kind="control",
            replica=self.replica,
            source=self.index,
            target=target,
            step=step,
            micro_batch=-1,
            seq=0,
            body=body,
        )
        self.wiring.links[target].send(self.wire.pack(header, None), kind="control")

    async def _hear(self, op: str, plan: StepPlan, source: int) -> dict[str, Any]:
        future = self._expect(op, plan.step)
        await asyncio.wait([future], timeout=plan.deadline_s)
        if not future.done():
            raise StageTimeout(
                f"stage {self.index} waited {plan.deadline_s:.1f} s for {op!r} of step {plan.step} "
                f"from stage {source}"
            )
        self._control.pop((op, plan.step), None)
        return future.result()

    def _expect(self, op: str, step: int) -> asyncio.Future[dict[str, Any]]:
        key = (op, step)
        if key not in self._control:
            self._control[key] = asyncio.get_running_loop().create_future()
        return self._control[key]
