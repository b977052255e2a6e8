"""Connecting to Ray: what is asked of it, and where its dashboard is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ray_pipe import cluster
from ray_pipe.errors import ClusterError


class FakeRay:
    """Remembers how it was started."""

    def __init__(self, dashboard_url: str = "") -> None:
        self.options: dict[str, Any] = {}
        self.is_up = False
        self._dashboard_url = dashboard_url

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> SimpleNamespace:
        self.options, self.is_up = options, True
        return SimpleNamespace(dashboard_url=self._dashboard_url)

    def shutdown(self) -> None:
        self.is_up = False


def start(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> FakeRay:
    monkeypatch.setattr(cluster, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def test_a_ray_of_our_own_has_no_dashboard_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = start(monkeypatch, FakeRay())

    with cluster.connect(None) as url:
        assert url is None
        assert fake.options["include_dashboard"] is False
        assert "job_config" not in fake.options
    assert not fake.is_up


def test_with_a_dashboard_its_url_is_given_and_the_job_has_the_runs_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = start(monkeypatch, FakeRay("127.0.0.1:8265"))

    with cluster.connect(None, dashboard=True, job_name="demo") as url:
        assert url == "http://127.0.0.1:8265"
        assert fake.options["include_dashboard"] is True
        assert fake.options["job_config"].metadata == {"job_name": "demo"}


def test_the_callers_ray_is_used_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = start(monkeypatch, FakeRay())
    fake.is_up = True

    with cluster.connect(None, dashboard=True, job_name="demo") as url:
        assert url is None
    assert fake.is_up
    assert fake.options == {}


def test_the_user_is_told_where_the_dashboard_is_or_why_there_is_none() -> None:
    assert cluster.show_dashboard("http://head:8265").startswith("dashboard: http://head:8265 (")
    assert "no dashboard" in cluster.show_dashboard(None)
    assert "--include-dashboard=true" in cluster.show_dashboard(None)


class SlowRay(FakeRay):
    """Starts in time only when asked for the `nth` time."""

    def __init__(self, nth: int, trouble: str) -> None:
        super().__init__()
        self.nth, self.trouble, self.asked = nth, trouble, 0

    def init(self, **options: Any) -> SimpleNamespace:
        self.asked += 1
        if self.asked < self.nth:
            raise RuntimeError(self.trouble)
        return super().init(**options)


LATE = "The current node timed out during startup."


@pytest.mark.parametrize(
    ("nth", "trouble", "asked"), [(3, LATE, 3), (4, LATE, 3), (2, "no such thing", 1)]
)
def test_a_ray_of_our_own_that_starts_too_slowly_is_started_again(
    monkeypatch: pytest.MonkeyPatch, nth: int, trouble: str, asked: int
) -> None:
    fake = start(monkeypatch, SlowRay(nth, trouble))

    if nth == 3:
        with cluster.connect(None):
            assert fake.is_up
    else:
        with pytest.raises(ClusterError, match=f"could not be started on this machine: {trouble}"):
            cluster.connect(None).__enter__()

    assert fake.asked == asked  # type: ignore[attr-defined]
