"""Training over links that the kernel slows down, one stage per host, nothing emulated.

`benchmarks/real_network.py` has the figures of the default job. Here a smaller model on a slower
link, where compute weighs little, and the best of a few steps: CI shares its cores with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.rig import Rig
from tests.cluster.service import COLD_STEPS, Service

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_HOSTS = 4
RATE_BPS = 4e6


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(NUM_HOSTS) as rig:
        rig.start_ray()
        yield rig


@pytest.fixture(scope="module")
def arms(rig: Rig) -> dict[tuple[str, str], dict[str, Any]]:
    """Both codecs over both kinds of links, and where the stages were."""
    service = Service(rig, NUM_HOSTS)
    assert service.placed["nodes"] == [host.ip for host in rig.hosts], "one stage on each host"
    found = {}
    for codec, steps in (("fp32", 4), ("acsgd", 8)):
        settings = {
            "codec.name": codec,
            "model.name": "gpt-nano",
            "steps": steps,
            "data.num_samples": 64 * COLD_STEPS,
        }
        for way in ("kernel", "emulated"):
            found[codec, way] = service.train(settings, rate_bps=RATE_BPS, kernel=way == "kernel")
    service.close()
    return found


def best_s(arm: dict[str, Any]) -> float:
    return min(arm["step_times_s"][COLD_STEPS - 1 :])


def test_losses_do_not_depend_on_who_slows_the_links(
    arms: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for codec in ("fp32", "acsgd"):
        kernel, emulated = (
            [loss for _, _, loss in arms[codec, way]["losses"]] for way in ("kernel", "emulated")
        )

        assert kernel == emulated
        assert kernel[-1] < kernel[0]


@pytest.mark.quiet
def test_the_kernel_and_our_emulation_agree_on_the_step_time(
    arms: dict[tuple[str, str], dict[str, Any]],
) -> None:
    kernel, emulated = best_s(arms["fp32", "kernel"]), best_s(arms["fp32", "emulated"])

    assert kernel == pytest.approx(emulated, rel=0.15)


@pytest.mark.quiet
def test_the_simulator_foresees_the_step_time_on_real_links(
    arms: dict[tuple[str, str], dict[str, Any]],
) -> None:
    arm = arms["fp32", "kernel"]

    assert best_s(arm) == pytest.approx(arm["predicted_step_s"], rel=0.15)


@pytest.mark.quiet
def test_compression_pays_on_real_links_as_it_does_on_emulated_ones(
    arms: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for way in ("kernel", "emulated"):
        speedup = best_s(arms["fp32", way]) / best_s(arms["acsgd", way])

        assert speedup > 4.5, f"{way}: {speedup:.2f}x"
