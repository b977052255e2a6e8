"""Folders that outlive a process: whole or not there, named errors, the same behind a URI."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from stages import storage
from stages.storage import FileNote, Folder, StorageError


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return Folder(tmp_path / "a" / "b")
    return Folder(f"memory://{uuid.uuid4().hex}/b")


def test_what_was_written_is_read_back(folder: Folder) -> None:
    note = folder.write("x.bin", [b"abc", memoryview(b"def")])

    assert note == FileNote(
        name="x.bin",
        nbytes=6,
        sha256="bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721",
    )
    assert folder.read("x.bin") == b"abcdef"
    assert folder.has("x.bin")
    assert not folder.has("y.bin")
    folder.check(note)


def test_a_folder_that_does_not_exist_has_no_children(folder: Folder) -> None:
    assert folder.children() == []


def test_children_are_folders_in_order(folder: Folder) -> None:
    folder.child("two").write("f", [b"1"])
    folder.child("one").write("f", [b"1"])
    folder.write("file", [b"1"])

    assert folder.children() == ["one", "two"]
    folder.child("one").remove()
    assert folder.children() == ["two"]


@pytest.mark.parametrize("name", ["cut", "changed"])
def test_a_file_that_is_not_the_one_written_is_named(folder: Folder, name: str) -> None:
    note = folder.write("x.bin", [b"abcdef"])
    folder.write("x.bin", [b"abc" if name == "cut" else b"abcdeX"])

    words = "has 3 bytes, 6 were written" if name == "cut" else "other content"
    with pytest.raises(StorageError, match=words):
        folder.check(note)


def test_a_published_folder_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "b")
    for text in (b"old", b"new"):
        aside = folder.aside()
        aside.write("f", [text])
        folder.publish(aside)

    assert folder.read("f") == b"new"
    parent = Folder(folder.uri.rpartition("/")[0])
    assert parent.children() == ["b"]


class PowerCutError(BaseException):
    """The machine stops here."""


def calls_of_publish(monkeypatch: pytest.MonkeyPatch, *, can_exchange: bool, cut_at: int) -> None:
    """Let the machine stop before the call number `cut_at` that changes a name."""
    seen = 0
    right_rename, right_exchange = os.rename, storage.exchange

    def counted(work: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(one: str, other: str) -> None:
            nonlocal seen
            if seen == cut_at:
                raise PowerCutError
            seen += 1
            work(one, other)

        return call

    def refused(one: str, other: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "rename", counted(right_rename))
    monkeypatch.setattr(storage, "exchange", counted(right_exchange) if can_exchange else refused)


def replace_and_stop(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, *, can_exchange: bool, cut_at: int
) -> None:
    aside = folder.aside()
    aside.write("f", [b"old"])
    folder.publish(aside)
    aside.write("f", [b"new"])
    with monkeypatch.context() as patch:
        calls_of_publish(patch, can_exchange=can_exchange, cut_at=cut_at)
        with contextlib.suppress(PowerCutError):
            folder.publish(aside)


@pytest.mark.parametrize(
    ("can_exchange", "cut_at", "text"),
    [
        (True, 0, b"old"),
        (True, 1, b"new"),
        (False, 0, b"old"),
        (False, 1, b"old"),  # the name is gone for a moment: `recover` brings the old one back
        (False, 2, b"new"),
    ],
)
def test_a_machine_that_stops_while_a_folder_is_replaced_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, cut_at: int, text: bytes
) -> None:
    folder = Folder(tmp_path / "c")
    replace_and_stop(folder, monkeypatch, can_exchange=can_exchange, cut_at=cut_at)

    folder.recover()

    assert folder.read("f") == text
    aside = folder.aside()
    aside.remove()
    aside.write("f", [b"newer"])
    folder.publish(aside)
    assert folder.read("f") == b"newer"
    assert Folder(tmp_path).children() == ["c"]


def test_two_names_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)

    try:
        storage.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    except OSError as error:
        pytest.skip(f"this file system cannot: {error}")

    assert [(tmp_path / name / "f").read_text() for name in ("a", "b")] == ["b", "a"]
    with pytest.raises(FileNotFoundError):
        storage.exchange(str(tmp_path / "a"), str(tmp_path / "missing"))


def test_recovering_a_folder_that_is_there_changes_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "c")
    folder.write("f", [b"this"])
    Folder(tmp_path / "c.old").write("f", [b"that"])

    folder.recover()

    assert folder.read("f") == b"this"


def test_on_a_store_every_attempt_writes_to_a_folder_of_its_own() -> None:
    folder = Folder(f"memory://{uuid.uuid4().hex}/b")
    first, second = folder.aside(), folder.aside()
    first.write("f", [b"1"])
    second.write("f", [b"2"])

    assert (first.read("f"), second.read("f"), folder.has("f")) == (b"1", b"2", False)
    assert folder.children() == sorted([first.name, second.name])


def test_a_store_that_refuses_the_new_file_keeps_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Folder(f"memory://{uuid.uuid4().hex}/b")
    folder.replace("f.json", b"one")

    def refuse(where: str, chunks: Any) -> None:
        raise OSError(errno.EIO, "the store does not answer")

    monkeypatch.setattr(folder, "_put", refuse)
    with pytest.raises(StorageError, match="the store does not answer"):
        folder.replace("f.json", b"two")

    assert folder.read("f.json") == b"one"


def test_until_it_is_published_a_local_folder_is_not_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "c")
    folder.aside().write("f", [b"1"])

    assert not folder.has("f")


def test_a_small_file_is_replaced(folder: Folder) -> None:
    folder.replace("f.json", b"one")
    folder.replace("f.json", b"two")

    assert folder.read("f.json") == b"two"
    assert not folder.has("f.json.part")


def test_an_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(StorageError, match="install what fsspec needs"):
        Folder("nosuch://bucket/x")


def test_a_writer_that_fails_leaves_no_file(folder: Folder) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"cannot write .*the disk is full; free space"):
        folder.write("x.bin", broken())
    assert not folder.has("x.bin")


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        folder = Folder(tmp_path)
        first = folder.write("first", [bytes(600_000)])
        with pytest.raises(StorageError, match=r"cannot write .*second: the disk is full"):
            folder.write("second", [bytes(600_000)])

        folder.check(first)
        assert os.listdir(tmp_path) == ["first"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(StorageError, match=r"read-only.*--checkpoint-dir"):
            Folder(tmp_path).write("x", [b"1"])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class MoodyError(Exception):
    """As stores raise them: no OSError."""


class MoodyStore(MemoryFileSystem):
    """Remembers nothing and complains about everything."""

    protocol = "moody"

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise MoodyError("Could not connect to\nthe endpoint")

    makedirs = open = cat_file = exists = rm = rm_file = ls = _refuse


def test_errors_of_a_stores_own_are_storage_errors_with_their_words() -> None:
    register_implementation("moody", MoodyStore, clobber=True)
    folder = Folder("moody://bucket/run")
    note = FileNote(name="a", nbytes=1, sha256="")
    calls = [
        lambda: folder.write("a", [b"x"]), lambda: folder.read("a"), lambda: folder.check(note),
        lambda: folder.has("a"), folder.children, folder.remove,
    ]  # fmt: skip

    for call in calls:
        with pytest.raises(StorageError, match="MoodyError: Could not connect to the endpoint"):
            call()
    folder.remove_file("a")  # costs nothing


def test_a_mistake_of_ours_is_not_taken_for_a_fault_of_the_disk(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Folder(tmp_path).write("a", chunks())
    assert list(tmp_path.iterdir()) == []
