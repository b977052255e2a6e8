"""Runs that were saved on the way, made without Ray: real stages and files, virtual time.

run = SavedRun(tmp_path / "runs" / "demo", steps=6, every=2)
run.train()
run.store.checkpoints("acsgd")
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from netsim.clock import run_virtual
from ray_pipe.arm_progress import progress_of, restore_meter
from ray_pipe.checkpoint import Pace, Saver
from ray_pipe.checkpoint_files import CheckpointStore, stage_file
from ray_pipe.config import RunConfig
from ray_pipe.metrics import ArmMeter
from ray_pipe.plans import Arm, arms_of
from ray_pipe.resume import Start, default_folder, load
from ray_pipe.workload import gpt_workload
from stages.compute import Compute
from stages.digest import hardware
from stages.rehearsal import LocalPipeline
from stages.state import StageState, block_digests
from stages.storage import Folder, StorageError

SMALL = {
    "model.name": "gpt-nano",
    "model.layers": 4,
    "model.width": 16,
    "model.heads": 2,
    "model.context": 8,
    "data.num_samples": 12,
    "pipeline.stages": 2,
    "pipeline.micro_batches": 2,
    "pipeline.micro_batch_size": 3,
    "network.bandwidth_bps": "unlimited",
}


def make_config(
    out: Path | str, name: str, *, steps: int, every: int | None, **more: Any
) -> RunConfig:
    dotted = {key.replace("__", "."): value for key, value in more.items()}
    settings = {"compare": [], "codec.name": "acsgd", **SMALL, **dotted}
    return RunConfig.from_dict(
        {"out": str(out), "name": name, "steps": steps, "checkpoint.every": every, **settings}
    )


class FakePipeline:
    """What the saver and resuming need of `ray_pipe.pipeline.Pipeline`, in this process."""

    def __init__(self, stages: Any, *, shared: bool = True) -> None:
        self.stages = stages
        self.infos = [
            {
                "blocks": block_digests(s.compute.module, s.first_block),
                "hardware": hardware("cpu"),
            }
            for s in stages
        ]
        self.shared = shared
        self.now: list[StageState] = []
        self.loaded: list[StageState] = []
        self.fail: dict[int, Exception] = {}
        """Stages that cannot save, and why."""

        self.writing: set[str] = set()
        """Keys of saves that take their time."""

        self.slow = False
        self.heals = False
        """Whether stages can save again once they were asked whether they are there."""

        self.num_check_ins = 0

    def see(self, folder: str, name: str, token: bytes) -> bool:
        return self.shared and Folder(folder).read(name) == token

    def start_save(self, key: str, step: int, folder: str | None) -> FakeSave:
        results: list[Any] = []
        for index, state in enumerate(self.now):
            try:
                if index in self.fail:
                    raise self.fail[index]
                raw = np.frombuffer(state.to_bytes(), dtype=np.uint8)
                chunks = state.chunks()
                results.append(
                    raw if folder is None else Folder(folder).write(stage_file(index), chunks)
                )
            except (StorageError, RuntimeError) as error:
                results.append(error)
        if self.slow:
            self.writing.add(key)
        return FakeSave(self, key, results)

    def file_of(self, index: int) -> str:
        return stage_file(index)

    def check_in(self) -> None:
        self.num_check_ins += 1
        if self.heals:
            self.fail = {}

    def load_states(self, states: list[StageState]) -> None:
        self.loaded = list(states)


@dataclass
class FakeSave:
    """What `ray_pipe.saving.Save` promises."""

    pipeline: FakePipeline
    key: str
    found: list[Any]

    def results(self, *, wait: bool) -> list[Any] | None:
        if self.key in self.pipeline.writing and not wait:
            return None
        self.pipeline.writing.discard(self.key)
        return self.found


@dataclass(kw_only=True)
class SavedRun:
    """One arm of a run, trained in virtual time and saved as the driver does."""

    path: Path
    steps: int = 6
    every: int | None = 2
    shared: bool = True
    must_write: bool = True
    pace: Pace | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    start: Start | None = None
    at_step: Any = None
    """Called with (pipeline, step) before a step is saved."""

    losses: list[float] = field(default_factory=list)
    final: list[StageState] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Instead of sleeping."""

    @property
    def config(self) -> RunConfig:
        return make_config(
            self.path.parent, self.path.name, steps=self.steps, every=self.every, **self.settings
        )

    @property
    def arm(self) -> Arm:
        config = self.config
        return arms_of(config, gpt_workload(config))[0]

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(default_folder(self.config, str(self.path)))

    def train(self, steps: int | None = None) -> SavedRun:
        """Run the arm, or its first steps, saving where it is due."""
        run_virtual(self._train(self.arm, self.steps if steps is None else steps))
        return self

    async def _train(self, arm: Arm, steps: int) -> None:
        specs = arm.specs()

        def compute_of(index: int) -> Compute:
            spec = specs[index]
            return Compute(spec.build(), optim=spec.optim, loss=spec.loss, seed=index)

        local = LocalPipeline(specs=specs, compute_of=compute_of, samples=arm.workload.samples)
        fake = FakePipeline(local.stages, shared=self.shared)
        meter = ArmMeter(arm.name)
        if self.start is not None and self.start.checkpoint is not None:
            assert self.start.progress is not None
            self.warnings += [*self.start.notes, *load(fake, self.start, arm)]
            for stage, state in zip(local.stages, fake.loaded, strict=True):
                await stage.load_state(state)
            restore_meter(meter, self.start.progress)
        saver = Saver(
            self.store,
            fake,
            arm,
            run_name=self.path.name,
            progress=lambda: progress_of(meter, [], None, num_steps=arm.num_steps),
            on_warning=self.warnings.append,
            pause=self.pauses.append,
            must_write=self.must_write,
            pace=self.pace,
        )
        if self.start is not None:
            saver.newest = self.start.checkpoint
        self.saver, self.pipeline = saver, fake
        for step in range(len(meter.rows), steps):
            (records,) = await local.run([arm.plan(step)])
            fake.now = [await stage.save_state() for stage in local.stages]
            if self.at_step is not None:
                self.at_step(fake, step)
            saver.sent(step)
            meter.add(records)
            saver.recorded(step)
        saver.finish()
        self.losses = [row.loss for row in meter.rows if row.loss is not None]
        self.final = fake.now
        if steps == arm.num_steps:
            numbers = progress_of(meter, [], None, num_steps=arm.num_steps)
            self.store.finish(arm.name, numbers)
        await asyncio.sleep(0)
