"""Where a run goes on: finds checkpoints, refuses those of another run, loads them.

An arm that is done is not trained again; one that was stopped goes on after its newest whole
checkpoint, or the one that was asked for. What would make the state meaningless (another model,
data, order, codec) is refused by name; what only makes the rest of the run another one (a learning
rate) is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray_pipe.checkpoint import code_version, data_of
from ray_pipe.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    locate,
)
from ray_pipe.config import RunConfig
from ray_pipe.plans import Arm
from ray_pipe.recovery import Source
from ray_pipe.replica_plans import is_deterministic
from stages.recut import recut
from stages.state import StageState, StateError
from stages.storage import Folder, StorageError

MUST_MATCH = (
    "task",
    "seed",
    "model",
    "eval",
    "optim.name",
    "pipeline.micro_batches",
    "pipeline.micro_batch_size",
    "codec.rows",
    "codec.rounding",
    "embedding.dim",
    "embedding.optimizer",
    "embedding.prune",
    "embedding.init",
    "sync.replicas",
    "sync.name",
    "sync.codec",
    "embedding.replicate",
)
"""Options, or whole sections, whose change makes the saved state one of another run."""

MAY_DIFFER = (
    "name", "out", "address", "compare", "epochs", "steps", "deadline_s", "dashboard",
    "data", "network", "faults", "checkpoint", "pipeline.stages", "pipeline.transport",
    "pipeline.recompute", "embedding.shards", "embedding.capacity", "embedding.spill",
    "embedding.rows", "embedding.baseline", "codec.name", "codec.spill_dir", "codec.spill_ram",
    "codec.checksum", "codec.compressed_eval", "sync.slow", "sync.rejoin", "sync.deadline_k",
)  # fmt: skip
"""Options that change no bit of the training, or are checked in another way: data by its digest."""


class Loads(Protocol):
    """What resuming needs of a pipeline."""

    infos: list[dict[str, Any]]

    def load_states(self, states: list[StageState]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BoxStart:
    """Black boxes to go on from."""

    run: str
    """They are found by it."""

    step: int
    """That all of them hold."""

    progress: Mapping[str, Any]
    """The arm's numbers up to there."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Start:
    """How an arm begins: from nothing, from a checkpoint, from the black boxes of a driver that
    was killed, or not at all because it is done."""

    checkpoint: Checkpoint | None = None
    progress: Mapping[str, Any] | None = None
    is_done: bool = False
    notes: tuple[str, ...] = ()
    boxes: BoxStart | None = None
    """If they are newer than the checkpoint, which stays what to fall back to."""

    @property
    def after(self) -> int:
        """The step whose state it begins with; -1 for none."""
        if self.boxes is not None:
            return self.boxes.step
        return -1 if self.checkpoint is None else self.checkpoint.step - 1

    @property
    def source(self) -> Source:
        if self.boxes is not None:
            return "box"
        return "fresh" if self.checkpoint is None else "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What was found to go on from."""

    store: CheckpointStore
    chosen: Checkpoint | None = None
    """The one checkpoint that was asked for, if it was."""

    def start(self, arm: Arm) -> Start:
        """How this arm begins; refuses a checkpoint of another run."""
        if self.chosen is not None and self.chosen.manifest.arm == arm.name:
            self.chosen.verify()
            return _checked(self.chosen, arm, [])
        done = self.store.finished(arm.name)
        newest, troubles = self.store.newest(arm.name)
        if newest is None and troubles:
            raise CheckpointError(
                f"{arm.name} has no whole checkpoint in {self.store}: {' '.join(troubles)} Start "
                "the run again without --resume, in another folder."
            )
        notes = [
            f"{trouble} The newest whole one is taken, {newest.path}."
            for trouble in troubles
            if newest
        ]
        if newest is None:
            return Start()
        if done is not None and done["num_steps"] == arm.num_steps == newest.step:
            checked = _checked(newest, arm, notes)
            return Start(checkpoint=newest, progress=done, is_done=True, notes=checked.notes)
        return _checked(newest, arm, notes)


def find_resume(
    config: RunConfig,
    default: Folder,
    names: Sequence[str] | None = None,
    *,
    may_lack: bool = False,
) -> Resume | None:
    """What `checkpoint.resume` means; None if it is `auto`, or it `may_lack` checkpoints, and there
    is nothing yet.

    `default` is where this run's own checkpoints are, `names` its arms.
    """
    wish = config.checkpoint.resume
    if wish is None:
        return None
    store, chosen = CheckpointStore(default), None
    if wish != "auto":
        try:
            store, chosen = locate(wish)
        except CheckpointError:
            if not may_lack:
                raise
    if (wish == "auto" or may_lack) and not store.arms():
        return None
    names = [arm.name for arm in config.arms] if names is None else names
    found = store.arms()
    if not set(names) & set(found):
        raise CheckpointError(
            f"{store} holds checkpoints of {', '.join(found) or 'no arm'}, this run trains "
            f"{', '.join(names)}; resume with --compare {','.join(found)}, or start anew."
        )
    if chosen is not None and chosen.manifest.arm not in names:
        raise CheckpointError(
            f"{chosen.path} is of {chosen.manifest.arm}, this run trains {', '.join(names)}; give "
            f"--codec {chosen.manifest.arm}."
        )
    return Resume(store=store, chosen=chosen)


def load(pipeline: Loads, start: Start, arm: Arm) -> list[str]:
    """Give every stage its part of the checkpoint, dealt out anew if the cut is another one.

    Returns what the user should know.
    """
    assert start.checkpoint is not None
    _refuse_other_model(pipeline, start.checkpoint)
    states, notes = states_for(arm, start.checkpoint)
    pipeline.load_states(states)
    return [*notes, *_other_hardware(pipeline, start.checkpoint)]


def _other_hardware(pipeline: Loads, checkpoint: Checkpoint) -> list[str]:
    before = checkpoint.manifest.code.get("hardware")
    now = code_version(pipeline.infos).get("hardware")
    if before == now or before is None or now is None:
        return []
    return [
        f"{checkpoint.path} was trained on {before}, this run computes on {now}: the last bits may "
        "differ."
    ]


def states_for(arm: Arm, checkpoint: Checkpoint) -> tuple[list[StageState], list[str]]:
    """The checkpoint as the arm's stages need it, and what the user should know about it."""
    manifest = checkpoint.manifest
    cuts = arm.workload.cuts(arm.config.pipeline.stages)
    states = checkpoint.states()
    notes: list[str] = []
    if arm.fleet is not None:
        return states, _check_fleet(checkpoint, arm, states)
    if [(cut.start, cut.stop) for cut in cuts] != list(manifest.cuts):
        try:
            states, dropped = recut(states, cuts)
        except StateError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}.") from error
        fresh = sorted({s.blocks.start for s in states if "activation_in" in s.notes["fresh"]})
        text = (
            f"{checkpoint.path} is of {len(manifest.cuts)} stages, this run has {len(cuts)}: "
            "weights and optimizer go on exactly"
        )
        if arm.codec.has_memory and (dropped or fresh):
            parts = [
                f"{doing} before block {', '.join(map(str, blocks))}"
                for doing, blocks in (("is dropped", dropped), ("begins cold", fresh))
                if blocks
            ]
            text += f"; what {arm.name} remembers {' and '.join(parts)}"
        notes.append(text)
    return states, notes


def _check_fleet(checkpoint: Checkpoint, arm: Arm, states: list[StageState]) -> list[str]:
    """Refuse replicas of another cut; say what cannot be as it was."""
    cuts = [(cut.start, cut.stop) for cut in arm.workload.cuts(arm.config.pipeline.stages)]
    saved = list(checkpoint.manifest.cuts)
    if saved[: len(cuts)] != cuts or len(saved) % len(cuts):
        raise CheckpointError(
            f"{checkpoint.path} has replicas cut into other stages; with replicas resume with the "
            "same --stages."
        )
    assert arm.fleet is not None
    notes = []
    here = {int(state.notes["sync"]["replica"]) for state in states}
    lost = sorted(set(arm.fleet.members) - here)
    if lost:
        names = ", ".join(map(str, lost))
        notes.append(
            f"{checkpoint.path} was saved without replica {names}, which had died; the others go "
            "on (sync.rejoin=true would start it anew)."
        )
    if not is_deterministic(arm.fleet.sync):
        notes.append(
            f"{arm.fleet.sync.name} goes on with all it knew, but not to the same bits: who meets "
            "whom depends on who is fast, and what was on its way is gone."
        )
    return notes


def _checked(checkpoint: Checkpoint, arm: Arm, notes: list[str]) -> Start:
    manifest, where = checkpoint.manifest, checkpoint.path
    if manifest.step > arm.num_steps:
        raise CheckpointError(
            f"{where} was saved after {manifest.step} steps, this run has only {arm.num_steps}; "
            "give more --steps or --epochs, or resume from an older checkpoint."
        )
    other = other_settings(manifest.config, arm.config, step=manifest.step)
    if other.wrong:  # first: with another model samples have another length, and another digest
        raise CheckpointError(
            f"{where} is a checkpoint of another run: {'; '.join(other.wrong)}. Resume with the "
            f"same settings (--set {other.way_out}), or leave them out: they are in the checkpoint."
        )
    _refuse_other_data(checkpoint, arm)
    notes = [
        *notes,
        *(
            f"{text} from now on: the losses will not be those of an unbroken run."
            for text in other.changed
        ),
    ]
    notes += _other_code(checkpoint)
    return Start(checkpoint=checkpoint, progress=checkpoint.progress(), notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class OtherSettings:
    """How the settings of a run differ from those of the one it goes on from."""

    wrong: tuple[str, ...]
    """What makes the state one of another run."""

    changed: tuple[str, ...]
    """What makes only the rest of the run another one."""

    way_out: str = ""


def other_settings(
    saved: Mapping[str, Any], config: RunConfig, *, step: int = 0, also: tuple[str, ...] = ()
) -> OtherSettings:
    """Compare; `also` are options that must be the same beside `MUST_MATCH`."""
    before, now = _flat(saved), _flat(config.to_dict())
    changed = [key for key in sorted(now) if key in before and before[key] != now[key]]
    wrong = [key for key in changed if _is_among(key, MUST_MATCH) or key in also]
    return OtherSettings(
        wrong=tuple(f"{key} is {before[key]!r} there and {now[key]!r} here" for key in wrong),
        changed=tuple(
            f"{key} was {before[key]!r} up to step {step} and is {now[key]!r}"
            for key in changed
            if not _is_among(key, MAY_DIFFER)
        ),
        way_out=f"{wrong[0]}={before[wrong[0]]}" if wrong else "",
    )


def _other_code(checkpoint: Checkpoint) -> list[str]:
    before, now = checkpoint.manifest.code, code_version()
    # An older version noted less; its source is another one, too.
    other = [name for name in now if name in before and before[name] != now[name]]
    if not other:
        return []
    listed = ", ".join(f"{name} {before[name]} there, {now[name]} here" for name in other)
    return [f"{checkpoint.path} was written by other code ({listed}): the last bits may differ."]


def _refuse_other_data(checkpoint: Checkpoint, arm: Arm) -> None:
    before, now = checkpoint.manifest.data, data_of(arm)
    other = [name for name in now if before.get(name) != now[name]]
    if other:
        listed = ", ".join(f"{name} {before.get(name)} there, {now[name]} here" for name in other)
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data or in another order ({listed}); resume "
            "with the same --data, data.num_samples, --seed and batch sizes."
        )


def _refuse_other_model(pipeline: Loads, checkpoint: Checkpoint) -> None:
    before = dict(checkpoint.manifest.blocks)
    now = {str(b): digest for info in pipeline.infos for b, digest in info["blocks"].items()}
    if len(before) != len(now):
        raise CheckpointError(
            f"{checkpoint.path} is of another model: it has {len(before)} blocks, this one has "
            f"{len(now)}."
        )
    other = [block for block in now if before.get(block) != now[block]]
    if other:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: the weights of block {other[0]} have other "
            "names, shapes or kinds there; resume with the model that was trained."
        )


def _is_among(key: str, names: tuple[str, ...]) -> bool:
    return key in names or key.partition(".")[0] in names


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


def default_folder(config: RunConfig, run_folder: str) -> Folder:
    """Where this run's checkpoints go."""
    try:
        return Folder(config.checkpoint.dir or f"{run_folder}/checkpoints")
    except StorageError as error:
        raise CheckpointError(f"--checkpoint-dir {error}.") from error
