"""Ids on the wire: distinct, sorted, as differences; and where each of them occurred.

Distinct ids travel as the gaps of their sorted list, in the shortest of three forms: 8 bytes each,
bytes of seven bits, or Golomb-Rice bits (within about half a bit a gap of what random ids need).
Shards are asked for distinct ids only. A batch of a user's loader travels as id lists: its distinct
ids and an index of as many bits as they need, or as it is where that is shorter. Nothing here
depends on the values' meaning; any int64 is an id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from compressors.base import CodecError, Packet
from compressors.wire_kernels import dedupe as dedupe

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
CODEC = "ids"
LISTS = "id_lists"


def encode_ids(ids: Ids) -> Packet:
    """A packet of ids that rise strictly; refuses others."""
    _check_ids(ids)
    n = len(ids)
    if n == 0:
        return Packet(codec=CODEC, shape=(0,), meta={"form": "raw"}, parts=(b"",))
    if not (ids[1:] > ids[:-1]).all():
        raise CodecError("ids must rise strictly: sort them and send each once (`dedupe`)")
    words = ids.view(np.uint64)
    gaps = words[1:] - words[:-1] - np.uint64(1)  # modulo 2**64, hence right for any int64
    total = int(ids[-1]) - int(ids[0]) - (n - 1)
    rice, width = _rice_bits(gaps, total)
    sizes = {"raw": 8 * (n - 1), "varint": int(_num_sevens(gaps).sum()), "rice": (rice + 7) // 8}
    form = min(sizes, key=lambda name: sizes[name])
    meta: dict[str, Any] = {"form": form, "first": int(ids[0])}
    if form == "raw":
        parts: tuple[bytes, ...] = (ids[1:].tobytes(),)
    elif form == "varint":
        parts = (encode_varints(gaps),)
    else:
        meta["width"] = width
        low = gaps & np.uint64((1 << width) - 1)
        ends = np.cumsum((gaps >> np.uint64(width)) + np.uint64(1)).astype(np.int64) - 1
        unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
        unary[ends] = 1
        parts = (pack_bits(low, width), np.packbits(unary, bitorder="little").tobytes())
    return Packet(codec=CODEC, shape=(n,), meta=meta, parts=parts)


def decode_ids(packet: Packet) -> Ids:
    """The ids of `encode_ids`; refuses what it never writes."""
    _expect(packet, CODEC)
    (n,) = _shape(packet, 1)
    form, first = packet.meta.get("form"), packet.meta.get("first", 0)
    if n == 0:
        return np.empty(0, np.int64)
    if type(first) is not int or not -(1 << 63) <= first < 1 << 63:
        raise CodecError(f"ids start at {first!r}, which is no int64")
    if form == "raw":
        rest = np.frombuffer(_sized(packet, 0, 8 * (n - 1)), np.int64)
        ids = np.concatenate([np.array([first], np.int64), rest])
    else:
        gaps = _read_varints(packet, n - 1) if form == "varint" else _read_rice(packet, n - 1)
        words = np.empty(n, np.uint64)
        words[0] = np.array(first, np.int64).view(np.uint64)
        words[1:] = gaps + np.uint64(1)
        ids = np.cumsum(words, dtype=np.uint64).view(np.int64)
    if not (ids[1:] > ids[:-1]).all():
        raise CodecError(f"a packet of {n} ids does not rise strictly; it is damaged")
    return ids


def encode_id_lists(ids: Ids, lengths: npt.NDArray[np.int64] | None = None) -> Packet:
    """Lists of ids, one for each sample; without `lengths` each has one id.

    Never longer than 8 bytes an id and 4 a length, but for 16 bytes.
    """
    _check_ids(ids)
    if lengths is not None and (int(lengths.sum()) != len(ids) or (lengths < 0).any()):
        raise CodecError(f"{len(ids)} ids do not make lists of {int(lengths.sum())} in all")
    unique, inverse, _ = dedupe(ids)
    width = _index_width(len(unique))
    coded = encode_ids(unique)
    meta: dict[str, Any] = {}
    inner: tuple[Packet, ...] = ()
    if coded.nbytes + (width * len(ids) + 7) // 8 < 8 * len(ids):
        inner, parts = (coded,), [pack_bits(inverse.view(np.uint64), width)]
    else:
        parts = [ids.tobytes()]
    if lengths is not None:
        meta["lists"] = len(lengths)
        if len(lengths) and (lengths == lengths[0]).all():
            meta["each"] = int(lengths[0])
        else:
            parts.append(encode_varints(lengths.astype(np.uint64)))
    return Packet(codec=LISTS, shape=(len(ids),), meta=meta, parts=tuple(parts), inner=inner)


def decode_id_lists(packet: Packet) -> tuple[Ids, npt.NDArray[np.int64] | None]:
    """The ids of all lists one after the other, and how many each has (None: one)."""
    _expect(packet, LISTS)
    (n,) = _shape(packet, 1)
    if packet.inner:
        unique = decode_ids(packet.inner[0])
        width = _index_width(len(unique))
        index = unpack_bits(_sized(packet, 0, (width * n + 7) // 8), width, n)
        if n and (len(unique) == 0 or int(index.max()) >= len(unique)):
            raise CodecError(f"an index points beyond its {len(unique)} ids; it is damaged")
        ids = unique[index.astype(np.int64)] if n else np.empty(0, np.int64)
    else:
        ids = np.frombuffer(_sized(packet, 0, 8 * n), np.int64)
    num = packet.meta.get("lists")
    if num is None:
        return ids, None
    if type(num) is not int or not 0 <= num <= 1 << 28:
        raise CodecError(f"{num!r} lists of ids; the packet is damaged")
    each = packet.meta.get("each")
    if type(each) is int:
        if num * each != n:
            raise CodecError(f"{num} lists of {each} ids are not {n} ids; the packet is damaged")
        return ids, np.full(num, each, np.int64)
    lengths = decode_varints(_part(packet, 1), num)
    if (lengths > n).any() or int(lengths.sum()) != n:  # at most 2 ** 28 of them: no overflow
        raise CodecError(f"lists of {lengths[:8].tolist()}… ids, {n} came in all")
    return ids, lengths.astype(np.int64)


# --- bits and bytes -------------------------------------------------------------------------------


def pack_bits(values: Words, width: int) -> bytes:
    """The low `width` bits of each value, one after the other."""
    shifts = np.arange(width, dtype=np.uint64)
    bits = ((values[:, None] >> shifts) & np.uint64(1)).astype(np.uint8)
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def unpack_bits(part: Any, width: int, n: int) -> Words:
    """`n` values of `width` bits."""
    if width == 0:
        return np.zeros(n, np.uint64)
    raw = np.frombuffer(part, np.uint8)
    bits = np.unpackbits(raw, count=n * width, bitorder="little").reshape(n, width)
    shifted = bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1), np.uint64)


def encode_varints(values: Words) -> bytes:
    """Seven bits in each byte, low bits first; the top bit says that more follow."""
    sizes = _num_sevens(values)
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    for place in range(int(sizes.max(initial=0))):
        here = sizes > place
        byte = (values[here] >> np.uint64(7 * place)) & np.uint64(127)
        out[starts[here] + place] = byte | ((sizes[here] > place + 1).astype(np.uint64) << 7)
    return out.tobytes()


def decode_varints(part: Any, n: int) -> Words:
    """Exactly `n` values, or `CodecError`."""
    raw = np.frombuffer(part, np.uint8)
    ends = np.flatnonzero(raw < 128)
    if len(ends) != n or (n == 0) != (len(raw) == 0) or (n and ends[-1] != len(raw) - 1):
        raise CodecError(f"{len(ends)} numbers in {len(raw)} bytes, {n} were announced")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[:n]
    sizes = ends - starts + 1
    if sizes.max(initial=0) > 10 or (raw[ends[sizes == 10]] > 1).any():
        raise CodecError("a number of more than 64 bits; the packet is damaged")
    values = np.zeros(n, np.uint64)
    for place in range(int(sizes.max(initial=0))):
        here = sizes > place
        byte = raw[starts[here] + place].astype(np.uint64) & np.uint64(127)
        values[here] |= byte << np.uint64(7 * place)
    return values


def _num_sevens(values: Words) -> npt.NDArray[np.int64]:
    sizes = np.ones(len(values), np.int64)
    for place in range(1, 10):
        sizes += values >= np.uint64(1 << (7 * place))
    return sizes


def _rice_bits(gaps: Words, total: int) -> tuple[int, int]:
    """The bits that Golomb-Rice needs and the width of its low part."""
    n = len(gaps)
    if n == 0:
        return 0, 0
    middle = (total // n).bit_length()
    widths = range(max(0, middle - 3), min(63, middle + 1) + 1)
    return min((n * (w + 1) + int((gaps >> np.uint64(w)).sum()), w) for w in widths)


def _read_varints(packet: Packet, n: int) -> Words:
    return decode_varints(_part(packet, 0), n)


def _read_rice(packet: Packet, n: int) -> Words:
    width = packet.meta.get("width")
    if type(width) is not int or not 0 <= width <= 63:
        raise CodecError(f"ids in form {packet.meta.get('form')!r} of width {width!r} are unknown")
    low = unpack_bits(_sized(packet, 0, (width * n + 7) // 8), width, n)
    unary = np.unpackbits(np.frombuffer(_part(packet, 1), np.uint8), bitorder="little")
    ends = np.flatnonzero(unary)
    if len(ends) != n:
        raise CodecError(f"{len(ends)} gaps between ids came, {n} were announced")
    high = np.diff(ends, prepend=-1) - 1
    return (high.astype(np.uint64) << np.uint64(width)) | low


def _index_width(num_ids: int) -> int:
    return max(0, num_ids - 1).bit_length()


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise CodecError("ids are a one-dimensional int64 array")


def _expect(packet: Packet, codec: str) -> None:
    if packet.codec != codec:
        raise CodecError(f"expected a packet of {codec}, got {packet.codec!r}")


def _shape(packet: Packet, dims: int) -> tuple[int, ...]:
    if len(packet.shape) != dims:
        raise CodecError(f"{packet.codec} has {dims} dimensions, got {packet.shape}")
    return packet.shape


def _part(packet: Packet, number: int) -> Any:
    if number >= len(packet.parts):
        raise CodecError(f"{packet.codec}: part {number} is missing")
    return packet.parts[number]


def _sized(packet: Packet, number: int, nbytes: int) -> Any:
    part = _part(packet, number)
    if memoryview(part).nbytes != nbytes:
        raise CodecError(
            f"{packet.codec}: part {number} has {memoryview(part).nbytes} bytes, not {nbytes}"
        )
    return part
