"""Doors for the hosts of a rig: keys, sshd, and accounts ready for `ray up`.

The nodes have no internet. Their environment begins with what the rig's own interpreter has, so
that the set-up commands of cluster.yaml only build and install this project, as they would on
nodes with a company's mirror.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.cluster.host import Host
from tests.cluster.rig import CACHE, UID, USER, Rig

SSHD_OPTIONS = {
    "UsePAM": "no",
    "PasswordAuthentication": "no",
    "StrictModes": "no",
    "AuthorizedKeysFile": ".ssh/authorized_keys",
    "Subsystem": "sftp internal-sftp",
    "MaxStartups": "100",
    "PidFile": "none",
}
COMPILED = CACHE / "ccache"
PROVIDERS = ("torch", "ray", "scikit_build_core", "nanobind")
BASHRC = """\
export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1
export RAY_USAGE_STATS_ENABLED=0 CCACHE_BASEDIR=$HOME CCACHE_NOHASHDIR=1 CCACHE_DIR={cache}
command -v ccache >/dev/null && export CMAKE_CXX_COMPILER_LAUNCHER=ccache
"""
# PIP_NO_BUILD_ISOLATION=0 means: no isolation. pip reads the negation first.


def open_doors(rig: Rig) -> None:
    """Start sshd on every host and let the laptop's key, and only it, in."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    for path in (COMPILED, *COMPILED.rglob("*")):
        os.lchown(path, UID, UID)
    key = rig.folder / "key"
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rig", "-f", str(key)]
    subprocess.run(keygen, check=True)
    for host in rig.everyone:
        furnish(host, key)
        if host is not rig.laptop:
            open_door(host)


def open_door(host: Host) -> None:
    """Start sshd; also after a host was revived."""
    options = [f"-o{name}={value}" for name, value in SSHD_OPTIONS.items()]
    host.run(["/usr/sbin/sshd", "-f", "/dev/null", f"-oHostKey={host.folder}/host_key", *options])


def furnish(host: Host, key: Path) -> None:
    """The login account: keys, shell environment, and a virtual environment with dependencies."""
    ssh = host.home / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(f"{key}.pub", ssh / "authorized_keys")
    shutil.copy(key, ssh / "id_ed25519")
    (ssh / "id_ed25519").chmod(0o600)
    shutil.copy(key, host.folder / "host_key")
    (host.folder / "host_key").chmod(0o600)
    (host.home / ".bashrc").write_text(BASHRC.format(cache=COMPILED), encoding="utf-8")
    venv = host.home / "ray_pipe_venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # pip, too, comes from there; a plain path in a .pth does not run the .pth files in it, so an
    # editable install of this project does not shine through.
    known = [str(Path(importlib.import_module(name).__path__[0]).parent) for name in PROVIDERS]
    base = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    lines = "\n".join([*known, base])
    (venv / "lib" / version / "site-packages" / "rig.pth").write_text(lines, encoding="utf-8")
    ray = venv / "bin" / "ray"  # the command is where the package is, and that is elsewhere
    ray.write_text(f"#!{venv}/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)
    for path in (host.home, *host.home.rglob("*")):
        os.lchown(path, UID, UID)


def ray_command(*words: str) -> list[str]:
    """`ray ...` with the rig's own interpreter."""
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


__all__ = ["USER", "open_door", "open_doors", "ray_command"]
