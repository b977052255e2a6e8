"""The programs a host needs for `ray up`, without installing anything on this machine.

What is missing is fetched as Debian packages and unpacked into a folder; the hosts see that folder
below their own /usr and /etc.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / "build" / "rig"
PROGRAMS = {"sshd": "/usr/sbin/sshd", "ssh": "/usr/bin/ssh", "rsync": "/usr/bin/rsync"}
PACKAGES = (
    "openssh-server",
    "openssh-sftp-server",
    "openssh-client",
    "rsync",
    "libwrap0",
    "libpopt0",
    "libxxhash0",
    "ccache",  # four hosts need not compile the same source four times
    "libhiredis0.14",
)


class NoPackages(RuntimeError):
    """The programs are neither here nor to be had."""


def ssh_layer(cache: Path) -> Path | None:
    """The folder with unpacked packages; None where this machine has all programs itself."""
    missing = [name for name, path in PROGRAMS.items() if not Path(path).exists()]
    if not missing:
        return None
    root = cache / "root"
    if (root / "usr/sbin/sshd").exists() and (root / "usr/bin/rsync").exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoPackages(f"{', '.join(missing)} missing, and no apt-get to fetch them with")
    aside = cache / "part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    got = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=aside, capture_output=True, text=True
    )
    if got.returncode:
        last = (got.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoPackages(
            f"{', '.join(missing)} missing, and `apt-get download` failed ({last}); install "
            "openssh-server and rsync, or run `apt-get update` first"
        )
    for package in sorted(aside.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(aside / "root")], check=True)
        package.unlink()
    shutil.rmtree(root, ignore_errors=True)
    (aside / "root").rename(root)
    return root


def why_no_ssh(cache: Path = CACHE) -> str | None:
    """Why `ray up` cannot be tried on a rig here; None where it can. CI says it aloud."""
    try:
        ssh_layer(cache)
    except NoPackages as error:
        return str(error)
    return None
