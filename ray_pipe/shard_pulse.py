"""Which embedding shards live: asked all at once, judged by how long each is silent.

Path: ray_pipe.shards -> ray_pipe.shard_pulse -> stages.embedding.shard_actor

    the call fails                            its process, or its node, is gone       -> died
    silent for a second, and another process on its node sees that it was stopped     -> hung
    silent for `PING_S`, longer on a busy machine                                     -> hung

A ping has a thread of the shard's actor for itself: a shard that is busy with its rows answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayError

from ray_pipe.hearing import PING_CROWDING, PING_S, SILENT_S
from stages.crowding import crowding

GONE_S = 10.0
"""Until the kernel has let go of a process that was killed."""


class Lost(NamedTuple):
    """A shard that does not live any more."""

    kind: Literal["died", "hung"]
    why: str


class _Ping(NamedTuple):
    handle: Any
    ref: Any
    sent_s: float


class Pulse:
    """The signs of life of one run's shards. One thread at a time."""

    def __init__(self) -> None:
        self._pings: dict[int, _Ping] = {}
        self.heard_s: dict[int, float] = {}
        """When the last ping that a shard has answered was sent, by `time.monotonic`."""

    def beat(
        self, handles: Sequence[Any], infos: Sequence[Mapping[str, Any]], *, wait_s: float
    ) -> dict[int, Lost]:
        """Who is lost, by number. Waits until all have answered, but not longer than `wait_s`."""
        now = time.monotonic()
        for index, handle in enumerate(handles):
            ping = self._pings.get(index)
            if ping is None or ping.handle is not handle:
                self._pings[index] = _Ping(handle, handle.ping.remote(), now)
        refs = [ping.ref for ping in self._pings.values()]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0])
        lost: dict[int, Lost] = {}
        for index, ping in list(self._pings.items()):
            if ping.ref not in ready:
                continue
            del self._pings[index]
            try:
                ray.get(ping.ref, timeout=wait_s)
            except RayError as error:
                lost[index] = Lost("died", type(error).__name__)
            else:
                self.heard_s[index] = ping.sent_s
        return lost | self._silent(handles, infos)

    def _silent(
        self, handles: Sequence[Any], infos: Sequence[Mapping[str, Any]]
    ) -> dict[int, Lost]:
        lost: dict[int, Lost] = {}
        patience_s = PING_S * min(PING_CROWDING, crowding())
        for index, ping in self._pings.items():
            silent_s = time.monotonic() - ping.sent_s
            if silent_s < SILENT_S or index >= len(infos):
                continue
            if self._is_stopped(index, handles, infos):
                lost[index] = Lost("hung", f"its process was stopped, silent for {silent_s:.1f} s")
            elif silent_s >= patience_s:
                lost[index] = Lost("hung", f"it gave no sign of life for {silent_s:.1f} s")
        return lost

    def _is_stopped(
        self, index: int, handles: Sequence[Any], infos: Sequence[Mapping[str, Any]]
    ) -> bool:
        witness = self.witness(index, handles, infos)
        if witness is None:
            return False
        with suppress(RayError):
            return bool(ray.get(witness.sees_stopped.remote(infos[index]), timeout=SILENT_S))
        return False

    def witness(
        self, index: int, handles: Sequence[Any], infos: Sequence[Mapping[str, Any]]
    ) -> Any:
        """Another shard on the same node that answers; None if there is none."""
        for other, info in enumerate(infos):
            if other != index and info["node"] == infos[index]["node"]:
                ping = self._pings.get(other)
                if ping is None or time.monotonic() - ping.sent_s < SILENT_S:
                    return handles[other]
        return None

    def end(self, index: int, handles: Sequence[Any], infos: Sequence[Mapping[str, Any]]) -> None:
        """End what is left of a lost shard: its spill folder is locked while it is there."""
        self._pings.pop(index, None)
        witness = self.witness(index, handles, infos) if index < len(infos) else None
        with suppress(Exception):
            if witness is not None:  # Ray takes five seconds to end a process that was stopped
                ray.get(witness.end_process.remote(infos[index]), timeout=GONE_S)
            ray.kill(handles[index])

    def born(self, index: int) -> None:
        """A new process has taken the place."""
        self._pings.pop(index, None)
        self.heard_s[index] = time.monotonic()
