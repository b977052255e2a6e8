"""What replicas agree on, properties 5, 7 and 14 to 17 of the replica spec, each with mutants.

As in test_sync_order: a property is a function that asserts, and each mutant fails it for the
reason that the message names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressors.registry import CodecSpec
from netsim.clock import run_virtual
from netsim.link import Link, frame_nbytes
from stages.sync.collective import Collective
from stages.sync.fleet import Fleet
from stages.sync.payload import VectorCoder
from stages.sync.post import Inbox
from stages.sync.problems import ModuleShard, ModuleTrainer
from stages.sync.replica import Replica
from stages.sync.ripples import ruler
from stages.sync.rules import FrozenAdam, OuterStep
from stages.sync.strategies import SyncSpec
from stages.sync.swap import Swap
from tests.unit.fleets import mean_of, quadratics, run_fleet, shuffled, slow_net, uniform_time

RIPPLES = SyncSpec(name="ripples", group_size=3)
AVERAGE = SyncSpec(name="local", outer_lr=1.0, outer_momentum=0.0)


# --- 5: the mean stays where it is ----------------------------------------------------------------


def assert_mean_is_kept(sync: SyncSpec) -> None:
    trainers = quadratics(8, lr=0.0, offset=1.0, compute_s=uniform_time(8, "random:6x@0.1"))
    before = mean_of(trainers)
    fleet = run_fleet(trainers, sync, 40, topology=slow_net(8))
    rest = [replica.exchanges[0].swap._pending for replica in fleet.replicas.values()]
    agreed = [x for x in rest if x is not None]  # answered, and not yet taken in
    moved = float((mean_of(trainers) + sum(agreed, torch.zeros(1)) / 8 - before).abs().max())
    assert moved < 1e-12, f"{sync.name}: the mean moved by {moved:.2g}"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "sync",
    [SyncSpec(), AVERAGE, RIPPLES, SyncSpec(name="ad-psgd"), SyncSpec(name="hop")],
    ids=lambda sync: sync.name,
)
def test_5_the_mean_is_kept(sync: SyncSpec) -> None:
    assert_mean_is_kept(sync)


@pytest.mark.slow
def test_5_mutant_dividing_by_all_instead_of_the_group(monkeypatch: Any) -> None:
    right = VectorCoder.mean
    monkeypatch.setattr(
        VectorCoder, "mean", lambda self, vectors: right(self, vectors) * len(vectors) / 8
    )

    with pytest.raises(AssertionError, match="ripples: the mean moved"):
        assert_mean_is_kept(RIPPLES)


def test_5_mutant_an_update_that_is_not_atomic_loses_the_one_before(monkeypatch: Any) -> None:
    """Two who ask meet the same third between its flushes: the later result replaces the other."""
    right = Swap._take_part

    async def replaces(self: Swap, header: Any, packet: Any) -> None:
        known, self._pending = self._pending, None
        await right(self, header, packet)
        if self._pending is None:
            self._pending = known

    monkeypatch.setattr(Swap, "_take_part", replaces)
    with pytest.raises(AssertionError, match="ad-psgd: the mean moved"):
        assert_mean_is_kept(SyncSpec(name="ad-psgd"))


# --- 7: one group of all is all-reduce ------------------------------------------------------------


def assert_one_group_is_all_reduce() -> None:
    ours = quadratics(4, spread=1.0)
    run_fleet(ours, SyncSpec(name="ripples", group_size=4, slowdown_threshold=0), 50)
    theirs = quadratics(4, spread=1.0)
    run_fleet(theirs, SyncSpec(), 50)  # the ring sums by `combine`, groups by `mean`
    apart = float((ours[0].x - theirs[0].x).abs().max())
    assert apart < 1e-6, f"apart by {apart:.2g}"


@pytest.mark.slow
def test_7_one_group_of_all_is_all_reduce() -> None:
    assert_one_group_is_all_reduce()


@pytest.mark.slow
def test_7_mutant_no_division(monkeypatch: Any) -> None:
    right = VectorCoder.mean
    monkeypatch.setattr(
        VectorCoder, "mean", lambda self, vectors: right(self, vectors) * len(vectors)
    )

    with pytest.raises(AssertionError, match="apart by"):
        assert_one_group_is_all_reduce()


@pytest.mark.slow
def test_7_mutant_averaging_before_the_local_step(monkeypatch: Any) -> None:
    async def step(self: Replica) -> None:
        self.strategy.entered(self.k)
        await self.trainer.compute(self.k)
        await self._agree(self.k)
        await self._update(self.k)
        self.num_run += 1

    monkeypatch.setattr(Replica, "step", step)
    with pytest.raises(AssertionError, match="apart by"):
        assert_one_group_is_all_reduce()


# --- 14: the same loss at equal epochs ------------------------------------------------------------

STRATEGIES = {
    "allreduce": SyncSpec(),
    "ripples": SyncSpec(name="ripples"),
    "hop": SyncSpec(name="hop"),
    "hop, backup, skip": SyncSpec(name="hop", backup_workers=1, skip=4),
    "ad-psgd": SyncSpec(name="ad-psgd"),
    "local": replace(AVERAGE, local_steps=4),
}


def logistic() -> nn.Module:
    return nn.Linear(10, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_after(
    sync: SyncSpec,
    make: Callable[[], nn.Module],
    *,
    num: int = 8,
    lr: float = 0.2,
) -> float:
    """Loss of the mean model on IID shards after equally many samples."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(1024, 10, generator=generator)
    targets = (inputs[:, :3].sum(1) + 0.5 * inputs[:, 3] * inputs[:, 4] > 0).float()
    loss_of = nn.functional.binary_cross_entropy_with_logits

    def loss_at(module: nn.Module, replica: int, k: int) -> Tensor:
        rows = replica * 128 + (torch.arange(32) + 32 * k) % 128
        loss: Tensor = loss_of(module(inputs[rows])[:, 0], targets[rows])
        return loss

    trainers = []
    for replica in range(num):
        torch.manual_seed(0)
        module = make()
        trainers.append(
            ModuleTrainer(
                replica, module, loss_at=loss_at, lr=lr, compute_s=uniform_time(num),
                optimizer=torch.optim.SGD(module.parameters(), lr=lr),
            )
        )  # fmt: skip

    async def main() -> None:
        fleet = Fleet(sync=sync, trainers=trainers, topology=slow_net(num, rate_bps=1e7))
        await fleet.run(40)

    run_virtual(main())
    shard = trainers[0].shards[0]
    shard.set_parameters(torch.stack([t.shards[0].parameters() for t in trainers]).mean(0))
    with torch.no_grad():
        return float(loss_of(trainers[0].module(inputs)[:, 0], targets))


def assert_same_loss(name: str, make: Callable[[], nn.Module], exact: float) -> None:
    found = loss_after(STRATEGIES[name], make)
    assert found == pytest.approx(exact, rel=0.02), f"{name}: {found:.4f}, all-reduce {exact:.4f}"


@cache
def all_reduced(make: Callable[[], nn.Module]) -> float:
    return loss_after(SyncSpec(), make)


@pytest.mark.slow
@pytest.mark.parametrize("make", [logistic, mlp])
def test_14_all_strategies_reach_the_same_loss_at_equal_epochs(make: Any) -> None:
    exact = all_reduced(make)

    assert 0.1 < exact < 0.6  # it has learnt something and is not done
    for name in list(STRATEGIES)[1:]:
        assert_same_loss(name, make, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_14_mutant_the_gradient_applied_twice(name: str, monkeypatch: Any) -> None:
    exact = all_reduced(mlp)
    right = ModuleShard.update
    monkeypatch.setattr(ModuleShard, "update", lambda self, k: (right(self, k), right(self, k)))

    with pytest.raises(AssertionError, match=name):
        assert_same_loss(name, mlp, exact)


@pytest.mark.slow
def test_14_mutant_the_wrong_sign_of_the_pseudo_gradient(monkeypatch: Any) -> None:
    exact = all_reduced(mlp)
    right = OuterStep.outgoing
    monkeypatch.setattr(OuterStep, "outgoing", lambda *args: -right(*args))

    with pytest.raises(AssertionError, match="local"):
        assert_same_loss("local", mlp, exact)


DILOCO = SyncSpec(name="local", local_steps=4, outer_lr=0.7, outer_momentum=0.5)
"""Ten outer steps: with a momentum of 0.9 they would hardly have begun."""


def assert_diloco_keeps_up(make: Callable[[], nn.Module]) -> None:
    """Its steps are `outer_lr / (1 - outer_momentum)` times as long, so the inner rate is less."""
    exact = all_reduced(make)
    found = loss_after(DILOCO, make, lr=0.2 * (1 - DILOCO.outer_momentum) / DILOCO.outer_lr)
    assert found == pytest.approx(exact, rel=0.02), f"diloco: {found:.4f}, not {exact:.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("make", [logistic, mlp])
def test_14_diloco_reaches_the_same_loss_at_equal_epochs(make: Any) -> None:
    assert_diloco_keeps_up(make)


def test_14_mutant_an_outer_step_without_its_momentum(monkeypatch: Any) -> None:
    monkeypatch.setattr(OuterStep, "incoming", plain_outer_step)

    with pytest.raises(AssertionError, match="diloco"):
        assert_diloco_keeps_up(mlp)


def plain_outer_step(self: OuterStep, shard: Any, k: int, result: Any) -> None:
    self.anchor = self.anchor - self.lr * result.value
    shard.set_parameters(self.anchor)


ADAM = SyncSpec(name="quantized-adam", warmup=10, codec=CodecSpec(name="directq", bits=4))


@cache
def agreed_exactly(make: Callable[[], nn.Module]) -> float:
    """With momenta as they are: what is frozen then is the same, and only bits differ."""
    return loss_after(replace(ADAM, codec=CodecSpec(name="fp32")), make, lr=0.02)


def assert_four_bits_lose_nothing(make: Callable[[], nn.Module]) -> None:
    exact, found = agreed_exactly(make), loss_after(ADAM, make, lr=0.02)
    assert found == pytest.approx(exact, rel=0.02), f"4 bits: {found:.4f}, not {exact:.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("make", [logistic, mlp])
def test_14_quantized_adam_reaches_the_loss_of_exact_momenta_at_equal_epochs(make: Any) -> None:
    assert_four_bits_lose_nothing(make)


@pytest.mark.slow
def test_14_mutant_a_gradient_that_quantized_adam_counts_twice(monkeypatch: Any) -> None:
    agreed_exactly(mlp)
    right = FrozenAdam.outgoing

    def twice(self: FrozenAdam, shard: Any, k: int) -> Any:
        return right(self, shard, k) + (0.1 * shard.gradients() if k >= ADAM.warmup else 0.0)

    monkeypatch.setattr(FrozenAdam, "outgoing", twice)

    with pytest.raises(AssertionError, match="4 bits"):
        assert_four_bits_lose_nothing(mlp)


# --- 15: all stages have the same members ---------------------------------------------------------


def assert_stages_agree(sync: SyncSpec) -> None:
    """Four stages, four replicas; looks after every exchange."""
    seen: list[list[tuple[int, ...]]] = []
    right = Replica._take

    async def take(self: Replica, k: int, results: Any) -> None:
        seen.append([result.contributors for result in results])
        await right(self, k, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "_take", take)
        run_fleet(
            quadratics(4, num_shards=4, compute_s=uniform_time(4, "1:3x")), sync, 12,
            topology=slow_net(4, 4),
        )  # fmt: skip
    assert len(seen) > 20
    assert all(len(groups) == 4 for groups in seen)
    apart = [groups for groups in seen if len({*groups}) > 1]
    assert not apart, f"stages of one replica in different groups: {apart[0]}"


@pytest.mark.parametrize(
    "sync",
    [
        SyncSpec(),
        SyncSpec(name="ripples", group_size=2),
        SyncSpec(name="ripples", groups="ruler"),
        SyncSpec(name="hop", backup_workers=1),
        SyncSpec(name="ad-psgd"),
    ],
    ids=lambda sync: f"{sync.name}, {sync.groups}",
)
def test_15_all_stages_of_a_replica_have_the_same_members(sync: SyncSpec) -> None:
    assert_stages_agree(sync)


def test_15_mutant_each_stage_has_groups_of_its_own(monkeypatch: Any) -> None:
    def begin(self: Replica, plan: Any, vectors: Any) -> Any:
        own = [
            replace(plan, peers=ruler(self.index, plan.number + stage, 4))
            for stage in range(len(vectors))
        ]
        return [e.begin(p, v) for e, p, v in zip(self.exchanges, own, vectors, strict=True)]

    monkeypatch.setattr(Replica, "_begin", begin)
    with pytest.raises(AssertionError, match="stages of one replica in different groups"):
        assert_stages_agree(SyncSpec(name="ripples", groups="ruler"))


# --- 16: DiLoCo with H = 1 and an outer step of one is parameter averaging ------------------------


def assert_anchors_are_the_same_bits() -> None:
    """At every replica, and again when letters come in another order."""
    found = []
    for seed in (1, 2, 3):
        trainers = quadratics(4, spread=1.0, dtype=torch.float32, dim=300)
        fleet = run_fleet(
            trainers, AVERAGE, 10, topology=slow_net(4, rate_bps=1e6),
            wrap_link=shuffled(seed=seed, share_twice=0.0, by_s=3.0),
        )  # fmt: skip
        found += [replica.rules[0].anchor for replica in fleet.replicas.values()]  # type: ignore[attr-defined]
    assert all(torch.equal(anchor, found[0]) for anchor in found[:4]), "replicas differ"
    assert all(torch.equal(anchor, found[0]) for anchor in found), "runs differ"


@pytest.mark.slow
def test_16_every_step_with_outer_rate_one_is_parameter_averaging() -> None:
    ours = quadratics(4, spread=1.0)
    run_fleet(ours, AVERAGE, 30)
    theirs = quadratics(4, spread=1.0)
    run_fleet(theirs, SyncSpec(name="ripples", group_size=4, slowdown_threshold=0), 30)

    torch.testing.assert_close(ours[0].x, theirs[0].x, rtol=0, atol=1e-12)
    assert_anchors_are_the_same_bits()


def test_16_mutant_a_sum_in_the_order_of_arrival(monkeypatch: Any) -> None:
    collect = Inbox.collect

    async def as_they_came(self: Inbox, op: str, tag: Any, wanted: Any, **options: Any) -> Any:
        wanted = list(wanted)
        packets = await collect(self, op, tag, wanted, **options)
        if op != "up":
            return packets
        came = list(self.came)  # type: ignore[attr-defined]
        order = sorted(range(len(wanted)), key=lambda i: came.index((*tag, *wanted[i])))
        return [packets[i] for i in order]

    put = Inbox._put

    def note(self: Inbox, header: Any, packet: Any) -> None:
        came = self.__dict__.setdefault("came", {})
        if header.body["op"] == "up":
            came[header.generation, header.step, header.micro_batch, header.replica] = None
        put(self, header, packet)

    monkeypatch.setattr(Inbox, "collect", as_they_came)
    monkeypatch.setattr(Inbox, "_put", note)
    with pytest.raises(AssertionError, match="runs differ"):
        assert_anchors_are_the_same_bits()


def test_16_mutant_an_owner_that_keeps_its_own_unrounded_mean(monkeypatch: Any) -> None:
    right = VectorCoder.encode

    def unrounded(self: VectorCoder, slot: str, vector: Tensor, *, exact: bool = False) -> Any:
        packet, read = right(self, slot, vector, exact=exact)
        return packet, vector if slot.startswith("down") else read

    monkeypatch.setattr(VectorCoder, "encode", unrounded)
    trainers = quadratics(4, spread=1.0, dtype=torch.float32, dim=700)
    run_fleet(trainers, replace(AVERAGE, codec=CodecSpec(name="directq", bits=4)), 3)

    assert not all(torch.equal(trainer.x, trainers[0].x) for trainer in trainers)


# --- 17: the bytes on every link ------------------------------------------------------------------


def assert_bytes_are_the_closed_form(sync: SyncSpec, packets: dict[tuple[int, int], int]) -> None:
    """`packets[source, target]` models in quarters cross each link in one step of four."""
    dim, steps = 4096, 5
    trainers = quadratics(4, dim=dim, dtype=torch.float32, lr=0.01)
    fleet = run_fleet(trainers, sync, steps)
    quarter = VectorCoder(sync.payload).nbytes(dim // 4)
    for link, num in packets.items():
        sent = fleet.links[link].sent.get("replica", 0)
        payload = steps * num * quarter
        headers = fleet.links[link].messages.get("replica", 0) * 200
        assert payload <= sent <= payload + headers, f"link {link}: {sent} bytes, not {payload}"
    others = [link.sent.get("replica", 0) for at, link in fleet.links.items() if at not in packets]
    assert not any(others)


RING = {(i, (i + 1) % 4): 6 for i in range(4)}
DIRECT = {(i, j): 2 for i in range(4) for j in range(4) if i != j}
FOUR_BITS = CodecSpec(name="directq", bits=4)


@pytest.mark.parametrize("codec", [CodecSpec(name="fp32"), FOUR_BITS], ids=["fp32", "4 bits"])
def test_17_bytes_on_every_link_are_the_closed_form(codec: CodecSpec) -> None:
    assert_bytes_are_the_closed_form(SyncSpec(codec=codec), RING)
    assert_bytes_are_the_closed_form(SyncSpec(codec=codec, route="direct"), DIRECT)
    assert_bytes_are_the_closed_form(replace(AVERAGE, codec=codec), DIRECT)


def assert_letters_have_their_size(
    sync: SyncSpec, *, sizes: list[int], exact: int = 0, near: tuple[int, ...] = ()
) -> None:
    """Every letter with a tensor holds one of these many values in 4 bits, `exact` of each link
    as they are; who writes to whom may depend on time. `near` are the bytes of letters to somebody
    who has nearly the same values: without scales, and of a mean with a bit for each doubling of
    those whom it is for."""
    dim, steps = 4096, 16
    trainers = quadratics(4, dim=dim, dtype=torch.float32, lr=0.01)
    coder = VectorCoder(sync.payload)
    seen: list[tuple[str, int]] = []

    def wrap(link: Link) -> Link:
        send = link.send

        def watched(frame: Any, *, kind: str) -> None:
            if kind == "replica":
                seen.append((link.name, frame_nbytes(frame)))
            send(frame, kind=kind)

        link.send = watched  # type: ignore[method-assign]
        return link

    run_fleet(trainers, sync, steps, wrap_link=wrap)
    assert len(seen) >= 4 * steps / 2
    coded = [(n, n + 200) for n in (*map(coder.nbytes, sizes), *near)]
    plain = [name for name, n in seen if not any(low <= n <= high for low, high in coded)]
    most = max((plain.count(name) for name in set(plain)), default=0)
    assert most <= exact, f"{sync.name}: {most} letters of a link are not in 4 bits"
    assert all(any(low <= n <= high for _, n in seen) for low, high in coded)


PAIRS = (2048 * 4 // 8, 2048 * 5 // 8)
FOURS = (1024 * 4 // 8, 1024 * 6 // 8)


@pytest.mark.parametrize(
    ("sync", "sizes", "exact", "near"),
    [
        (SyncSpec(name="quantized-adam", warmup=1), [1024], 2, ()),  # the warm-up: up and down
        (SyncSpec(name="ripples", group_size=2), [2048], 0, PAIRS),
        (SyncSpec(name="ripples", groups="ruler"), [2048, 1024], 0, (*PAIRS, *FOURS)),
        (SyncSpec(name="hop", graph="ring"), [4096], 1, ()),  # the first, that others build on
        (SyncSpec(name="ad-psgd"), [4096], 1, (4096 * 4 // 8,)),  # asked for in full
    ],
    ids=["quantized-adam", "ripples", "ruler", "hop", "ad-psgd"],
)
def test_17_letters_of_every_strategy_are_in_four_bits(
    sync: SyncSpec, sizes: list[int], exact: int, near: tuple[int, ...]
) -> None:
    sync = replace(sync, codec=FOUR_BITS)
    assert_letters_have_their_size(sync, sizes=sizes, exact=exact, near=near)


def test_17_mutant_a_silent_fall_back_of_hop(monkeypatch: Any) -> None:
    right = VectorCoder.encode
    monkeypatch.setattr(
        VectorCoder,
        "encode",
        lambda self, slot, x, *, exact=False: right(self, slot, x, exact=True),
    )

    with pytest.raises(AssertionError, match="are not in 4 bits"):
        assert_letters_have_their_size(
            SyncSpec(name="hop", graph="ring", codec=FOUR_BITS), sizes=[4096], exact=1
        )


def test_17_mutant_a_silent_fall_back_to_fp32(monkeypatch: Any) -> None:
    right = VectorCoder.encode
    monkeypatch.setattr(
        VectorCoder,
        "encode",
        lambda self, slot, x, *, exact=False: right(self, slot, x, exact=True),
    )

    with pytest.raises(AssertionError, match=r"link \(\d, \d\): \d+ bytes, not \d+"):
        assert_bytes_are_the_closed_form(SyncSpec(codec=FOUR_BITS), RING)


def test_17_mutant_a_ring_that_sends_straight_to_the_owners(monkeypatch: Any) -> None:
    monkeypatch.setattr(Collective, "_ring", Collective._direct)

    with pytest.raises(AssertionError, match="bytes, not"):
        assert_bytes_are_the_closed_form(SyncSpec(), RING)
