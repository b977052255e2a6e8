"""Checkpoints of embeddings as folders: what `Embeddings.save` writes, and what a run writes.

    shard-00000-of-00002.00003.safetensors   one shard (`shard_files`), of the third save here
    embedding.json                           which files count; written last, by rename

A save never touches the files of the one before: until the marker names the new ones the old
checkpoint is whole, and only then are the old files removed. The checkpoint of a run
(`ray_pipe.checkpoint_files`) holds the same files of shards under other names beside the dense
network, with a manifest; its rows are read from there just as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.embedding.shard import Shard
from stages.embedding.shard_files import ShardFileError, write_aside
from stages.embedding.shard_stream import KeptShard, keep_shard
from stages.storage import FileNote, Folder, StorageError

MARKER = "embedding.json"
FORMAT = 3
CHUNK_NBYTES = 8 << 20
RUN_MANIFEST = "manifest.json"
RUN_FILE = "shard_"
_FILE = re.compile(r"shard-\d{5}-of-\d{5}(\.(\d+))?\.safetensors(\.part)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShard:
    """One shard of a checkpoint. Reading it checks it."""

    folder: Path
    file: str
    nbytes: int
    crc32: int | None = None
    sha256: str = ""
    """Of a run's checkpoint."""

    def read(self) -> Any:
        """The bytes that were written, where they lie, or a `ShardFileError` that says what is
        wrong with them."""
        path = self.folder / self.file
        try:
            data: Any = np.memmap(path, mode="r")
        except FileNotFoundError:
            raise ShardFileError(f"{path} is missing; the marker names it") from None
        except ValueError:
            data = np.empty(0, np.uint8)  # an empty file cannot be mapped
        if len(data) != self.nbytes:
            raise ShardFileError(
                f"{path} has {len(data)} bytes, {self.nbytes} were written: it is truncated; take "
                "an earlier checkpoint"
            )
        if self.crc32 is not None and _crc32(data) != self.crc32:
            raise ShardFileError(f"{path} is damaged: its checksum is not the one that was written")
        if self.sha256:
            try:
                Folder(self.folder).check(
                    FileNote(name=self.file, nbytes=self.nbytes, sha256=self.sha256)
                )
            except StorageError as error:
                raise ShardFileError(f"{path} is damaged: {error}") from None
        return data


def save_shards(shards: Sequence[Shard], folder: Path) -> None:
    """Write all shards at their present version; whatever goes wrong, one save is whole.

    Call it between pushes, from whoever owns the shards. Steps that are under way are not part of
    it: whoever resumes takes them again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = _own_files(folder)
    number = max(old.values(), default=0) + 1
    parts = []
    for shard in shards:
        file = f"shard-{shard.index:05d}-of-{len(shards):05d}.{number:05d}.safetensors"
        with keep_shard(shard) as kept:
            crc32 = _write(folder / file, kept)
            parts.append({"file": file, "nbytes": kept.nbytes, "crc32": crc32})
    text = json.dumps({"format": FORMAT, "save": number, "shards": parts}, indent=1)
    write_aside(folder / MARKER, text.encode())
    _sync(folder)  # a removal must not be on disk before the marker is
    for path in old:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def saved_shards(folder: Path) -> list[SavedShard]:
    """The shards of a checkpoint, of `save_shards` or of a run; read and checked one by one."""
    if (folder / MARKER).exists():
        marker = json.loads((folder / MARKER).read_bytes())
        if marker.get("format") != FORMAT:
            raise ShardFileError(
                f"{folder}: format {marker.get('format')}, this source reads {FORMAT}"
            )
        return [SavedShard(folder=folder, **part) for part in marker["shards"]]
    if (folder / RUN_MANIFEST).exists():
        return _of_a_run(folder)
    raise ShardFileError(
        f"{folder} has no {MARKER}: it is no checkpoint of embeddings, or one whose writing "
        "was cut short; take the one before"
    )


def _of_a_run(folder: Path) -> list[SavedShard]:
    try:
        notes: list[Any] = json.loads((folder / RUN_MANIFEST).read_bytes())["files"]
        found = [
            SavedShard(
                folder=folder, file=note["name"], nbytes=note["nbytes"], sha256=note["sha256"]
            )
            for note in notes
            if note["name"].startswith(RUN_FILE)
        ]
    except (ValueError, KeyError, TypeError):
        raise ShardFileError(
            f"{folder / RUN_MANIFEST} is no manifest of a run's checkpoint, or it was cut off"
        ) from None
    if not found:
        raise ShardFileError(f"{folder} is a checkpoint of a run without embedding shards")
    return found


def _own_files(folder: Path) -> dict[Path, int]:
    """Files of earlier saves, finished or not, and the number of each."""
    found = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match:
            found[path] = int(match[2] or 0)
    return found


def _write(path: Path, kept: KeptShard) -> int:
    """Write a shard piece by piece; returns its checksum."""
    crc32 = 0

    def counted() -> Iterator[memoryview]:
        nonlocal crc32
        for chunk in kept.chunks():
            crc32 = zlib.crc32(chunk, crc32)
            yield chunk

    write_aside(path, counted())
    return crc32


def _crc32(data: Any) -> int:
    crc32 = 0
    for first in range(0, len(data), CHUNK_NBYTES):
        crc32 = zlib.crc32(data[first : first + CHUNK_NBYTES], crc32)
    return crc32


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
