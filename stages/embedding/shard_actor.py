"""A shard's Ray face: letters in, letters out, beside the stages of the dense network.

Path: netsim.link -> stages.embedding.shard_actor -> stages.embedding.shard_server

Threads as in `stages.actor`: `net` (letters come in, in order), `control` (numbers), `pulse` (signs
of life, which wait for nobody), `save` (checkpoints, beside training), the private event loop that
the shard lives on, and a courier. The shard's uplink is shaped as a stage's, and its bytes are
counted at its links.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from netsim.link import Link, LinkLike
from netsim.loop_thread import LoopThread
from netsim.shaper import Uplink
from netsim.topology import Topology
from stages.actor_probes import end_actor
from stages.copies import Copies
from stages.courier import Courier, disclose
from stages.digest import software
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.embedding.row_export import Exporter, Increment
from stages.embedding.shard import Shard
from stages.embedding.shard_files import fill_shard
from stages.embedding.shard_server import ShardServer
from stages.embedding.shard_stream import KeptShard, keep_shard
from stages.mishap import commit_deed
from stages.process_state import is_stopped
from stages.remote import own_copy
from stages.storage import Folder

T = TypeVar("T")
CLIENT = 0
"""Stage 0 is the only client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlace:
    """Where a shard stands in a run."""

    index: int
    num_stages: int
    topology: Topology
    generation: int
    """Of the arm's stages: frames of an earlier arm are dropped."""

    life: int = 0
    """Raised for each new process in the place of one that died."""


class ShardActor:
    """A process that can be a shard. Wrapped with `ray.remote` where it is used; no `async`."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self.index = index
        self.troubles: list[str] = []
        self._loop = LoopThread(
            name=f"shard-{index}", on_error=lambda error: self.troubles.append(repr(error))
        )
        self._client: Any = None
        self._server: ShardServer | None = None
        self._link: LinkLike | None = None
        self._generation = -1
        self._num_shards = 1
        self._exporters: dict[Path, Exporter] = {}
        self._copies: Copies[KeptShard] = Copies()

    def __repr__(self) -> str:
        return f"EmbeddingShard(shard={self.index})"

    def connect(self, client: Any) -> None:
        """Learn the actor of stage 0."""
        self._client = client

    def setup(self, spec: EmbeddingSpec, place: ShardPlace) -> dict[str, Any]:
        """Become an empty shard of an arm; whatever this actor was before is forgotten."""
        self._close_copies()
        self._server = self._on_loop(self._build, spec, place)
        self._generation = place.generation
        self._num_shards = spec.num_shards
        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "store": "native" if self._server.shard.store.native else "twin",
            **software(),
        }

    def _build(self, spec: EmbeddingSpec, place: ShardPlace) -> ShardServer:
        if self._link is not None:
            self._link.close()
        self._let_go()  # the memory of two shards may be more than there is
        node = spec.node(place.index, place.num_stages)
        courier = Courier(node, self.troubles.append)
        generation = place.generation
        link = Link(
            place.topology.link(node, CLIENT),
            Uplink(place.topology.uplink_bps(node)),
            lambda frame: courier.push(self._client, CLIENT, generation, frame),
            seed=spec.seed * 1009 + node,
            name=f"e{place.index}->{CLIENT}",
        )
        self._link = link
        shard = Shard(
            spec.tables,
            index=place.index,
            tau=spec.bound,
            seed=spec.seed,
            capacity=spec.capacity,
            num_shards=spec.num_shards,
            spill=spec.spill,
            core=spec.core,
            slab=spec.slab,
            pages="huge" if spec.slab >= 2 << 20 else "4k",
        )
        server = ShardServer(shard, link_to=lambda client: link, wire=spec.wire)
        own = [
            (m.point, m.version)
            for m in spec.mishaps
            if (m.shard, m.life) == (place.index, place.life)
        ]
        if own:
            server.on_point = lambda point: _strike((point, shard.version) in own)
        return server

    def _let_go(self) -> None:
        """Of the shard that this was."""
        old, self._server = self._server, None
        self._exporters = {}
        if old is not None:
            old.shard.close()

    def deliver(self, *parts: Any) -> None:
        """A letter of stage 0: enqueue only. What is left of an earlier arm is dropped."""
        _, generation, frame = disclose(parts)
        server = self._server
        if server is not None and generation == self._generation:
            self._loop.call_soon(server.on_frame, frame)

    def books(self) -> dict[str, Any]:
        """Bytes sent so far by link and kind, and the shard's numbers; counters only rise."""
        return self._on_loop(self._books)

    def _books(self) -> dict[str, Any]:
        server, link = self._server, self._link
        assert server is not None
        assert link is not None
        return {
            "sent": {link.name: dict(link.sent)},
            "spans": link.drain_spans(),
            "resident_bytes": resident_bytes(),
            "troubles": list(self.troubles),
            **server.shard.stats(),
        }

    # --- checkpoints: stage 0 says when, between two steps with nothing under way ---------------

    def keep(self, key: str) -> None:
        """Take a snapshot of the shard for `write_kept`; training goes on at once."""
        kept = self._on_loop(self._keep)
        if not self._copies.put(key, kept):
            kept.close()  # stage 0 died meanwhile, and the driver has given up this copy

    def keep_not(self, key: str, why: str) -> None:
        """Stage 0 gave up, or is gone: `write_kept` need not wait for a snapshot."""
        self._copies.put_if_missing(key, RuntimeError(f"stage 0 did not save its state: {why}"))

    def _close_copies(self) -> None:
        """Those that nobody will write: a snapshot pins the rows of its moment."""
        for kept in self._copies.clear():
            kept.close()

    def _keep(self) -> KeptShard:
        assert self._server is not None
        if self._server.shard.num_open:
            raise RuntimeError(
                f"shard {self.index} has {self._server.shard.num_open} steps under way; it can be "
                "saved only after stage 0 has waited for them"
            )
        self._server.reach("keep")
        return keep_shard(self._server.shard)

    def write_kept(self, key: str, folder: str | None, name: str) -> Any:
        """Write what was kept to a file, beside training: its `FileNote`. Waits for the snapshot.
        Without a folder (none that this machine sees too), its bytes."""
        with self._copies.take(key) as kept:
            if folder is None:
                return np.frombuffer(kept.to_bytes(), dtype=np.uint8)
            return Folder(folder).write(name, kept.chunks())

    def sees(self, folder: str, name: str, token: bytes) -> bool:
        """Whether a file that the driver wrote is the same here: storage is shared."""
        try:
            return Folder(folder).read(name) == token
        except OSError:
            return False

    def fill_from(
        self, num_shards: int, with_counts: bool, touch_base: int | None, *files: Any
    ) -> tuple[int, int]:
        """Take the own rows out of saved shards, however many there were; returns how many it took,
        and the base of its touches (`Shard.touch_base`), which all shards of a run share.

        A file is its bytes, or the path of one that this machine sees too; then nothing is copied.
        `with_counts`: all shards begin anew, and the sums of their counters go on.
        """
        here = [np.memmap(file, mode="r") if isinstance(file, str) else file for file in files]
        return self._on_loop(self._fill, num_shards, with_counts, touch_base, here)

    def _fill(
        self, num_shards: int, with_counts: bool, touch_base: int | None, files: list[Any]
    ) -> tuple[int, int]:
        assert self._server is not None
        self._server.reach("fill")
        shard = self._server.shard
        num_rows = fill_shard(
            shard, files, num_shards=num_shards, with_counts=with_counts, touch_base=touch_base
        )
        return num_rows, shard.touch_base

    def sizes(self, paths: list[str]) -> list[int]:
        """Bytes of files as this machine sees them; -1 of those that it does not."""
        return [os.path.getsize(path) if os.path.isfile(path) else -1 for path in paths]

    def export(self, folder: str, full: bool) -> Increment:
        """Write what serving has not seen of this shard, or all of it; see `row_export`."""
        return self._on_loop(self._export, Path(folder), full)

    def _export(self, folder: Path, full: bool) -> Increment:
        assert self._server is not None
        if folder not in self._exporters or full:
            shard = self._server.shard
            self._exporters[folder] = Exporter(shard, folder, num_shards=self._num_shards)
        return self._exporters[folder].export()

    def rows(self, table: str) -> tuple[Any, Any]:
        """Ids and weights of all rows of a table, by rising id: for tests and tools."""
        return self._on_loop(self._rows, table)

    def _rows(self, table: str) -> tuple[Any, Any]:
        assert self._server is not None
        shard = self._server.shard
        parts = [part.keys for part in shard.store[table].scan()]
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        return keys, shard.rows[table].read(keys).weights  # those on disk too

    def ping(self) -> int:
        """The process id, as a sign of life."""
        return os.getpid()

    def sees_stopped(self, info: dict[str, Any]) -> bool:
        """Whether the shard that `setup` returned `info` of was stopped, seen from its node."""
        return is_stopped(info["pid"])

    def end_process(self, info: dict[str, Any]) -> bool:
        """Kill the shard that `setup` returned `info` of, if it is on this node and still there."""
        return end_actor(info)

    def _on_loop(self, work: Callable[..., T], *args: Any) -> T:
        async def run() -> T:
            return work(*args)

        return self._loop.submit(run()).result()


def _strike(now: bool) -> None:
    if now:
        commit_deed("kill")


def resident_bytes() -> int:
    """Memory of this process, as the system counts it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


CONCURRENCY = {"net": 1, "control": 1, "pulse": 1, "save": 1}
GROUPS = {
    "deliver": "net",
    "books": "control",
    "ping": "pulse",  # a shard that is busy with its rows lives
    "sees_stopped": "pulse",
    "end_process": "pulse",
    "write_kept": "save",
    "sees": "save",
    "sizes": "pulse",
}


def remote_shard(index: int, *, name: str, strategy: Any = "SPREAD") -> Any:
    """Start a shard's actor. Ray must not restart it: rows would be gone, and nobody would know."""
    return _remote_class().options(name=name, scheduling_strategy=strategy).remote(index)


@cache
def _remote_class() -> Any:
    """One for all shards: who is given a handle keeps its class (`stages.remote`)."""
    cls: Any = type("EmbeddingShard", (ShardActor,), {})
    for method, group in GROUPS.items():
        options: dict[str, Any] = {"concurrency_group": group}
        if method == "deliver":
            options |= {"num_returns": 0, "enable_task_events": False}
        setattr(cls, method, ray.method(**options)(own_copy(getattr(ShardActor, method))))
    decorate: Any = ray.remote
    return decorate(num_cpus=0, max_restarts=0, concurrency_groups=CONCURRENCY)(cls)
