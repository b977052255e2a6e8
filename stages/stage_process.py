"""A process that can be a stage: what it is made of, and how it becomes one.

Path: stages.actor -> stages.stage_process -> stages.stage

Its threads: Ray's own for `run_step`; one for `net` (frames come in, in order); one for `control`
(abort, status); the private event loop that the stage lives on; its three lanes; and a courier
that pushes frames to the neighbours' actors.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import ray
import torch

from compressors.registry import sizing_codec
from netsim.loop_thread import LoopThread
from stages.assembly import assemble
from stages.black_box import BlackBox, BoxError
from stages.box_places import OFF, open_box
from stages.by_hand import StageByHand
from stages.compute import Compute
from stages.copies import Copies
from stages.courier import Courier
from stages.crowding import crowding
from stages.digest import hardware, software
from stages.keeper import Keeper
from stages.lanes import Recorder, ThreadLane, Unrecorded
from stages.mishap import Mishaps, faulty_links
from stages.optim import make_optimizer
from stages.room import room_for
from stages.spec import StageSpec
from stages.stage import Stage
from stages.state import StageState, block_digests
from stages.sync.seating import take_seat
from stages.sync.slow_lane import SlowLane
from stages.wiring import Lanes

T = TypeVar("T")

SPARE = -1
"""The index of an actor that is no stage yet."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep Python's lock while another wants it. A compute lane gives it up at
each torch operation; with Python's default of 5 ms it may wait that long to get on."""


def set_aside_what_stays() -> None:
    """Let Python's collector look only at what is made from now on.

    Torch and Ray are 200,000 objects that never go. A collection that walks through all of them
    holds Python's lock for some tenths of a second, whichever lane happened to trigger it.
    """
    gc.unfreeze()  # what was set aside for an earlier arm may be garbage by now
    gc.collect()
    gc.freeze()


class StageProcess:
    """Holds a stage, once `setup` has made one."""

    def __init__(self, index: int, replica: int | None = None) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        torch.set_num_threads(1)  # more threads than cores run many times slower
        self.index = index
        self.replica = replica
        self._loop = LoopThread(
            name=f"stage-{index}", on_error=lambda error: self.abort(repr(error))
        )
        self._peers: dict[int, Any] = {}
        self.has_order = False
        self._fleet: dict[int, Any] = {}
        self._copies: Copies[StageState] = Copies()
        self._stage: Stage | None = None
        self._device = "cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu"
        self._recorder = Recorder()
        self._lanes = Lanes(
            receive=ThreadLane("receive", self._recorder),
            compute=ThreadLane("compute", self._recorder),
            transmit=ThreadLane("transmit", self._recorder),
        )
        self._box_lane = ThreadLane("black-box", Unrecorded())
        self._courier = Courier(index, self.abort, put=ray.put)

    def __repr__(self) -> str:
        if self.index == SPARE:
            return "PipelineStage(spare)"
        replica = "" if self.replica is None else f"replica={self.replica}, "
        return f"PipelineStage({replica}stage={self.index})"

    def warm_up(self, spec: StageSpec) -> int:
        """Load what a stage needs, so that `setup` finds it; returns the process id.

        Reading `spec`, of any stage of the run, has loaded the modules of its model already.
        """
        # Torch's first optimizer loads torch's compiler: a second of CPU.
        weight = torch.nn.Parameter(torch.zeros(1, device=self._device))
        make_optimizer(spec.optim, [weight])
        torch.autograd.backward(weight.sum())
        for codec in (spec.activation_codec, spec.gradient_codec):
            sizing_codec(codec)
        software()
        set_aside_what_stays()
        return os.getpid()

    def become(self, index: int) -> None:
        """A spare takes the place of a stage."""
        self.index = self._courier.source = index

    def connect(self, peers: dict[int, Any]) -> None:
        """Learn the actors of the other stages."""
        self._peers = peers

    def setup(
        self, spec: StageSpec, samples: Any, transport: str = "push", reborn: bool = False
    ) -> dict[str, Any]:
        """Become a stage; whatever this actor was before is forgotten.

        `reborn` takes the place of a stage that died: its black box is left as it was found.
        """
        self._spec, self._samples = spec, fetched(samples)
        self._copies.clear()
        self._set_threads(spec.threads or threads_for(spec.sharing))
        compute = Compute(
            spec.build(),
            optim=spec.optim,
            loss=spec.loss,
            recompute=spec.recompute,
            precision=spec.precision,
            device=self._device,
            seed=spec.seed * 1009 + spec.node,
            first_block=spec.first_block,
        )
        self._recorder.offset_s = time.time() - time.monotonic() - spec.epoch_s
        self._recorder.cpu.clear()
        self._recorder.drain()
        self.close(keep_box=reborn)
        self._stage = self._do(self._assemble, compute, transport)
        self.hand = StageByHand(self._stage, self._loop)
        trouble = self._open_box(compute)
        if self._stage.keeper is not None and not reborn:
            self._loop.submit(self._stage.keeper.start_over()).result()
        if not reborn:  # whoever takes a place has done it as a spare, and is waited for now
            set_aside_what_stays()
        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "num_cores": num_cores(),
            "threads": torch.get_num_threads(),
            "device": self._device,
            "hardware": hardware(self._device),
            "crowding": crowding(),
            **software(),
            "blocks": block_digests(compute.module, spec.first_block),
            "num_parameters": sum(p.numel() for p in compute.parameters),
            "box_trouble": trouble,
            "room": room_for(
                spill=spec.activation_codec.spill_dir,
                log=None if (keeper := self._stage.keeper) is None else keeper.log_folder,
            ),
        }

    def _set_threads(self, count: int) -> None:
        """How many threads torch computes with: each thread that calls it has a number of its
        own, here (where costs are measured) and in the lane."""
        torch.set_num_threads(count)
        set_there = self._lanes.compute.run("sync", "threads", -1, torch.set_num_threads, count)
        self._loop.submit(set_there).result()

    def _open_box(self, compute: Compute) -> str:
        """Give the stage its black box; returns why it has none, if it should."""
        spec = self._spec
        if spec.black_box == OFF:
            return ""
        image_nbytes = 3 * sum(p.nbytes for p in compute.parameters)
        try:
            box = open_box(
                spec.black_box,
                run=spec.run,
                stage=spec.index,
                need_nbytes=2 * spec.num_stages * image_nbytes,  # all stages may be on this node
                rows_nbytes=spec.rows_nbytes,
                spill=spec.activation_codec.spill_dir if spec.rows_nbytes else None,
                gone=spec.gone,
            )
        except (OSError, BoxError) as error:
            return f"stage {spec.index} has no black box: {error}"
        self._do(self._keep_box, box)
        return ""

    def _keep_box(self, box: BlackBox) -> None:
        self.stage.keeper = Keeper(self.stage, box, self._box_lane)
        if self._spec.mishaps:
            watch = Mishaps(self._spec.mishaps)
            self.stage.on_point, box.on_write = watch.on_point, watch.on_write

    def close(self, keep_box: bool = False) -> None:
        """Let go of the stage: its rows, files and black box, which is removed unless another
        stage is to begin with it."""
        stage, self._stage = self._stage, None
        if stage is not None:
            self._loop.submit(_end(stage, keep_box=keep_box)).result()

    def _assemble(self, compute: Compute, transport: str) -> Stage:
        def deliver_to(target: int) -> Callable[[Any], None]:
            if transport == "refs":
                return lambda frame: self.hand.arrived(frame)
            generation = self._spec.generation
            # Looked up for each frame: a neighbour that died has a new actor.
            return lambda frame: self._courier.push(self._peers[target], target, generation, frame)

        stage = assemble(
            self._spec,
            compute=compute,
            samples=self._samples,
            lanes=self._lanes_of(self._spec),
            recorder=self._recorder,
            deliver_to=deliver_to,
            wrap_link=faulty_links(
                self._spec.link_faults,
                seed=self._spec.seed,
                note=lambda text: stage.control.events.append(text),
            ),
            session=max(1, int(1000 * (time.time() - self._spec.epoch_s))),
        )
        if self._spec.fleet is not None:
            self._seat = take_seat(stage, self._spec, deliver_to=self._post_to)
        if self._spec.mishaps:
            stage.on_point = Mishaps(self._spec.mishaps).on_point
        return stage

    def _lanes_of(self, spec: StageSpec) -> Lanes:
        if spec.fleet is None or not spec.fleet.slow:
            return self._lanes
        return replace(self._lanes, compute=SlowLane(self._lanes.compute))

    def _post_to(self, replica: int) -> Callable[[Any], None]:
        generation = self._spec.generation

        def post(frame: Any) -> None:
            peer = self._fleet.get(replica)  # looked up each time: replicas come and go
            if peer is not None:
                self._courier.post(peer, replica, generation, frame)

        return post

    def abort(self, why: str) -> None:
        """End the running step, if there is one."""
        if self._stage is not None:
            self._loop.call_soon(self._stage.abort, why)

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self.index} has not been set up")
        return self._stage

    def _do(self, work: Callable[..., T], *args: Any) -> T:
        """Do something on the stage's loop, and wait for it."""
        return self._loop.submit(_on_loop(work, *args)).result()


def fetched(given: Any) -> Any:
    """What a call was given, or was lent: a list of one ref (`ray_pipe.calls.lend`)."""
    return ray.get(given[0]) if isinstance(given, list) else given


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(sharing: int) -> int:
    """A fair part of the node's cores, where so many stages share them."""
    return max(1, num_cores() // sharing)


async def _on_loop(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


async def _end(stage: Stage, *, keep_box: bool) -> None:
    if stage.keeper is not None:
        await stage.keeper.settled()
        stage.keeper.close(keep_box=keep_box)
    stage.retire()
