"""Raw tokens of click logs as 64-bit row ids, the same in every process and on every machine.

A row id is any int64. `HashIds` needs no state: the id is a keyed hash of table and token, so
that equal tokens of two tables differ and nothing has to be shared between readers. 64 bits make
collisions a matter of theory (100 million tokens of a table: one chance in 3,700). `VocabIds`
counts tokens in order of appearance instead: small dense ids, for models with plain arrays.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_pipe.errors import DataError

UNKNOWN = 0
"""What a frozen vocabulary makes of a token that it never saw."""

CACHED_TOKENS = 1 << 20
"""Of each table that `HashIds` remembers, so that the head of a long tail is hashed once."""


class IdMap(Protocol):
    """Gives a token of a table its id."""

    def id_of(self, table: str, token: str) -> int: ...


class HashIds:
    """A keyed 64-bit hash. Python's own `hash` is salted per process and would not do."""

    def __init__(self) -> None:
        self._cached: dict[str, dict[str, int]] = {}
        self._keys: dict[str, bytes] = {}

    def id_of(self, table: str, token: str) -> int:
        known = self._cached.setdefault(table, {})
        found = known.get(token)
        if found is None:
            if len(known) >= CACHED_TOKENS:
                known.clear()
            found = known[token] = self._hash(table, token)
        return found

    def _hash(self, table: str, token: str) -> int:
        key = self._keys.get(table)
        if key is None:
            # Hashed because a key has at most 64 bytes and a table's name any length.
            key = self._keys[table] = hashlib.blake2b(table.encode(), digest_size=16).digest()
        digest = hashlib.blake2b(token.encode(), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "little", signed=True)


class VocabIds:
    """Ids 1, 2, … of each table in order of appearance; `UNKNOWN` for new ones once frozen."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, int]] = {}
        self.frozen = False

    def id_of(self, table: str, token: str) -> int:
        known = self._ids.setdefault(table, {})
        if self.frozen:
            return known.get(token, UNKNOWN)
        return known.setdefault(token, len(known) + 1)

    def freeze(self) -> None:
        """From now on new tokens are `UNKNOWN`: call it between training and test data."""
        self.frozen = True

    def num_ids(self, table: str) -> int:
        """Rows that an array for this table needs, `UNKNOWN` included."""
        return len(self._ids.get(table, {})) + 1

    def save(self, path: str | Path) -> None:
        """Write the tokens of each table in the order of their ids."""
        tables = {table: list(known) for table, known in self._ids.items()}
        text = json.dumps({"ray_pipe_vocab": 1, "tables": tables}, ensure_ascii=False)
        aside = Path(f"{path}.part")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> VocabIds:
        """Read what `save` wrote; frozen, because the model's rows are counted by now."""
        try:
            read: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            tables = read["tables"] if read["ray_pipe_vocab"] == 1 else None
        except (ValueError, KeyError, TypeError):
            tables = None
        if not isinstance(tables, dict):
            raise DataError(f"{path} is no vocabulary that ray_pipe saved, or was cut short")
        vocab = cls()
        for table, tokens in tables.items():
            vocab._ids[table] = {token: place for place, token in enumerate(tokens, 1)}
            if len(vocab._ids[table]) != len(tokens):
                raise DataError(f"{path}: table {table!r} names a token twice")
        vocab.frozen = True
        return vocab


# --- mixing whole arrays --------------------------------------------------------------------------

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def salt_of(*purpose: str | int) -> int:
    """A salt for one purpose. Small numbers as salts would meet: a split that shares one with a
    feature is no random split, it cuts by that feature."""
    return int.from_bytes(hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest(), "little")


def mixed(values: NDArray[np.uint64], *, salt: int) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers that looks random (the finaliser of SplitMix64)."""
    start = np.uint64((salt * int(_STEP)) % (1 << 64))
    z = (values ^ start) + _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniform(values: NDArray[np.uint64], *, salt: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each value and salt: random access without a generator's state."""
    bits = mixed(mixed(values, salt=salt), salt=salt) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
