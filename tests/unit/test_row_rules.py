"""Optimizers inside the row store against torch's, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages.embedding.row_rules import Adagrad, Adam, RowAdagrad, Sgd, Uniform, rule_of
from stages.embedding.row_store import RowStore

STEPS = 50
IDS = np.arange(5, dtype=np.int64)


def trained(optimizer: Any, dim: int, gradients: list[Any]) -> tuple[Any, Any]:
    """First and last weights of five rows."""
    store = RowStore(capacity="4MiB", slab="64KiB", pages="4k", core="native")
    rows = store.table("t", dim=dim, optimizer=optimizer, init=Uniform(0.5), seed=dim)
    first, _ = rows.lookup(IDS)
    for g in gradients:
        rows.apply(IDS, g)
    return first, rows.lookup(IDS, train=False)[0]


def gradients_of(dim: int) -> list[Any]:
    random = np.random.default_rng(dim)
    return [random.standard_normal((5, dim)).astype(np.float32) for _ in range(STEPS)]


def by_torch(make: Any, first: Any, gradients: list[Any], sparse: bool = False) -> Any:
    weights = torch.nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = make([weights])
    for g in gradients:
        dense = torch.from_numpy(g)
        weights.grad = dense.to_sparse(1) if sparse else dense
        optimizer.step()
    return weights.detach().numpy()


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 16])
@pytest.mark.parametrize(
    ("rule", "make", "sparse"),
    [
        (Sgd(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), False),
        (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), False),
        (
            Adagrad(lr=0.1, initial_accumulator=0.5, eps=1e-6),
            lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5, eps=1e-6),
            False,
        ),
        (Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01), True),
    ],
)
def test_fifty_steps_are_torch_s(dim: int, rule: Any, make: Any, sparse: bool) -> None:
    gradients = gradients_of(dim)

    first, last = trained(rule, dim, gradients)

    np.testing.assert_allclose(last, by_torch(make, first, gradients, sparse), rtol=0, atol=1e-6)
    assert np.abs(last - first).max() > 0.1


@pytest.mark.parametrize("dim", [1, 7, 16])
def test_row_adagrad_divides_by_the_root_of_the_mean_square(dim: int) -> None:
    gradients = gradients_of(dim)
    first, last = trained(RowAdagrad(lr=0.1, eps=1e-8), dim, gradients)

    weights, total = first.astype(np.float64), np.zeros((5, 1))
    for g in gradients:
        total += (g.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
        weights -= 0.1 * g / (np.sqrt(total) + 1e-8)
    np.testing.assert_allclose(last, weights, rtol=0, atol=1e-5)


def test_adam_is_near_the_dense_one_whose_eps_is_outside_the_bias_correction() -> None:
    gradients = gradients_of(16)

    first, last = trained(Adam(lr=0.01), 16, gradients)

    dense = by_torch(lambda p: torch.optim.Adam(p, lr=0.01), first, gradients)
    np.testing.assert_allclose(last, dense, rtol=0, atol=1e-4)


def test_the_first_step_of_adam_is_the_learning_rate() -> None:
    one = np.full((5, 4), 3.0, np.float32)

    first, last = trained(Adam(lr=0.01), 4, [one])

    np.testing.assert_allclose(first - last, 0.01, rtol=1e-4)


def test_lazy_adam_leaves_rows_alone_that_a_step_does_not_touch() -> None:
    store = RowStore(capacity="4MiB", slab="64KiB", pages="4k", core="native")
    rows = store.table("t", dim=4, optimizer=Adam(lr=0.1))
    rows.lookup(IDS)
    rows.apply(IDS, np.ones((5, 4), np.float32))
    before = rows.lookup(IDS, train=False)[0]
    rows.apply(IDS[:1].copy(), np.ones((1, 4), np.float32))
    after = rows.lookup(IDS, train=False)[0]

    assert (after[1:] == before[1:]).all()  # torch.optim.Adam would move them by their moments
    assert (after[0] != before[0]).all()


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"lr": 1.0, "eps": -1e-8}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        Adagrad(**wrong)


def test_what_a_rule_does_not_do_it_does_not_accept() -> None:
    with pytest.raises(TypeError, match="momentum"):
        Sgd(lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="betas are in"):
        Adam(lr=0.1, beta1=1.0)
    with pytest.raises(ValueError, match="got str"):
        rule_of("sgd")  # type: ignore[arg-type]
