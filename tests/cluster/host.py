"""One machine of the rig: the commands that run on it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class RigError(RuntimeError):
    """The rig could not do what was asked, with the command's own words."""


@dataclass(kw_only=True)
class Host:
    """One machine of the rig."""

    name: str
    ip: str
    folder: Path
    python: str
    pid: int = 0
    """Its process 1, as the machine sees it; 0 when it is down."""

    env: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def command(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, user: str | None = None
    ) -> list[str]:
        """The command that runs `words` on this host. `user` logs in; else it is root."""
        if not self.pid:
            raise RigError(f"{self.name} is down")
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p"]
        if user is not None:
            shell = ["runuser", "-u", user, "--", "bash", "-lc"]
            pairs = [f"{key}={value}" for key, value in (env or {}).items()]
            inner = f"source ~/.bashrc; cd {REPOSITORY}; {shlex.join(['env', *pairs, *words])}"
            # no -i: an interactive shell would want the terminal
            first = [f"HOME={self.home}", "PATH=/usr/bin:/bin:/usr/sbin:/sbin"]
            return [*enter, "env", "-i", *first, *shell, inner]
        pairs = [f"{key}={value}" for key, value in {**self.env, **(env or {})}.items()]
        return [*enter, "env", "-i", "-C", str(REPOSITORY), *pairs, *words]

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 120.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here and wait; what it said is in the error if it fails."""
        done = subprocess.run(
            self.command(words, env=env, user=user),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise RigError(
                f"{self.name}: {shlex.join(words)} ended with {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command here; whoever starts it waits for it, or takes the host down."""
        env, user = options.pop("env", None), options.pop("user", None)
        options = {"stdin": subprocess.DEVNULL, "text": True} | options
        return subprocess.Popen(self.command(words, env=env, user=user), **options)


def do(*words: str) -> None:
    """Run a command of the machine itself, which must not fail."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"{shlex.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
