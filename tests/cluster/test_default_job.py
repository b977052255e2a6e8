"""The default job over links of 100 and 10 Mbps that the kernel limits: within 15 %, 6x faster."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.real_links import measure, misses

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.quiet]


def test_real_links_give_the_times_that_the_emulation_and_the_simulator_foresee() -> None:
    found = measure(say=lambda text: sys.stderr.write(text + "\n"))

    assert misses(found) == []
