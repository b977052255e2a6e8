"""A stage's books: what its links, codecs and lanes did, made into the record of a step."""

from __future__ import annotations

import math
from typing import Any

from stages.ends import Edge
from stages.lanes import Recorder
from stages.plan import StepPlan
from stages.record import Span, StepRecord
from stages.wiring import Wiring


class Books:
    """Reads counters that only rise, and tells what was added since the last record."""

    def __init__(
        self,
        index: int,
        wiring: Wiring,
        recorder: Recorder,
        *,
        first_node: int = 0,
        replica: int = 0,
    ) -> None:
        """`first_node` is the place of the replica's stage 0 among all stages of all replicas."""
        self._first = first_node
        self._replica = replica
        self._index = first_node + index
        self._wiring = wiring
        self._recorder = recorder
        self._counted: dict[str, dict[str, int]] = {}

    def record(
        self,
        plan: StepPlan,
        *,
        start: float,
        end: float,
        loss: float | None,
        num_tokens: int,
        norm: float | None,
        events: list[str],
        embedding: dict[str, Any] | None = None,
        sync: dict[str, Any] | None = None,
    ) -> StepRecord:
        """The record of a step that ran from `start` to `end`, in loop time."""
        spans, seconds = self._recorder.drain()
        offset = self._recorder.offset_s
        for own in self._wiring.ends():
            events = [*events, *own.events]
            own.events.clear()
        if norm is not None and math.isinf(norm):
            events.append(f"step {plan.step}: the gradient is not finite, the update was skipped")
        return StepRecord(
            stage=self._index,
            step=plan.step,
            loss=loss,
            num_tokens=num_tokens,
            start_s=start + offset,
            end_s=end + offset,
            seconds=seconds,
            sent=self._bytes_since_last_record(),
            codec=self._codec_stats(),
            grad_norm=norm,
            spans=spans + self._wire_spans(),
            events=tuple(events),
            embedding=embedding or {},
            replica=self._replica,
            sync=sync or {},
        )

    def _wire_spans(self) -> tuple[Span, ...]:
        offset = self._recorder.offset_s
        return tuple(
            Span(
                lane="wire",
                name=f"{link.name} {span.kind}",
                start_s=span.start + offset,
                end_s=span.depart + offset,
                arrive_s=span.arrive + offset,
            )
            for link in (*self._wiring.links.values(), *self._wiring.replica_links.values())
            for span in link.drain_spans()
        )

    def _bytes_since_last_record(self) -> dict[str, dict[str, int]]:
        sent: dict[str, dict[str, int]] = {}
        for link in (*self._wiring.links.values(), *self._wiring.replica_links.values()):
            name = link.name
            before = self._counted.get(name, {})
            now = dict(link.sent)
            self._counted[name] = now
            change = {kind: count - before.get(kind, 0) for kind, count in now.items()}
            if any(change.values()):
                sent[name] = {kind: count for kind, count in change.items() if count}
        return sent

    def _codec_stats(self) -> dict[str, dict[str, float]]:
        stats: dict[str, dict[str, float]] = {}
        for sending in self._wiring.sending():
            name = self._edge(sending.edge)
            stats[name] = {
                **sending.codec.stats(),
                "resent": float(sending.num_resent),
                "fp32_bytes": float(sending.fp32_nbytes),
            }
            sending.num_resent = sending.fp32_nbytes = 0
            if sending.num_nonfinite:
                stats[name]["nonfinite"] = float(sending.num_nonfinite)
                sending.num_nonfinite = 0
        for receiving in self._wiring.receiving():
            if receiving.num_nacks:
                stats.setdefault(self._edge(receiving.edge), {})["nacks"] = float(
                    receiving.num_nacks
                )
                receiving.num_nacks = 0
        return stats

    def _edge(self, edge: Edge) -> str:
        return f"{self._first + edge.source}->{self._first + edge.target}"
