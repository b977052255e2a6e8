"""The codecs a user can name, without loading them (they need torch).

A name is a base and any number of suffixes: `acsgd+zstd`. A test holds this page and
`compressors.registry` to each other.
"""

from __future__ import annotations

from ray_pipe.errors import ConfigError, listed, nearest

BACKWARD: dict[str, str] = {
    "acsgd": "directq",
    "directq": "directq",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "topk": "topk",
    "reference": "reference",
    "acsgd-topk": "topk",
    "acsgd-reference": "reference",
}
"""Codecs of activations, and the one that gradients get: the same, but never with memory."""

ALIASES = {"none": "fp32", "identity": "fp32"}
SUFFIXES = ("ef", "zstd")


def canonical_codec(name: str, *, source: str = "codec.name") -> str:
    """The name with aliases resolved and suffixes in order; an unknown one is refused."""
    base, *suffixes = name.split("+")
    base = ALIASES.get(base, base)
    if base not in BACKWARD:
        raise ConfigError(
            f"{source}: there is no codec {base!r}{nearest(base, [*BACKWARD, *ALIASES])} "
            f"Known are {listed(BACKWARD)}; +ef and +zstd may follow."
        )
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise ConfigError(
                f"{source}: {name!r} has the suffix +{suffix}, which does not exist"
                f"{nearest(suffix, SUFFIXES)} Known are +ef and +zstd."
            )
        if suffixes.count(suffix) > 1:
            raise ConfigError(f"{source}: {name!r} has +{suffix} twice; once is enough.")
    if "ef" in suffixes and has_memory(base):
        raise ConfigError(
            f"{source}: {name!r} asks for error feedback, but each visit of {base} already carries "
            "what rounding lost before; leave out +ef."
        )
    return "+".join([base, *sorted(suffixes)])


def has_memory(name: str) -> bool:
    """Whether the codec remembers each sample between visits, as AC-SGD does."""
    return name.startswith("acsgd")


def backward_codec(name: str) -> str:
    """The gradient's codec for a canonical name; suffixes are kept."""
    base, *suffixes = name.split("+")
    return "+".join([BACKWARD[base], *suffixes])
