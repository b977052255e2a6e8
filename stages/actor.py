"""The stage's Ray face: what the driver and the other stages may call.

Path: ray_pipe.pipeline -> stages.actor -> stages.stage

Threads of an actor: Ray's own for `run_step`; one for `net` (frames come in, in order); one for
`control` (abort, status); the private event loop that the stage lives on; its three lanes; and a
courier that pushes frames to the neighbours' actors. Frames above Ray's inline limit travel as
object refs owned by this actor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from compressors import kernels
from compressors.registry import sizing_codec
from netsim.loop_thread import LoopThread
from stages.assembly import assemble
from stages.black_box import BlackBox, BoxError
from stages.box_places import OFF, open_box
from stages.by_hand import StageByHand
from stages.compute import Compute
from stages.courier import VIEW_NBYTES, Courier
from stages.crowding import crowding
from stages.digest import source_digest
from stages.keeper import Keeper
from stages.lanes import Recorder, ThreadLane, Unrecorded
from stages.measure import measure_stage
from stages.mishap import Mishaps, faulty_links
from stages.optim import make_optimizer
from stages.plan import StepPlan
from stages.record import StepRecord
from stages.spec import StageSpec
from stages.stage import Stage
from stages.state import StageState, as_newcomer, block_digests
from stages.state_tree import from_tree
from stages.storage import Folder
from stages.sync.seat import Seat
from stages.sync.seating import take_seat
from stages.sync.slow_lane import SlowLane
from stages.sync.strategy import MemberEvent
from stages.wiring import Lanes

T = TypeVar("T")

SPARE = -1
"""The index of an actor that is no stage yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a stage can go back to, and what it did in the steps that its box remembers."""

    live: int | None
    box: tuple[int, ...]
    records: tuple[StepRecord, ...]


async def _end(stage: Stage) -> None:
    if stage.keeper is not None:
        await stage.keeper.settled()
        stage.keeper.close()
    stage.retire()


async def _on_loop(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


class StageActor:
    """A process that can be a stage. Wrapped with `ray.remote` where it is used.

    No method may be `async`: one would make this an asyncio actor, whose calls Ray reorders.
    """

    def __init__(self, index: int, replica: int | None = None) -> None:
        torch.set_num_threads(1)  # more threads than cores run many times slower
        self.index = index
        self.replica = replica
        self._loop = LoopThread(
            name=f"stage-{index}", on_error=lambda error: self.abort(repr(error))
        )
        self._peers: dict[int, Any] = {}
        self.has_order = False
        self._fleet: dict[int, Any] = {}
        self._kept: dict[str, StageState] = {}
        self._stage: Stage | None = None
        self._device = "cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu"
        self._recorder = Recorder()
        self._lanes = Lanes(
            receive=ThreadLane("receive", self._recorder),
            compute=ThreadLane("compute", self._recorder),
            transmit=ThreadLane("transmit", self._recorder),
        )
        self._box_lane = ThreadLane("black-box", Unrecorded())
        self._courier = Courier(index, self.abort)

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
        kernels.core()
        source_digest()
        return os.getpid()

    def become(self, index: int) -> None:
        """A spare takes the place of a stage."""
        self.index = self._courier.source = index

    def connect(self, peers: dict[int, Any]) -> None:
        """Learn the actors of the other stages."""
        self._peers = peers

    def connect_fleet(self, fleet: dict[int, Any]) -> None:
        """Learn the same stage's actors of the other replicas, and the Group Generator."""
        self._fleet = fleet

    def setup(
        self, spec: StageSpec, samples: Any, transport: str = "push", reborn: bool = False
    ) -> dict[str, Any]:
        """Become a stage; whatever this actor was before is forgotten.

        `reborn` takes the place of a stage that died: its black box is left as it was found.
        """
        self._spec, self._samples = spec, samples
        compute = Compute(
            spec.build(),
            optim=spec.optim,
            loss=spec.loss,
            recompute=spec.recompute,
            precision=spec.precision,
            device=self._device,
            seed=spec.seed * 1009 + spec.node,
        )
        self._recorder.offset_s = time.time() - time.monotonic() - spec.epoch_s
        self._recorder.cpu.clear()
        self._recorder.drain()
        self.close()
        self._stage = self._loop.submit(_on_loop(self._assemble, compute, transport)).result()
        self.hand = StageByHand(self._stage, self._loop)
        trouble = self._open_box(compute)
        if self._stage.keeper is not None and not reborn:
            self._loop.submit(self._stage.keeper.start_over()).result()
        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "num_cores": len(os.sched_getaffinity(0)),
            "device": self._device,
            "crowding": crowding(),
            "core": kernels.core(),
            "source": source_digest(),
            "blocks": block_digests(compute.module, spec.first_block),
            "num_parameters": sum(p.numel() for p in compute.parameters),
            "box_trouble": trouble,
        }

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
            )
        except (OSError, BoxError) as error:
            return f"stage {spec.index} has no black box: {error}"
        self._loop.submit(_on_loop(self._keep_box, box)).result()
        return ""

    def _keep_box(self, box: BlackBox) -> None:
        self.stage.keeper = Keeper(self.stage, box, self._box_lane)
        if self._spec.mishaps:
            watch = Mishaps(self._spec.mishaps)
            self.stage.on_point, box.on_write = watch.on_point, watch.on_write

    def close(self) -> None:
        """Let go of the stage: its rows, files and black box."""
        stage, self._stage = self._stage, None
        if stage is not None:
            self._loop.submit(_end(stage)).result()

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
            wrap_link=faulty_links(self._spec.link_faults, seed=self._spec.seed),
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

    def measure(
        self, ids: tuple[int, ...], source: Any, repeats: int
    ) -> tuple[dict[str, float], Any]:
        """CPU seconds of this stage's pieces of work, and its output for the next stage."""
        tensor = None if source is None else torch.from_numpy(np.array(source))
        costs, output = measure_stage(
            self._spec, self._samples, ids, tensor, device=self._device, repeats=repeats
        )
        return costs, None if output is None else output.cpu().numpy()

    def cpu_beside_lanes(self) -> float:
        """CPU seconds of this process so far that were no work of a lane: what messages cost."""
        return time.process_time() - self._recorder.cpu_total

    def probe(self, target: int, nbytes: int, count: int) -> tuple[float, float]:
        """CPU seconds that one message of `nbytes` costs this process and the one it goes to."""
        peer = self._peers[target]
        payload: Any = bytes(nbytes) if nbytes <= VIEW_NBYTES else np.zeros(nbytes, np.uint8)
        before = ray.get(peer.cpu_seconds.remote())
        start = time.process_time()
        ray.get([peer.discard.remote(payload) for _ in range(count)])
        own = time.process_time() - start
        return own / count, (ray.get(peer.cpu_seconds.remote()) - before) / count

    def cpu_seconds(self) -> float:
        """CPU time of this process so far, all threads."""
        return time.process_time()

    def discard(self, frame: Any) -> None:
        """Where probes end."""

    # --- the refs transport: the driver gives every order ---------------------------------
    # `after` is the token of the call before: a dependency, so that calls run in order.

    def begin_step(self, plan: StepPlan) -> None:
        """Open a step."""
        self.hand.begin(plan)

    def forward(self, micro_batch: int, frame: Any, after: Any) -> tuple[None, Any]:
        """One forward pass: (token, frame for the next stage)."""
        return None, self.hand.forward(micro_batch, frame)

    def backward(self, micro_batch: int, frame: Any, after: Any) -> tuple[None, Any]:
        """One backward pass: (token, frame for the previous stage)."""
        return None, self.hand.backward(micro_batch, frame)

    def carry(self, target: int, kind: str, frame: Any) -> Any:
        """The link: returns the frame when it has arrived."""
        return self.hand.carry(target, kind, frame)

    def squared_norms(self, after: Any) -> list[float]:
        """This stage's part of the global norm."""
        return self.hand.squared_norms()

    def finish_step(self, factor: float, norm: float, after: Any) -> StepRecord:
        """Update, commit, record."""
        return replace(self.hand.finish(factor, norm), crowding=crowding())

    def run_step(self, plan: StepPlan) -> StepRecord:
        """Run one step to its commit."""
        record = self._loop.submit(self.stage.run(plan)).result()
        return replace(record, crowding=crowding())

    def deliver(self, source: int, generation: int, frame: Any) -> None:
        """A frame of another stage: enqueue only. What is left of an earlier arm is dropped."""
        if self._stage is not None and generation == self._spec.generation:
            self._loop.call_soon(self._stage.on_frame, source, frame)

    # --- embeddings: stage 0 is the shards' client ----------------------------------------

    def settle_embeddings(self) -> dict[str, Any]:
        """Wait until every gradient has reached its shard; what happened so far."""
        feed = self.stage.feed
        assert feed is not None
        self._loop.submit(feed.drain()).result()
        return self._loop.submit(_on_loop(feed.numbers)).result()

    def nudge(self, shard: int, node: int, actor: Any) -> None:
        """A shard has a new process: what the old one did not answer is asked again now."""
        self._peers[node] = actor
        if self._stage is not None and self._stage.feed is not None:
            self._loop.call_soon(self._stage.feed.nudge, shard)

    def scores(self) -> Any:
        """Logits and labels of the last evaluation, from the last stage."""
        collected: Any = self.stage.compute.loss
        return collected.scores()

    # --- replicas --------------------------------------------------------------------------

    def deliver_letter(self, generation: int, frame: Any) -> None:
        """A letter of another replica, or of the Group Generator: enqueue only."""
        if self._stage is not None and generation == self._spec.generation:
            self._loop.call_soon(self._seat.on_frame, frame)

    def on_member(self, event: MemberEvent) -> None:
        """A replica came or went."""
        self._loop.submit(_on_loop(self.seat.on_member, event)).result()

    def leave(self) -> None:
        """There are no more steps for this replica; it still answers others."""
        self._loop.submit(_on_loop(self.seat.leave)).result()

    def strategy_state(self) -> dict[str, Any]:
        """What a newcomer adopts."""
        return self._loop.submit(_on_loop(self.seat.strategy_state)).result()

    def adopt(self, state: dict[str, Any], k: int) -> None:
        """Join: others may write from now on; the first iteration will be `k`."""
        self._loop.submit(_on_loop(self.seat.adopt, state, k)).result()

    def take_over(self, saved: Any, k: int) -> None:
        """Become what a donor saved, before its iteration `k`."""
        state = StageState.from_bytes(np.asarray(saved).tobytes())
        self._loop.submit(self.stage.load_state(as_newcomer(state))).result()
        sync = from_tree(state.notes["sync"], state.arrays)
        self._loop.submit(_on_loop(self.seat.take_over, sync, k)).result()

    @property
    def seat(self) -> Seat:
        assert self._stage is not None
        assert self._spec.fleet is not None
        return self._seat

    def abort(self, why: str) -> None:
        """End the running step, if there is one."""
        if self._stage is not None:
            self._loop.call_soon(self._stage.abort, why)

    def is_at_work(self) -> bool:
        """Whether an order of the driver is being carried out at this moment."""
        return self.has_order

    def sees_stopped(self, info: Mapping[str, Any]) -> bool:
        """Whether the stage that `setup` returned `info` of was stopped (SIGSTOP), seen from here,
        the same node."""
        try:
            stat = Path(f"/proc/{info['pid']}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def end_process(self, info: Mapping[str, Any]) -> bool:
        """Kill the stage that `setup` returned `info` of, if it is on this node and still there."""
        pid: int = info["pid"]
        if info["node"] != ray.get_runtime_context().get_node_id() or pid == os.getpid():
            return False
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                return False
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def ping(self) -> int:
        """The process id, as a sign of life."""
        return os.getpid()

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer of this stage."""
        return self.stage.compute.state_dict()

    def save_state(self) -> Any:
        """The stage between two steps, as the bytes of a safetensors file in a numpy array."""
        state = self._loop.submit(self.stage.save_state()).result()
        return np.frombuffer(state.to_bytes(), dtype=np.uint8)

    def keep_state(self, key: str, step: int) -> str:
        """Copy the stage after a step, for `write_kept`; training goes on at once.

        If that step was aborted the state is another one, and is refused. Stage 0 of a click model
        waits for its gradients first, and has the shards keep theirs.
        """
        if self.stage.feed is not None:
            self._loop.submit(self.stage.feed.drain()).result()
            shards = [actor for node, actor in self._peers.items() if node >= self.stage.num_stages]
            ray.get([actor.keep.remote(key) for actor in shards])
        state = self._loop.submit(self.stage.save_state()).result()
        if state.step != step:
            raise RuntimeError(f"it has committed step {state.step}, not {step}")
        self._kept[key] = state
        return key

    def write_kept(self, key: str, folder: str | None, name: str) -> Any:
        """Write what was kept to a file, beside training: its `FileNote`.

        Without a folder (none that this machine sees too), its bytes.
        """
        state = self._kept.pop(key)
        if folder is None:
            return np.frombuffer(state.to_bytes(), dtype=np.uint8)
        return Folder(folder).write(name, state.chunks())

    def sees(self, folder: str, name: str, token: bytes) -> bool:
        """Whether a file that the driver wrote is the same here: storage is shared."""
        try:
            return Folder(folder).read(name) == token
        except OSError:
            return False

    def load_state(self, saved: Any) -> int:
        """Become what `save_state` returned; returns the step that was committed last."""
        state = StageState.from_bytes(np.asarray(saved).tobytes())
        self._loop.submit(self.stage.load_state(state)).result()
        if self.stage.keeper is not None:
            self._loop.submit(self.stage.keeper.start_over()).result()
        return state.step

    # --- after a failure: the driver asks who has what, and where to go on ----------------

    def status(self) -> Status:
        """What this stage can go back to; ends what an abort has left."""

        async def look() -> tuple[int | None, list[int], list[StepRecord]]:
            await self.stage.settle()
            keeper = self.stage.keeper
            if keeper is None:
                return self.stage.intact, [], []
            await keeper.settled()
            return self.stage.intact, keeper.steps(), keeper.records()

        live, steps, records = self._loop.submit(look()).result()
        return Status(live=live, box=tuple(steps), records=tuple(records))

    def restore(self, step: int, saved: Any = None) -> None:
        """Go back to a step: as it is, from the black box, or from what `save_state` returned."""
        stage = self.stage
        if saved is not None:
            self.load_state(saved)
        elif stage.intact != step:
            assert stage.keeper is not None
            self._loop.submit(stage.keeper.restore(step)).result()

    def costs(self) -> dict[str, list[float]]:
        """CPU seconds of the latest single pieces of work, by phase."""
        return {phase: list(seconds) for phase, seconds in self._recorder.cpu.items()}

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self.index} has not been set up")
        return self._stage
