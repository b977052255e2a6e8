"""The C++ core. Imported by its facades only (compressors.native), which check all arguments.

Tensors are passed as addresses of dense row-major memory that the caller keeps alive. Each kernel
returns first how many rows it could not code; unless that is 0 its outputs mean nothing.
"""

from typing import Any

ABI: int

def build_info() -> dict[str, str]:
    """Compiler, version, build type and the instruction set in use."""

def isas() -> list[str]:
    """The instruction sets that this machine can run, slowest first."""

def use_isa(name: str, /) -> None:
    """Use the kernels built for this instruction set; the fastest are used unless told."""

def stream_beyond(nbytes: int, /) -> int:
    """Write outputs that fill more than 3/4 of so much cache past it; returns what was set before.

    The size of the last cache unless told. The same bits either way.
    """

def touch(
    codes: int,
    scales: int,
    row: int,
    out: int,
    new_row: int,
    rows: int,
    channels: int,
    bits: int,
    streamed: bool,
    /,
) -> int:
    """The memory traffic of a decoder and nothing else, for benchmarks: how fast it could be.

    Groups of 32 in whole blocks, rows in bf16; with `row` 0 as `dequantize`, else as
    `delta_decode`. Outputs are filled with the halves 0x3f80, and aligned to 64 bytes if
    `streamed`: written past the caches. Returns the bits seen in what was read.
    """

CRC32_FOLDS: bool
"""This machine has carry-less products; `crc32` is slower than zlib's where it has none."""

def crc32(address: int, nbytes: int, start: int, /) -> int:
    """As `zlib.crc32` of that memory."""

def quantize(
    x: int,
    codes: int,
    scales: int,
    rows: int,
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    /,
) -> int: ...
def dequantize(
    codes: int,
    scales: int,
    out: int,
    rows: int,
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    /,
) -> int: ...
def delta_encode(
    h: int,
    row: int,
    codes: int,
    scales: int,
    new_row: int,
    rows: int,
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    row_is_bf16: bool,
    /,
) -> tuple[int, float, float, float]:
    """(bad rows, |h - row|^2, |h|^2, |h - new|^2)."""

def delta_decode(
    codes: int,
    scales: int,
    row: int,
    out: int,
    new_row: int,
    rows: int,
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    row_is_bf16: bool,
    /,
) -> int: ...
def delta_encode_rows(
    h: list[int],
    rows: list[int],
    codes: int,
    scales: int,
    new_rows: list[int],
    positions: list[int],
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    row_is_bf16: bool,
    /,
) -> list[float]:
    """|h - row|^2, |h|^2, |h - new|^2 of each sample; nothing if one could not be coded."""

def delta_decode_rows(
    codes: int,
    scales: int,
    rows: list[int],
    outs: list[int],
    new_rows: list[int],
    positions: list[int],
    channels: int,
    bits: int,
    group: int,
    symmetric: bool,
    row_is_bf16: bool,
    /,
) -> int: ...

# --- rows and ids on the wire; their facade is compressors.wire_kernels ---------------------------

def rows_to_half(rows: int, num: int, dim: int, codes: int, exponents: int, /) -> int: ...
def half_to_rows(codes: int, exponents: int, num: int, dim: int, rows: int, /) -> int: ...
def rows_to_int8(
    rows: int, num: int, dim: int, smallest: float, largest: float, codes: int, steps: int, /
) -> int: ...
def int8_to_rows(codes: int, steps: int, num: int, dim: int, rows: int, /) -> int: ...
def dedupe(ids: int, num: int, unique: int, inverse: int, counts: int, /) -> int:
    """Returns how many are distinct."""

# --- the row store; its facade is stages.embedding.row_store --------------------------------------

ROWS_ABI: int

def row_procedures() -> list[str]:
    """Names that `RowTable.run` knows."""

class SnapshotExpired(RuntimeError): ...

class RowSnapshot:
    @property
    def stamp(self) -> int: ...
    def close(self) -> None: ...

class RowTable:
    """Arrays are C-contiguous and are used where they lie; the GIL is released."""

    @property
    def record_bytes(self) -> int: ...
    def multi_get(
        self, keys: Any, out: Any, seen: Any, snapshot: RowSnapshot | None, group: int, /
    ) -> int:
        """Returns how many rows are spilled."""

    def lookup(self, keys: Any, out: Any, seen: Any, step: int, /) -> tuple[int, int, int, int]:
        """(inserted, evicted, full, spilled)."""

    def apply(
        self, keys: Any, gradients: Any, lr: float, counts: Any | None, seen: Any, /
    ) -> tuple[int, int, int, int]:
        """(applied, absent, spilled, full)."""

    def run(
        self,
        name: str,
        offsets: Any,
        keys: Any,
        payload: Any | None,
        modes: Any | None,
        expected: Any | None,
        out: Any | None,
        seen: Any | None,
        statuses: Any,
        batch: int,
        inlined: int,
        lr: float,
        hops: int,
        /,
    ) -> None: ...
    def scan(
        self,
        snapshot: RowSnapshot | None,
        cursor: int,
        keys: Any,
        stamps: Any,
        recency: Any,
        records: Any,
        /,
    ) -> tuple[int, int, bool]:
        """(rows, next cursor, whether that was all)."""

    def restore(self, keys: Any, records: Any, touched: Any | None, /) -> int:
        """Returns how many found no room."""

    def order(self, keys: Any, touched: Any, /) -> int: ...
    def remove(self, keys: Any, /) -> int: ...
    def evict(self, n: int, /) -> int: ...
    def oldest(self, keys: Any, stamps: Any, records: Any, /) -> int: ...
    def mark_spilled(self, keys: Any, stamps: Any, /) -> int: ...
    def recall(self, keys: Any, stamps: Any, records: Any, done: Any, /) -> int: ...
    def stamps(
        self, keys: Any, snapshot: RowSnapshot | None, stamps: Any, on_disk: Any, /
    ) -> None: ...
    def alive(self, keys: Any, alive: Any, /) -> None: ...
    def initial(self, keys: Any, out: Any, /) -> None: ...
    def prune(self, max_alive: int, weights: Any, /) -> tuple[int, int, int, int, int]:
        """(rows, pruned, regrown, dropped rows, alive). Weights: [idle periods, chunks]."""

    def stats(self) -> dict[str, int]: ...
    def set_progress(self, steps: int, epoch: int, /) -> None: ...

class RowStore:
    @staticmethod
    def make(capacity: int, slab: int, huge: bool, snapshot_budget: int, /) -> RowStore: ...
    @staticmethod
    def table(
        store: RowStore,
        name: str,
        dim: int,
        chunks: int,
        optimizer: int,
        rule: tuple[float, float, float, float],
        init: int,
        mean: float,
        scale: float,
        seed: int,
        max_rows: int,
        lru: bool,
        spill: bool,
        expected_rows: int,
        decay: float,
        utility_scale: float,
        /,
    ) -> RowTable: ...
    @staticmethod
    def snapshot(store: RowStore, /) -> RowSnapshot: ...
    def stats(self) -> dict[str, int]: ...
    def compact(self) -> int: ...
