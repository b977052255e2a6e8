"""The settings of a run that is to be resumed, so that a command need not repeat them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_pipe.checkpoint_files import CheckpointError, locate, newest_run
from ray_pipe.errors import ConfigError
from ray_pipe.sections import LINK_OPTIONS
from ray_pipe.unfinished import FILE, has_record, read_record


def saved_settings(
    wish: str, *, out: str, name: str, folder: str | None
) -> tuple[str, dict[str, Any]] | None:
    """The settings of the run to resume, so that a command need not repeat them, and their place.

    None where `auto` finds nothing: the run then starts from the beginning.
    """
    place: str | None = wish
    if wish == "auto":
        if folder is not None:
            place = folder
        elif name:
            place = f"{out}/{name}"
        else:
            place = newest_run(out)
        if place is None:
            return None
    assert place is not None
    left = f"{out}/{name}" if wish == "auto" and name else place
    if has_record(left):
        try:
            return _of_unfinished(Path(left))
        except ConfigError:
            pass  # told by whoever looks for what is left of that run
    try:
        store, chosen = locate(place)
    except CheckpointError:
        if wish == "auto":
            return None
        raise
    manifests = [one.manifest for arm in store.arms() for one in store.checkpoints(arm)[-1:]]
    manifest = chosen.manifest if chosen else max(manifests, key=lambda m: (m.written, m.serial))
    settings = _without_resume(manifest.config)
    network = settings.get("network") or {}
    if network.get("topology"):  # older runs wrote the defaults of links beside it
        settings["network"] = {key: network[key] for key in network if key not in LINK_OPTIONS}
    codec, arms = settings.get("codec") or {}, settings.get("compare")
    if arms and codec.get("name") not in arms:  # older runs wrote the default's name there
        settings["codec"] = {key: codec[key] for key in codec if key != "name"}
    is_inside = not settings["checkpoint"].get("dir")
    if store.folder.is_local and store.folder.name == "checkpoints" and is_inside:
        _follow(settings, Path(str(store.folder.parent)))
    return str(store), settings


def _of_unfinished(folder: Path) -> tuple[str, dict[str, Any]]:
    """The settings of a run whose driver was killed: newer than those of any checkpoint there."""
    settings = _without_resume(read_record(folder)["config"])
    _follow(settings, folder.absolute())
    return str(folder / FILE), settings


def _without_resume(config: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = {**config.get("checkpoint", {})}
    checkpoint.pop("resume", None)
    return {**config, "checkpoint": checkpoint}


def _follow(settings: dict[str, Any], run: Path) -> None:
    """A run that was moved is where it is, not where its settings say."""
    if os.path.abspath(f"{settings['out']}/{settings['name']}") != str(run):
        settings["out"], settings["name"] = str(run.parent), run.name
