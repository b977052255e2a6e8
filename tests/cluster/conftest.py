"""Tests on the rig say why they are left out where there can be none."""

from __future__ import annotations

import pytest

from tests.cluster.rig import why_not


@pytest.fixture(scope="session", autouse=True)
def _rig_is_possible() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
