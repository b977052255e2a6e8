"""One message on the wire: a short msgpack header, then raw buffers, then a checksum.

Path: compressors.base -> compressors.frame -> netsim.link

    magic "RPF" | version u8 | header length u32 | total length u32     (little endian)
    msgpack header | zeros up to 8 | part | zeros up to 8 | part | ... | CRC-32 of all before

Packing copies each part once, into the frame; unpacking copies none: parts are views of the
buffer, aligned to eight bytes within it. Nothing is pickled. Whatever is wrong with a buffer, the
reader gets a `FrameError` that names it and has allocated no more than a few times the header.

Header values are None, bool, int, float, str, bytes, sequences and string-keyed mappings;
sequences arrive as tuples.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import msgpack

from compressors.base import Buffer, CodecError, Packet, RowMarks

Kind = Literal["activation", "gradient", "replica", "embedding", "control"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MAGIC = b"RPF"
VERSION = 1
MAX_FRAME_NBYTES = 1 << 30
MAX_HEADER_NBYTES = 1 << 18
MAX_ELEMENTS = 1 << 28  # of a packet's shape: a sparse codec could otherwise ask for any memory
MAX_DIMS = 8
MAX_PARTS = 64  # of a frame, all packets together
MAX_PACKETS = 16
MAX_DEPTH = 4  # of packets in packets
MAX_ROWS = 1 << 16
MAX_LIST = 4096  # items of one sequence or mapping in `meta` or `body`
MAX_VALUE_DEPTH = 8

_PREFIX = struct.Struct("<3sBII")
_CHECKSUM = struct.Struct("<I")
_ALIGN = 8
_WIDTHS = "bhiqQ"  # array typecodes, narrowest first


class FrameError(CodecError):
    """A buffer that is no frame, or a message that does not fit into one."""


class BadMagic(FrameError):
    """The buffer does not begin like a frame."""


class UnknownVersion(FrameError):
    """A frame of another release."""


class Truncated(FrameError):
    """The buffer ends before the frame does."""


class BadChecksum(FrameError):
    """At least one bit changed on the way."""


class TooLarge(FrameError):
    """A size or a count is above its limit."""


class BadHeader(FrameError):
    """The frame is whole, but its header makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """Where a message comes from, where it goes, and which of its kind it is."""

    kind: Kind
    source: int
    """Stage that sends; -1 is the driver."""

    target: int
    step: int
    replica: int = 0
    micro_batch: int = 0
    seq: int = 0
    """Counts the frames of one link and direction, so that a gap or a repeat shows."""

    generation: int = 0
    """Of the run: a recovery raises it, and frames of an older one are dropped."""

    attempt: int = 0
    flags: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    """Small values of a control message."""


def pack(header: FrameHeader, packet: Packet | None = None) -> bytes:
    """The frame as bytes. Each part is copied once; refuses what `unpack` would refuse."""
    coded, parts, total = _plan(header, packet)
    pieces: list[Buffer] = [_PREFIX.pack(MAGIC, VERSION, len(coded), total), coded]
    pieces.append(bytes(-(_PREFIX.size + len(coded)) % _ALIGN))
    for part in parts:
        pieces.append(part)
        pieces.append(bytes(-part.nbytes % _ALIGN))
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    pieces.append(_CHECKSUM.pack(checksum))
    return b"".join(pieces)


def frame_nbytes(header: FrameHeader, packet: Packet | None = None) -> int:
    """Exactly `len(pack(header, packet))`, without touching the parts' contents."""
    return _plan(header, packet)[2]


def header_nbytes(header: FrameHeader, packet: Packet | None = None) -> int:
    """What the frame costs on top of the packet's payload."""
    return frame_nbytes(header, packet) - (0 if packet is None else packet.nbytes)


def estimate_frame_nbytes(
    payload_nbytes: int,
    *,
    num_samples: int,
    num_parts: int = 2,
    remembers: bool = False,
    num_dims: int = 3,
) -> int:
    """Frame size for a payload not made yet, within 64 bytes of the real one.

    `remembers` counts the row marks (ids, visits, generations) of AC-SGD, with ids and visits
    below 32768, and the second packet header that a wrapping codec brings.
    """
    parts = tuple(bytes(_ALIGN) for _ in range(num_parts))
    shape = (num_samples,) + (256,) * (num_dims - 1)
    meta = {"bits": 4, "grid": "signed", "group": 32, "dtype": "float32"}
    packet = Packet(codec="uniform", shape=shape, meta=meta, parts=parts)
    if remembers:
        ids = tuple(300 + i for i in range(num_samples))
        rows = RowMarks(
            ids=ids, visits=(2,) * num_samples, generations=(0,) * num_samples,
            cold=(False,) * num_samples,
        )  # fmt: skip
        packet = Packet(codec="delta", shape=shape, inner=(packet,), rows=rows)
    header = FrameHeader(kind="activation", source=1, target=2, step=300, seq=3000)
    return header_nbytes(header, packet) + payload_nbytes


def unpack(buffer: Any) -> tuple[FrameHeader, Packet | None]:
    """Header and packet; the packet's parts are views of `buffer` and keep it alive."""
    view = _bytes_view(buffer)
    if view.nbytes < _PREFIX.size:
        _check_opening(view)
        raise Truncated(f"frame has {view.nbytes} bytes, its prefix alone has {_PREFIX.size}")
    _check_opening(view)
    _, _, header_length, total = _PREFIX.unpack_from(view)
    if header_length > MAX_HEADER_NBYTES:
        raise TooLarge(f"frame header of {header_length} bytes, limit is {MAX_HEADER_NBYTES}")
    if total > MAX_FRAME_NBYTES:
        raise TooLarge(f"frame of {total} bytes, limit is {MAX_FRAME_NBYTES}")
    if view.nbytes < total:
        raise Truncated(f"frame states {total} bytes, {view.nbytes} arrived")
    if view.nbytes > total:
        raise BadHeader(f"frame states {total} bytes, {view.nbytes - total} more follow it")
    header_end = _PREFIX.size + header_length
    parts_start = header_end + -header_end % _ALIGN
    parts_end = total - _CHECKSUM.size
    if parts_start > parts_end:
        raise Truncated(f"frame of {total} bytes cannot hold its header of {header_length}")
    (expected,) = _CHECKSUM.unpack_from(view, parts_end)
    actual = zlib.crc32(view[:parts_end])
    if actual != expected:
        raise BadChecksum(f"frame checksum is {actual:08x}, the sender's was {expected:08x}")
    fields = _tuple(_decode_header(view[_PREFIX.size : header_end]), 12, "frame header")
    header = _read_frame_header(fields)
    cutter = _Cutter(view[parts_start:parts_end])
    packet = None if fields[11] is None else _read_packet(fields[11], cutter, depth=1)
    if cutter.left:
        raise BadHeader(f"frame has {cutter.left} bytes that belong to no part")
    return header, packet


# Writing


def _plan(header: FrameHeader, packet: Packet | None) -> tuple[bytes, list[memoryview], int]:
    """Coded header, parts in frame order, total length."""
    parts: list[memoryview] = []
    _check_value(header.body, "body", depth=1)
    fields = [
        KINDS.index(header.kind) if header.kind in KINDS else _bad(f"kind {header.kind!r}"),
        header.replica, header.source, header.target, header.step, header.micro_batch,
        header.seq, header.generation, header.attempt, header.flags,
        header.body,
        None if packet is None else _packet_fields(packet, parts, depth=1, count=[0]),
    ]  # fmt: skip
    for value in fields[1:10]:
        _int(value, "frame header")
    try:
        coded: bytes = msgpack.packb(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadHeader(f"{header.kind} frame cannot be coded as msgpack: {error}") from error
    if len(coded) > MAX_HEADER_NBYTES:
        raise TooLarge(f"frame header of {len(coded)} bytes, limit is {MAX_HEADER_NBYTES}")
    total = _PREFIX.size + len(coded)
    total += -total % _ALIGN + sum(_aligned(part.nbytes) for part in parts) + _CHECKSUM.size
    if total > MAX_FRAME_NBYTES:
        raise TooLarge(f"frame of {total} bytes, limit is {MAX_FRAME_NBYTES}; send smaller parts")
    return coded, parts, total


def _packet_fields(
    packet: Packet, parts: list[memoryview], *, depth: int, count: list[int]
) -> list[Any]:
    count[0] += 1
    if depth > MAX_DEPTH or count[0] > MAX_PACKETS:
        _too_nested(packet.codec)
    if type(packet.codec) is not str:
        _bad(f"codec {packet.codec!r}")
    _check_value(packet.meta, f"meta of {packet.codec}", depth=1)
    views = [_bytes_view(part) for part in packet.parts]
    parts.extend(views)
    if len(parts) > MAX_PARTS:
        raise TooLarge(f"frame has more than {MAX_PARTS} parts")
    _check_shape(packet.shape)
    return [
        packet.codec,
        packet.shape,
        packet.meta,
        [view.nbytes for view in views],
        [_packet_fields(p, parts, depth=depth + 1, count=count) for p in packet.inner],
        None if packet.rows is None else _rows_fields(packet.rows),
    ]


def _rows_fields(rows: RowMarks) -> list[Any]:
    num = len(rows.ids)
    if not num == len(rows.visits) == len(rows.generations) == len(rows.cold):
        _bad(f"row marks of unequal length: {num} ids, {len(rows.visits)} visits, "
             f"{len(rows.generations)} generations, {len(rows.cold)} cold flags")  # fmt: skip
    if max(num, len(rows.evicted)) > MAX_ROWS:
        raise TooLarge(f"{max(num, len(rows.evicted))} row marks, limit is {MAX_ROWS}")
    return [
        num,
        _code_ints(rows.ids),
        _code_ints(rows.visits),
        _code_ints(rows.generations),
        _code_ints([int(flag) for flag in rows.cold]),
        len(rows.evicted),
        _code_ints(rows.evicted),
        rows.checksum,
    ]


def _code_ints(values: Sequence[int]) -> int | bytes:
    """One integer if all are equal, else a typecode and the values at the narrowest width."""
    if not values:
        return b""
    low, high = min(values), max(values)
    if low == high:
        return _int(low, "row mark")
    for code in _WIDTHS:
        bits = 8 * array(code).itemsize
        lowest = 0 if code.isupper() else -(1 << (bits - 1))
        if lowest <= low and high < lowest + (1 << bits):
            return code.encode() + array(code, values).tobytes()
    return _bad(f"row marks from {low} to {high} do not fit 64 bits")


# Reading: every value is checked before it is used, every count before memory is taken for it


class _Cutter:
    """Hands out the parts of a frame in order."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._offset = 0
        self.num_parts = 0
        self.num_packets = 0

    @property
    def left(self) -> int:
        return self._view.nbytes - self._offset

    def cut(self, nbytes: int) -> memoryview:
        self.num_parts += 1
        if self.num_parts > MAX_PARTS:
            raise TooLarge(f"frame has more than {MAX_PARTS} parts")
        if nbytes < 0 or _aligned(nbytes) > self.left:
            raise BadHeader(f"frame part of {nbytes} bytes, {self.left} are left")
        part = self._view[self._offset : self._offset + nbytes]
        self._offset += _aligned(nbytes)
        return part


def _decode_header(view: memoryview) -> Any:
    try:
        return msgpack.unpackb(
            view, use_list=False, raw=False, strict_map_key=True, max_array_len=MAX_LIST,
            max_map_len=MAX_LIST, max_ext_len=0, ext_hook=_refuse_extension,
        )  # fmt: skip
    # msgpack raises its own classes, all ValueErrors or UnpackExceptions, and the hash of a key
    # or the stack may fail beneath it: whatever the reason, this is no header.
    except Exception as error:
        raise BadHeader(f"frame header is not msgpack as we write it: {error!r}") from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise BadHeader(f"frame header holds a msgpack extension of type {code}")


def _read_frame_header(fields: tuple[Any, ...]) -> FrameHeader:
    kind = _int(fields[0], "kind")
    if not 0 <= kind < len(KINDS):
        _bad(f"kind number {kind}, known are 0 to {len(KINDS) - 1}")
    replica, source, target, step, micro_batch, seq, generation, attempt, flags = (
        _int(value, "frame header") for value in fields[1:10]
    )
    return FrameHeader(
        kind=KINDS[kind], replica=replica, source=source, target=target, step=step,
        micro_batch=micro_batch, seq=seq, generation=generation, attempt=attempt, flags=flags,
        body=_mapping(fields[10], "body"),
    )  # fmt: skip


def _read_packet(value: Any, cutter: _Cutter, *, depth: int) -> Packet:
    codec, shape, meta, lengths, inner, rows = _tuple(value, 6, "packet")
    cutter.num_packets += 1
    if depth > MAX_DEPTH or cutter.num_packets > MAX_PACKETS:
        _too_nested(codec)
    if type(codec) is not str:
        _bad(f"codec {codec!r}")
    _check_shape(shape)
    parts = tuple(cutter.cut(_int(n, "part length")) for n in _tuple(lengths, None, "parts"))
    inner = _tuple(inner, None, "inner packets")
    return Packet(
        codec=codec,
        shape=shape,
        meta=_mapping(meta, "meta"),
        parts=parts,
        inner=tuple(_read_packet(item, cutter, depth=depth + 1) for item in inner),
        rows=None if rows is None else _read_rows(rows),
    )


def _read_rows(value: Any) -> RowMarks:
    num, ids, visits, generations, cold, num_evicted, evicted, checksum = _tuple(value, 8, "rows")
    return RowMarks(
        ids=_read_ints(ids, num),
        visits=_read_ints(visits, num),
        generations=_read_ints(generations, num),
        cold=tuple(bool(flag) for flag in _read_ints(cold, num)),
        evicted=_read_ints(evicted, num_evicted),
        checksum=None if checksum is None else _int(checksum, "row checksum"),
    )


def _read_ints(coded: Any, num: Any) -> tuple[int, ...]:
    if not 0 <= _int(num, "number of row marks") <= MAX_ROWS:
        raise TooLarge(f"{num} row marks, limit is {MAX_ROWS}")
    if num == 0 and coded == b"":
        return ()
    if num and type(coded) is int:
        return (coded,) * num
    if type(coded) is not bytes or coded[:1] not in [code.encode() for code in _WIDTHS]:
        _bad(f"row marks coded as {type(coded).__name__}")
    values: array[int] = array(chr(coded[0]))
    if len(coded) != 1 + num * values.itemsize:
        _bad(f"{num} row marks in {len(coded) - 1} bytes of width {values.itemsize}")
    values.frombytes(coded[1:])
    return tuple(values)


# Checks that both directions share


def _check_opening(view: memoryview) -> None:
    opening = bytes(view[: len(MAGIC)])
    if opening != MAGIC[: len(opening)]:
        raise BadMagic(f"frame begins with {opening!r}, expected {MAGIC!r}")
    if view.nbytes > len(MAGIC) and view[len(MAGIC)] != VERSION:
        raise UnknownVersion(
            f"frame version {view[len(MAGIC)]}, this build reads {VERSION}; "
            "run the same source on all nodes"
        )


def _bytes_view(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise BadHeader(f"not a contiguous buffer of bytes: {error}") from error


def _check_shape(shape: Any) -> None:
    dims = _tuple(shape, None, "shape")
    if len(dims) > MAX_DIMS:
        raise TooLarge(f"shape with {len(dims)} dimensions, limit is {MAX_DIMS}")
    if any(_int(size, "shape") < 0 for size in dims):
        _bad(f"shape {dims}")
    if math.prod(dims) > MAX_ELEMENTS:
        raise TooLarge(f"shape {dims} has more than {MAX_ELEMENTS} elements")


def _check_value(value: Any, what: str, *, depth: int) -> None:
    for item in _children(value, what):
        if depth > MAX_VALUE_DEPTH:
            raise TooLarge(f"{what} is nested deeper than {MAX_VALUE_DEPTH}")
        _check_value(item, what, depth=depth + 1)


def _children(value: Any, what: str) -> Iterator[Any]:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return iter(())
    if not isinstance(value, (Mapping, list, tuple)):
        _bad(f"{what} holds a {type(value).__name__}")
    if len(value) > MAX_LIST:
        raise TooLarge(f"{what} holds {len(value)} items in one place, limit is {MAX_LIST}")
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            _bad(f"{what} has keys that are not text")
        return iter(value.values())
    return iter(value)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        _bad(f"{what} is a {type(value).__name__}, expected a mapping")
    _check_value(value, what, depth=1)
    return value


def _tuple(value: Any, length: int | None, what: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or length not in (None, len(value)):
        size = len(value) if isinstance(value, tuple) else "no"
        _bad(f"{what} is a {type(value).__name__} of {size} items, expected {length or 'a list'}")
    return value


def _int(value: Any, what: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 64:
        _bad(f"{what} holds {value!r:.80}, expected an integer of 64 bits")
    return value


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def _too_nested(codec: Any) -> NoReturn:
    raise TooLarge(
        f"packet of codec {codec!r:.40}: at most {MAX_PACKETS} packets, nested {MAX_DEPTH} deep"
    )


def _bad(what: str) -> NoReturn:
    raise BadHeader(f"frame: {what}")
