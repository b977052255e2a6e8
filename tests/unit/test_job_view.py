"""The status message of a submitted job: only ours to change while it runs."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from ray_pipe.monitoring import job_view
from ray_pipe.monitoring.job_view import JobMessage, submission_id, with_message

RUNNING = {"status": "RUNNING", "message": "Job is currently running.", "metadata": None, "x": 1}


def record(**changes: Any) -> bytes:
    return json.dumps({**RUNNING, **changes}).encode()


class Store:
    """A key-value store that tells when it was written to."""

    def __init__(self, value: bytes | None) -> None:
        self.value = value
        self.written = threading.Event()
        self.keys: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.keys.append(key)
        return self.value

    def put(self, key: str, value: bytes) -> None:
        self.value = value
        self.written.set()


def test_the_message_is_replaced_and_the_rest_kept() -> None:
    changed = with_message(record(), "acsgd: step 3 of 9", run="demo")

    assert changed is not None
    assert json.loads(changed) == {
        **RUNNING,
        "message": "acsgd: step 3 of 9",
        "metadata": {"job_name": "demo"},
    }


def test_a_name_that_the_user_gave_stays() -> None:
    changed = with_message(record(metadata={"job_name": "mine", "team": "a"}), "t", run="demo")

    assert changed is not None
    assert json.loads(changed)["metadata"] == {"job_name": "mine", "team": "a"}


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"\x00no json",
        b"[1]",
        record(status="STOPPED"),
        record(status="SUCCEEDED"),
        json.dumps({"status": "RUNNING"}).encode(),
    ],
)
def test_a_record_that_ended_or_is_unknown_is_left_alone(value: bytes | None) -> None:
    assert with_message(value, "t", run="demo") is None


def test_the_newest_text_is_shown_under_the_jobs_key() -> None:
    store = Store(record())
    with JobMessage("demo", job="raysubmit_1", store=store, interval_s=0.0) as message:
        message.show("step 1")
        assert store.written.wait(60.0)

    assert json.loads(store.value or b"")["message"] == "step 1"
    assert set(store.keys) == {"_ray_internal_job_info_raysubmit_1"}


def test_a_job_that_was_stopped_is_never_called_running_again() -> None:
    store = Store(record(status="STOPPED"))
    with JobMessage("demo", job="a", store=store, interval_s=0.0) as message:
        message.show("step 1")

    assert store.value == record(status="STOPPED")


def test_a_store_that_fails_does_not_disturb_the_run() -> None:
    class Broken(Store):
        def get(self, key: str) -> bytes | None:
            raise ConnectionError("the head is gone")

    with JobMessage("demo", job="a", store=Broken(None), interval_s=0.0) as message:
        message.show("step 1")
        message.show("step 2")


def test_a_driver_started_by_hand_has_no_message() -> None:
    store = Store(record())
    with JobMessage("demo", job=None, store=store, interval_s=0.0) as message:
        message.show("step 1")

    assert store.keys == []


def test_the_submission_id_is_read_from_what_ray_tells_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(job_view.JOB_CONFIG, raising=False)
    assert submission_id() is None
    monkeypatch.setenv(job_view.JOB_CONFIG, "{broken")
    assert submission_id() is None
    monkeypatch.setenv(job_view.JOB_CONFIG, json.dumps({"metadata": None}))
    assert submission_id() is None
    monkeypatch.setenv(
        job_view.JOB_CONFIG, json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})
    )
    assert submission_id() == "raysubmit_1"


def test_names_are_those_of_the_installed_ray() -> None:
    constants = pytest.importorskip("ray._private.runtime_env.constants")
    common = pytest.importorskip("ray.dashboard.modules.job.common")

    assert constants.RAY_JOB_CONFIG_JSON_ENV_VAR == job_view.JOB_CONFIG
    assert common.JobInfoStorageClient.JOB_DATA_KEY.format(
        job_id="a"
    ) == job_view.RECORD_KEY.format("a")
    assert common.JOB_ID_METADATA_KEY == "job_submission_id"
    assert common.JOB_NAME_METADATA_KEY == "job_name"
    assert common.ray_constants.KV_NAMESPACE_JOB.decode() == job_view.NAMESPACE
