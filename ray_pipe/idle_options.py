"""Options that were changed and would do nothing: refused by name, with the way out.

A run whose bits, rows or losses were asked for and not used would be compared with others as if
they had been. What has its default's value is never refused: saved settings name every option.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ray_pipe.codec_names import has_memory
from ray_pipe.errors import ConfigError

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig

QUANTISED = ("acsgd", "directq", "reference", "acsgd-reference")
"""Codecs that have bits, forward and backward."""

OF_BITS = ("fw_bits", "bw_bits")
OF_ROWS = ("first_visit_bits", "rows", "memory_cap", "spill_dir", "spill_ram", "checksum")


def check_codec_options(config: RunConfig) -> None:
    """Bits where no arm has bits, rows where no arm remembers.

    A resumed run brings the settings of all its arms, of which only some may be trained on.
    """
    if config.checkpoint.resume is not None:
        return
    names = [arm.name for arm in config.arms]
    trained = f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} trained"
    changed = _changed(config)
    if not any(name.split("+")[0] in QUANTISED for name in names):
        for key in (key for key in OF_BITS if key in changed):
            raise ConfigError(
                f"codec.{key} is {changed[key]}, but only {trained}, which has no bits to choose; "
                f"leave it out, or use --codec acsgd or directq."
            )
    if not any(has_memory(name) for name in names):
        for key in (key for key in OF_ROWS if key in changed):
            raise ConfigError(
                f"codec.{key} is {changed[key]}, but only {trained}, which remembers no "
                "activations; leave it out, or use --codec acsgd."
            )


def check_losses(config: RunConfig) -> None:
    """What is lost costs the time to send it again and a round trip: one of them must take time."""
    network = config.network
    if network.loss_rate and network.unlimited and not network.latency_s:
        raise ConfigError(
            f"network.loss_rate is {network.loss_rate:g}, but the links are unlimited and without "
            "latency, so that sending again would take no time; add --latency 20ms or a "
            "--bandwidth such as 100Mbps, or leave the losses out."
        )


def _changed(config: RunConfig) -> dict[str, object]:
    default = type(config.codec)()
    return {
        one.name: value
        for one in dataclasses.fields(default)
        if (value := getattr(config.codec, one.name)) != getattr(default, one.name)
    }
