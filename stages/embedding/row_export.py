"""Rows for serving: a whole table once, then what changed, and what is gone.

    manifest.json                                 how many shards there are, written last
    shard-00000-of-00002/manifest.json            the chain of files that are valid
    shard-00000-of-00002/17-000000.safetensors    all rows;  17 is the chain's own number
    shard-00000-of-00002/17-000001.safetensors    rows written since, ids that are no more

An increment is one snapshot of the shard: rows whose commit is newer than the last export's, and
tombstones for ids that were exported and are not there any more (evicted, pruned away), or they
would be served for ever. Readers look at manifests only, which are replaced by rename and name what
is whole. Where a row is served from depends on the number of shards, so an export with another
number is written beside the old one, becomes the valid one when the upper manifest says its
number, and only then is the old one removed.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from stages.embedding.row_store import RowStore
from stages.embedding.shard import Shard
from stages.embedding.shard_files import ShardFileError, write_aside
from stages.embedding.tables import shard_of

MANIFEST = "manifest.json"
FORMAT = 2
TRIES = 5
_FOLDER = re.compile(r"shard-\d{5}(-of-\d{5})?")
_FILE = re.compile(r"(manifest\.json|\d+-\d{6}\.safetensors)(\.part)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """One export of one shard."""

    number: int
    rows: int
    tombstones: int
    nbytes: int
    version: int


class Exporter:
    """Writes one shard's chain. Each life of an exporter begins a new one, with all rows.

    Readers follow once all shards have exported and `publish` has said how many there are.
    """

    def __init__(self, shard: Shard, folder: Path, *, num_shards: int) -> None:
        self._shard = shard
        self._folder = _folder(folder, shard.index, num_shards)
        self._folder.mkdir(parents=True, exist_ok=True)
        old = _manifest(self._folder)
        self._old_files = [] if old is None else [entry["file"] for entry in old["files"]]
        self._chain = 0 if old is None else int(old["chain"]) + 1
        self._files: list[dict[str, Any]] = []
        self._stamp = 0
        self._known = {name: np.empty(0, np.int64) for name in shard.tables}

    def export(self) -> Increment:
        """Write what is new since the last call; the manifest makes it count."""
        arrays: dict[str, Any] = {}
        num_rows = num_gone = 0
        known = {}
        with self._shard.store.snapshot() as snapshot:
            for name in self._shard.tables:
                keys, weights, known[name] = self._changed(name, snapshot)
                gone = np.setdiff1d(self._known[name], known[name], assume_unique=True)
                arrays[f"{name}/keys"], arrays[f"{name}/weights"] = keys, weights
                arrays[f"{name}/gone"] = gone
                num_rows += len(keys)
                num_gone += len(gone)
            stamp = snapshot.stamp
        data = save(arrays)
        file = f"{self._chain}-{len(self._files):06d}.safetensors"
        write_aside(self._folder / file, data)
        self._files.append({"file": file, "nbytes": len(data), "crc32": zlib.crc32(data)})
        manifest = {
            "format": FORMAT,
            "chain": self._chain,
            "version": self._shard.version,
            "dims": {name: table.dim for name, table in self._shard.tables.items()},
            "files": self._files,
        }
        write_aside(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        self._stamp, self._known = stamp, known
        for old in self._old_files:
            (self._folder / old).unlink(missing_ok=True)
        self._old_files = []
        return Increment(
            number=len(self._files) - 1,
            rows=num_rows,
            tombstones=num_gone,
            nbytes=len(data),
            version=self._shard.version,
        )

    def _changed(self, name: str, snapshot: Any) -> tuple[Any, Any, Any]:
        dim = self._shard.tables[name].dim
        keys, weights, present = [np.empty(0, np.int64)], [np.empty((0, dim), np.float32)], []
        for part in self._shard.rows[name].scan(snapshot):
            new = part.stamps > np.uint64(self._stamp)
            present.append(part.keys.copy())
            keys.append(part.keys[new])
            weights.append(part.weights()[new])
        everyone = np.sort(np.concatenate([np.empty(0, np.int64), *present]))
        return np.concatenate(keys), np.concatenate(weights), everyone


def publish(folder: Path, *, num_shards: int) -> None:
    """Every shard has exported: readers take these from now on. Those of another number go."""
    old = _manifest(folder) or {"edition": 0, "num_shards": 0}
    if old["num_shards"] != num_shards:  # chains begin anew: a reader must not take them for known
        upper = {"format": FORMAT, "edition": old["edition"] + 1, "num_shards": num_shards}
        write_aside(folder / MANIFEST, json.dumps(upper, indent=1).encode())
    valid = {_folder(folder, index, num_shards) for index in range(num_shards)}
    for stale in set(folder.glob("shard-*")) - valid:
        if stale.is_dir() and _FOLDER.fullmatch(stale.name):
            for file in stale.iterdir():
                if _FILE.fullmatch(file.name):  # what others put there is not ours to remove
                    file.unlink()
            with contextlib.suppress(OSError):
                stale.rmdir()


class ExportReader:
    """Serves what exporters wrote, with memory of its own; `refresh` takes what is new."""

    def __init__(self, folder: str | Path, *, capacity: int | str = "1GiB", **store: Any) -> None:
        self.folder = Path(folder)
        self._options = {"capacity": capacity, **store}
        self._shards: list[_Served] = []
        self._edition = 0
        self.refresh()

    def refresh(self) -> int:
        """Apply the files that came since the last call; how many."""
        came = 0
        for attempt in range(TRIES):
            manifest = _manifest(self.folder)
            if manifest is None:
                raise ShardFileError(f"{self.folder} has no exports: there is no {MANIFEST}")
            # All of an edition before any of it is served: two numbers of shards do not mix.
            known = self._edition == manifest["edition"]
            shards = self._shards if known else self._begun(int(manifest["num_shards"]))
            try:
                for shard in shards:
                    came += shard.refresh()
            except FileNotFoundError:
                if attempt == TRIES - 1:
                    raise
                continue  # an export with another number of shards replaced this one
            self._shards, self._edition = shards, manifest["edition"]
            return came
        raise AssertionError

    def _begun(self, num: int) -> list[_Served]:
        folders = (_folder(self.folder, index, num) for index in range(num))
        return [_Served(folder, self._options) for folder in folders]

    def lookup(self, table: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Weights; zeros for ids that are not there."""
        places = shard_of(ids, len(self._shards))
        parts = {}
        for number, shard in enumerate(self._shards):
            parts[number] = shard.rows(table, np.ascontiguousarray(ids[places == number]))
        out = np.empty((len(ids), parts[0].shape[1]), np.float32)
        for number, part in parts.items():
            out[places == number] = part
        return out


class _Served:
    """One shard's chain, as far as it was read."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self._chain, self._num_read = -1, 0
        self._store: RowStore | None = None

    def refresh(self) -> int:
        for attempt in range(TRIES):
            manifest = _manifest(self._folder)
            if manifest is None:
                raise FileNotFoundError(f"{self._folder} has no {MANIFEST}")
            try:
                return self._follow(manifest)
            except FileNotFoundError:
                if attempt == TRIES - 1:
                    raise
                # A new chain replaced this one between the manifest and its files.
        raise AssertionError

    def _follow(self, manifest: Any) -> int:
        if manifest["chain"] != self._chain:
            files = [self._read(entry) for entry in manifest["files"]]
            self._store = RowStore(**self._options)
            for name, dim in manifest["dims"].items():
                self._store.table(name, dim=dim)
            self._chain, self._num_read = manifest["chain"], 0
        else:
            files = [self._read(entry) for entry in manifest["files"][self._num_read :]]
        for arrays in files:
            self._take(arrays, manifest["dims"])
            self._num_read += 1
        return len(files)

    def _read(self, entry: Any) -> dict[str, Any]:
        data = (self._folder / entry["file"]).read_bytes()
        if len(data) != entry["nbytes"] or zlib.crc32(data) != entry["crc32"]:
            raise ShardFileError(
                f"{self._folder / entry['file']} has {len(data)} bytes and is not the "
                f"{entry['nbytes']} that were exported; export anew with full=True"
            )
        return dict(load(data))

    def _take(self, arrays: dict[str, Any], dims: dict[str, int]) -> None:
        assert self._store is not None
        for name, dim in dims.items():
            rows, keys = self._store[name], arrays[f"{name}/keys"]
            raw = np.zeros((len(keys), rows.core.record_bytes), np.uint8)
            raw[:, 0] = 1  # its one chunk is there
            weights = np.ascontiguousarray(arrays[f"{name}/weights"], np.float32)
            raw[:, 8:] = weights.view(np.uint8).reshape(len(keys), 4 * dim)
            rows.remove(np.ascontiguousarray(arrays[f"{name}/gone"]))
            rows.restore(np.ascontiguousarray(keys), raw)

    def rows(self, table: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        assert self._store is not None
        return self._store[table].multi_get(ids)[0]


def _folder(folder: Path, index: int, num_shards: int) -> Path:
    return folder / f"shard-{index:05d}-of-{num_shards:05d}"


def _manifest(folder: Path) -> Any:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    if manifest.get("format") != FORMAT:
        raise ShardFileError(
            f"{folder}: exports of format {manifest.get('format')}, this source reads {FORMAT}"
        )
    return manifest
