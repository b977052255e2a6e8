"""What the sender of AC-SGD does with odd samples: padded, reshaped, infinite, evicted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressors.base import CodecError, Packet, SampleKeys
from compressors.delta import Delta
from compressors.quantize import Uniform
from compressors.spill import Spill, SpillShelf
from compressors.spill_file import ChunkFile, Slot
from compressors.topk import TopK

torch.set_num_threads(1)

ROW_NBYTES = 4 * 32 * 2


def keys(*ids: int, lengths: Sequence[int] | None = None) -> SampleKeys:
    return SampleKeys(ids=ids, lengths=None if lengths is None else tuple(lengths))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_ends(bits: int = 4, **options: Any) -> tuple[Delta, Delta]:
    return (
        Delta(Uniform(bits), namespace="edge", **options),
        Delta(Uniform(bits), namespace="edge", **options),
    )


def cold_flags(packet: Packet) -> tuple[bool, ...]:
    assert packet.rows is not None
    return packet.rows.cold


# Cold and warm


def test_a_micro_batch_may_mix_samples_with_and_without_a_row() -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(2, 4, 32), keys=keys(3, 5)))
    h = noise(4, 4, 32, seed=1)
    packet = sender.encode(h, keys=keys(9, 5, 8, 3))
    new = receiver.decode(packet)

    assert cold_flags(packet) == (True, False, True, False)
    assert [inner.shape for inner in packet.inner] == [(2, 4, 32), (2, 4, 32)]
    assert sender.row_digest() == receiver.row_digest()
    assert (new[0] - h[0]).norm() / h[0].norm() < 0.01
    assert sender.stats()["hits"] == 2
    assert sender.stats()["cold"] == 4
    assert sender.stats()["hit_rate"] == pytest.approx(1 / 3)


def test_first_visits_take_eight_bits_or_fp32_as_asked() -> None:
    h = noise(1, 4, 32)
    eight, full = two_ends()[0], two_ends(first_visit=32)[0]

    assert eight.encode(h, keys=keys(0)).nbytes == 4 * 32 + 4 * 2
    assert full.encode(h, keys=keys(0)).nbytes == 4 * 4 * 32
    assert two_ends(first_visit=Uniform(2))[0].encode(h, keys=keys(0)).nbytes == 4 * 8 + 4 * 2
    with pytest.raises(ValueError, match="first_visit takes 1 to 8 bits, or 32 for fp32, got 16"):
        two_ends(first_visit=16)


@pytest.mark.parametrize("shape", [(2,), (2, 7), (2, 3, 5), (2, 2, 3, 33), (2, 0, 8), (0, 4, 8)])
def test_any_shape_travels(shape: tuple[int, ...]) -> None:
    sender, receiver = two_ends(first_visit=32)
    ids = tuple(range(shape[0]))
    for seed in range(3):
        h = noise(*shape, seed=seed)
        new = receiver.decode(sender.encode(h, keys=keys(*ids)))

        assert new.shape == h.shape
        assert sender.row_digest() == receiver.row_digest()


def test_other_dtypes_are_coded_as_fp32_come_back_as_they_were_and_leave_their_graph() -> None:
    sender, receiver = two_ends(first_visit=32, rows="fp32")
    h = noise(1, 4, 32).to(torch.bfloat16).requires_grad_()
    packet = sender.encode(h, keys=keys(0))
    new = receiver.decode(packet)

    assert packet.inner[0].meta["dtype"] == "float32"
    assert new.dtype == torch.bfloat16
    assert not new.requires_grad
    assert torch.equal(new, h.detach())
    assert sender.row_digest() == receiver.row_digest()


def test_a_packet_of_fp32_says_nothing_of_its_dtype_and_one_that_is_no_float_is_refused() -> None:
    sender, receiver = two_ends()
    packet = sender.encode(noise(1, 4, 32), keys=keys(0))

    assert "dtype" not in packet.meta
    with pytest.raises(CodecError, match="delta packet has dtype int64, which is no float"):
        receiver.decode(replace(packet, meta={**packet.meta, "dtype": "int64"}))
    assert receiver.decode(packet).dtype == torch.float32


def test_a_tensor_and_ids_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4, 32\) comes with 2 sample ids"):
        two_ends()[0].encode(noise(3, 4, 32), keys=keys(0, 1))


def test_the_tensor_may_be_reused_after_encoding() -> None:
    sender, receiver = two_ends()
    h = noise(1, 4, 32)
    packet = sender.encode(h, keys=keys(0))
    h.zero_()
    receiver.decode(packet)

    assert sender.row_digest() == receiver.row_digest()


def test_unsent_coordinates_of_top_k_keep_the_row() -> None:
    sender = Delta(TopK(0.25), namespace="edge", first_visit=32, rows="fp32")
    receiver = Delta(TopK(0.25), namespace="edge", first_visit=32, rows="fp32")
    h = noise(1, 4, 8)
    receiver.decode(sender.encode(h, keys=keys(0)))
    moved = h.clone()
    moved[0, 0] += 1.0  # a quarter of all coordinates
    new = receiver.decode(sender.encode(moved, keys=keys(0)))

    assert torch.equal(new[0, 1:], h[0, 1:])
    assert torch.allclose(new[0, 0], moved[0, 0], atol=0.01)


# Padding and shapes: (d) 13


def test_padding_enters_neither_scale_nor_row_and_decodes_to_zero() -> None:
    clean, padded = noise(2, 6, 32), noise(2, 6, 32)
    padded[0, 4:] = 1e6
    padded[1, 2:] = float("nan")
    outcomes = []
    for h in (clean, padded):
        sender, receiver = two_ends()
        for _ in range(2):
            new = receiver.decode(sender.encode(h, keys=keys(0, 1, lengths=(4, 2))))
        assert sender.row_digest() == receiver.row_digest()
        outcomes.append((new, receiver.row_digest()))

    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]
    assert not outcomes[0][0][0, 4:].any()
    assert not outcomes[0][0][1, 2:].any()
    assert receiver._store.value(1).shape == (2, 32)


def test_padding_costs_no_bytes() -> None:
    sender, _ = two_ends()
    h = noise(2, 6, 32)
    sender.encode(h, keys=keys(0, 1, lengths=(4, 2)))

    assert sender.encode(h, keys=keys(0, 1, lengths=(4, 2))).nbytes == 6 * 16 + 6 * 2


def test_samples_of_several_lengths_equal_each_sample_alone() -> None:
    together, alone = two_ends(), two_ends()
    lengths = (4, 1, 6, 0)
    for seed in range(3):
        h = noise(4, 6, 32, seed=seed)
        packet = together[0].encode(h, keys=keys(0, 1, 2, 3, lengths=lengths))
        new = together[1].decode(packet)
        for i, length in enumerate(lengths):
            own = alone[1].decode(alone[0].encode(h[i : i + 1, :length], keys=keys(i)))
            assert torch.equal(new[i, :length], own[0])

    assert together[1].row_digest() == alone[1].row_digest()


def test_a_sample_of_another_length_is_cold() -> None:
    sender, receiver = two_ends()
    receiver.decode(sender.encode(noise(1, 6, 32), keys=keys(0, lengths=(4,))))
    packet = sender.encode(noise(1, 6, 32), keys=keys(0, lengths=(5,)))
    receiver.decode(packet)

    assert cold_flags(packet) == (True,)
    assert sender.row_digest() == receiver.row_digest()
    assert cold_flags(sender.encode(noise(1, 5, 32), keys=keys(0))) == (False,)
    assert cold_flags(sender.encode(noise(1, 5, 16), keys=keys(0))) == (True,)


def test_a_partial_last_batch_needs_nothing_special() -> None:
    sender, receiver = two_ends()
    for ids in ((0, 1, 2, 3), (4, 5), (3, 2, 1, 0), (5, 4)):
        receiver.decode(sender.encode(noise(len(ids), 4, 32), keys=keys(*ids)))

    assert sender.row_digest() == receiver.row_digest()


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a sample of length 7 in a tensor of shape"):
        two_ends()[0].encode(noise(1, 6, 32), keys=keys(0, lengths=(7,)))
    with pytest.raises(ValueError, match="lengths need a tensor"):
        two_ends()[0].encode(noise(1, 6), keys=keys(0, lengths=(3,)))


# Non-finite values: (d) 14


@pytest.mark.parametrize("rows", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_infinite_value_travels_as_it_is_and_leaves_no_row(bad: float, rows: str) -> None:
    sender, receiver = two_ends(rows=rows)
    good = noise(2, 4, 32)
    receiver.decode(sender.encode(good, keys=keys(0, 1)))
    h = good.clone()
    h[1, 2, 3] = bad
    packet = sender.encode(h, keys=keys(0, 1))
    new = receiver.decode(packet)

    assert cold_flags(packet) == (False, True)
    assert torch.equal(new[1].nan_to_num(5, 6, 7), h[1].nan_to_num(5, 6, 7))
    assert new[0].isfinite().all()
    assert sender.stats()["nonfinite"] == receiver.stats()["nonfinite"] == 1
    assert sender.row_digest() == receiver.row_digest()
    after = sender.encode(good, keys=keys(0, 1))
    assert cold_flags(after) == (False, True)
    assert receiver.decode(after).isfinite().all()
    assert sender.row_digest() == receiver.row_digest()


def test_a_row_that_is_not_finite_is_never_a_base() -> None:
    sender, receiver = two_ends()
    h = noise(1, 4, 32)
    receiver.decode(sender.encode(h, keys=keys(0)))
    sender._store.value(0)[0, 0] = float("nan")  # as a broken checkpoint would bring it
    packet = sender.encode(h, keys=keys(0))

    assert cold_flags(packet) == (True,)
    assert sender.stats()["nonfinite"] == 1
    receiver.decode(packet)
    assert sender.row_digest() == receiver.row_digest()


def test_a_hundred_thousand_survives_the_round_trip() -> None:
    sender, receiver = two_ends(2)
    h = torch.full((1, 4, 32), 1e5)
    for _ in range(4):
        new = receiver.decode(sender.encode(h, keys=keys(0)))

        assert torch.allclose(new, h, rtol=0.005)
    assert sender.stats()["nonfinite"] == 0


@pytest.mark.parametrize("first_visit", [8, 32])
def test_values_at_the_edge_of_fp32_stay_finite_or_cold_at_both_ends(first_visit: int) -> None:
    sender, receiver = two_ends(first_visit=first_visit)
    largest = torch.finfo(torch.float32).max
    for h in (torch.full((1, 2, 32), largest), torch.full((1, 2, 32), -largest), noise(1, 2, 32)):
        new = receiver.decode(sender.encode(h, keys=keys(0)))

        assert new.isfinite().all()
        assert sender.row_digest() == receiver.row_digest()


# Memory cap: (d) 10


def test_eviction_is_symmetric_and_a_miss_takes_the_cold_path() -> None:
    sender, receiver = two_ends(cap_bytes=5 * ROW_NBYTES)
    generator = torch.Generator().manual_seed(0)
    num_cold = 0
    for step in range(30):
        for _ in range(2):
            ids = torch.randperm(9, generator=generator)[:2].tolist()
            packet = sender.encode(noise(2, 4, 32, seed=step), keys=keys(*ids))
            receiver.decode(packet)
            num_cold += sum(cold_flags(packet))
        assert sender.row_digest() == receiver.row_digest(without=sender.pending_evictions)
        sender.commit()
        receiver.commit()
        evicted = sender.pending_evictions
        assert sender.row_digest() == receiver.row_digest(without=evicted)
        assert sender.stats()["resident_bytes"] <= 5 * ROW_NBYTES
        assert receiver.stats()["resident_bytes"] <= (5 + len(evicted)) * ROW_NBYTES

    assert sender.stats()["rows"] == 5
    assert sender.stats()["evictions"] == num_cold - 5  # each cold row but those still here
    assert receiver.stats()["evictions"] == 0


def test_mutant_receiver_that_evicts_for_itself_is_seen() -> None:
    sender, receiver = two_ends(cap_bytes=2 * ROW_NBYTES)
    for sample in range(4):
        receiver.decode(sender.encode(noise(1, 4, 32), keys=keys(sample)))
    sender.commit()
    receiver._store.commit(evict=True)  # the mutant: its own decision, the same today ...
    receiver._store.stage_drop(3)  # ... and another one tomorrow
    receiver._store.commit(evict=True)

    assert sender.row_digest() != receiver.row_digest(without=sender.pending_evictions)


# Spill: (d) 20


class LateDisk(ChunkFile):
    """Lets every write wait until it is forced to go, by a read or by the end of a step."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1 << 16)
        self.gate = threading.Event()
        self.num_reads = 0

    def write(self, slot: Slot, raw: Tensor) -> None:
        assert self.gate.wait(20)
        super().write(slot, raw)

    def read(self, slot: Slot, nbytes: int) -> Tensor:
        self.num_reads += 1
        return super().read(slot, nbytes)


def run_epochs(sender: Delta, receiver: Delta, disk: LateDisk | None = None) -> list[Tensor]:
    outputs = []
    for epoch in range(4):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        for step in range(4):
            ids = order[2 * step : 2 * step + 2]
            if disk is not None:
                # The disk stands still in every second step, and works off its queue in the others.
                disk.gate.clear() if step % 2 else disk.gate.set()
            for end in (sender, receiver):
                end.prefetch(order[2 * step + 2 : 2 * step + 4])
            packet = sender.encode(noise(2, 4, 32, seed=10 * epoch + step), keys=keys(*ids))
            outputs.append(receiver.decode(packet))
            assert sender.row_digest() == receiver.row_digest()
            sender.commit()
            receiver.commit()
        if disk is not None:  # what was filed in this epoch is read back in the next
            disk.gate.set()
            receiver._store.shelf.flush()
    return outputs


def test_a_slow_disk_leaves_every_value_as_it_was(tmp_path: Path) -> None:
    plain = two_ends()
    expected = run_epochs(*plain)
    spilled = two_ends(
        spill=Spill(directory=tmp_path, ram_bytes=2 * ROW_NBYTES, chunk_bytes=1 << 16)
    )
    disk = LateDisk(tmp_path)
    spill = Spill(directory=tmp_path, ram_bytes=ROW_NBYTES, chunk_bytes=1 << 16)
    spilled[1]._store.shelf = SpillShelf(spill, disk=disk)
    outputs = run_epochs(*spilled, disk)
    disk.gate.set()

    assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    assert spilled[0].row_digest() == spilled[1].row_digest() == plain[0].row_digest()
    assert spilled[0].stats()["spilled_bytes"] == 6 * ROW_NBYTES
    assert disk.num_reads > 0
    for end in spilled:
        end.close()
    assert list(tmp_path.iterdir()) == []


# Saving


@pytest.mark.parametrize("rows", ["bf16", "fp32", "int4"])
def test_a_resumed_run_equals_an_uninterrupted_one(rows: str, tmp_path: Path) -> None:
    from safetensors.torch import load, save

    ends = two_ends(2, rows=rows, cap_bytes=6 * 4 * 32 * 4)
    run_epochs(*ends)
    resumed = []
    for end in ends:
        state = end.state_dict()
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        back = {**state, **load(save(tensors))}
        resumed.append(Delta(Uniform(2), namespace="edge", rows=rows, cap_bytes=6 * 4 * 32 * 4))
        resumed[-1].load_state_dict(back)

    assert all(torch.equal(a, b) for a, b in zip(run_epochs(*ends), run_epochs(*resumed)))
    for end, twin in zip(ends, resumed):
        assert end.row_digest() == twin.row_digest()
    assert ends[0].pending_evictions == resumed[0].pending_evictions


def test_spilled_rows_are_saved_like_others(tmp_path: Path) -> None:
    plain, spilled = two_ends(), two_ends(spill=Spill(directory=tmp_path, ram_bytes=0))
    run_epochs(*plain)
    run_epochs(*spilled)
    state, other = plain[0].state_dict(), spilled[0].state_dict()

    assert state.keys() == other.keys()
    assert torch.equal(state["values"], other["values"])
    for end in spilled:
        end.close()


def test_rows_of_another_namespace_are_not_loaded() -> None:
    state = two_ends()[0].state_dict()

    with pytest.raises(ValueError, match=r"saved rows belong to \['edge'\], this codec serves"):
        Delta(Uniform(4), namespace="other").load_state_dict(state)


# Numbers


def test_stats_describe_the_running_step_and_right_after_it_the_last() -> None:
    sender, receiver = two_ends(2)
    h = noise(2, 4, 32)
    receiver.decode(sender.encode(h, keys=keys(0, 1)))
    assert sender.stats()["cold"] == 2
    assert "delta_ratio" not in sender.stats()
    sender.commit()
    assert sender.stats()["cold"] == 2
    sender.encode(1.1 * h, keys=keys(0, 1))
    stats = sender.stats()

    assert stats["hits"] == 2
    assert stats["cold"] == 0
    assert stats["hit_rate"] == 1.0
    assert stats["delta_ratio"] == pytest.approx(0.1 / 1.1, rel=0.1)
    assert 0 < stats["error"] < 0.45 * stats["delta_ratio"]
    assert stats["rows"] == 2
    assert stats["resident_bytes"] == 2 * ROW_NBYTES
    assert "error" not in receiver.stats()  # only the sender knows h


def test_the_estimate_is_what_a_warm_micro_batch_costs() -> None:
    sender, _ = two_ends(4)
    h = noise(8, 16, 64)
    sender.encode(h, keys=keys(*range(8)))

    assert sender.encode(h, keys=keys(*range(8))).nbytes == sender.estimate_nbytes((8, 16, 64))


def test_calls_from_several_threads_do_not_mix() -> None:
    sender, receiver = two_ends()
    packets: list[Packet] = []

    def transmit() -> None:
        for step in range(40):
            packets.append(sender.encode(noise(2, 4, 32, seed=step), keys=keys(step % 5, 7)))

    threads = [threading.Thread(target=transmit)]
    threads.append(threading.Thread(target=lambda: [sender.stats() for _ in range(200)]))
    threads.append(threading.Thread(target=lambda: [sender.commit() for _ in range(50)]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for packet in packets:
        receiver.decode(packet)

    assert sender.row_digest() == receiver.row_digest()
