"""Replicas made slow on purpose: what `--slow` says, and how long a step then takes.

    2:4x            replica 2 computes 4 times slower, always
    random:6x@0.06  each step of each replica is 6 times slower with probability 0.06

Several are given as a list or joined by commas; their factors multiply. Draws depend on the seed,
the replica and the step alone, so that every strategy meets the same slowness.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_WRITING = re.compile(
    r"(?:(?P<who>\d+)|(?P<random>random))\s*:\s*(?P<factor>\d+(?:\.\d*)?|\.\d+)x"
    r"(?:\s*@\s*(?P<chance>\d+(?:\.\d*)?|\.\d+)(?P<percent>%)?)?"
)
_EXPECTED: Final = "'2:4x' (replica 2 is 4 times slower) or 'random:6x@0.06'"


class SlownessError(ValueError):
    """A `--slow` that cannot be read in exactly one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """One cause of slowness."""

    factor: float
    replica: int | None = None
    """None: any replica, at random."""

    chance: float = 1.0

    def factor_at(self, replica: int, step: int, *, seed: int) -> float:
        """How many times slower this step of this replica is."""
        if self.replica is not None:
            return self.factor if replica == self.replica else 1.0
        return self.factor if draw(seed, replica, step, "slow") < self.chance else 1.0

    def __str__(self) -> str:
        if self.replica is not None:
            return f"{self.replica}:{self.factor:g}x"
        return f"random:{self.factor:g}x@{self.chance:g}"


def parse_slow(text: str | Iterable[str], *, num_replicas: int) -> tuple[Slowness, ...]:
    """What `--slow` says; refuses what cannot be read, replicas that do not exist, speed-ups."""
    texts = text.split(",") if isinstance(text, str) else [p for t in text for p in t.split(",")]
    return tuple(_parse_one(part.strip(), num_replicas) for part in texts if part.strip())


def parse_slow_link(text: str, *, num_replicas: int) -> tuple[Slowness, ...]:
    """Uplinks that are slow: of replicas by name, and always."""
    found = parse_slow(text, num_replicas=num_replicas)
    for one in found:
        if one.replica is None:
            raise SlownessError(
                f"slow link {str(one)!r}: a link is slow all the time; write '2:{one.factor:g}x'"
            )
    return found


def slow_factor(slow: Iterable[Slowness], replica: int, step: int, *, seed: int) -> float:
    """All causes together."""
    factor = 1.0
    for one in slow:
        factor *= one.factor_at(replica, step, seed=seed)
    return factor


def draw(seed: int, *what: object) -> float:
    """A number from 0 to 1 that depends on nothing but the arguments."""
    text = "/".join(map(str, (seed, *what))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") / 2**56


def _parse_one(text: str, num_replicas: int) -> Slowness:
    match = _WRITING.fullmatch(text)
    if match is None:
        raise SlownessError(f"slow {text!r} is not understood: expected {_EXPECTED}")
    factor = float(match["factor"])
    if factor < 1:
        raise SlownessError(f"slow {text!r}: {factor:g}x is a speed-up, must be 1x or more")
    if match["random"]:
        if match["chance"] is None:
            raise SlownessError(f"slow {text!r} lacks how often: write 'random:{factor:g}x@0.06'")
        chance = float(match["chance"]) / (100 if match["percent"] else 1)
        if not 0 < chance <= 1:
            raise SlownessError(f"slow {text!r}: {chance:g} is no probability, from 0 to 1")
        return Slowness(factor=factor, chance=chance)
    if match["chance"] is not None:
        raise SlownessError(
            f"slow {text!r}: a named replica is always slow; leave out '@{match['chance']}', "
            f"or write 'random:{factor:g}x@{match['chance']}'"
        )
    replica = int(match["who"])
    if replica >= num_replicas:
        raise SlownessError(
            f"slow {text!r}: there is no replica {replica}, with {num_replicas} replicas they are "
            f"0 to {num_replicas - 1}"
        )
    return Slowness(factor=factor, replica=replica)
