"""The C++ core. Imported by its facades only (compressors.kernels), which check all arguments.

Tensors are passed as addresses of dense row-major memory that the caller keeps alive. Each kernel
returns first how many rows it could not code; unless that is 0 its outputs mean nothing.
"""

ABI: int

def build_info() -> dict[str, str]:
    """Compiler, version, build type and the instruction set in use."""

def isas() -> list[str]:
    """The instruction sets that this machine can run, slowest first."""

def use_isa(name: str, /) -> None:
    """Use the kernels built for this instruction set; the fastest are used unless told."""

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
