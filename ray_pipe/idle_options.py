"""Options that were changed and would do nothing: refused by name, with the way out.

A run whose bits, rows or losses were asked for and not used would be compared with others as if
they had been. What has its default's value is never refused: saved settings name every option.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from ray_pipe.codec_names import BACKWARD, has_memory
from ray_pipe.errors import ConfigError

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig

QUANTISED = ("acsgd", "directq", "reference", "acsgd-reference")
"""Codecs that have bits, forward and backward."""

GROUPED = ("acsgd", "directq", "acsgd-topk", "acsgd-reference")
"""Those of which something is on the grid of `codec.grid`, if only first visits."""


class Use(NamedTuple):
    """Options of a codec, and who has a use for them."""

    keys: tuple[str, ...]
    bases: tuple[str, ...]
    without: str
    """What an arm is said to lack that has none."""

    instead: str


USES = (
    Use(("fw_bits", "bw_bits"), QUANTISED, "has no bits to choose", "acsgd or directq"),
    Use(
        ("first_visit_bits", "rows", "memory_cap", "spill_dir", "spill_ram", "checksum"),
        tuple(name for name in BACKWARD if has_memory(name)),
        "remembers no activations",
        "acsgd",
    ),
    Use(("grid", "group"), GROUPED, "has no groups of channels on a grid", "acsgd or directq"),
    Use(("rounding",), QUANTISED, "rounds to no grid", "acsgd or directq"),
    Use(("reference_group",), ("reference", "acsgd-reference"), "has another grid", "reference"),
    Use(("density",), ("topk", "acsgd-topk"), "sends every value", "topk"),
)

OF_REPLICAS_TOO = ("grid", "group", "rounding", "density")
"""What replicas send each other is coded with these, whatever the arms are."""


def check_codec_options(config: RunConfig) -> None:
    """Bits where no arm has bits, rows where no arm remembers, and so on.

    A resumed run brings the settings of all its arms, of which only some may be trained on.
    """
    if config.checkpoint.resume is not None:
        return
    names = [arm.name for arm in config.arms]
    bases = {name.split("+")[0] for name in names}
    trained = f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} trained"
    changed = _changed(config.codec)
    if config.sync.replicas > 1:
        changed = {key: value for key, value in changed.items() if key not in OF_REPLICAS_TOO}
    for use in USES:
        for key in (key for key in use.keys if key in changed and not bases & {*use.bases}):
            raise ConfigError(
                f"codec.{key} is {changed[key]}, but only {trained}, which {use.without}; "
                f"leave it out, or use --codec {use.instead}."
            )
    if config.codec.compressed_eval and not config.eval:
        raise ConfigError(
            "codec.compressed_eval is True, but nothing is evaluated; add --eval, or leave it out."
        )


def check_optim_options(config: RunConfig) -> None:
    """Momentum of the other optimizer, the end of a decay that is none."""
    if config.checkpoint.resume is not None or config.sync.replicas > 1:
        return  # a strategy may have its own use for them, as quantized-adam has for the betas
    optim = config.optim
    changed = _changed(optim)
    of_other = ("momentum",) if optim.name == "adamw" else ("beta1", "beta2", "eps")
    other = "sgd" if optim.name == "adamw" else "adamw"
    for key in (key for key in of_other if key in changed):
        raise ConfigError(
            f"optim.{key} is {changed[key]:g}, but optim.name is {optim.name}, which has none; "
            f"leave it out, or use --set optim.name={other}."
        )
    if "min_lr_ratio" in changed and optim.decay == "constant":
        raise ConfigError(
            f"optim.min_lr_ratio is {optim.min_lr_ratio:g}, but the learning rate is constant; "
            "leave it out, or use --set optim.decay=cosine."
        )


def check_fault_options(config: RunConfig) -> None:
    """Spares and black boxes, where nobody would be brought back by them."""
    if config.checkpoint.resume is not None:
        return
    changed = _changed(config.faults)
    if config.sync.replicas > 1:
        why = "replicas keep neither spares nor black boxes: the others go on without one that dies"
        way_out = "leave it out (--set sync.rejoin=true starts a lost replica anew)"
    elif config.faults.max_failures == 0:
        why = "with --max-failures 0 the first failure ends the run"
        way_out = "leave it out, or allow failures"
    else:
        return
    for key in ("spares", "spare_after_s", "black_box"):
        if key in changed and changed[key] not in (0, "off"):
            raise ConfigError(f"faults.{key} is {changed[key]}, but {why}; {way_out}.")


def check_losses(config: RunConfig) -> None:
    """What is lost costs the time to send it again and a round trip: one of them must take time."""
    network = config.network
    if network.loss_rate and network.unlimited and not network.latency_s:
        raise ConfigError(
            f"network.loss_rate is {network.loss_rate:g}, but the links are unlimited and without "
            "latency, so that sending again would take no time; add --latency 20ms or a "
            "--bandwidth such as 100Mbps, or leave the losses out."
        )


def _changed(section: Any) -> dict[str, Any]:
    default = type(section)()
    return {
        one.name: value
        for one in dataclasses.fields(default)
        if (value := getattr(section, one.name)) != getattr(default, one.name)
    }
