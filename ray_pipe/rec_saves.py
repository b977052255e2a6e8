"""A pipeline from Python on disk: stages and shards as files, a manifest that makes them count.

Path: ray_pipe.rec_pipeline -> ray_pipe.rec_saves -> ray_pipe.checkpoint_files

The same files as the checkpoints of a run, in the folder that the user names. It is written aside
and renamed, so an older checkpoint of that name is whole until the new one is. When a stage or a
shard is lost meanwhile, the files of this try are void: all go back to one step, and write anew.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray_pipe.checkpoint import code_version
from ray_pipe.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Manifest,
    open_checkpoint,
)
from ray_pipe.errors import TrainingError
from ray_pipe.rec_arm import LoadedPipeline
from ray_pipe.rec_stage import EmbeddingStage
from stages.storage import FileNote, Folder, StorageError

TRIES = 3
"""Of one checkpoint: whoever dies of being saved will not live longer the fourth time."""


def save(
    pipeline: LoadedPipeline,
    emb: EmbeddingStage,
    folder: str | Path,
    *,
    steps: int,
    settle: Callable[[], None],
) -> None:
    """Write the pipeline after so many steps, again if somebody is lost; `settle` waits for what is
    under way, which after a loss may be a step that is run again."""
    for left in reversed(range(TRIES)):
        settle()
        num_lost = len(pipeline.failures)
        try:
            _write(pipeline, emb, folder, steps=steps)
        except (CheckpointError, TrainingError) as error:
            pipeline.check_in()  # who is lost is replaced and counted; or this ends the pipeline
            if len(pipeline.failures) == num_lost:
                raise  # all live: a full disk would be full the next time
            if not left:
                raise CheckpointError(
                    f"{folder} was not written: somebody was lost in each of {TRIES} tries, last: "
                    f"{pipeline.failures[-1]}. What was there before is as it was."
                ) from error
        else:
            return


def _write(
    pipeline: LoadedPipeline, emb: EmbeddingStage, folder: str | Path, *, steps: int
) -> None:
    """One try; nothing may be under way. Files that will not count are not left behind."""
    place = Folder(str(folder))
    aside = place.aside()
    try:
        aside.remove()
        try:
            notes = _write_files(pipeline, aside, steps=steps)
        except BaseException:
            with contextlib.suppress(StorageError):
                aside.remove()
            raise
        manifest = _manifest(pipeline, emb, notes, steps=steps)
        CheckpointStore(place.parent).commit(place, aside, manifest)
    except StorageError as error:
        raise CheckpointError(f"{folder} could not be written: {error}.") from error


def _write_files(pipeline: LoadedPipeline, aside: Folder, *, steps: int) -> list[FileNote]:
    """One of each stage and shard, or the error of the first that has none."""
    token = uuid.uuid4().hex
    aside.write(token, [token.encode()])
    shared = pipeline.see(str(aside), token, token.encode())
    aside.remove_file(token)
    save = pipeline.start_save(token, steps - 1, str(aside) if shared else None)
    results = save.results(wait=True)
    assert results is not None
    notes: list[FileNote] = []
    for index, result in enumerate(results):
        if isinstance(result, BaseException):
            raise CheckpointError(f"{pipeline.file_of(index)} was not saved: {result}.")
        if not isinstance(result, FileNote):  # its bytes: the driver writes for it
            result = aside.write(pipeline.file_of(index), [memoryview(result)])
        notes.append(result)
    return notes


def _manifest(
    pipeline: LoadedPipeline, emb: EmbeddingStage, notes: list[FileNote], *, steps: int
) -> Manifest:
    arm = pipeline.own
    cuts = arm.workload.cuts(arm.config.pipeline.stages)
    return Manifest(
        arm=arm.name,
        step=steps,
        serial=1,
        config={"tables": tables_of(emb), "seed": emb.seed},
        data={"digest": arm.workload.samples.digest},
        blocks={str(b): d for info in pipeline.infos for b, d in info["blocks"].items()},
        cuts=tuple((cut.start, cut.stop) for cut in cuts),
        files=tuple(notes),
        code=code_version(pipeline.infos),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def open_saved(folder: str | Path, emb: EmbeddingStage, *, num_stages: int) -> Checkpoint:
    """A whole checkpoint of the same tables and stages; refuses another by name."""
    checkpoint = open_checkpoint(Folder(str(folder)))
    checkpoint.verify()
    saved: Mapping[str, Any] = checkpoint.manifest.config.get("tables", {})
    here = tables_of(emb)
    if set(saved) != set(here):
        raise CheckpointError(
            f"{folder} has tables {sorted(saved)}, this pipeline has {sorted(here)}."
        )
    for name, numbers in here.items():
        for what, value in numbers.items():
            if saved[name].get(what) != value:
                raise CheckpointError(
                    f"{folder}: table {name!r} was saved with {what} {saved[name].get(what)}, "
                    f"this pipeline has {value}; load it with the tables it was trained with."
                )
    if len(checkpoint.manifest.cuts) != num_stages:
        raise CheckpointError(
            f"{folder} has {len(checkpoint.manifest.cuts)} dense stages, this pipeline has "
            f"{num_stages}; give it the same blocks and num_stages."
        )
    return checkpoint


def check_blocks(pipeline: LoadedPipeline, checkpoint: Checkpoint) -> None:
    """Refuse weights of other names or shapes."""
    here = {str(b): d for info in pipeline.infos for b, d in info["blocks"].items()}
    other = [b for b, digest in here.items() if checkpoint.manifest.blocks.get(b) != digest]
    if other:
        raise CheckpointError(
            f"{checkpoint.path}: the weights of blocks {other} have other names or shapes than "
            "those that were saved; load it with the model it was trained with."
        )


def tables_of(emb: EmbeddingStage) -> dict[str, dict[str, Any]]:
    """What makes saved rows those of a table."""
    return {
        table.name: {
            "dim": table.dim,
            "placement": table.placement,
            "optimizer": type(table.optimizer).__name__,
            "chunks": table.chunks,
        }
        for table in emb.tables
    }
