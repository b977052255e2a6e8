"""The stage's Ray face; the only file here that imports ray.

Path: ray_pipe.driver -> stages.actor -> stages.stage

Threads of an actor: Ray's own for `run_step`; one for `net` (frames come in, in order); one for
`control` (abort, status); the private event loop that the stage lives on; its three lanes; and a
courier that pushes frames to the neighbours' actors. Frames above Ray's inline limit travel as
object refs owned by this actor.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import nn

from compressors.registry import CodecSpec
from netsim.loop_thread import LoopThread
from netsim.topology import Topology
from stages.assembly import assemble
from stages.compute import Compute
from stages.lanes import Recorder, ThreadLane
from stages.loss import LossFn
from stages.optim import OptimSpec
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.stage import Lanes, Stage

log = logging.getLogger("ray_pipe")

INLINE_NBYTES = 100 * 1024
"""Ray sends arguments up to this size with the call; larger ones go through the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """All that an actor needs to become a stage of an arm."""

    index: int
    num_stages: int
    build: Callable[[], nn.Module]
    loss: LossFn | None
    optim: OptimSpec
    activation_codec: CodecSpec
    gradient_codec: CodecSpec
    topology: Topology
    dataset: str
    """Digest of the data: rows of one set never serve another."""

    replica: int = 0
    recompute: bool = False
    precision: str = "fp32"
    seed: int = 0
    epoch_s: float = 0.0
    """`time.time()` at the start of the run: spans of all stages are counted from it."""


class Courier:
    """Pushes frames to other actors in order, and notices when a push fails."""

    def __init__(self, source: int, on_error: Callable[[str], None]) -> None:
        self._source = source
        self._on_error = on_error
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="courier")
        self._pending: dict[Any, int] = {}

    def push(self, peer: Any, target: int, frame: bytes) -> None:
        """Hand a frame to an actor; returns at once."""
        self._pool.submit(self._push, peer, target, frame)

    def _push(self, peer: Any, target: int, frame: bytes) -> None:
        try:
            payload: Any = frame
            if len(frame) > INLINE_NBYTES:
                payload = np.frombuffer(frame, dtype=np.uint8)  # read in place at the other end
            self._pending[peer.deliver.remote(self._source, payload)] = target
            done, _ = ray.wait(
                list(self._pending), num_returns=len(self._pending), timeout=0, fetch_local=False
            )
            for ref in done:
                target = self._pending.pop(ref)
                ray.get(ref)
        except RayError as error:
            self._on_error(f"pushing to stage {target} failed: {type(error).__name__}")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class StageActor:
    """A process that can be a stage. Wrapped with `ray.remote` where it is used."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)  # more threads than cores run many times slower
        self.index = index
        self._loop = LoopThread(name=f"stage-{index}")
        self._peers: dict[int, Any] = {}
        self._stage: Stage | None = None
        self._recorder = Recorder()
        self._lanes = Lanes(
            receive=ThreadLane("receive", self._recorder),
            compute=ThreadLane("compute", self._recorder),
            transmit=ThreadLane("transmit", self._recorder),
        )
        self._courier = Courier(index, self.abort)

    def __repr__(self) -> str:
        return f"PipelineStage(stage={self.index})"

    def connect(self, peers: dict[int, Any]) -> None:
        """Learn the actors of the other stages."""
        self._peers = peers

    def setup(self, spec: StageSpec, samples: Any) -> dict[str, Any]:
        """Become a stage; whatever this actor was before is forgotten."""
        device = "cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu"
        compute = Compute(
            spec.build(),
            optim=spec.optim,
            loss=spec.loss,
            recompute=spec.recompute,
            precision=spec.precision,
            device=device,
        )
        self._recorder.offset_s = time.time() - time.monotonic() - spec.epoch_s
        self._recorder.cpu.clear()
        self._recorder.drain()
        self._stage = self._loop.submit(self._assemble(spec, compute, samples)).result()
        return {
            "pid": os.getpid(),
            "device": device,
            "num_parameters": sum(p.numel() for p in compute.parameters),
        }

    async def _assemble(self, spec: StageSpec, compute: Compute, samples: Any) -> Stage:
        def deliver_to(target: int) -> Callable[[Any], None]:
            return lambda frame: self._courier.push(self._peers[target], target, frame)

        return assemble(
            spec,
            compute=compute,
            samples=samples,
            lanes=self._lanes,
            recorder=self._recorder,
            deliver_to=deliver_to,
        )

    def run_step(self, plan: StepPlan) -> StepRecord:
        """Run one step to its commit."""
        return self._loop.submit(self.stage.run(plan)).result()

    def deliver(self, source: int, frame: Any) -> None:
        """A frame of another stage: enqueue only."""
        self._loop.call_soon(self.stage.on_frame, source, frame)

    def abort(self, why: str) -> None:
        """End the running step, if there is one."""
        if self._stage is not None:
            self._loop.call_soon(self._stage.abort, why)

    def ping(self) -> int:
        """The process id, as a sign of life."""
        return os.getpid()

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer of this stage."""
        return self.stage.compute.state_dict()

    def costs(self) -> dict[str, list[float]]:
        """CPU seconds of single pieces of work, by phase, since `setup`."""
        return self._recorder.cpu

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self.index} has not been set up")
        return self._stage


CONCURRENCY = {"net": 1, "control": 1}


def remote_stage(index: int, *, name: str, num_gpus: float) -> Any:
    """Start a stage actor. State would be lost by a restart, so Ray must not restart it."""
    cls: Any = type("PipelineStage", (StageActor,), {})
    for method, group in {"deliver": "net", "abort": "control", "ping": "control"}.items():
        setattr(cls, method, ray.method(concurrency_group=group)(_own(getattr(StageActor, method))))
    remote = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups=CONCURRENCY)(cls)
    return remote.options(name=name, num_gpus=num_gpus).remote(index)


def _own(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method that Ray may mark without touching the plain class."""

    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    call.__name__ = method.__name__
    call.__doc__ = method.__doc__
    return call
