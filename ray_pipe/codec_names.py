"""The codecs a user can name, without loading them (they need torch).

A name is a base and any number of stages after it: `acsgd+zstd`. A test holds this page and
`compressors.registry` to each other.
"""

from __future__ import annotations

from ray_pipe.errors import ConfigError, listed, nearest

BASES: dict[str, str] = {
    "acsgd": "low-bit changes against a per-sample memory (AC-SGD); gradients as directq",
    "directq": "low-bit values without memory (DirectQ)",
    "fp32": "nothing is compressed",
    "fp16": "half precision",
    "bf16": "bfloat16",
    "topk": "the largest entries only",
}
SUFFIXES: dict[str, str] = {
    "zstd": "zstandard after the codec",
    "ef": "error feedback: what was lost is added to the next tensor",
}


def split_codec(name: str, *, source: str = "codec.name") -> tuple[str, tuple[str, ...]]:
    """Base and suffixes of a codec's name; an unknown one is refused with the nearest."""
    base, *suffixes = name.split("+")
    if base not in BASES:
        raise ConfigError(
            f"{source}: there is no codec {base!r}{nearest(base, BASES)} "
            f"Known are {listed(BASES)}, each with +zstd or +ef after it if wanted."
        )
    for suffix in suffixes:
        if suffix not in SUFFIXES:
            raise ConfigError(
                f"{source}: {name!r} ends in +{suffix}, which is no stage of a codec"
                f"{nearest(suffix, SUFFIXES)} Known are "
                f"{listed(f'+{known}' for known in SUFFIXES)}."
            )
    repeated = {suffix for suffix in suffixes if suffixes.count(suffix) > 1}
    if repeated:
        raise ConfigError(f"{source}: {name!r} names +{min(repeated)} twice; once is enough.")
    return base, tuple(suffixes)


def has_memory(name: str) -> bool:
    """Whether the codec remembers each sample between visits, as AC-SGD does."""
    return name.split("+")[0] == "acsgd"


def backward_codec(name: str) -> str:
    """The gradient's codec: the same, but never with per-sample memory."""
    base, *suffixes = name.split("+")
    return "+".join(["directq" if base == "acsgd" else base, *suffixes])
