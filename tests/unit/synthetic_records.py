"""Plausible step records without training: a GPipe pipeline whose links have a bandwidth.

Used by the tests of metrics, timeline and report, and to look at the report by eye.
"""

from __future__ import annotations

import math
import random

from stages.record import Span, StepRecord


def make_step(
    *,
    step: int,
    start_s: float,
    num_stages: int = 4,
    num_micro_batches: int = 4,
    forward_s: float = 0.01,
    backward_s: float = 0.02,
    nbytes: int = 125_000,
    bandwidth_bps: float = 100e6,
    codec_s: float = 0.0,
    loss: float = 2.0,
    codec: dict[str, float] | None = None,
) -> list[StepRecord]:
    """The records of one GPipe step that starts at `start_s`: fill, turn round, drain, update."""
    wire_s = nbytes * 8 / bandwidth_bps
    free = [start_s] * num_stages
    link_free: dict[str, float] = {}
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    sent: list[dict[str, dict[str, int]]] = [{} for _ in range(num_stages)]

    def send(
        source: int, target: int, name: str, kind: str, micro_batch: int, ready: float
    ) -> float:
        link = f"{source}->{target}"
        if codec_s:
            spans[source].append(
                Span(lane="encode", name=name, start_s=ready, end_s=ready + codec_s)
            )
        begin = max(ready + codec_s, link_free.get(link, start_s))
        end = begin + wire_s
        link_free[link] = end
        spans[source].append(
            Span(
                lane="wire",
                name=f"{link} {name}",
                start_s=begin,
                end_s=end,
                micro_batch=micro_batch,
            )
        )
        kinds = sent[source].setdefault(link, {})
        kinds[kind] = kinds.get(kind, 0) + nbytes
        kinds["control"] = kinds.get("control", 0) + 96
        if codec_s:
            spans[target].append(Span(lane="decode", name=name, start_s=end, end_s=end + codec_s))
        return end + codec_s

    def compute(stage: int, name: str, micro_batch: int, ready: float, seconds: float) -> float:
        begin = max(free[stage], ready)
        if begin > free[stage]:
            spans[stage].append(
                Span(
                    lane="wait",
                    name=name,
                    start_s=free[stage],
                    end_s=begin,
                    micro_batch=micro_batch,
                )
            )
        free[stage] = begin + seconds
        spans[stage].append(
            Span(
                lane="compute", name=name, start_s=begin, end_s=free[stage], micro_batch=micro_batch
            )
        )
        return free[stage]

    order = range(num_micro_batches)
    ready = dict.fromkeys(order, start_s)
    for stage in range(num_stages):
        for m in order:
            done = compute(stage, f"F{m}", m, ready[m], forward_s)
            if stage + 1 < num_stages:
                ready[m] = send(stage, stage + 1, f"F{m}", "activation", m, done)
    ready = dict.fromkeys(order, 0.0)
    for stage in reversed(range(num_stages)):
        for m in order:
            done = compute(stage, f"B{m}", m, ready[m], backward_s)
            if stage > 0:
                ready[m] = send(stage, stage - 1, f"B{m}", "gradient", m, done)
    synced = max(free)
    records = []
    for stage in range(num_stages):
        spans[stage].append(
            Span(lane="update", name="update", start_s=synced, end_s=synced + forward_s / 2)
        )
        edge = f"{stage}->{stage + 1}"
        records.append(
            StepRecord(
                stage=stage,
                step=step,
                loss=loss if stage == num_stages - 1 else None,
                num_tokens=num_micro_batches * 256,
                start_s=start_s,
                end_s=synced + forward_s / 2,
                seconds={
                    "forward": forward_s * num_micro_batches,
                    "backward": backward_s * num_micro_batches,
                    "update": forward_s / 2,
                },
                sent=sent[stage],
                codec={edge: _deeper(codec, stage)} if codec and stage + 1 < num_stages else {},
                grad_norm=1.5,
                spans=tuple(spans[stage]),
            )
        )
    return records


def _deeper(codec: dict[str, float], stage: int) -> dict[str, float]:
    """Activations of later stages change more."""
    growing = {"delta_ratio", "error"}
    return {
        name: value * (1 + 0.35 * stage) if name in growing and value < 0.9 else value
        for name, value in codec.items()
    }


_ARMS: dict[str, tuple[int, float, float]] = {
    # name: bytes of a warm packet, seconds of a codec call, extra final loss
    "fp32": (262_144, 0.0, 0.0),
    "fp16": (131_072, 0.0003, 0.0),
    "directq": (33_000, 0.0008, 0.16),
    "acsgd": (33_000, 0.0008, -0.004),
    "acsgd+zstd": (25_000, 0.0016, -0.002),
    "topk": (41_000, 0.0011, 0.24),
}


def make_arm(
    name: str,
    *,
    num_steps: int = 120,
    start_s: float = 0.0,
    num_stages: int = 4,
    num_micro_batches: int = 4,
    steps_per_epoch: int = 20,
    bandwidth_bps: float = 40e6,
    seed: int = 7,
) -> list[list[StepRecord]]:
    """The records of an arm, step by step; losses fall like a small GPT's."""
    warm, codec_s, extra = _ARMS[name]
    noise = random.Random(f"{seed} {name}")
    batches = random.Random(seed)  # the same for all arms
    steps = []
    now = start_s
    for step in range(num_steps):
        epoch = step // steps_per_epoch
        learns = name.startswith("acsgd")
        cold = learns and epoch == 0
        ratio = 0.06 + 0.5 * math.exp(-step / 35)
        decay = 5.6 * math.exp(-step / 9) + 2.6 * math.exp(-step / 60)
        loss = 2.05 + extra * (1 - math.exp(-step / 30)) + decay / 2 + batches.gauss(0, 0.05)
        numbers = {
            "hit_rate": 0.0 if cold else 1.0,
            "delta_ratio": 1.0 if cold else ratio * noise.uniform(0.95, 1.05),
            "error": 0.004 if cold else 0.09 * ratio,
            "cold": 16.0 if cold else 0.0,
            "nacks": 0.0,
            "nonfinite": 0.0,
            "rows": 16.0 * min(step + 1, steps_per_epoch),
            "resident_bytes": 16.0 * min(step + 1, steps_per_epoch) * 16_384,
        }
        wobble = noise.uniform(0.97, 1.05)
        records = make_step(
            step=step,
            start_s=now,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            forward_s=0.008 * wobble,
            backward_s=0.016 * wobble,
            nbytes=66_000 if cold else warm,
            bandwidth_bps=bandwidth_bps,
            codec_s=codec_s,
            loss=loss,
            codec=numbers if learns else None,
        )
        steps.append(records)
        now = max(record.end_s for record in records) + 0.001
    return steps
