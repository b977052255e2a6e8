"""Calls of a stage's actor that save its state, and bring it back.

Path: stages.actor -> stages.actor_saving -> stages.state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from stages.record import StepRecord
from stages.stage_process import StageProcess, fetched
from stages.state import StageState
from stages.storage import Folder

KEEP_S = 300.0
"""For all shards to take their snapshots; one that does not answer is replaced long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a stage can go back to, and what it did in the steps that its box remembers."""

    live: int | None
    box: tuple[int, ...]
    records: tuple[StepRecord, ...]


class SavingCalls(StageProcess):
    """Checkpoints; and after a failure the driver asks who has what, and where to go on."""

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer of this stage."""
        return self.stage.compute.state_dict()

    def save_state(self) -> Any:
        """The stage between two steps, as the bytes of a safetensors file in a numpy array."""
        state = self._loop.submit(self.stage.save_state()).result()
        return np.frombuffer(state.to_bytes(), dtype=np.uint8)

    def keep_state(self, key: str, step: int) -> None:
        """Copy the stage after a step, for `write_kept`; training goes on at once.

        If that step was aborted the state is another one, and `write_kept` refuses it. Stage 0 of a
        click model waits for its gradients first, and has the shards keep theirs.
        """
        try:
            self._copies.put(key, self._copy(key, step))
        except Exception as error:  # told by `write_kept`, whose result is looked at
            self._copies.put(key, error)
            for shard in self._shards():
                shard.keep_not.remote(key, str(error))

    def _copy(self, key: str, step: int) -> StageState:
        if self.stage.feed is not None:
            self._loop.submit(self.stage.feed.drain()).result()
            ray.get([shard.keep.remote(key) for shard in self._shards()], timeout=KEEP_S)
        state = self._loop.submit(self.stage.save_state()).result()
        if state.step != step:
            raise RuntimeError(f"it has committed step {state.step}, not {step}")
        return state

    def _shards(self) -> list[Any]:
        """Of stage 0 of a click model; others have none."""
        if self._stage is None or self._stage.feed is None:
            return []
        return [actor for node, actor in self._peers.items() if node >= self._stage.num_stages]

    def write_kept(self, key: str, folder: str | None, name: str) -> Any:
        """Write what `keep_state` copies to a file, beside training: its `FileNote`. Waits for it.

        Without a folder (none that this machine sees too), its bytes.
        """
        state = self._copies.take(key)
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
        state = StageState.from_bytes(np.asarray(fetched(saved)).tobytes())
        self._loop.submit(self.stage.load_state(state)).result()
        if self.stage.keeper is not None:
            self._loop.submit(self.stage.keeper.start_over()).result()
        return state.step

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
