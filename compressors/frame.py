"""One message on the wire: a short msgpack header, then raw buffers, then a checksum.

Path: compressors.base -> compressors.frame -> netsim.link

    magic "RPF" | version u8 | header length u32 | total length u32     (little endian)
    msgpack header | zeros up to 8 | part | zeros up to 8 | part | ... | CRC-32 of all before

`pack` copies each part once, into the frame; `scatter` leaves large ones where they are, for a
transport that gathers pieces itself. Unpacking copies none: parts are views of the buffer, aligned
to eight bytes within it. Nothing is pickled. Whatever is wrong with a buffer, the
reader gets a `FrameError` that names it and has allocated no more than a few times the header.

Header values are None, bool, int, float, str, bytes, sequences and string-keyed mappings;
sequences arrive as tuples.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import msgpack

from compressors.base import Buffer, Packet
from compressors.checksum import crc32
from compressors.frame_fields import (
    MAX_DEPTH,
    MAX_FRAME_NBYTES,
    MAX_HEADER_NBYTES,
    MAX_LIST,
    MAX_PACKETS,
    MAX_PARTS,
    BadChecksum,
    BadHeader,
    BadMagic,
    FrameError,
    TooLarge,
    Truncated,
    UnknownVersion,
    as_int,
    as_mapping,
    as_tuple,
    bad_header,
    bytes_view,
    check_shape,
    check_value,
    lengthen,
    read_rows,
    rows_fields,
    shorten,
)
from compressors.scattered import Scattered, gather_small

__all__ = [
    "KINDS",
    "RAW",
    "BadChecksum",
    "BadHeader",
    "BadMagic",
    "FrameError",
    "FrameHeader",
    "Kind",
    "Scattered",
    "TooLarge",
    "Truncated",
    "UnknownVersion",
    "frame_nbytes",
    "header_nbytes",
    "pack",
    "scatter",
    "unpack",
]

Kind = Literal["activation", "gradient", "replica", "embedding", "control"]
KINDS: tuple[Kind, ...] = get_args(Kind)

RAW = 1
"""Flag: the tensor is in the packet as it was, whatever the codec of the edge."""

MAGIC = b"RPF"
VERSION = 1
_PREFIX = struct.Struct("<3sBII")
_CHECKSUM = struct.Struct("<I")
_ALIGN = 8


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
    """Of the group of replicas: who leaves or comes raises it, and letters of an older one are
    dropped. Rows have generations of their own, in the packet."""

    attempt: int = 0
    """At this step, within the pipeline: an abort raises it."""

    flags: int = 0
    """`RAW`, or nothing."""

    body: Mapping[str, Any] = field(default_factory=dict)
    """Small values of a control message."""


def pack(header: FrameHeader, packet: Packet | None = None) -> bytes:
    """The frame as bytes. Each part is copied once; refuses what `unpack` would refuse."""
    return b"".join(_pieces(header, packet))


def scatter(header: FrameHeader, packet: Packet | None = None) -> bytes | Scattered:
    """The same frame with large parts where they are; bytes, if there are none."""
    return gather_small(_pieces(header, packet))


def frame_nbytes(header: FrameHeader, packet: Packet | None = None) -> int:
    """Exactly `len(pack(header, packet))`, without touching the parts' contents."""
    return _plan(header, packet)[2]


def header_nbytes(header: FrameHeader, packet: Packet | None = None) -> int:
    """What the frame costs on top of the packet's payload."""
    return frame_nbytes(header, packet) - (0 if packet is None else packet.nbytes)


def unpack(buffer: Any) -> tuple[FrameHeader, Packet | None]:
    """Header and packet; the packet's parts are views of `buffer` and keep it alive.

    A list of pieces is read as what `scatter` makes.
    """
    if isinstance(buffer, list):
        buffer = Scattered(buffer)
    frame = buffer if isinstance(buffer, Scattered) else Scattered((buffer,))
    opening = frame.cut(0, min(_PREFIX.size, frame.nbytes))
    _check_opening(opening)
    if frame.nbytes < _PREFIX.size:
        raise Truncated(f"frame has {frame.nbytes} bytes, its prefix alone has {_PREFIX.size}")
    _, _, header_length, total = _PREFIX.unpack_from(opening)
    if header_length > MAX_HEADER_NBYTES:
        raise TooLarge(f"frame header of {header_length} bytes, limit is {MAX_HEADER_NBYTES}")
    if total > MAX_FRAME_NBYTES:
        raise TooLarge(f"frame of {total} bytes, limit is {MAX_FRAME_NBYTES}")
    if frame.nbytes < total:
        raise Truncated(f"frame states {total} bytes, {frame.nbytes} arrived")
    if frame.nbytes > total:
        raise BadHeader(f"frame states {total} bytes, {frame.nbytes - total} more follow it")
    header_end = _PREFIX.size + header_length
    parts_start = header_end + -header_end % _ALIGN
    parts_end = total - _CHECKSUM.size
    if parts_start > parts_end:
        raise Truncated(f"frame of {total} bytes cannot hold its header of {header_length}")
    (expected,) = _CHECKSUM.unpack(frame.cut(parts_end, total))
    actual = frame.checksum(parts_end)
    if actual != expected:
        raise BadChecksum(f"frame checksum is {actual:08x}, the sender's was {expected:08x}")
    fields = as_tuple(_decode_header(frame.cut(_PREFIX.size, header_end)), 12, "frame header")
    header = _read_frame_header(fields)
    cutter = _Cutter(frame, parts_start, parts_end)
    packet = None if fields[11] is None else _read_packet(fields[11], cutter, depth=1)
    if cutter.left:
        raise BadHeader(f"frame has {cutter.left} bytes that belong to no part")
    return header, packet


# Writing


def _pieces(header: FrameHeader, packet: Packet | None) -> list[Buffer]:
    """The frame, checksum and all; parts are those of the packet."""
    coded, parts, total = _plan(header, packet)
    opening = _PREFIX.pack(MAGIC, VERSION, len(coded), total) + coded
    pieces: list[Buffer] = [opening + bytes(-len(opening) % _ALIGN)]
    for part in parts:
        pieces.append(part)
        pieces.append(bytes(-part.nbytes % _ALIGN))
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    pieces.append(_CHECKSUM.pack(checksum))
    return pieces


def _plan(header: FrameHeader, packet: Packet | None) -> tuple[bytes, list[memoryview], int]:
    """Coded header, parts in frame order, total length."""
    parts: list[memoryview] = []
    check_value(header.body, "body", depth=1)
    fields = [
        KINDS.index(header.kind) if header.kind in KINDS else bad_header(f"kind {header.kind!r}"),
        header.replica, header.source, header.target, header.step, header.micro_batch,
        header.seq, header.generation, header.attempt, header.flags,
        dict(header.body),
        None if packet is None else _packet_fields(packet, parts, depth=1, count=[0]),
    ]  # fmt: skip
    for value in fields[1:10]:
        as_int(value, "frame header")
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
        bad_header(f"codec {packet.codec!r}")
    check_value(packet.meta, f"meta of {packet.codec}", depth=1)
    views = [bytes_view(part) for part in packet.parts]
    parts.extend(views)
    if len(parts) > MAX_PARTS:
        raise TooLarge(f"frame has more than {MAX_PARTS} parts")
    check_shape(packet.shape)
    return [
        shorten(packet.codec),
        packet.shape,
        shorten(packet.meta),
        [view.nbytes for view in views],
        [_packet_fields(p, parts, depth=depth + 1, count=count) for p in packet.inner],
        None if packet.rows is None else rows_fields(packet.rows),
    ]


# Reading


class _Cutter:
    """Hands out the parts of a frame in order."""

    def __init__(self, frame: Scattered, start: int, end: int) -> None:
        self._frame = frame
        self._offset = start
        self._end = end
        self.num_parts = 0
        self.num_packets = 0

    @property
    def left(self) -> int:
        return self._end - self._offset

    def cut(self, nbytes: int) -> memoryview:
        self.num_parts += 1
        if self.num_parts > MAX_PARTS:
            raise TooLarge(f"frame has more than {MAX_PARTS} parts")
        if nbytes < 0 or _aligned(nbytes) > self.left:
            raise BadHeader(f"frame part of {nbytes} bytes, {self.left} are left")
        part = self._frame.cut(self._offset, self._offset + nbytes)
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
    kind = as_int(fields[0], "kind")
    if not 0 <= kind < len(KINDS):
        bad_header(f"kind number {kind}, known are 0 to {len(KINDS) - 1}")
    replica, source, target, step, micro_batch, seq, generation, attempt, flags = (
        as_int(value, "frame header") for value in fields[1:10]
    )
    return FrameHeader(
        kind=KINDS[kind], replica=replica, source=source, target=target, step=step,
        micro_batch=micro_batch, seq=seq, generation=generation, attempt=attempt, flags=flags,
        body=as_mapping(fields[10], "body"),
    )  # fmt: skip


def _read_packet(value: Any, cutter: _Cutter, *, depth: int) -> Packet:
    codec, shape, meta, lengths, inner, rows = as_tuple(value, 6, "packet")
    cutter.num_packets += 1
    if depth > MAX_DEPTH or cutter.num_packets > MAX_PACKETS:
        _too_nested(codec)
    if type(codec) is not str:
        bad_header(f"codec {codec!r}")
    check_shape(shape)
    parts = tuple(cutter.cut(as_int(n, "part length")) for n in as_tuple(lengths, None, "parts"))
    inner = as_tuple(inner, None, "inner packets")
    return Packet(
        codec=lengthen(codec),
        shape=shape,
        meta=lengthen(as_mapping(meta, "meta")),
        parts=parts,
        inner=tuple(_read_packet(item, cutter, depth=depth + 1) for item in inner),
        rows=None if rows is None else read_rows(rows),
    )


def _check_opening(view: memoryview) -> None:
    opening = bytes(view[: len(MAGIC)])
    if opening != MAGIC[: len(opening)]:
        raise BadMagic(f"frame begins with {opening!r}, expected {MAGIC!r}")
    if view.nbytes > len(MAGIC) and view[len(MAGIC)] != VERSION:
        raise UnknownVersion(
            f"frame version {view[len(MAGIC)]}, this build reads {VERSION}; "
            "run the same source on all nodes"
        )


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def _too_nested(codec: Any) -> NoReturn:
    raise TooLarge(
        f"packet of codec {codec!r:.40}: at most {MAX_PACKETS} packets, nested {MAX_DEPTH} deep"
    )
