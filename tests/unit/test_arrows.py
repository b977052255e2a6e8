"""The shape of the tree, read from its source: who may import whom, and the path of a micro-batch.

Arrows point down, `ray_pipe -> stages -> {compressors, netsim}`; Ray is spoken in few files; and
the `Path:` lines of the headers join into one walk, from the command line to the report.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ray_pipe", "stages", "compressors", "netsim")
MAY_IMPORT = {
    "ray_pipe": {"ray_pipe", "stages", "compressors", "netsim"},
    "stages": {"stages", "compressors", "netsim"},
    "compressors": {"compressors"},
    "netsim": {"netsim"},
}
SPEAK_RAY = {
    "stages.sync.generator_actor",
    "stages.actor_probes",
    "stages.actor_saving",
    "stages.stage_process",
    "stages.remote",
    "stages.embedding.shard_actor",
    "ray_pipe.calls",
    "ray_pipe.cluster",
    "ray_pipe.stage_actors",
    "ray_pipe.ctr_pipeline",
    "ray_pipe.doctor_probe",
    "ray_pipe.doctor_rounds",
    "ray_pipe.failures",
    "ray_pipe.machine",
    "ray_pipe.pipeline",
    "ray_pipe.hearing",
    "ray_pipe.pulse",
    "ray_pipe.replica_watch",
    "ray_pipe.replicas",
    "ray_pipe.replica_actors",
    "ray_pipe.replica_members",
    "ray_pipe.joining",
    "ray_pipe.rec_pipeline",
    "ray_pipe.rec_rows",
    "ray_pipe.rescue",
    "ray_pipe.saving",
    "ray_pipe.spares",
    "ray_pipe.shard_pulse",
    "ray_pipe.shards",
    "ray_pipe.preflight",
    "ray_pipe.preparing",
    "ray_pipe.monitoring.exporter",
    "ray_pipe.monitoring.job_view",
}
"""`machine` only asks Ray for its version."""

NATIVE_FACADES = {"compressors.kernels", "compressors.native"}

WALK = [
    "ray_pipe.run",
    "ray_pipe.driver",
    "ray_pipe.data",
    "stages.schedule",
    "stages.stage",
    "stages.actions",
    "stages.compute",
    "stages.ends",
    "compressors.base",
    "compressors.frame",
    "netsim.link",
    "stages.receiving",
    "stages.loss",
    "stages.optim",
    "stages.record",
    "ray_pipe.metrics",
    "ray_pipe.arms",
    "ray_pipe.report",
]


@functools.cache
def _sources() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def modules() -> dict[str, str]:
    """Source of every module, by its dotted name."""
    return dict(_sources())


parsed = functools.cache(ast.parse)


@functools.cache
def imports(source: str) -> tuple[str, ...]:
    """Everything that a module imports, anywhere in it."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_arrows(sources: dict[str, str]) -> list[str]:
    return sorted(
        {
            f"{name} -> {target}"
            for name, source in sources.items()
            for target in imports(source)
            if (top := target.split(".")[0]) in PACKAGES
            and top not in MAY_IMPORT[name.split(".")[0]]
        }
    )


def speakers(sources: dict[str, str], package: str) -> set[str]:
    return {
        name
        for name, source in sources.items()
        if any(target.split(".")[0] == package for target in imports(source))
    }


def test_arrows_point_down() -> None:
    assert wrong_arrows(modules()) == []


def test_mutant_an_arrow_that_points_up_is_seen() -> None:
    mutant = {"netsim.link": "def f():\n    from stages.stage import Stage\n"}

    assert wrong_arrows(mutant) == [
        "netsim.link -> stages.stage",
        "netsim.link -> stages.stage.Stage",
    ]


def test_ray_is_spoken_in_few_files() -> None:
    assert speakers(modules(), "ray") == SPEAK_RAY


def test_the_native_core_is_behind_its_facades() -> None:
    assert speakers(modules(), "ray_pipe_native") <= NATIVE_FACADES


def test_base_names_are_unique_across_packages() -> None:
    names = [name.split(".")[-1] for name in modules() if not name.endswith(PACKAGES)]

    assert sorted(n for n in set(names) if names.count(n) > 1) == []


# --- the path -------------------------------------------------------------------------------------

Place = tuple[str | None, str | None]
"""What comes before and after; None where the walk begins or ends."""


def paths(sources: dict[str, str]) -> dict[str, Place]:
    """The `Path:` line of each header that has one."""
    found: dict[str, Place] = {}
    for name, source in sources.items():
        header = ast.get_docstring(parsed(source)) or ""
        lines = re.findall(r"^Path: (.*)$", header, flags=re.MULTILINE)
        assert len(lines) <= 1, f"{name} has {len(lines)} paths"
        if lines:
            steps = [step.strip() for step in lines[0].split("->")]
            assert name in steps, f"{name} is not on its own path: {lines[0]}"
            assert 2 <= len(steps) <= 3, f"{name}: expected before -> here -> after, {lines[0]}"
            here = steps.index(name)
            before = steps[here - 1] if here else None
            after = steps[here + 1] if here + 1 < len(steps) else None
            found[name] = (None if before == "(command line)" else before, after)
    return found


def walk(places: dict[str, Place]) -> list[str]:
    """From the first module along what each says comes after it."""
    steps = ["ray_pipe.run"]
    while (after := places[steps[-1]][1]) is not None:
        if after in steps:
            raise AssertionError(f"the walk comes back to {after}")
        if places.get(after, (None, None))[0] != steps[-1]:
            raise AssertionError(f"{steps[-1]} leads to {after}, which does not come after it")
        steps.append(after)
    return steps


def test_the_walk_of_a_micro_batch_goes_from_the_command_line_to_the_report() -> None:
    assert walk(paths(modules())) == WALK


def test_mutant_a_header_that_disagrees_with_its_neighbour_is_seen() -> None:
    places = paths(modules())
    places["netsim.link"] = ("compressors.base", "stages.loss")

    with pytest.raises(AssertionError, match=r"compressors.frame leads to netsim.link, which"):
        walk(places)


def test_every_path_names_modules_that_exist() -> None:
    known = modules()
    for name, place in paths(known).items():
        for neighbour in place:
            assert neighbour is None or neighbour in known, f"{name} names {neighbour}"


def test_every_detour_starts_from_the_walk() -> None:
    """A codec's insides, an actor: following what comes before leads back to the walk."""
    places = paths(modules())
    for name in places:
        here, seen = name, [name]
        while here not in WALK:
            before = places[here][0] if here in places else None
            assert before is not None, f"{name}: the path ends at {here}, which is on no path"
            assert before not in seen, f"{name}: the path goes round in {seen}"
            seen.append(before)
            here = before


def test_every_module_says_what_it_is() -> None:
    silent = [
        name
        for name, source in modules().items()
        if source.strip() and not (ast.get_docstring(parsed(source)) or "").strip()
    ]

    assert silent == []
