"""The run's own words in the dashboard's Jobs view.

Ray shows a status message for jobs that were submitted (`ray job submit`), and has no call to set
it: the message is a field of the record that its job manager keeps in the cluster's key-value
store. `JobMessage` rewrites that field, from a thread of its own, only while the record says
RUNNING, and gives up for good at the first thing it does not know. A driver that was started by
hand has no such record; its row shows the run's name (`ray_pipe.cluster` tells Ray) and its
command.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any

log = logging.getLogger("ray_pipe")

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable by which Ray's job manager tells a driver who it is."""

RECORD_KEY = "_ray_internal_job_info_{}"
NAMESPACE = "job"
INTERVAL_S = 2.0
LEAVE_TIMEOUT_S = 2.0


def submission_id() -> str | None:
    """Of the submitted job that this process is the driver of, if it is one."""
    try:
        metadata = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("metadata") or {}
    except ValueError:
        return None
    found = metadata.get("job_submission_id")
    return str(found) if found else None


class ClusterStore:
    """The cluster's key-value store, where Ray's job manager keeps its records."""

    def get(self, key: str) -> bytes | None:
        from ray.experimental.internal_kv import _internal_kv_get

        found: bytes | None = _internal_kv_get(key.encode(), namespace=NAMESPACE)
        return found

    def put(self, key: str, value: bytes) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)


def with_message(record: bytes | None, text: str, *, run: str) -> bytes | None:
    """The job's record with a new message, and the run's name where the user gave none.

    None if the record must be left alone: gone, ended, or not of the form we know.
    """
    if record is None:
        return None
    try:
        info = json.loads(record)
    except ValueError:
        return None
    if not isinstance(info, dict) or info.get("status") != "RUNNING" or "message" not in info:
        return None
    info["message"] = text
    info["metadata"] = {"job_name": run, **(info.get("metadata") or {})}
    return json.dumps(info).encode()


class JobMessage:
    """Shows the latest text; never makes the caller wait. For a driver by hand it does nothing."""

    def __init__(
        self,
        run: str,
        *,
        job: str | None,
        store: Any = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._run, self._job = run, job
        self._store = store or ClusterStore()
        self._interval_s = interval_s
        self._text: str | None = None
        self._fresh = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._main, name="job-message", daemon=True)

    def show(self, text: str) -> None:
        """The newest text wins; those that came too quickly after one another are not shown."""
        self._text = text
        self._fresh.set()

    def __enter__(self) -> JobMessage:
        if self._job is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends before Ray does; Ray's own words about success or failure come after ours."""
        self._leave.set()
        self._fresh.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_TIMEOUT_S)

    def _main(self) -> None:
        key = RECORD_KEY.format(self._job)
        while self._fresh.wait() and not self._leave.is_set():
            self._fresh.clear()
            try:
                changed = with_message(self._store.get(key), self._text or "", run=self._run)
                if changed is None:
                    log.debug("job %s: its record is not ours to change", self._job)
                    return
                self._store.put(key, changed)
            except Exception as error:  # a status line is never worth a run
                log.debug("job %s: no status message: %r", self._job, error)
                return
            self._leave.wait(self._interval_s)
