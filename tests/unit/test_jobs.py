"""The small training job: its gradient is the right one, and it can be learnt."""

from __future__ import annotations

import torch

from stages.sync.jobs import FEATURES, HIDDEN, SIZES, Classify
from stages.sync.problems import no_time


def loss_by_autograd(job: Classify, vector: torch.Tensor, rows: slice) -> torch.Tensor:
    w1, b1, w2, b2 = torch.split(vector, SIZES)
    hidden = torch.tanh(job._inputs[rows] @ w1.view(FEATURES, HIDDEN) + b1)
    return torch.nn.functional.binary_cross_entropy_with_logits(
        hidden @ w2 + b2, job._targets[rows]
    )


def test_the_gradient_written_out_is_that_of_autograd() -> None:
    job = Classify(4, seed=3)
    vector = job.start.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss_by_autograd(job, vector, job.rows(2, 5)), vector)

    torch.testing.assert_close(job.gradient(job.start, job.rows(2, 5)), expected)


def test_the_mean_gradient_is_the_mean_of_the_replicas_gradients() -> None:
    job = Classify(4)
    each = [job.gradient(job.start, job.rows(r, 7)) for r in range(4)]

    torch.testing.assert_close(job.mean_gradient(job.start, 7), torch.stack(each).mean(0))


def test_replicas_have_shards_of_their_own() -> None:
    job = Classify(5)
    rows = [{*range(10_000)[job.rows(r, k)]} for r in range(5) for k in range(300)]
    own = [set().union(*rows[300 * r : 300 * r + 300]) for r in range(5)]

    assert all(not own[a] & own[b] for a in range(5) for b in range(a))
    assert all(len(batch) == job.batch for batch in rows)


def test_it_can_be_learnt() -> None:
    job = Classify(1)
    (trainer,) = job.trainers(no_time)
    for k in range(400):
        trainer.shards[0].gradient = job.gradient(trainer.x, job.rows(0, k))
        trainer.shards[0].update(k)

    assert job.loss(job.start) > 0.65
    assert job.loss(trainer.x) < 0.25
