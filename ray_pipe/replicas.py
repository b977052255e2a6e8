"""Several copies of the pipeline: every replica at its own pace, one row for each step of all.

Path: ray_pipe.pipeline -> ray_pipe.replicas

Each replica is shipped its own plans, a step ahead. How far they may part is their strategy's
business (`stages.sync`), which they settle among themselves; the driver only watches.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from ray_pipe.calls import Item
from ray_pipe.checkpoint_files import stage_file
from ray_pipe.pipeline import AHEAD, PATIENCE_DEADLINES, PATIENCE_S
from ray_pipe.pulse import PULSE_S
from ray_pipe.replica_members import Members, Track
from ray_pipe.replica_rows import RowsByStep, RowsByWork
from ray_pipe.replica_watch import Standstill
from ray_pipe.saving import Save
from stages.plan import StepPlan
from stages.record import StepRecord

TAIL = 4
"""So many steps of each replica before the end of shared work nobody is sent two steps at once."""

Records = list[StepRecord]


class ReplicaPipeline(Members):
    """All replicas of one arm, ready to train."""

    def train(self, steps: range | None = None) -> Generator[Records, None, None]:
        """Run the arm's steps (or some more); yields the records of each row, in order."""
        steps = range(self.arm.num_steps) if steps is None else steps
        if not steps:
            return
        rows: RowsByStep | RowsByWork
        rows = RowsByWork(steps.start, len(steps)) if self._by_work else RowsByStep(steps.start)
        while rows.num_given < len(steps):
            self._send(steps, rows)
            if not any(track.flight for track in self.tracks.values()):
                break
            self._hear_one(rows)
            for row in rows.ready(self._wanted(steps)):
                self._ask_generator()
                yield row
        if isinstance(rows, RowsByWork):
            self.settle(rows)
            for row in rows.rest():
                yield row
        self._ask_generator(wait=True)
        if steps.stop >= self.arm.num_steps:
            for newcomer in self.joining:
                newcomer.give_up("the run was over before it was ready")
            self.joining = []

    def settle(self, rows: RowsByStep | RowsByWork | None = None) -> None:
        """Let the steps that are in flight end. Where replicas wait for each other, those that are
        behind run as far as the others were sent: alone nobody would come to an end."""
        while True:
            level = max((track.next_step for track in self.tracks.values()), default=0)
            for track in self.tracks.values():
                if self._by_work:
                    self._leave_if_idle(track)
                elif track.next_step < level and len(track.flight) < AHEAD:
                    self._send_one(track)
            if not any(track.flight for track in self.tracks.values()):
                return
            self._hear_one(rows)

    def evaluate(self, plan: StepPlan) -> Records:
        """Forward passes of every replica with its own parameters; the loss is their mean."""
        self.settle()
        calls = {}
        for replica in self.alive:
            # Turns must rise: where a fast replica ran ahead its own step counts.
            own = max(plan.step, self.tracks[replica].next_step - 1)
            part = self.current(replace(plan, step=own), replica)
            for stage, handle in enumerate(self.actors.of(replica)):
                calls[handle.run_step.options(name=f"{self.arm.name} evaluation").remote(part)] = (
                    replica * self.num_stages + stage
                )
        records = self.gather(calls, doing="in an evaluation", step=plan.step)
        losses = [record.loss for record in records if record.loss is not None]
        mean = sum(losses) / len(losses) if losses else None
        return [replace(record, step=plan.step, loss=mean) for record in records]

    def current(self, plan: StepPlan, replica: int = 0) -> StepPlan:
        """The plan with what may have changed since it was made; a slow replica has more time."""
        slow = max((one.factor for one in self.fleet.slow), default=1.0)
        return replace(plan, attempt=self.attempt, deadline_s=slow * self.deadlines.value_s)

    def _wanted(self, steps: range) -> dict[int, int]:
        """Replicas without which no row is complete, and their first steps."""
        return {
            track.index: track.since
            for track in self.tracks.values()
            if self._by_work or track.num_done < steps.stop
        }

    def _send(self, steps: range, rows: RowsByStep | RowsByWork) -> None:
        """Keep every replica a step ahead, as long as there is work."""
        progress = True
        while progress:
            progress = False
            for track in sorted(self.tracks.values(), key=lambda one: one.next_step):
                if self._may_send(track, steps, rows):
                    self._send_one(track)
                    progress = True
        if self._by_work:
            for track in self.tracks.values():
                self._leave_if_idle(track)

    def _may_send(self, track: Track, steps: range, rows: RowsByStep | RowsByWork) -> bool:
        if track.next_step == track.stop:
            return False
        if isinstance(rows, RowsByStep):
            ahead = len(track.flight) < AHEAD and track.next_step < steps.stop
            return ahead and not self._is_barrier(track.next_step)
        flight = sum(len(other.flight) for other in self.tracks.values())
        left = (rows.num_rows - rows.num_given) * len(self.tracks) - rows.num_waiting - flight
        return left > 0 and len(track.flight) < (AHEAD if left > TAIL * len(self.tracks) else 1)

    def _is_barrier(self, step: int) -> bool:
        """The state after the step before is to be saved, and not everybody was sent that one."""
        every = self.arm.config.checkpoint.every
        if self.on_sent is None or every is None or step % every or not step:
            return False
        return any(other.next_step < step for other in self.tracks.values())

    def _send_one(self, track: Track) -> None:
        # A newcomer beyond the first replicas shares the samples of one of them.
        shard = track.index % self.arm.num_replicas
        step = track.next_step
        item = Item(plan=self.arm.plan(step, shard))
        plan = self.current(item.plan, track.index)
        item.calls = {
            handle.run_step.options(name=f"{self.arm.name} replica {track.index} step").remote(
                plan
            ): stage
            for stage, handle in enumerate(self.actors.of(track.index))
        }
        track.flight.append(item)
        track.next_step += 1
        track.has_left = False
        if self.on_sent is None:
            return
        if self._by_work:
            sent = sum(other.next_step for other in self.tracks.values())
            if sent % len(self.tracks) == 0:
                self.on_sent(sent // len(self.tracks) - 1)
        elif all(other.next_step > step for other in self.tracks.values()):
            self.on_sent(step)

    def _hear_one(self, rows: RowsByStep | RowsByWork | None) -> None:
        """Wait for one call to end, and see what that means."""
        owner = {
            ref: (track, item, stage)
            for track in self.tracks.values()
            for item in track.flight
            for ref, stage in item.calls.items()
        }
        coming = [ref for newcomer in self.joining for ref in newcomer.calls]
        ready, _ = ray.wait([*owner, *coming], num_returns=1, timeout=PULSE_S)
        if ready and ready[0] not in owner:
            ready, _ = ray.wait(list(owner), num_returns=1, timeout=0.05) if owner else ([], [])
            self._tend()
        elif self.joining:
            self._tend()
        if not ready:
            self._look()
            return
        track, item, stage = owner[ready[0]]
        try:
            item.results[stage] = ray.get(ready[0])
        except RayError as error:
            self.lose(track.index, {stage: error})
            return
        del item.calls[ready[0]]
        self.watch.heard(track.index * self.num_stages + stage)
        if not item.calls:
            track.flight.remove(item)
            track.num_done = item.plan.step + 1
            records = [item.results[place] for place in sorted(item.results)]
            self.book.ended(track.index, item.plan.step, records)
            self._leave_if_done(track)
            if rows is not None:
                rows.add(track.index, item.plan.step, records)
        self._look()

    def _look(self) -> None:
        """Are those alive who owe a step?"""
        slow = max((one.factor for one in self.fleet.slow), default=1.0)
        patience_s = max(PATIENCE_S, PATIENCE_DEADLINES * slow * self.deadlines.value_s)
        owing = {
            track.index * self.num_stages + stage
            for track in self.tracks.values()
            for item in track.flight
            for stage in item.calls.values()
        }
        try:
            found = self.watch.look(owing, patience_s=patience_s)
        except Standstill:
            if not self.joining:
                raise
            for newcomer in self.joining:  # they may wait for it
                newcomer.give_up(f"no step of the others ended within {patience_s:.0f} s")
            self.joining = []
            self.watch.changed()
            return
        lost: dict[int, dict[int, BaseException]] = {}
        for place, error in found.items():
            replica, stage = divmod(place, self.num_stages)
            lost.setdefault(replica, {})[stage] = error
        for replica, errors in lost.items():
            self.lose(replica, errors)

    def _leave_if_idle(self, track: Track) -> None:
        """Of shared work: a replica without a step is not waited for at a group."""
        if not track.flight and not track.has_left:
            track.has_left = True
            self.actors.of(track.index)[0].leave.remote()

    def _leave_if_done(self, track: Track) -> None:
        """Where replicas keep near each other: one that has done all its steps holds nobody."""
        if not self._by_work and track.num_done == self.arm.num_steps and not self.can_train_on:
            self.actors.of(track.index)[0].leave.remote()

    def start_save(self, key: str, step: int, folder: str | None) -> Save:
        """Have every stage copy its state after the step that its replica was sent last."""
        handles: dict[int, Any] = {}
        for track in (self.tracks[index] for index in self.alive):
            for handle in self.actors.of(track.index):
                handle.keep_state.remote(key, track.next_step - 1)
                handles[len(handles)] = handle
        return Save(
            handles,
            lambda place: handles[place].write_kept.remote(key, folder, stage_file(place)),
            patience_s=self.patience_s(),
        )
