"""The gradient at a cut, (d)11: that of the uncut graph but for the gradient's own codec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from local_pipeline import DIRECTQ, FP32, Bench, acsgd, same_bits
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from compressors.base import SampleKeys
from compressors.delta import Delta
from compressors.registry import CodecSpec, make_codec
from stages.compute import Compute
from stages.loss import cross_entropy
from stages.optim import OptimSpec


class Double(nn.Module):
    """A small smooth function in double precision."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)


def over_the_wire(tensor: Tensor, codec: CodecSpec) -> Tensor:
    end = make_codec(codec, namespace=("n",))
    return end.decode(end.encode(tensor, keys=SampleKeys(ids=(0, 1)))).double()


def forward_through_cuts(x: Tensor) -> tuple[list[Compute], Tensor]:
    """Three stages that are handed what the codec of the cuts lets through, and what comes out."""
    computes = [Compute(Double(s), optim=OptimSpec(name="sgd")) for s in range(3)]
    value = x
    for compute in computes:
        value = compute.forward(0, over_the_wire(value, FP32), ids=(0, 1))
    return computes, value.detach()


def boundary_gradient(
    gradient_codec: CodecSpec, x: Tensor = X, gradient: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of three stages, and what each hands back to the one before."""
    computes, value = forward_through_cuts(x)
    gradient = torch.ones_like(value) if gradient is None else gradient
    passed = []
    for compute in reversed(computes):
        back = compute.backward(0, gradient)
        assert back is not None
        gradient = over_the_wire(back, gradient_codec)
        passed.append(back)
    return [p.grad for c in computes for p in c.parameters if p.grad is not None], passed


def cut_with(gradient_codec: CodecSpec) -> type[torch.autograd.Function]:
    """Our stages and cuts as one function of autograd's, so that its own check can look at it."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward_through_cuts(x.detach())[1]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return boundary_gradient(gradient_codec, x.detach(), gradient)[1][-1]

    return Cut


def test_gradcheck_holds_across_our_cuts_at_32_bits() -> None:
    """Differences of what comes out of the stages, against what they hand back."""
    assert torch.autograd.gradcheck(cut_with(FP32).apply, (X.clone().requires_grad_(),))


def test_mutant_gradcheck_sees_a_gradient_codec_that_loses_something() -> None:
    coarse = replace(DIRECTQ, bits=8)

    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(cut_with(coarse).apply, (X.clone().requires_grad_(),))


def test_the_gradient_at_a_cut_is_that_of_the_uncut_graph_in_double() -> None:
    leaf = X.clone().requires_grad_()
    whole = nn.Sequential(*(Double(s) for s in range(3)))

    whole(leaf).sum().backward()
    ours, passed = boundary_gradient(FP32)
    assert same_bits(ours, [p.grad for p in whole.parameters() if p.grad is not None])
    assert leaf.grad is not None
    assert torch.equal(passed[-1], leaf.grad)


def test_only_the_gradient_codec_stands_between_two_stages() -> None:
    """The last stage's gradients are exact; the first one's carry the codec's error."""
    exact, _ = boundary_gradient(FP32)
    coarse, _ = boundary_gradient(DIRECTQ)

    assert same_bits(coarse[4:], exact[4:])
    assert not same_bits(coarse[:2], exact[:2])


def test_what_is_sent_back_is_the_gradient_of_what_the_receiver_decoded() -> None:
    """Taken at the decoded value, not at h: a stage sees only what came over the wire."""
    bench = Bench(num_stages=2, activation=acsgd(bits=2, first_visit_bits=2))
    stage = bench.compute(1)
    batch = bench.data().batch((0, 1))
    decoded = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))

    stage.forward_loss(0, decoded, batch.targets, ids=(0, 1), num_items=16)
    sent_back = stage.backward(0, None)

    leaf = decoded.clone().requires_grad_()
    loss = cross_entropy(bench.module(range(2, 4))(leaf), batch.targets)[0] / 16
    loss.backward()
    assert leaf.grad is not None
    assert sent_back is not None
    assert torch.equal(sent_back, leaf.grad)
    assert decoded.grad is None


def test_nothing_flows_into_the_memory_of_the_codec() -> None:
    run = Bench(num_stages=2, activation=acsgd()).run(5)

    checked = 0
    for stage in run.stages:
        for end in stage.wiring.ends():
            if isinstance(end.codec, Delta):
                checked += check_rows_are_leaves(end.codec)
    assert checked == 2 * 12  # both ends of the activations' edge, all samples


def check_rows_are_leaves(codec: Delta) -> int:
    """No remembered value, as the next delta will use it, hangs on a graph; returns how many."""
    rows = codec.store.rows()
    for sample, mark, value in rows:
        assert value is not None
        assert mark is not None
        decoded = codec.store.row_format.unpack(value, mark.shape)
        for tensor in (value, decoded):
            assert tensor.grad_fn is None, f"row {sample} hangs on {tensor.grad_fn}"
            assert not tensor.requires_grad, f"row {sample} takes gradients"
    return len(rows)


def test_mutant_a_store_that_keeps_the_graph_is_caught() -> None:
    run = Bench(num_stages=2, activation=acsgd()).run(5)
    assert run.stages[0].wiring.activation_out is not None
    codec: Any = run.stages[0].wiring.activation_out.codec
    shelf, sample = codec.store.shelf, codec.store.samples()[0]
    weight = torch.ones((), requires_grad=True)
    shelf.put(sample, shelf.get(sample).float() * weight)

    with pytest.raises(AssertionError, match=f"row {sample} hangs on"):
        check_rows_are_leaves(codec)
