"""A stage's way out: frames go to the other actors from a thread that never blocks the stage.

Path: stages.actor -> stages.courier
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from compressors.scattered import Scattered

VIEW_NBYTES = 512 * 1024
"""Frames above this size travel as arrays, which Ray hands over as views, not as copies."""

_TAG = struct.Struct("<iI")
"""Source and generation before a frame; eight bytes, so that its parts stay aligned."""


def enclose(source: int, generation: int, frame: bytes | Scattered) -> tuple[Any, ...]:
    """The arguments of `deliver`. One `bytes` is what Ray carries with the least work: three
    arguments, or an array, cost a quarter more at both ends of a message."""
    payload = _payload(frame)
    if isinstance(payload, bytes):
        return (_TAG.pack(source, generation) + payload,)
    return source, generation, payload


def disclose(parts: tuple[Any, ...]) -> tuple[int, int, Any]:
    """The inverse of `enclose`: source, generation and frame."""
    if len(parts) == 3:
        return parts
    (tagged,) = parts
    source, generation = _TAG.unpack_from(tagged)
    return source, generation, memoryview(tagged)[_TAG.size :]


class Courier:
    """Pushes frames to other actors, in order, from a thread of its own.

    A push asks for no answer: that would cost as much again, and whether an actor lives is the
    driver's to watch. A frame that is lost with its actor is missed by whoever waits for it.
    """

    def __init__(
        self,
        source: int,
        on_error: Callable[[str], None],
        *,
        put: Callable[[Any], Any] | None = None,
    ) -> None:
        """`put` stores a payload and gives a reference in its place (`ray.put`): a letter that goes
        to several in a row is then stored once. Without it every push carries its own."""
        self.source = source
        self._put = put
        self._on_error = on_error
        self._frames: SimpleQueue[tuple[Any, str, tuple[int, ...], bytes | Scattered]] = (
            SimpleQueue()
        )
        Thread(target=self._main, name="courier", daemon=True).start()

    def push(self, peer: Any, target: int, generation: int, frame: bytes | Scattered) -> None:
        """Hand a frame to an actor of this replica; returns at once."""
        self._frames.put((peer, f"stage {target}", (self.source, generation), frame))

    def post(self, peer: Any, replica: int, generation: int, frame: bytes | Scattered) -> None:
        """Hand a letter to an actor of another replica; returns at once."""
        self._frames.put((peer, f"replica {replica}", (generation,), frame))

    def _main(self) -> None:
        stored: tuple[Any, Any] = (None, None)  # the last frame in pieces, and its reference
        peer: Any
        frame: Any
        payload: Any
        while True:
            if self._frames.empty():
                stored = (None, None)  # an idle courier must not keep a frame alive
            peer, target, tags, frame = self._frames.get()
            try:
                # Two tags: a frame of a neighbour. One: a letter of a replica.
                if len(tags) == 2:
                    peer.deliver.remote(*enclose(*tags, frame))
                else:
                    payload = _payload(frame)
                    if self._put is not None and isinstance(frame, Scattered):
                        if stored[0] is not frame:
                            stored = (frame, self._put(payload))
                        payload = stored[1]
                    peer.deliver_letter.remote(*tags, payload)
            except Exception as error:  # whatever it is, the thread must live and the stage hear
                self._on_error(f"pushing to {target} failed: {error!r}")
            peer = frame = payload = None


def _payload(frame: bytes | Scattered) -> Any:
    """What Ray is given: large frames as arrays, read in place at the other end."""
    if isinstance(frame, Scattered):  # Ray gathers the pieces, in one copy
        return [np.frombuffer(piece, dtype=np.uint8) for piece in frame.pieces]
    return np.frombuffer(frame, dtype=np.uint8) if len(frame) > VIEW_NBYTES else frame
