"""One option of a configuration: what it may hold, and how it is read from text.

Sections of the configuration are frozen dataclasses. Their annotation gives the type of an option,
`option(...)` its limits and unit; reading a file, `--set` and the flags all end in `read_option`,
and whatever way a section was built, `check_section` looks at it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import os
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ray_pipe.errors import ConfigError, listed, nearest

UNIT_SUFFIXES = {"bandwidth": "_bps", "duration": "_s", "size": "", "fraction": ""}
"""How the name of an option ends that has a unit; text may leave the ending out."""


class Unsaid(float):
    """A default that nobody asked for: the same number, told apart from one that was said.

    It survives `dataclasses.replace` and pickling, and goes with the first number in its place.
    """


class UnsaidText(str):
    """The same for a word."""


class UnsaidNames(tuple[str, ...]):
    """The same for several."""


def option(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
) -> Any:
    """A field with limits (`low`, `high` are allowed, `above`, `below` not) and perhaps a unit."""
    limits = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"limits": limits, "unit": unit})


@dataclasses.dataclass(frozen=True, slots=True)
class OptionType:
    """What an option's annotation says."""

    kind: type
    optional: bool = False
    """Whether None is allowed."""

    choices: tuple[str, ...] = ()
    """The words that are allowed, if not all."""


@functools.cache
def option_types(section: type) -> dict[str, OptionType]:
    """The type of each option, from annotations such as `int | None` or `Literal["a", "b"]`."""
    found: dict[str, OptionType] = {}
    for name, hint in typing.get_type_hints(section).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        first, *_ = (member for member in members if member is not type(None))
        optional = type(None) in members
        if typing.get_origin(first) is typing.Literal:
            found[name] = OptionType(str, optional, typing.get_args(first))
        else:
            found[name] = OptionType(typing.get_origin(first) or first, optional)
    return found


@functools.cache
def option_docs(section: type) -> dict[str, str]:
    """The docstring below each option; empty where the source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    except (OSError, TypeError):
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return docs


def resolve_key(section: type, key: str, *, source: str) -> str:
    """The option's full name; a wrong one is refused with the nearest right one."""
    names = {field.name: field for field in dataclasses.fields(section) if field.init}
    if key in names:
        return key
    for name, field in names.items():
        suffix = UNIT_SUFFIXES.get(field.metadata.get("unit", ""), "")
        if suffix and key + suffix == name:
            return name
    short = [_without_unit(name, field) for name, field in names.items()]  # as people write them
    raise ConfigError(
        f"{source}: there is no option {key!r}{nearest(key, short)} Known are {listed(short)}."
    )


def _without_unit(name: str, field: dataclasses.Field[Any]) -> str:
    return name.removesuffix(UNIT_SUFFIXES.get(field.metadata.get("unit", ""), ""))


def read_option(section: type, key: str, value: Any, *, source: str) -> tuple[str, Any]:
    """The option's full name and its value with the right type, from text or a file's value.

    A bare number for an option with a unit is taken only where the name given says the unit
    (`network.bandwidth_bps=1e8`), so that bits and bytes, seconds and milliseconds are never
    mixed; a size that is a number already, as in a saved configuration, is bytes.
    """
    name = resolve_key(section, key, source=source)
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    known = option_types(section)[name]
    kind, optional = known.kind, known.optional
    unit = field.metadata.get("unit", "")
    word = value.strip().lower() if isinstance(value, str) else value
    if optional and word in (None, "", "none", "null"):
        return name, None
    if value is None:
        raise ConfigError(f"{source}: {name} cannot be empty, it needs {_wanted(kind, unit)}.")
    says_unit = key == name and (unit != "size" or not isinstance(value, str))
    if unit and not (says_unit and _is_number(value)):
        return name, _with_unit(unit, value, kind, source=source)
    try:
        return name, _READERS[kind](value)
    except (TypeError, ValueError):
        wanted = _wanted(kind, unit)
        raise ConfigError(f"{source}: {name} needs {wanted}, got {value!r}.") from None


def check_section(section: Any, *, prefix: str) -> None:
    """Type, limits and choices of each option. Numbers and their limits are in the message."""
    owner: type = type(section)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        known = option_types(owner)[field.name]
        kind, choices = known.kind, known.choices
        label = f"{prefix}{field.name}"
        if value is None and known.optional:
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(section, field.name, float(value))
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{label} needs {_wanted(kind, '')}, got {value!r}.")
        if choices and value not in choices:
            raise ConfigError(
                f"{label} is {value!r}{nearest(str(value), choices)} "
                f"Choose {listed(repr(choice) for choice in choices)}."
            )
        if isinstance(value, int | float):
            _check_limits(label, value, field.metadata.get("limits", {}))


def expand_home(section: Any, *names: str) -> None:
    """`~` in options that are paths: behind `=`, in files and in submitted jobs no shell has done
    it, and a folder of the name ~ would be made."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, str) and value.startswith("~"):
            object.__setattr__(section, name, os.path.expanduser(value))


def plain(value: Any) -> Any:
    """The value as JSON can hold it: tuples become lists, an infinite rate `unlimited`."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "unlimited"
    if isinstance(value, UnsaidText):
        return str(value)
    return float(value) if isinstance(value, Unsaid) else value


def show_option(field: dataclasses.Field[Any], value: Any) -> tuple[str, Any]:
    """The option as people write it, key and value: `bandwidth_bps` 1e8 as `bandwidth` 100Mbps."""
    unit = field.metadata.get("unit", "")
    if value is None or unit in ("", "fraction"):
        return field.name, plain(value)
    from netsim import units

    shown: dict[str, Callable[[Any], str]] = {
        "bandwidth": units.show_bandwidth,
        "duration": units.show_duration,
        "size": units.show_size,
    }
    suffix = UNIT_SUFFIXES[unit]
    return field.name.removesuffix(suffix) if suffix else field.name, shown[unit](value)


def _check_limits(label: str, value: float, limits: Mapping[str, float | None]) -> None:
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    wrong = (
        math.isnan(value)
        or (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    )
    if not wrong:
        return
    words = {"low": "at least", "high": "at most", "above": "above", "below": "below"}
    rules = [
        f"{words[name]} {_shown(limit)}" for name, limit in limits.items() if limit is not None
    ]
    raise ConfigError(
        f"{label} is {_shown(value)}; it must be {' and '.join(rules) or 'a number'}."
    )


def _shown(value: float) -> str:
    """A whole number as it is: 2**32 is no 4.29497e+09."""
    return str(value) if isinstance(value, int) and abs(value) < 10**15 else f"{value:g}"


def _with_unit(unit: str, value: Any, kind: type, *, source: str) -> Any:
    from netsim import units  # late: the units know of no configuration

    read: dict[str, Callable[[str], float]] = {
        "bandwidth": units.parse_bandwidth,
        "duration": units.parse_duration,
        "size": units.parse_size,
        "fraction": units.parse_fraction,
    }
    try:
        return kind(read[unit](str(value)))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return math.isfinite(float(value))  # `inf` is for the units to read or refuse
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    return words[str(value).strip().lower()] if str(value).strip().lower() in words else _refuse()


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        _refuse()
    if isinstance(value, int):
        return value
    number = float(value)  # 1e3 is as good as 1000
    if not number.is_integer():
        _refuse()
    return (
        int(value)
        if isinstance(value, str) and value.strip().lstrip("+-").isdigit()
        else int(number)
    )


def _read_float(value: Any) -> float:
    return _refuse() if isinstance(value, bool) else float(value)


def _read_str(value: Any) -> str:
    return (
        str(value)
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else _refuse()
    )


def _read_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",") if value.strip() else ()
    return tuple(_read_str(item).strip() for item in value)


def _refuse() -> typing.NoReturn:
    raise ValueError


_READERS: dict[type, Callable[[Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    tuple: _read_names,
}


def _wanted(kind: type, unit: str) -> str:
    if unit:
        examples = {"bandwidth": "100Mbps", "duration": "20ms", "size": "2GB", "fraction": "1%"}
        return f"a {unit} such as {examples[unit]}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "names with commas between")
