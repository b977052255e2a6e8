"""The Group Generator behind its post box: letters in, decisions out, leases on the clock.

In a rehearsal it is a node of its own; in earnest a small Ray actor holds one. It can be ended and
begun again at any time: replicas go on alone until it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from compressors.base import Packet
from compressors.frame import FrameHeader
from stages.sync.generator import GroupGenerator
from stages.sync.post import Post
from stages.sync.strategy import MemberEvent
from stages.sync.tickets import Notice


class GeneratorDesk:
    """Answers replicas. `make(epoch)` gives an empty generator."""

    def __init__(self, post: Post, make: Callable[[int], GroupGenerator]) -> None:
        self._post = post
        self._make = make
        self.is_open = True
        self.generator = make(0)
        self._timer: asyncio.TimerHandle | None = None
        post.handlers["request"] = self._on_request
        post.handlers["done"] = self._on_done
        post.handlers["lost"] = self._on_lost
        post.handlers["leave"] = self._on_leave

    def close(self) -> None:
        """The generator is dead: nothing is answered, everything is forgotten."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reopen(self) -> None:
        """It is back, empty and with a higher epoch."""
        self.generator = self._make(self.generator.epoch + 1)
        self.is_open = True

    def on_member(self, event: MemberEvent) -> None:
        """Somebody came or went; whoever comes will ask."""
        if not self.is_open:
            return
        if event.kind == "dead":
            self._tell(self.generator.gone(event.replica, now=self._now()))
        else:
            self.generator.came(event.replica)

    def _on_request(self, header: FrameHeader, packet: Packet | None) -> None:
        if self.is_open:
            self._tell(
                self.generator.request(
                    header.replica,
                    number=header.body["req"],
                    counter=header.body["count"],
                    now=self._now(),
                )
            )
            self._arm()

    def _on_done(self, header: FrameHeader, packet: Packet | None) -> None:
        if self.is_open and header.generation == self.generator.epoch:
            self._tell(
                self.generator.done(
                    header.step,
                    header.replica,
                    number=header.body["req"],
                    ok=bool(header.body.get("ok", True)),
                    sent_s=float(header.body.get("sent_s", 0.0)),
                    now=self._now(),
                )
            )

    def _on_lost(self, header: FrameHeader, packet: Packet | None) -> None:
        if self.is_open:
            notices = self.generator.lost(
                header.step, header.replica, epoch=header.generation, now=self._now()
            )
            for notice in notices:
                if notice.gid == header.step and notice.kind == "cancel":
                    self._post.send(
                        notice.to, "cancel", epoch=header.generation, number=header.step
                    )
                else:
                    self._tell([notice])

    def _on_leave(self, header: FrameHeader, packet: Packet | None) -> None:
        if self.is_open:
            self._tell(self.generator.leave(header.replica, now=self._now()))

    def _tell(self, notices: Iterable[Notice]) -> None:
        epoch = self.generator.epoch
        for notice in notices:
            if notice.kind == "cancel":
                self._post.send(notice.to, "cancel", epoch=epoch, number=notice.gid)
                continue
            body = {
                "members": notice.members,
                "req": notice.request,
                "limit": notice.deadline_s,
                "over": notice.over,
            }
            self._post.send(notice.to, "ticket", epoch=epoch, number=notice.gid, body=body)

    def _arm(self) -> None:
        """Look for expired leases now and then, as long as anybody asks for anything."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            limit_s = self.generator._patience.limit_s
            self._timer = loop.call_later(limit_s, self._check)

    def _check(self) -> None:
        self._timer = None
        self._tell(self.generator.expire(self._now()))
        if self.generator._groups:
            self._arm()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
