"""Settings from files, flags and `--set`, laid over each other.

A layer is a source of settings with the name that errors give it. Within a layer an option may be
written nested (`codec: {fw_bits: 2}`), dotted (`codec.fw_bits: 2`) or, for a section's first
option, short (`codec: acsgd`). Later layers win.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ray_pipe.errors import ConfigError, nearest
from ray_pipe.options import UNIT_SUFFIXES, option_docs, read_option, show_option
from ray_pipe.sections import LINK_OPTIONS, hidden_options

Labels = str | Mapping[str, str]
"""What errors call a source: one name, or one for each dotted key (the flags)."""

SHORT = {"model": "name", "data": "source", "codec": "name", "optim": "name"}
"""Sections that can be given as one word, and the option which that word is."""

BATCH_SIZE = "pipeline.batch_size"
"""Not an option but a way to give `pipeline.micro_batch_size`: samples per step."""


def read_settings(path: str) -> dict[str, Any]:
    """The settings of a YAML file; refuses what cannot be read, with the place."""
    import yaml

    from netsim.topology import StrictLoader  # late: it knows of no configuration

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read, {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path}: is not UTF-8 text (byte {error.start}); save it as UTF-8 YAML."
        ) from None
    try:
        values = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is no YAML"
        raise ConfigError(f"--config {path}: {problem}{place}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path}: holds a {type(values).__name__} instead of settings; "
            "write lines such as `codec: {name: acsgd, fw_bits: 2}`."
        )
    return {str(key): value for key, value in values.items()}


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """`["codec.fw_bits=2"]` as a layer; the last of two equal keys wins."""
    layer: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {setting}: expected key=value, such as --set codec.fw_bits=2."
            )
        layer[key.strip()] = value.strip()
    return layer


def merge_layers(run: type, layers: Iterable[tuple[Labels, Mapping[str, Any]]]) -> dict[str, Any]:
    """Dotted keys with typed values, later layers over earlier ones.

    A layer that gives `steps` takes `epochs` of earlier ones away, and the other way round; one
    that gives a topology takes the bandwidth, latency, jitter and loss of earlier ones; one that
    gives a codec's name and no `compare` asks for that codec alone; one that gives `compare` and no
    codec's name takes away an earlier one that is not in it.
    """
    merged: dict[str, Any] = {}
    for labels, values in layers:
        layer = _read_layer(run, values, labels)
        if layer.get("steps") is not None and layer.get("epochs") is not None:
            raise ConfigError(
                f"{_label(labels, 'steps')}: steps={layer['steps']} and epochs={layer['epochs']} "
                "are both given; keep one of them."
            )
        for one, other in (("steps", "epochs"), (BATCH_SIZE, "pipeline.micro_batch_size")):
            if layer.get(one) is not None:
                merged.pop(other, None)
            if layer.get(other) is not None:
                merged.pop(one, None)
        if layer.get("network.topology") is not None:
            for name in LINK_OPTIONS:
                merged.pop(f"network.{name}", None)
        if "codec.name" in layer and "compare" not in layer:
            merged["compare"] = ()
        arms = layer.get("compare")
        if arms and merged.get("codec.name") not in arms:
            merged.pop("codec.name", None)
        merged.update(layer)
    return merged


def under(defaults: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with other defaults below them; what excludes a default takes it away."""
    if merged.get("steps") is not None:
        defaults = {key: value for key, value in defaults.items() if key != "epochs"}
    if BATCH_SIZE in merged:
        size = "pipeline.micro_batch_size"
        defaults = {key: value for key, value in defaults.items() if key != size}
    return {**defaults, **merged}


def build_sections(run: type, merged: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the run's constructor from dotted keys."""
    sections = _sections(run)
    merged = _resolve_batch_size(sections, merged)
    arguments: dict[str, Any] = {key: value for key, value in merged.items() if "." not in key}
    for name, section in sections.items():
        options = {
            key.partition(".")[2]: value
            for key, value in merged.items()
            if key.startswith(f"{name}.")
        }
        arguments[name] = section(**options)
    return arguments


def _read_layer(run: type, values: Mapping[str, Any], labels: Labels) -> dict[str, Any]:
    sections = _sections(run)
    layer: dict[str, Any] = {}
    for key, value in _flatten(values, sections):
        section_name, _, option_name = key.rpartition(".")
        source = _label(labels, key)
        if key == BATCH_SIZE:
            layer[key] = read_option(
                sections["pipeline"], "micro_batch_size", value, source=source
            )[1]
            continue
        if key in sections:
            first = next(field.name for field in dataclasses.fields(sections[key]))
            raise ConfigError(
                f"{source}: {key!r} is a section and takes no value of its own, got {value!r}; "
                f"give its options, such as {key}.{first}."
            )
        owner = sections.get(section_name) if section_name else run
        if owner is None or (owner is run and not _is_option(run, option_name)):
            raise ConfigError(f"{source}: there is no option {key!r}{_suggest(run, key)}")
        name, read = read_option(owner, option_name, value, source=source)
        layer[f"{section_name}.{name}" if section_name else name] = read
    return layer


def _flatten(values: Mapping[str, Any], sections: Mapping[str, type]) -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if key in sections and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", inner_value
        elif key in sections and value is None:
            continue  # a heading with nothing below it
        elif key in SHORT:
            yield f"{key}.{SHORT[key]}", value
        else:
            yield str(key), value


def _resolve_batch_size(
    sections: Mapping[str, type], merged: Mapping[str, Any]
) -> Mapping[str, Any]:
    batch = merged.get(BATCH_SIZE)
    rest = {key: value for key, value in merged.items() if key != BATCH_SIZE}
    if batch is None:
        return rest
    default = sections["pipeline"]().micro_batches
    parts: int = merged.get("pipeline.micro_batches", default)
    if parts < 1:
        return rest  # refused with its own message when the section is built
    size, over = divmod(batch, parts)
    if over or size < 1:
        below, above = batch - over, max(batch - over + parts, parts)
        ways = f"{below} or {above}" if below > 0 else f"{above}"
        raise ConfigError(
            f"a batch of {batch} samples cannot be divided into {parts} micro-batches; "
            f"use --batch-size {ways}, or another --micro-batches."
        )
    given = rest.get("pipeline.micro_batch_size")
    if given is not None and given != size:
        raise ConfigError(
            f"--batch-size {batch} over {parts} micro-batches is {size} samples each, but "
            f"--micro-batch-size says {given}; keep one of them."
        )
    return {**rest, "pipeline.micro_batch_size": size}


def _sections(run: type) -> dict[str, type]:
    hints: dict[str, type] = typing.get_type_hints(run)
    return {name: hint for name, hint in hints.items() if hasattr(hint, "__dataclass_fields__")}


def _is_option(owner: type, key: str) -> bool:
    units = {
        field.name: field.metadata.get("unit", "")
        for field in dataclasses.fields(owner)
        if field.init
    }
    return key in units or any(
        key + UNIT_SUFFIXES.get(unit, "") == name for name, unit in units.items()
    )


def _suggest(run: type, key: str) -> str:
    """The nearest option of any section; the right name in no or the wrong section comes first."""
    sections = _sections(run)
    last = key.rpartition(".")[2]
    for name, section in sections.items():
        if _is_option(section, last):
            return f"; did you mean '{name}.{last}'?"
    top = [field.name for field in dataclasses.fields(run) if field.init]
    dotted = [
        f"{name}.{f.name}" for name, owner in sections.items() for f in dataclasses.fields(owner)
    ]
    guess = nearest(key, [*top, *dotted])
    if guess != ".":
        return guess
    bare = nearest(last, [name.rpartition(".")[2] for name in dotted])
    if bare == ".":
        return f". Sections are {', '.join(sections)}; --show-config lists every option."
    word = bare.split("'")[1]
    return _suggest(run, word)


def _label(labels: Labels, key: str) -> str:
    if isinstance(labels, str):
        return f"{labels} {key}" if labels == "--set" else f"{labels}, {key}"
    return labels.get(key, key)


def show_settings(config: Any) -> str:
    """The whole configuration as a YAML file with what each option means; reads back as equal."""
    import yaml

    lines: list[str] = []

    def add(owner: Any, indent: str) -> None:
        kind: type = type(owner)
        docs, hidden = option_docs(kind), hidden_options(owner)
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if not field.init or dataclasses.is_dataclass(value) or field.name in hidden:
                continue
            key, text = show_option(field, value)
            if field.name == "name" and getattr(owner, "name_is_generated", False):
                text = ""  # a new one for each run
            comment = f"{indent}# "
            meaning = docs.get(field.name, "")
            lines.extend(
                textwrap.wrap(meaning, 98, initial_indent=comment, subsequent_indent=comment)
            )
            written = yaml.safe_dump(text, default_flow_style=True, width=10_000)
            written = written.removesuffix("\n").removesuffix("\n...")
            lines.append(f"{indent}{key}: {written}")

    add(config, "")
    for name in _sections(type(config)):
        section = getattr(config, name)
        lines.extend(["", f"# {inspect.getdoc(section)}", f"{name}:"])
        add(section, "  ")
    return "\n".join(lines) + "\n"
