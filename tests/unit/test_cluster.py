"""Connecting to Ray: what is asked of it, and where its dashboard is."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from ray_pipe import cluster, stage_actors
from ray_pipe.errors import ClusterError, Terminated
from ray_pipe.planner.placement import Node


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


def test_another_ray_than_the_callers_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = start(monkeypatch, FakeRay())
    fake.is_up = True
    fake.get_runtime_context = lambda: SimpleNamespace(gcs_address="127.0.0.1:6379")

    with pytest.raises(ClusterError, match=r"--address 10\.0\.0\.1:6379: this process is con"):
        cluster.connect("10.0.0.1:6379").__enter__()
    for same in ("127.0.0.1:6379", "localhost:6379", "auto", None):
        with cluster.connect(same) as url:
            assert url is None


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


class Settled:
    """Stage actors without Ray: only who sits in which bundle."""

    def __init__(self, homes: list[str], *, spares: list[object] | None = None) -> None:
        self.actors: Any = stage_actors.StageActors.__new__(stage_actors.StageActors)
        self.actors._homes = [home * 56 for home in homes]  # Ray's ids are so long
        self.actors._group = None
        self.actors.handles = [object() for _ in homes]
        self.actors._bundles = {handle: i for i, handle in enumerate(self.actors.handles)}
        self.actors.spares = SimpleNamespace(handles=spares or [])

    def die(self, stage: int) -> None:
        self.actors._bundles.pop(self.actors.handles[stage])

    def start_on(self, node: str) -> tuple[object, int | None]:
        """The new actor, and the bundle that it was started in."""
        seen: list[Any] = []

        def start(strategy: Any) -> object:
            seen.append(strategy)
            return object()

        handle = self.actors._settle(Node(id=node * 56, ip="10.0.0.1"), start)
        return handle, getattr(seen[0], "placement_group_bundle_index", None)


def test_a_new_actor_takes_the_bundle_that_the_dead_one_left_on_its_node() -> None:
    settled = Settled(["a", "a", "b"])
    settled.die(1)

    assert settled.start_on("b")[1] is None  # that node's only bundle is in use
    handle, bundle = settled.start_on("a")
    assert bundle == 1
    settled.actors.handles[1] = handle
    assert settled.start_on("a")[1] is None


def test_a_bundle_is_free_again_when_the_spare_in_it_is_gone() -> None:
    settled = Settled(["a"])
    settled.die(0)
    spare, bundle = settled.start_on("a")
    settled.actors.spares.handles.append(spare)

    assert bundle == 0
    assert settled.start_on("a")[1] is None
    settled.actors.spares.handles.clear()
    assert settled.start_on("a")[1] == 0


def test_a_stage_that_is_lost_while_all_are_introduced_is_named_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    def wait(refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        waited.append(timeout)
        return [], refs

    monkeypatch.setattr(stage_actors.ray, "wait", wait)
    settled, lost = Settled(["a", "b"]), {1: RayError("stopped")}

    with pytest.raises(stage_actors.NotIntroduced) as refused:
        settled.actors._hear({"x": 0, "y": 1}, lambda waiting: lost)

    assert refused.value.errors == lost
    assert waited == [2.0]


def test_ray_does_not_keep_a_signal_that_somebody_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    class TakesSignals(FakeRay):
        def init(self, **options: Any) -> SimpleNamespace:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return super().init(**options)

    def stop(number: int, frame: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        start(monkeypatch, TakesSignals())
        with cluster.connect(None):
            assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "may_leave", "closes"),
    [
        (None, True, True),
        (KeyboardInterrupt(), True, True),
        (Terminated(), True, False),
        (Terminated(), False, True),
    ],
)
def test_stages_remove_their_boxes_unless_the_machine_ends_a_run_that_can_be_taken_up(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, may_leave: bool, closes: bool
) -> None:
    closed: list[bool] = []
    actors: Any = stage_actors.StageActors.__new__(stage_actors.StageActors)
    actors.handles, actors._group = [], None
    actors.spares = SimpleNamespace(end=lambda: None)
    actors.may_leave_boxes = may_leave
    actors._close = lambda: closed.append(True)
    monkeypatch.setattr(stage_actors, "remove_placement_group", lambda group: None)

    actors.__exit__(type(error), error, None)

    assert bool(closed) == closes
