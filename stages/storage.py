"""Folders that outlive a process: on this machine's disk, or behind any URI that fsspec reads.

What `write` returns is on disk: written, flushed to the device, read back and compared. A local
folder is published by one rename, so that it is there as a whole or not at all. Object stores
know no rename; there each attempt has a folder of its own within, and one small file that is
written last (a manifest) and replaced as a whole says which of them counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

CHUNK_NBYTES = 1 << 20
"""Read back at a time: as much memory as it takes, whatever the size of a file."""

NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""What a system or file system answers that cannot exchange two names."""

ATTEMPT = "attempt-"
"""How the folders begin that attempts to write a folder on a store have within it."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageError(OSError):
    """A folder or file that cannot be read or written; says which, why, and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)  # its number means nothing to who reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNote:
    """What a file must be to be the one that was written."""

    name: str
    nbytes: int
    sha256: str


class Folder:
    """One folder. Makes itself when something is written."""

    def __init__(self, uri: str | Path) -> None:
        self.uri = str(uri).rstrip("/") or "/"
        try:
            self._fs, path = fsspec.core.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            raise StorageError(
                errno.ENOPROTOOPT,
                f"{self.uri}: {error}; give a local folder, or install what fsspec needs for "
                "this kind of address on every node (as s3fs for s3://)",
            ) from None
        self.path = str(path)
        protocols = self._fs.protocol
        self.is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
        if self.is_local:
            self.uri = self.path  # absolute: other processes have other working directories

    def __str__(self) -> str:
        return self.uri

    def child(self, name: str) -> Folder:
        return Folder(f"{self.uri}/{name}")

    @property
    def parent(self) -> Folder:
        return Folder(self.uri.rpartition("/")[0] or "/")

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]

    # --- files ------------------------------------------------------------------------------

    def write(self, name: str, chunks: Iterable[Any], *, keep_old: bool = False) -> FileNote:
        """Write a file and read it back; raises `StorageError` and leaves none on failure, unless
        it is to `keep_old`, where a store has one until the new one is there as a whole."""
        digest, nbytes = hashlib.sha256(), 0

        def counted() -> Iterator[Any]:
            nonlocal nbytes
            for chunk in chunks:
                digest.update(chunk)
                nbytes += memoryview(chunk).nbytes
                yield chunk

        where = f"{self.path}/{name}"
        with self._explained(f"cannot write {self.uri}/{name}"):
            try:
                self._fs.makedirs(self.path, exist_ok=True)
                self._put(where, counted())
            except Exception:
                if not keep_old:
                    self.remove_file(name)
                raise
        note = FileNote(name=name, nbytes=nbytes, sha256=digest.hexdigest())
        self.check(note)
        return note

    def replace(self, name: str, data: bytes | Iterable[bytes]) -> FileNote:
        """Write a file in place of an older one: readers see the old or the new."""
        chunks = [data] if isinstance(data, bytes) else data
        if not self.is_local:
            return self.write(name, chunks, keep_old=True)
        note = self.write(f"{name}.part", chunks)
        with self._explained(f"cannot write {self.uri}/{name}"):
            os.replace(f"{self.path}/{name}.part", f"{self.path}/{name}")
            _sync_folder(self.path)
        return FileNote(name=name, nbytes=note.nbytes, sha256=note.sha256)

    def read(self, name: str) -> bytes:
        with self._explained(f"cannot read {self.uri}/{name}"):
            data: bytes = self._fs.cat_file(f"{self.path}/{name}")
        return data

    def check(self, note: FileNote) -> None:
        """Raise `StorageError` unless the file is the one that was written, byte for byte."""
        digest, nbytes = hashlib.sha256(), 0
        with (
            self._explained(f"cannot read {self.uri}/{note.name}"),
            self._fs.open(f"{self.path}/{note.name}", "rb") as file,
        ):
            while chunk := file.read(CHUNK_NBYTES):
                digest.update(chunk)
                nbytes += len(chunk)
        refuse_other(self.uri, note, nbytes, digest.hexdigest())

    def check_size(self, note: FileNote) -> None:
        """Raise `StorageError` unless the file is there, with as many bytes as were written."""
        with self._explained(f"cannot read {self.uri}/{note.name}"):
            nbytes = int(self._fs.size(f"{self.path}/{note.name}"))
        refuse_other(self.uri, note, nbytes, note.sha256)

    def has(self, name: str) -> bool:
        with self._explained(f"cannot look for {self.uri}/{name}"):
            return bool(self._fs.exists(f"{self.path}/{name}"))

    def remove_file(self, name: str) -> None:
        """If it is there and can be removed."""
        with contextlib.suppress(StorageError), self._explained(f"cannot remove {name}"):
            self._fs.rm_file(f"{self.path}/{name}")

    # --- folders ----------------------------------------------------------------------------

    def children(self) -> list[str]:
        """Names of the folders in it, in order; empty where it does not exist."""
        with self._explained(f"cannot list {self.uri}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self.path, detail=True)
            except FileNotFoundError:
                return []
        return sorted(
            str(entry["name"]).rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory"
        )

    def remove(self) -> None:
        """The folder and everything in it, if it is there."""
        with self._explained(f"cannot remove {self.uri}"):
            if self.is_local:
                shutil.rmtree(self.path, ignore_errors=True)
            elif self._fs.exists(self.path):
                self._fs.rm(self.path, recursive=True)

    def aside(self) -> Folder:
        """Where to write what becomes this folder: beside it, for `publish`, where names can be
        changed; on a store a new folder within, as nothing there may be touched before its time."""
        if self.is_local:
            return Folder(f"{self.uri}.part")
        return self.child(f"{ATTEMPT}{uuid.uuid4().hex[:12]}")

    def publish(self, aside: Folder) -> None:
        """Make `aside`, which holds the final files, this folder, by one rename: local ones only.

        A folder of this name from before is replaced: at every moment one of the two is there, or
        `recover` brings the old one back.
        """
        assert self.is_local
        with self._explained(f"cannot publish {self.uri}"):
            _sync_folder(aside.path)
            if not os.path.isdir(self.path):
                os.rename(aside.path, self.path)
                _sync_folder(os.path.dirname(self.path))
                return
            old = Folder(f"{self.uri}.old")
            try:
                exchange(aside.path, self.path)
                old = aside
            except OSError as error:
                if error.errno not in NO_EXCHANGE:
                    raise
                old.remove()
                os.rename(self.path, old.path)
                _sync_folder(os.path.dirname(self.path))
                os.rename(aside.path, self.path)
            _sync_folder(os.path.dirname(self.path))
            old.remove()

    def recover(self) -> None:
        """After a machine that stopped in the middle of `publish`: put back what was there before.

        Only a file system that cannot exchange two names ever needs it.
        """
        old = f"{self.path}.old"
        if self.is_local and not os.path.isdir(self.path) and os.path.isdir(old):
            with self._explained(f"cannot put {self.uri} back in its place"):
                os.rename(old, self.path)
                _sync_folder(os.path.dirname(self.path))

    def _put(self, where: str, chunks: Iterable[Any]) -> None:
        if not self.is_local:
            with self._fs.open(where, "wb") as file:
                for chunk in chunks:
                    file.write(bytes(chunk))
            return
        with open(where, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error.errno, f"{doing}: {_why(error)}") from error
        except Exception as error:
            if self.is_local:
                raise
            # Each store has errors of its own (botocore's, aiohttp's, …), and most are no OSError.
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise StorageError(errno.EIO, f"{doing}: the store says {words}") from error


def refuse_other(where: str, note: FileNote, nbytes: int, sha256: str) -> None:
    """Raise `StorageError` if size or content are not those of the note."""
    if nbytes != note.nbytes:
        raise StorageError(
            errno.EIO,
            f"{where}/{note.name} has {nbytes} bytes, {note.nbytes} were written: it was cut off "
            "or changed",
        )
    if sha256 != note.sha256:
        raise StorageError(
            errno.EIO,
            f"{where}/{note.name} has the right size but other content than was written (sha256 "
            f"{sha256[:12]}, not {note.sha256[:12]}): it was changed or the disk is failing",
        )


def _why(error: OSError) -> str:
    if error.errno in FULL:
        return "the disk is full; free space, or choose another --checkpoint-dir"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{(error.strerror or 'not allowed').lower()}; choose a folder that may be written "
            "with --checkpoint-dir"
        )
    return (error.strerror or str(error)).lower()


def exchange(one: str, other: str) -> None:
    """Let two names change places, in one step that nobody can see half of. Linux has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, "this system cannot exchange two names")
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one)


def _sync_folder(path: str) -> None:
    """A rename is on disk only when its folder is."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
