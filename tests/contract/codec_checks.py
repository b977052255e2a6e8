"""What every codec promises, as plain functions over a `Case`: each raises AssertionError.

Called by `test_codec_contract.py` on every registered codec, and on mutants that break a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressors.base import CodecError, Compressor, Packet, SampleKeys
from compressors.frame import FrameHeader, pack, unpack

HEADER = FrameHeader(kind="activation", source=0, target=1, step=1)
SHAPES = ((1, 1), (3, 5, 7), (2, 64), (4, 6, 32), (2, 3, 4, 5), (5, 33))


@dataclass(frozen=True)
class Case:
    """A codec under test: `make` gives one end, both ends are made alike."""

    name: str
    make: Callable[[], Compressor]
    exact: bool = True
    """Whether `estimate_nbytes` is the size itself, not only a bound."""

    decode_any: Callable[[Packet], Tensor] | None = None
    """How a packet is read without an instance; None if the codec remembers samples."""

    feedback: bool = False
    """Whether a packet also carries what earlier ones lost."""


class Edge:
    """A sender and a receiver of one codec, with a frame between them."""

    def __init__(self, case: Case) -> None:
        self.sender = case.make()
        self.receiver = case.make()
        self.payloads: list[bytes] = []

    def send(self, tensor: Tensor, keys: SampleKeys | None = None) -> Tensor:
        packet = self.sender.encode(tensor, keys=keys or keys_of(tensor))
        self.payloads.append(payload(packet))
        return self.receiver.decode(through_frame(packet))

    def commit(self) -> None:
        self.sender.commit()
        self.receiver.commit()

    def abort(self) -> None:
        self.sender.abort()
        self.receiver.abort()

    def step(self, tensor: Tensor, keys: SampleKeys | None = None) -> Tensor:
        out = self.send(tensor, keys)
        self.commit()
        return out

    def state(self) -> Any:
        return frozen([self.sender.state_dict(), self.receiver.state_dict()])


def keys_of(tensor: Tensor, **more: Any) -> SampleKeys:
    return SampleKeys(ids=tuple(range(100, 100 + tensor.shape[0])), **more)


def through_frame(packet: Packet) -> Packet:
    _, received = unpack(pack(HEADER, packet))
    assert received is not None
    return received


def payload(packet: Packet) -> bytes:
    return b"".join([*map(bytes, packet.parts), *map(payload, packet.inner)])


def frozen(value: Any) -> Any:
    """The value with tensors as bytes: comparable, and out of reach of later changes."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bytes(raw.tolist())
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return value


def tensors(shape: Sequence[int], num: int, seed: int = 0) -> list[Tensor]:
    """A sample's values over `num` visits: they drift, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(*shape, generator=generator)
    return [base + 0.1 * i * torch.randn(*shape, generator=generator) for i in range(num)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(frozen(a) == frozen(b))


def all_same(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    return all(same_bits(a, b) for a, b in pairs)


def check_shape_dtype_and_error(case: Case) -> None:
    """Any shape comes back, in fp32, nearer to the tensor than zero is, at every visit.

    With error feedback that is true of sums: a packet also pays what earlier ones owe.
    """
    for shape in SHAPES:
        edge = Edge(case)
        sent, wanted = torch.zeros(shape), torch.zeros(shape)
        for x in tensors(shape, 3):
            got = edge.step(x)
            assert got.shape == x.shape, f"shape {tuple(got.shape)} for {shape}"
            assert got.dtype == x.dtype, f"dtype {got.dtype}"
            assert bool(got.isfinite().all())
            sent, wanted = (sent + got, wanted + x) if case.feedback else (got, x)
            error = (sent - wanted).norm() / wanted.norm()
            assert error < 0.8, f"error {error} for {shape}"


def check_own_dtype(case: Case) -> None:
    """A float comes back as it was: a stage of bf16 weights computes on bf16, at every visit."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        edge = Edge(case)
        for x in tensors((3, 5, 7), 2):
            assert edge.step(x.to(dtype)).dtype == dtype
        evaluated = edge.send(x.to(dtype), keys_of(x, remember=False))
        assert evaluated.dtype == dtype, f"evaluated in {evaluated.dtype}"


def check_packet_tells_all(case: Case) -> None:
    """A receiver that was never configured by tensors reads the packet after a frame."""
    for shape in SHAPES:
        sender, near, far = case.make(), case.make(), case.make()
        for x in tensors(shape, 2):
            packet = sender.encode(x, keys=keys_of(x))
            received = through_frame(packet)
            assert received.codec == packet.codec
            expected = near.decode(packet)
            assert expected.shape == x.shape
            assert same_bits(far.decode(received), expected)
            if case.decode_any is not None:
                assert same_bits(case.decode_any(received), expected)
            for end in (sender, near, far):
                end.commit()


def check_estimate(case: Case) -> None:
    """`estimate_nbytes` is the payload of a sample seen before, or a bound of it."""
    for shape in SHAPES:
        codec = case.make()
        estimate = codec.estimate_nbytes(tuple(shape))
        for visit, x in enumerate(tensors(shape, 2)):
            nbytes = codec.encode(x, keys=keys_of(x)).nbytes
            codec.commit()
            if visit:
                assert nbytes == estimate if case.exact else nbytes <= estimate, (
                    f"{nbytes} bytes for {shape}, estimated {estimate}"
                )


def check_zero(case: Case) -> None:
    """Q(0) = 0, so that an unchanged sample stays unchanged."""
    for shape in SHAPES:
        edge = Edge(case)
        for _ in range(2):
            assert not bool(edge.step(torch.zeros(shape)).any())


def check_determinism(case: Case) -> None:
    """Two edges that see the same tensors send the same bytes, whatever else draws numbers."""
    first, second = Edge(case), Edge(case)
    for x in tensors((4, 6, 32), 3):
        torch.rand(1)
        a = first.step(x)
        torch.rand(7)
        b = second.step(x)
        assert same_bits(a, b)
    assert first.payloads == second.payloads


def check_state(case: Case) -> None:
    """A run that was saved and loaded goes on to the bit like one that was not."""
    whole, resumed = Edge(case), Edge(case)
    visits = tensors((3, 5, 7), 5)
    for x in visits[:3]:
        whole.step(x)
    saved = whole.sender.state_dict(), whole.receiver.state_dict()
    before = frozen(list(saved))
    whole.payloads.clear()
    expected = [whole.step(x) for x in visits[3:]]
    assert frozen(list(saved)) == before, "the saved state changed after it was saved"
    resumed.sender.load_state_dict(saved[0])
    resumed.receiver.load_state_dict(saved[1])
    assert resumed.state() == before
    assert all_same(zip([resumed.step(x) for x in visits[3:]], expected))
    assert resumed.payloads == whole.payloads


def check_abort(case: Case) -> None:
    """An aborted step, first or later, changes neither bytes nor values of the next."""
    plain, disturbed = Edge(case), Edge(case)
    visits = tensors((3, 5, 7), 3)
    for x, noise in zip(visits, tensors((3, 5, 7), 3, seed=9)):
        disturbed.send(noise)
        disturbed.send(2 * noise)
        disturbed.abort()
        disturbed.payloads.clear()
        plain.payloads.clear()
        assert all_same([(disturbed.step(x), plain.step(x))])
        assert disturbed.payloads == plain.payloads


def check_evaluation(case: Case) -> None:
    """With `remember` off no state changes, though the same samples are sent."""
    plain, disturbed = Edge(case), Edge(case)
    for x in tensors((3, 5, 7), 3):
        before = disturbed.state()
        got = disturbed.send(3 * x, keys_of(x, remember=False))
        assert got.shape == x.shape
        assert disturbed.state() == before
        disturbed.payloads.clear()
        plain.payloads.clear()
        assert all_same([(disturbed.send(x), plain.send(x))])
        disturbed.send(3 * x, keys_of(x, remember=False))  # in the middle of a step too
        disturbed.commit()
        plain.commit()
        assert disturbed.payloads[:1] == plain.payloads
        assert disturbed.state() == plain.state()


def check_empty_batch(case: Case) -> None:
    """No sample is a batch too."""
    edge = Edge(case)
    for _ in range(2):
        got = edge.step(torch.empty(0, 5, 7))
        assert got.shape == (0, 5, 7)
        assert got.dtype == torch.float32
    assert case.make().estimate_nbytes((0, 5, 7)) == 0


def check_padding(case: Case) -> None:
    """What lies in padded positions changes nothing in the valid ones, at any visit."""
    lengths = (5, 2, 1)
    valid = torch.arange(5)[None, :] < torch.tensor(lengths)[:, None]
    for garbage in (1e6, -1e30, float("nan")):
        clean, dirty = Edge(case), Edge(case)
        for x in tensors((3, 5, 7), 3):
            x = x * valid[:, :, None]
            y = torch.where(valid[:, :, None], x, garbage)
            a = clean.step(x, keys_of(x, lengths=lengths))
            b = dirty.step(y, keys_of(y, lengths=lengths))
            assert a.shape == x.shape == b.shape
            assert same_bits(a[valid], b[valid]), f"padding of {garbage} shows"


def check_non_contiguous(case: Case) -> None:
    """Strides do not matter."""
    straight, strided = Edge(case), Edge(case)
    for x in tensors((4, 6, 32), 2):
        wide = torch.empty(4, 32, 12).transpose(1, 2)[:, ::2]
        wide.copy_(x)
        assert not wide.is_contiguous()
        assert same_bits(strided.step(wide), straight.step(x))
    assert strided.payloads == straight.payloads


def check_no_gradient(case: Case) -> None:
    """Autograd ends at a codec: nothing that comes out hangs on what went in."""
    edge = Edge(case)
    for x in tensors((2, 64), 2):
        leaf = x.requires_grad_()
        got = edge.step(leaf * 1.0)
        assert not got.requires_grad
        assert got.grad_fn is None
        assert leaf.grad is None
        got.requires_grad_()  # the receiver's fresh leaf


def check_input_untouched(case: Case) -> None:
    """Encoding changes neither the tensor nor an earlier packet's tensor."""
    edge = Edge(case)
    visits = tensors((3, 5, 7), 3)
    visits[0][0] = 1e4
    before = [frozen(x) for x in visits]
    for x in visits:
        edge.step(x)
        assert [frozen(y) for y in visits] == before


def check_output_is_the_callers(case: Case) -> None:
    """Writing to what was decoded, or to what was sent, changes no later visit."""
    plain, scribbled = Edge(case), Edge(case)
    for x in tensors((3, 5, 7), 3):
        mine = x.clone()
        a = scribbled.step(mine)
        b = plain.step(x)
        assert same_bits(a, b)
        a.fill_(7.0)
        mine.fill_(-7.0)


def check_damage_is_refused(case: Case) -> None:
    """A packet that lost a part or some bytes, or whose shape they cannot fill, is a `CodecError`.

    What is only odd, another value in `meta` or as many bytes of something else, may be read; it
    must not crash.
    """
    sender = case.make()
    packets: list[Packet] = []
    for x in tensors((3, 5, 7), 2):
        packets.append(sender.encode(x, keys=keys_of(x)))
        sender.commit()
        for damaged, must_be_refused in damages(packets[-1]):
            receiver = case.make()
            for earlier in packets[:-1]:
                receiver.decode(earlier)
                receiver.commit()
            try:
                receiver.decode(damaged)
            except CodecError:
                continue
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} {error} for {damaged}") from error
            assert not must_be_refused or damaged == packets[-1], f"accepted {damaged}"


def damages(packet: Packet) -> Iterator[tuple[Packet, bool]]:
    """The packet with one thing wrong, at every depth, and whether it can make no sense at all."""
    for name in packet.meta:
        rest = {key: value for key, value in packet.meta.items() if key != name}
        yield replace(packet, meta=rest), name in ("dtype", "bits", "raw", "namespace", "rows")
        for wrong in (None, -1, 0, 1 << 40, "nonsense", 1.5, (), (1, 2), {}, b"x"):
            yield replace(packet, meta={**rest, name: wrong}), False
    for i, part in enumerate(packet.parts):
        for wrong_part in (b"", bytes(part)[:-1], bytes(part) + b"x"):
            parts = (*packet.parts[:i], wrong_part, *packet.parts[i + 1 :])
            yield replace(packet, parts=parts), True
        noise = b"\xff" * len(bytes(part))
        yield replace(packet, parts=(*packet.parts[:i], noise, *packet.parts[i + 1 :])), False
    yield replace(packet, parts=()), True
    yield replace(packet, parts=(*packet.parts, b"more")), True
    for shape in ((), (0,), (3,), (3, 5, 9), (1 << 40, 5, 7)):
        yield replace(packet, shape=shape), True
    for shape in ((3, 5, 8), (3, 5, 7, 1)):  # the same bytes can be such a tensor, too
        yield replace(packet, shape=shape), False
    yield replace(packet, inner=()), True
    yield replace(packet, inner=(*packet.inner, packet)), True
    for i, inner in enumerate(packet.inner):
        for damaged, certain in damages(inner):
            changed = (*packet.inner[:i], damaged, *packet.inner[i + 1 :])
            yield replace(packet, inner=changed), certain


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_shape_dtype_and_error,
    check_own_dtype,
    check_packet_tells_all,
    check_estimate,
    check_zero,
    check_determinism,
    check_state,
    check_abort,
    check_evaluation,
    check_empty_batch,
    check_padding,
    check_non_contiguous,
    check_no_gradient,
    check_input_untouched,
    check_output_is_the_callers,
    check_damage_is_refused,
)
