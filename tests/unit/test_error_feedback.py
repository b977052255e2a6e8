"""Error feedback: nothing is lost for good, nothing is kept that was not committed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors.base import Packet, SampleKeys
from compressors.error_feedback import ErrorFeedback
from compressors.floating import Bf16, Fp16
from compressors.topk import TopK

torch.set_num_threads(1)
KEYS = SampleKeys(ids=(0, 1))


def gradients(num: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 40, generator=generator) for _ in range(num)]


def sum_sent(codec: ErrorFeedback, tensors: list[Tensor]) -> Tensor:
    total = torch.zeros(2, 40)
    for x in tensors:
        total += codec.decode(codec.encode(x, keys=KEYS))
        codec.commit()
    return total


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.02, 1.0))
def test_sum_sent_plus_residual_is_the_true_sum(seed: int, density: float) -> None:
    codec = ErrorFeedback(TopK(density))
    tensors = gradients(12, seed)

    total = sum_sent(codec, tensors)

    residual = codec.residual((2, 40))
    assert residual is not None
    torch.testing.assert_close(total + residual, sum(tensors), atol=1e-5, rtol=0)


def test_mutant_without_feedback_loses_what_was_not_sent() -> None:
    tensors = gradients(12)
    plain = TopK(0.1)
    total = sum((plain.decode(plain.encode(x, keys=KEYS)) for x in tensors), torch.zeros(2, 40))

    assert (total - sum(tensors)).norm() > 5
    assert (sum_sent(ErrorFeedback(plain), tensors) - sum(tensors)).norm() < (
        total - sum(tensors)
    ).norm()


def test_a_constant_gradient_is_sent_in_full_over_time() -> None:
    x = torch.tensor([[1.0, 0.4], [0.2, 0.9]])
    codec = ErrorFeedback(TopK(0.5, values="fp32"))

    total = torch.zeros(2, 2)
    for _ in range(50):
        total += codec.decode(codec.encode(x, keys=KEYS))
        codec.commit()

    torch.testing.assert_close(total / 50, x, atol=0.03, rtol=0)


def test_a_micro_batch_of_the_same_step_sees_the_staged_residual() -> None:
    codec = ErrorFeedback(TopK(0.5, values="fp32"))
    x = torch.tensor([[3.0, 2.0]])
    key = SampleKeys(ids=(0,))

    first = codec.decode(codec.encode(x, keys=key))
    second = codec.decode(codec.encode(x, keys=key))

    assert first.tolist() == [[3.0, 0.0]]
    assert second.tolist() == [[0.0, 4.0]]


def test_abort_forgets_the_step_and_commit_keeps_it() -> None:
    codec = ErrorFeedback(TopK(0.5, values="fp32"))
    x = torch.tensor([[3.0, 2.0]])
    key = SampleKeys(ids=(0,))
    codec.encode(x, keys=key)
    codec.commit()
    codec.encode(x, keys=key)
    codec.abort()

    residual = codec.residual((1, 2))

    assert residual is not None
    assert residual.tolist() == [[0.0, 2.0]]


def test_state_holds_committed_residuals_only_and_resumes_to_the_bit() -> None:
    tensors = gradients(8)
    codec = ErrorFeedback(TopK(0.2))
    sum_sent(codec, tensors[:4])
    saved = codec.state_dict()
    codec.encode(tensors[7], keys=KEYS)
    assert torch.equal(codec.state_dict()["residuals"]["2x40|"], saved["residuals"]["2x40|"])
    codec.abort()
    resumed = ErrorFeedback(TopK(0.2))
    resumed.load_state_dict(saved)

    assert torch.equal(sum_sent(codec, tensors[4:]), sum_sent(resumed, tensors[4:]))


def test_the_saved_state_does_not_change_afterwards() -> None:
    codec = ErrorFeedback(TopK(0.2))
    sum_sent(codec, gradients(2))
    saved = codec.state_dict()
    before = saved["residuals"]["2x40|"].clone()
    sum_sent(codec, gradients(3))

    assert torch.equal(saved["residuals"]["2x40|"], before)


def test_slots_and_shapes_have_residuals_of_their_own() -> None:
    codec = ErrorFeedback(TopK(0.5, values="fp32"))
    key = SampleKeys(ids=(0,))
    codec.encode(torch.tensor([[3.0, 2.0]]), keys=key, slot="w|q")
    codec.encode(torch.tensor([[5.0, 1.0]]), keys=key, slot="b")
    codec.encode(torch.tensor([[9.0, 1.0, 1.0, 8.0]]), keys=key)
    codec.commit()
    other = ErrorFeedback(TopK(0.5))
    other.load_state_dict(codec.state_dict())

    for each in (codec, other):
        found = [each.residual((1, 2), slot="w|q"), each.residual((1, 2), slot="b")]
        assert [None if r is None else r.tolist() for r in found] == [[[0, 2.0]], [[0, 1.0]]]
        assert each.residual((1, 2)) is None
        assert each.residual((1, 4)) is not None


def test_padding_leaves_no_residual() -> None:
    codec = ErrorFeedback(TopK(0.25, values="fp32"))
    x = torch.tensor([[[1.0], [2.0], [70.0], [80.0]]])

    codec.encode(x, keys=SampleKeys(ids=(0,), lengths=(2,)))

    residual = codec.residual((1, 4, 1))
    assert residual is not None
    assert residual.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]


def test_an_infinite_gradient_leaves_no_residual_and_is_counted() -> None:
    codec = ErrorFeedback(Fp16())
    x = torch.tensor([[float("inf"), 1e6, 1.0]])

    codec.encode(x, keys=SampleKeys(ids=(0,)))

    residual = codec.residual((1, 3))
    assert residual is not None
    assert residual.tolist() == [[0.0, 1e6 - 65504, 0.0]]
    assert codec.stats()["residual_nonfinite"] == 1
    assert codec.stats()["residual_nbytes"] == 12


def test_a_bf16_tensor_keeps_what_the_sum_lost_by_rounding_to_its_own_dtype() -> None:
    codec = ErrorFeedback(TopK(0.5, values="fp32"))
    key = SampleKeys(ids=(0,))
    codec.encode(torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16), keys=key)

    sent = codec.decode(codec.encode(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), keys=key))

    residual = codec.residual((1, 2))
    assert sent.tolist() == [[0.0, 1.0]]
    assert residual is not None
    assert residual.tolist() == [[0.0, 2.0**-9]]


def test_evaluation_adds_no_residual_and_leaves_none() -> None:
    codec = ErrorFeedback(TopK(0.5, values="fp32"))
    x = torch.tensor([[3.0, 2.0]])
    codec.encode(x, keys=SampleKeys(ids=(0,)))

    got = codec.decode(codec.encode(x, keys=SampleKeys(ids=(0,), remember=False)))

    assert got.tolist() == [[3.0, 0.0]]
    residual = codec.residual((1, 2))
    assert residual is not None
    assert residual.tolist() == [[0.0, 2.0]]


def test_the_packet_is_the_inner_codecs_own() -> None:
    packet = ErrorFeedback(Bf16()).encode(torch.ones(2, 3), keys=KEYS)

    assert isinstance(packet, Packet)
    assert packet.codec == "bf16"
    assert torch.equal(Bf16().decode(packet), torch.ones(2, 3))


def test_a_state_of_another_codec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16\+ef: state has keys \['rows'\], expected inner"):
        ErrorFeedback(Bf16()).load_state_dict({"rows": {}})
