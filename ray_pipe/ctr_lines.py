"""The lines of a click log, and the errors that say where in the file they are.

Files are read as a stream, gzipped ones too. A line that cannot be used ends the reading: a
sample that was silently left out would shift the ids of all samples after it.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from ray_pipe.errors import DataError

LARGEST = 3.4028234663852886e38
"""Of fp32, in which dense features travel."""


class Lines:
    """The text of a file line by line; `number` is the last line given out, from 1."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        self.number = 0
        try:
            with self._opened() as file:
                for raw in file:
                    self.number += 1
                    yield self._decoded(raw)
        except FileNotFoundError:
            raise DataError(f"no such data file: {self.path}") from None
        except EOFError:
            raise DataError(
                f"{self.path}:{self.number + 1}: the gzip stream ends early; the file was cut "
                "short, fetch it again"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error

    def bad(self, problem: str, *, line: int | None = None) -> DataError:
        """An error at the current line, or at another."""
        return DataError(f"{self.path}:{self.number if line is None else line}: {problem}")

    def number_in(self, text: str, column: str) -> float:
        """A finite number that fp32 can hold, or the error that says otherwise."""
        try:
            value = float(text) if "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not -LARGEST <= value <= LARGEST:
            raise self.bad(f"column {column} is {text!r}, expected a finite number")
        return value

    def _opened(self) -> IO[bytes]:
        if self.path.suffix == ".gz":
            return cast("IO[bytes]", gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self.bad(
                f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8; "
                "convert the file, for example with iconv"
            ) from None


def signed_log(value: float) -> float:
    """log(1 + |x|) with the sign of x: counts of clicks span six decades, networks like one."""
    return math.copysign(math.log1p(abs(value)), value)
