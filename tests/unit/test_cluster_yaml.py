"""The cluster files that we ship, read by Ray's own eyes. No cloud, no network."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_pipe.cluster import SYSTEM_CONFIG

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "cluster.yaml"
CLOUD = ROOT / "examples" / "cluster-aws.yaml"


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def validate(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` does to a file before it touches a machine."""
    try:
        from ray.autoscaler._private.util import prepare_config, validate_config
    except ImportError:  # private: it may move
        pytest.skip("this Ray keeps its validation elsewhere")
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("path", [LOCAL, CLOUD], ids=lambda path: path.name)
def test_ray_accepts_what_we_ship(path: Path) -> None:
    prepared = validate(read(path))

    assert prepared["cluster_name"].startswith("raypipe")


def test_with_the_lines_for_tls_every_node_gets_what_the_documentation_says() -> None:
    text = LOCAL.read_text(encoding="utf-8").replace("# TLS: ", "")
    config: dict[str, Any] = yaml.safe_load(text)
    validate(config)

    given = {"~/.ray/tls/" + name: "./tls/" + name for name in ("ca.crt", "node.crt", "node.key")}
    assert given.items() <= config["file_mounts"].items()
    assert "./tls" not in config["file_mounts"].values()  # the authority's key is nobody's
    commands = config["setup_commands"]
    (tls,) = [command for command in commands if "RAY_USE_TLS=1" in command]
    (anew,) = [command for command in commands if "' > ~/.ray_pipe_env" in command]
    assert commands.index(anew) < commands.index(tls)  # or it would be written over
    words = shlex.split(tls)[1].replace("$HOME", "/home/ray").split()
    env = dict(word.split("=") for word in words[1:])
    assert env == {
        "RAY_USE_TLS": "1",
        **{
            name: "/home/ray/.ray/tls/" + file
            for name, file in zip(
                ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"),
                ("ca.crt", "node.crt", "node.key"),
                strict=True,
            )
        },
    }
    assert "RAY_USE_TLS" not in str(read(LOCAL))


def test_every_listed_worker_is_wanted_at_once() -> None:
    prepared = validate(read(LOCAL))

    (kind,) = prepared["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (3, 3)


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in keys[:-1]:
            config = config[key]
        del config[keys[-1]]

    return change


def with_value(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = value

    return change


MUTANTS = {
    "an unknown key": (LOCAL, with_value("x", "set_up_commands"), "'set_up_commands' was unexpec"),
    "no worker addresses": (LOCAL, without("provider", "worker_ips"), "list of `worker_ips`"),
    "no head address": (LOCAL, without("provider", "head_ip"), "supply a `head_ip`"),
    "node types on own machines": (
        LOCAL,
        with_value({"a": {}}, "available_node_types"),
        "available_node_types is not supported for on-premise",
    ),
    "one command, not a list": (LOCAL, with_value("ls", "setup_commands"), "concatenate|operand"),
    "an unknown key in a node type": (
        CLOUD,
        with_value(1, "available_node_types", "head", "gpus"),
        "'gpus' was unexpected",
    ),
    "a head of no known type": (
        CLOUD,
        with_value("chef", "head_node_type"),
        "`head_node_type` must be one of",
    ),
    "fewer workers than wanted": (CLOUD, with_value(1, "max_workers"), "`max_workers` is smaller"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_ray_refuses_a_file_with_a_mistake(name: str) -> None:
    path, change, words = MUTANTS[name]
    config = read(path)
    change(config)

    with pytest.raises(Exception, match=words):
        validate(config)


@pytest.mark.parametrize("path", [LOCAL, CLOUD], ids=lambda path: path.name)
def test_each_node_gets_all_that_the_install_needs(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = [
        *project["tool"]["scikit-build"]["wheel"]["packages"],
        project["tool"]["scikit-build"]["cmake"]["source-dir"],
        project["project"]["readme"],
        *project["project"]["license-files"],
        "pyproject.toml",
        "constraints.txt",
        "tools",
    ]
    mounts = read(path)["file_mounts"]

    assert {f"./{name}" for name in needed} <= set(mounts.values())
    for remote, local in mounts.items():
        if local.startswith("./"):
            assert (ROOT / local).exists(), local
            assert remote == f"~/ray_pipe_src/{local[2:]}"
    assert "bash ~/ray_pipe_src/tools/install_on_node.sh" in read(path)["setup_commands"]


@pytest.mark.parametrize("path", [LOCAL, CLOUD], ids=lambda path: path.name)
def test_tokens_are_on_and_ports_are_set(path: Path) -> None:
    config = read(path)

    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    head, worker = config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]
    assert "--dashboard-port=8265" in head
    assert "--dashboard-host=127.0.0.1" in head, "in clear text, so not for the open network"
    assert "--metrics-export-port=8090" in head
    assert "--metrics-export-port=8090" in worker
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head


@pytest.mark.parametrize("path", [LOCAL, CLOUD], ids=lambda path: path.name)
def test_the_head_is_started_as_a_ray_of_our_own_would_be(path: Path) -> None:
    words = shlex.split(read(path)["head_start_ray_commands"][-1])

    (config,) = [word for word in words if word.startswith("--system-config=")]
    assert json.loads(config.partition("=")[2]) == SYSTEM_CONFIG


@pytest.mark.parametrize("path", [LOCAL, CLOUD], ids=lambda path: path.name)
def test_plain_ray_up_starts_every_worker(path: Path) -> None:
    """`ray up` exports the newer autoscaler before each command; the file's own word comes last."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    command = read(path)["head_start_ray_commands"][-1]
    (sent,) = util.with_envs([command], {"RAY_enable_autoscaler_v2": "1"})
    script = sent.partition("ray start --head")[0] + "printenv RAY_enable_autoscaler_v2"
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)

    assert said.stdout == "0\n"


def test_nodes_of_the_cloud_file_have_one_python() -> None:
    kinds = read(CLOUD)["available_node_types"].values()

    assert len({kind["node_config"]["ImageId"] for kind in kinds}) == 1


def test_a_node_that_has_what_it_needs_is_not_touched_before_the_set_up(tmp_path: Path) -> None:
    (command,) = read(CLOUD)["initialization_commands"]
    for name in ("c++", "rsync", "python3"):
        write_program(tmp_path / name, "exit 0")
    write_program(tmp_path / "sudo", f'echo "$@" >> {tmp_path}/asked')

    subprocess.run(["/bin/bash", "-c", command], env={"PATH": str(tmp_path)}, check=True)
    assert not (tmp_path / "asked").exists()

    (tmp_path / "rsync").unlink()
    subprocess.run(["/bin/bash", "-c", command], env={"PATH": str(tmp_path)}, check=True)
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert [line.split()[:3] for line in asked] == [
        ["apt-get", "-qq", "update"],
        ["apt-get", "-qq", "install"],
    ]


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def test_both_files_set_nodes_up_alike() -> None:
    same = (
        "file_mounts",
        "setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    )

    assert {key: read(LOCAL)[key] for key in same} == {key: read(CLOUD)[key] for key in same}


def test_the_cloud_has_gpu_workers_in_two_zones() -> None:
    kinds = read(CLOUD)["available_node_types"]
    workers = {name: kind for name, kind in kinds.items() if name.startswith("gpu")}

    assert len({tuple(kind["node_config"]["SubnetIds"]) for kind in workers.values()}) == 2
    assert sum(kind["min_workers"] for kind in workers.values()) == 4


def test_keys_runs_and_caches_stay_out_of_an_uploaded_folder() -> None:
    ignored = (ROOT / ".rayignore").read_text(encoding="utf-8").split()

    assert {".git/", ".venv/", "runs/", "build/", "*.pem", "auth_token"} <= set(ignored)
