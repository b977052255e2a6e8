"""A DLRM as blocks: cut anywhere it is the same, and its input's gradient is the tables' due."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ray_pipe.models.dlrm import DLRMShape, dlrm_block, dlrm_blocks, dlrm_flops, pack, unpack
from stages.compute import Compute
from stages.loss import binary_cross_entropy, checked_sum
from stages.optim import OptimSpec

SHAPE = DLRMShape(num_dense=3, dims=(4, 4), bottom=(5,), top=(6,))
CONCAT = DLRMShape(num_dense=3, dims=(4, 2), bottom=(5,), top=(6,), interaction="concat")
NO_DENSE = DLRMShape(num_dense=0, dims=(4, 4), top=(6,))
SHAPES = pytest.mark.parametrize("shape", [SHAPE, CONCAT, NO_DENSE])


def inputs(shape: DLRMShape, batch: int = 7) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(batch, shape.num_dense, generator=generator)
    return dense, [torch.randn(batch, dim, generator=generator) for dim in shape.dims]


def test_the_interaction_is_every_product_of_two_vectors() -> None:
    dense, pooled = inputs(SHAPE)
    blocks = dlrm_blocks(SHAPE, seed=1)
    hidden = nn.Sequential(*blocks[:2])(pack(dense, pooled))

    bottom = hidden[:, :4]
    assert torch.equal(hidden[:, 4:], torch.cat(pooled, dim=1))  # handed on as they came
    pairs = [(bottom, pooled[0]), (bottom, pooled[1]), (pooled[0], pooled[1])]
    expected = torch.cat([bottom, *((a * b).sum(1, keepdim=True) for a, b in pairs)], dim=1)
    assert torch.allclose(blocks[2][0](hidden), expected, atol=1e-6)
    assert SHAPE.top_widths == (7, 6, 1)


@SHAPES
def test_one_logit_comes_out_for_each_sample(shape: DLRMShape) -> None:
    model = nn.Sequential(*dlrm_blocks(shape, seed=1))

    assert model(pack(*inputs(shape))).shape == (7,)
    assert model(pack(*inputs(shape, batch=1))).shape == (1,)
    assert model(pack(*inputs(shape, batch=0))).shape == (0,)
    assert len(model) == shape.num_blocks


def test_a_block_is_the_same_wherever_it_is_built_and_leaves_the_generator_alone() -> None:
    whole = dlrm_blocks(SHAPE, seed=3)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)

    for index in reversed(range(SHAPE.num_blocks)):
        alone = dlrm_block(SHAPE, index, seed=3).state_dict()
        assert all(torch.equal(alone[name], t) for name, t in whole[index].state_dict().items())

    assert torch.equal(torch.rand(1), expected)
    other = dlrm_block(SHAPE, 0, seed=4).state_dict()
    assert not torch.equal(other["linear.weight"], whole[0].state_dict()["linear.weight"])
    with pytest.raises(IndexError, match="has blocks 0 to 3, got 4"):
        dlrm_block(SHAPE, 4, seed=0)


@SHAPES
def test_every_block_has_weights_so_every_stage_has_something_to_train(shape: DLRMShape) -> None:
    for index, block in enumerate(dlrm_blocks(shape, seed=0)):
        assert list(block.parameters())
        assert dlrm_flops(shape, index) > 0


def plain_gradients(shape: DLRMShape, labels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    dense, pooled = inputs(shape)
    leaves = [one.clone().requires_grad_() for one in pooled]
    model = nn.Sequential(*dlrm_blocks(shape, seed=2))
    logits = model(pack(dense, leaves))
    nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum").div(
        7
    ).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None], [
        p.grad for p in model.parameters() if p.grad is not None
    ]


@pytest.mark.parametrize(
    ("shape", "cut"), [(SHAPE, 1), (SHAPE, 2), (SHAPE, 3), (CONCAT, 1), (CONCAT, 2), (NO_DENSE, 1)]
)
def test_two_stages_give_the_gradients_of_one_model_to_the_last_bit(
    shape: DLRMShape, cut: int
) -> None:
    """Also of the pooled vectors: what comes back from the first stage goes to the tables."""
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    blocks, optim = dlrm_blocks(shape, seed=2), OptimSpec()
    first = Compute(nn.Sequential(*blocks[:cut]), optim=optim)
    last = Compute(nn.Sequential(*blocks[cut:]), optim=optim, loss=binary_cross_entropy)

    ids = tuple(range(7))
    hidden = first.forward(0, pack(*inputs(shape)), ids=ids)
    last.forward_loss(0, hidden.detach(), labels, ids=ids, num_items=7)
    due = first.backward(0, last.backward(0, None))

    assert due is not None
    of_pooled, of_weights = plain_gradients(shape, labels)
    for found, expected in zip(unpack(shape, due)[1], of_pooled, strict=True):
        assert torch.equal(found, expected)
    for parameter, grad in zip((*first.parameters, *last.parameters), of_weights, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)


@SHAPES
def test_unpack_is_the_inverse_of_pack(shape: DLRMShape) -> None:
    dense, pooled = inputs(shape)

    again, vectors = unpack(shape, pack(dense, pooled))

    assert torch.equal(again, dense)
    assert all(torch.equal(a, b) for a, b in zip(vectors, pooled, strict=True))


def test_shapes_that_cannot_be_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"\(4, 8\) have no dot products; .*'concat'"):
        DLRMShape(num_dense=1, dims=(4, 8))
    with pytest.raises(ValueError, match="interaction 'fm', expected dot or concat"):
        DLRMShape(num_dense=1, dims=(4,), interaction="fm")
    with pytest.raises(ValueError, match="needs at least one feature"):
        DLRMShape(num_dense=1, dims=())
    with pytest.raises(ValueError, match="need 1 or more"):
        DLRMShape(num_dense=1, dims=(4,), top=(0,))


def test_the_click_loss_is_a_sum_with_a_count_of_samples() -> None:
    logits, labels = torch.tensor([0.0, 100.0, -100.0]), torch.tensor([1.0, 0.0, 0.0])

    total, count = binary_cross_entropy(logits, labels)

    assert (float(total), count) == (pytest.approx(100.6931472), 3)
    assert float(checked_sum(binary_cross_entropy, logits, labels)) == float(total)
    # Mutant: a mean would make M micro-batches weigh what one does.
    mean = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert float(mean) != float(total)
    with pytest.raises(ValueError, match=r"\(3,\) logits for \(2,\) labels, expected one each"):
        binary_cross_entropy(logits, labels[:2])
