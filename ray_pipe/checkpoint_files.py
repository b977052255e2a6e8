"""Checkpoints as folders of files: what is in one, which there are, which may be removed.

    <run>/checkpoints/<arm>/checkpoint_000020/stage_0.safetensors   one for each stage
                                              progress.json.zst     rows, ledger, losses so far
                                              manifest.json         written last: makes it count
                            finished.json.zst                       the arm's numbers, once done

On a store that cannot rename, all but the manifest lie one folder deeper (`attempt-…`), a new one
in each attempt; the manifest names it. A checkpoint that is written once more is there, old or new,
at every moment.

A checkpoint without a manifest was never finished, and is none. The manifest has size and sha256 of
every file and a digest of itself, so that a cut or edited checkpoint is refused by name. No torch:
the command line reads a manifest's settings before anything heavy is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_pipe.errors import ConfigError
from ray_pipe.step_log import RowsThen, StepLog
from ray_pipe.unfinished import newest_record
from stages.storage import ATTEMPT, FileNote, Folder, StorageError, refuse_other

if TYPE_CHECKING:
    from stages.state import StageState

FORMAT = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json.zst"
FINISHED = "finished.json.zst"
PREFIX = "checkpoint_"
LEVEL, WINDOW_LOG = 3, 17
"""Of zstd. Rows repeat within a few kilobytes: with 128 of them they are packed no worse than with
the two megabytes that it would take, at every checkpoint anew."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used here; says why, and what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is of, and what it is made of."""

    arm: str
    step: int
    """Steps that were done: the number of the next one."""

    serial: int
    """Rises with each checkpoint of an arm; the highest is the newest, whatever its step."""

    config: Mapping[str, Any]
    data: Mapping[str, Any]
    """`digest` of the samples, and the order they come in; the cursor is `step`."""

    blocks: Mapping[str, str]
    """Digest of each block's weights: names, kinds and shapes, not values."""

    cuts: tuple[tuple[int, int], ...]
    """Blocks of each stage."""

    files: tuple[FileNote, ...]
    within: str = ""
    """The folder of the files inside the checkpoint's; none where it was published by a rename."""

    code: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""

    def to_json(self) -> bytes:
        body = {"format": FORMAT, **asdict(self)}
        if not self.within:
            del body["within"]
        return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Manifest:
        """Refuses one that was cut off, edited, or written by another format."""
        try:
            body = json.loads(raw)
            digest = body.pop("digest")
            version = body.pop("format")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{where}/{MANIFEST} is no manifest: it was cut off.") from None
        if version != FORMAT:
            raise CheckpointError(
                f"{where} has format {version}, this version of ray_pipe reads {FORMAT}; resume "
                "with the version that wrote it."
            )
        if digest != _digest({"format": version, **body}):
            raise CheckpointError(f"{where}/{MANIFEST} was edited: its own digest does not fit.")
        files = tuple(FileNote(**note) for note in body.pop("files"))
        cuts = tuple((int(start), int(stop)) for start, stop in body.pop("cuts"))
        return cls(files=files, cuts=cuts, **body)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was finished. Reading anything of it checks it."""

    folder: Folder
    manifest: Manifest

    @property
    def path(self) -> str:
        return str(self.folder)

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.manifest.step

    @property
    def _files(self) -> Folder:
        within = self.manifest.within
        return self.folder.child(within) if within else self.folder

    def verify(self) -> None:
        """Raise `CheckpointError` unless every file is the one that was written."""
        for note in self.manifest.files:
            try:
                self._files.check(note)
            except StorageError as error:
                raise CheckpointError(f"{error}.") from error

    def read(self, name: str) -> bytes:
        """A file of the checkpoint, checked."""
        note = next((note for note in self.manifest.files if note.name == name), None)
        if note is None:
            raise CheckpointError(f"{self.path} has no file {name}.")
        try:
            raw = self._files.read(name)
            refuse_other(self._files.uri, note, len(raw), hashlib.sha256(raw).hexdigest())
        except StorageError as error:
            raise CheckpointError(f"{error}.") from error
        return raw

    def progress(self) -> dict[str, Any]:
        """The arm's numbers up to here."""
        return unpack(self.read(PROGRESS))

    def check(self, notes: Sequence[FileNote]) -> None:
        """Raise `CheckpointError` unless these files are what was written, without holding them."""
        try:
            for note in notes:
                self.folder.check(note)
        except StorageError as error:
            raise CheckpointError(f"{error}.") from error

    def shard_notes(self) -> list[FileNote]:
        """Of the files with embedding rows, in order; empty for a model without shards."""
        return [note for note in self.manifest.files if note.name.startswith("shard_")]

    def shard_files(self) -> list[str]:
        """Names of the files with embedding rows, in order; empty for a model without shards."""
        return [note.name for note in self.shard_notes()]

    def states(self) -> list[StageState]:
        """The stages, in order."""
        from stages.state import StageState

        names = [stage_file(index) for index in range(len(self.manifest.cuts))]
        states = [StageState.from_bytes(self.read(name)) for name in names]
        for name, state in zip(names, states, strict=True):
            # Replicas may be apart; then a checkpoint is of so many steps of all of them.
            if state.step != self.step - 1 and "sync" not in state.notes:
                raise CheckpointError(
                    f"{self.path}/{name} was saved after {state.step + 1} steps, the checkpoint "
                    f"after {self.step}."
                )
        return states


class CheckpointStore:
    """All checkpoints of a run."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def arms(self) -> list[str]:
        """Arms that have at least one checkpoint."""
        return [name for name in self.folder.children() if self.checkpoints(name)]

    def checkpoints(self, arm: str) -> list[Checkpoint]:
        """Those of an arm that were finished, oldest first."""
        home = self.folder.child(arm)
        found = []
        for name in _names_in(home):
            folder = home.child(name)
            if is_checkpoint_name(name) and folder.has(MANIFEST):
                try:
                    found.append(open_checkpoint(folder))
                except CheckpointError:
                    continue  # `open_checkpoint` tells why, to whoever asks for this one
        return sorted(found, key=lambda one: one.manifest.serial)

    def newest(self, arm: str) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with newer ones."""
        troubles: list[str] = []
        home = self.folder.child(arm)
        for name in _names_in(home):
            if is_checkpoint_name(name) and home.child(name).has(MANIFEST):
                try:
                    open_checkpoint(home.child(name))
                except CheckpointError as error:
                    troubles.append(str(error))
        for one in reversed(self.checkpoints(arm)):
            try:
                one.verify()
            except CheckpointError as error:
                troubles.append(str(error))
            else:
                return one, troubles
        return None, troubles

    def place(self, arm: str, step: int) -> Folder:
        """Where the checkpoint of a step goes."""
        return self.folder.child(arm).child(f"{PREFIX}{step:06d}")

    def next_serial(self, arm: str) -> int:
        found = self.checkpoints(arm)
        return found[-1].manifest.serial + 1 if found else 1

    def commit(self, place: Folder, aside: Folder, manifest: Manifest) -> Checkpoint:
        """Write the manifest and publish what lies aside; from here on it counts."""
        if place.is_local:
            aside.write(MANIFEST, [manifest.to_json()])
            place.publish(aside)
            done = open_checkpoint(place)
            for note in manifest.files:  # each was read back by whoever wrote it
                place.check_size(note)
            return done
        manifest = replace(manifest, within=aside.name)
        Checkpoint(folder=place, manifest=manifest).verify()  # while the old one still counts
        place.replace(MANIFEST, manifest.to_json())
        return open_checkpoint(place)

    def tidy(self, done: Checkpoint) -> None:
        """Remove what other attempts at a checkpoint have left on a store; nobody is at one now."""
        if done.manifest.within:
            for name in done.folder.children():
                if name.startswith(ATTEMPT) and name != done.manifest.within:
                    done.folder.child(name).remove()

    def prune(self, arm: str, keep: int) -> list[str]:
        """Remove all but the newest `keep` of an arm; called after a new one was verified."""
        old = self.checkpoints(arm)[:-keep]
        for one in old:
            one.folder.remove_file(MANIFEST)  # first: half of a checkpoint is none
            one.folder.remove()
        return [one.path for one in old]

    def finish(self, arm: str, progress: Mapping[str, Any]) -> None:
        """Note that an arm is done, with all its numbers."""
        self.folder.child(arm).replace(FINISHED, Numbers.of(progress).packed())

    def finished(self, arm: str) -> dict[str, Any] | None:
        """The numbers of an arm that is done; None if it is not, or they cannot be read."""
        home = self.folder.child(arm)
        if not home.has(FINISHED):
            return None
        try:
            return unpack(home.read(FINISHED))
        except (CheckpointError, StorageError):
            return None

    def reopen(self, arm: str) -> None:
        """The arm is trained on: it is not done any more."""
        self.folder.child(arm).remove_file(FINISHED)


def open_checkpoint(folder: Folder) -> Checkpoint:
    """The checkpoint in a folder; refuses what is none."""
    try:
        folder.recover()
        if not folder.has(MANIFEST):
            raise CheckpointError(
                f"{folder} has no {MANIFEST}, so its writing never ended; resume from the run's "
                "folder, which finds the newest whole checkpoint."
            )
        raw = folder.read(MANIFEST)
    except StorageError as error:
        raise CheckpointError(f"{error}.") from error
    return Checkpoint(folder=folder, manifest=Manifest.from_json(raw, where=str(folder)))


def locate(path: str, *, asked: str = "--resume ") -> tuple[CheckpointStore, Checkpoint | None]:
    """The store behind what a user gave: a run's folder, its checkpoints, an arm, or a checkpoint.

    With a checkpoint itself, that one too. `asked` is how the user gave it, for errors.
    """
    if os.path.isfile(path):
        raise CheckpointError(
            f"{asked}{path}: is a file; give the folder of a run that was started with "
            "--checkpoint-every, or one of its checkpoints."
        )
    try:
        folder = Folder(path)
        names = folder.children()
    except StorageError as error:
        raise CheckpointError(f"{asked.strip() or 'checkpoint'}: {error}.") from error
    if folder.has(MANIFEST) or is_checkpoint_name(folder.name):
        return CheckpointStore(folder.parent.parent), open_checkpoint(folder)
    if any(map(is_checkpoint_name, names)):
        return CheckpointStore(folder.parent), None
    for store in (CheckpointStore(folder.child("checkpoints")), CheckpointStore(folder)):
        if store.arms():
            return store, None
    is_missing = folder.is_local and not os.path.isdir(folder.path)
    what = "there is no such folder" if is_missing else "there is no checkpoint in it"
    raise CheckpointError(
        f"{asked}{path}: {what}; give the folder of a run that was started with "
        "--checkpoint-every, or one of its checkpoints."
    )


def newest_run(out: str) -> str | None:
    """The run below `out` whose checkpoint was written last, or whose driver was killed since."""
    found = [
        (path.stat().st_mtime, str(path.parents[3]))
        for path in Path(out).glob(f"*/checkpoints/*/{PREFIX}*/{MANIFEST}")
    ]
    if (unfinished := newest_record(out)) is not None:
        found.append(unfinished)
    return max(found)[1] if found else None


def _names_in(home: Folder) -> list[str]:
    """Of the folders of an arm, once a replacement that was stopped half-way is taken back."""
    names = home.children()
    replaced = [name.removesuffix(".old") for name in names if name.endswith(".old")]
    try:
        for name in replaced:
            home.child(name).recover()
    except StorageError as error:
        raise CheckpointError(f"{error}.") from error
    return home.children() if replaced else names


def is_checkpoint_name(name: str) -> bool:
    """`checkpoint_000020`; what lies aside has another ending."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdigit()


def stage_file(index: int) -> str:
    return f"stage_{index}.safetensors"


def shard_file(index: int, num_shards: int) -> str:
    """The rows of one shard of embeddings."""
    return f"shard_{index}_of_{num_shards}.safetensors"


@dataclass(frozen=True, slots=True)
class Numbers:
    """An arm's numbers as they were when this was made, on their way to a file.

    The rows stay where they are, and are read and packed piece by piece, as often as the file is
    written: those of a long run are never all in memory, packed or not.
    """

    parts: tuple[bytes | RowsThen, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Numbers:
        """`value` may change afterwards, and its logs may grow."""
        parts: list[bytes | RowsThen] = []
        for number, (key, item) in enumerate(value.items()):
            parts.append(f"{', ' if number else ''}{json.dumps(key)}: ".encode())
            parts.append(item.then() if isinstance(item, StepLog) else json.dumps(item).encode())
        return cls((b"{", *parts, b"}"))

    def packed(self) -> Iterator[bytes]:
        """The file: JSON (NaN and infinity as Python writes them), compressed, with a digest of
        its own."""
        import zstandard

        digest, nbytes = hashlib.sha256(), 0
        for text in self._texts():
            digest.update(text)
            nbytes += len(text)
        head = digest.hexdigest().encode()
        size = len(head) + nbytes
        options = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, source_size=size, window_log=WINDOW_LOG
        )
        packing = zstandard.ZstdCompressor(compression_params=options).compressobj(size=size)
        for text in chain([head], self._texts()):
            if piece := packing.compress(text):
                yield piece
        yield packing.flush()

    def _texts(self) -> Iterator[bytes]:
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
                continue
            yield b"["
            for place, text in enumerate(part.texts()):
                yield f"{', ' if place else ''}{text}".encode()
            yield b"]"


def pack(value: Mapping[str, Any]) -> bytes:
    """The whole file of an arm's numbers."""
    return b"".join(Numbers.of(value).packed())


def unpack(raw: bytes) -> dict[str, Any]:
    """What `pack` was given; refuses what was changed."""
    import zstandard

    try:
        text = zstandard.ZstdDecompressor().decompress(raw)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"the numbers of an arm cannot be read: {error}.") from None
    head, body = text[:64], text[64:]
    if hashlib.sha256(body).hexdigest().encode() != head:
        raise CheckpointError("the numbers of an arm were changed: their digest does not fit.")
    value: dict[str, Any] = json.loads(body)
    return value


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
