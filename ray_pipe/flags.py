"""The flags of the command line: names for options of the configuration, and their help.

A flag is only a short way to write `--set`: its text, type, limits and default are the option's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ray_pipe import __version__
from ray_pipe.config import RunConfig
from ray_pipe.errors import ConfigError, nearest
from ray_pipe.options import option_docs, option_types, show_option
from ray_pipe.settings_file import BATCH_SIZE, Labels, parse_settings, read_settings

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "what is trained": {
        "--task": ("task", "NAME"),
        "--model": ("model.name", "NAME"),
        "--data": ("data.source", "FILE|DIR|pydoc"),
        "--epochs": ("epochs", "N"),
        "--steps": ("steps", "N"),
        "--lr": ("optim.lr", "RATE"),
        "--seed": ("seed", "N"),
        "--eval": ("eval", ""),
    },
    "compression": {
        "--compare": ("compare", "A,B,..."),
        "--codec": ("codec.name", "NAME"),
        "--fw-bits": ("codec.fw_bits", "N"),
        "--bw-bits": ("codec.bw_bits", "N"),
    },
    "click models (--task ctr)": {
        "--staleness": ("embedding.staleness", "0|N|auto"),
        "--shards": ("embedding.shards", "N"),
        "--wire": ("embedding.wire", "NAME"),
        "--prune": ("embedding.prune", "RATIO"),
        "--capacity": ("embedding.capacity", "SIZE"),
        "--spill": ("embedding.spill", "DIR"),
        "--columns": ("embedding.columns", "SPEC"),
    },
    "links": {
        "--bandwidth": ("network.bandwidth", "RATE"),
        "--latency": ("network.latency", "TIME"),
        "--jitter": ("network.jitter", "TIME"),
        "--loss-rate": ("network.loss_rate", "SHARE"),
        "--topology": ("network.topology", "FILE.yaml"),
    },
    "pipeline": {
        "--stages": ("pipeline.stages", "N"),
        "--micro-batches": ("pipeline.micro_batches", "N"),
        "--micro-batch-size": ("pipeline.micro_batch_size", "N"),
        "--batch-size": (BATCH_SIZE, "N"),
        "--schedule": ("pipeline.schedule", "NAME"),
        "--transport": ("pipeline.transport", "NAME"),
        "--recompute": ("pipeline.recompute", ""),
        "--precision": ("pipeline.precision", "NAME"),
    },
    "replicas": {
        "--replicas": ("sync.replicas", "N"),
        "--sync": ("sync.name", "NAME"),
        "--sync-codec": ("sync.codec", "NAME"),
        "--sync-bits": ("sync.bits", "N"),
        "--slow": ("sync.slow", "2:4x"),
    },
    "checkpoints": {
        "--checkpoint-every": ("checkpoint.every", "STEPS"),
        "--keep-checkpoints": ("checkpoint.keep", "N"),
        "--checkpoint-dir": ("checkpoint.dir", "DIR|URI"),
        "--resume": ("checkpoint.resume", "PATH|auto"),
    },
    "run": {
        "--name": ("name", "NAME"),
        "--out": ("out", "DIR"),
        "--address": ("address", "ADDRESS"),
        "--max-failures": ("faults.max_failures", "N"),
        "--spares": ("faults.spares", "N"),
        "--dashboard": ("dashboard", ""),
    },
}
"""Group -> flag -> (dotted option, what stands for the value in the help)."""

WITHOUT_VALUE = {"--resume": "auto"}
"""Flags that may stand alone, and what they mean then."""

EXAMPLES = """\
examples:
  python -m ray_pipe.run --bandwidth 100Mbps
      compare fp32, DirectQ and AC-SGD over emulated 100 Mbps links
  python -m ray_pipe.run --bandwidth 10Mbps --latency 20ms --codec acsgd --fw-bits 2
      AC-SGD alone, two bits forward, on a slow and distant link
  python -m ray_pipe.run --data book.txt --model gpt-small --stages 8 --schedule 1f1b --epochs 4
      a larger model on your own text, in eight stages
  python -m ray_pipe.run --replicas 4 --stages 2 --sync ripples --slow 2:4x --codec acsgd
      four copies of the pipeline, one of them slow, that average in small groups
  python -m ray_pipe.run --address auto --bandwidth unlimited --compare fp32,acsgd+zstd
      on a Ray cluster whose network is slow by itself
  python -m ray_pipe.run --task ctr --bandwidth 100Mbps --latency 50ms
      a click model whose rows live on shards: synchronous against hybrid training
  python -m ray_pipe.run --show-config > run.yaml
      every option with its meaning; edit, then run with --config run.yaml

later beats earlier: defaults, those of a resumed run, --config, flags, --set. Rates are in bits
(100Mbps, 1.5 Gbit/s) or bytes (12.5 MB/s) as written. Exit status: 0 done, 1 training failed,
2 bad flag or file, 130 stopped by Ctrl-C.
"""


class FlagParser(argparse.ArgumentParser):
    """Refuses by raising `ConfigError`, so that all refusals look alike."""

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument ([\w/, -]+): (.*)", message)
        if match is None:
            raise ConfigError(f"{message}.")
        flag, trouble = match.groups()
        if trouble == "expected one argument":
            action = next(a for a in self._actions if flag in a.option_strings)
            trouble = f"needs a value, {flag} {action.metavar}"
        trouble = trouble.replace("invalid float value:", "needs a number, got")
        raise ConfigError(f"{flag}: {trouble}.")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A word such as -5Mbps after a flag is its value, to be refused as one."""
        takes = {flag for a in self._actions if a.nargs != 0 for flag in a.option_strings}
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if words and words[-1] in takes and re.match(r"-\.?\d", word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)


def make_parser() -> FlagParser:
    """All flags, in groups, each with its default."""
    parser = FlagParser(
        prog="python -m ray_pipe.run",
        usage="%(prog)s [flags]",
        description="Train a model in pipeline stages over slow links, and see what compressing\n"
        "the traffic gains. Without --codec, fp32, DirectQ and AC-SGD are compared.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag, (dotted, metavar) in flags.items():
            text = _help(dotted).replace("%", "%%")
            if flag in WITHOUT_VALUE:
                group.add_argument(
                    flag, dest=dotted, metavar=metavar, nargs="?", const=WITHOUT_VALUE[flag],
                    help=text,
                )  # fmt: skip
            elif metavar:
                group.add_argument(flag, dest=dotted, metavar=metavar, help=text)
            else:
                group.add_argument(flag, dest=dotted, action="store_const", const="true", help=text)
    group = parser.add_argument_group("settings and output")
    group.add_argument("--config", metavar="FILE.yaml", help="Settings from a YAML file.")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="Any option by its full name, such as codec.rows=int8; may be given again.",
    )
    group.add_argument(
        "--show-config", action="store_true", help="Print the settings as YAML and stop."
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="Print the results as the last line of standard output, all else to standard error.",
    )
    group.add_argument("--debug", action="store_true", help="Show tracebacks.")
    group.add_argument(
        "--version", action="version", version=f"ray_pipe {__version__}", help="Print the version."
    )
    group.add_argument("-h", "--help", action="help", help="Print this help.")
    return parser


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags as given; an unknown one is refused with the nearest."""
    parser = make_parser()
    known = [flag for action in parser._actions for flag in action.option_strings]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{flag!r} is no flag; flags begin with --, see --help.")
        raise ConfigError(f"there is no flag {flag}{nearest(flag, known)} See --help for all.")
    return args


def build_config(args: argparse.Namespace) -> RunConfig:
    """Defaults, then the file, then flags, then `--set`; later beats earlier."""
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for flags in GROUPS.values():
        for flag, (dotted, _) in flags.items():
            value = getattr(args, dotted)
            if value is not None:
                values[dotted] = value
                labels[dotted] = flag
    layers: list[tuple[Labels, Mapping[str, Any]]] = []
    if args.config:
        layers.append((args.config, read_settings(args.config)))
    given = parse_settings(args.set)
    own = _settings_to_resume([*(layer for _, layer in layers), values, given])
    if own is not None:
        layers.insert(0, own)
    # A codec by --set is no wish for one arm where the same command line says what to compare.
    if "compare" in values and {"codec", "codec.name"} & given.keys():
        given.setdefault("compare", values["compare"])
    if "compare" in given and "codec.name" in values and "codec" not in given:
        given.setdefault("codec.name", values["codec.name"])  # nor the other way round
    # Nor does a topology by --set hide what the same command line says of the links.
    if "network.topology" in given:
        links = {key: value for key, value in values.items() if key.startswith("network.")}
        given = {**links, **given}
    return RunConfig.from_layers([*layers, (labels, values), ("--set", given)])


def with_flag(text: str, words: Sequence[str]) -> str:
    """An error that begins with an option, begun with the flag that gave it, if one did."""
    match = re.match(r"[a-z_]+(\.[a-z_]+)?", text)
    if match is None:
        return text
    given = {word.partition("=")[0] for word in words}
    for flags in GROUPS.values():
        for flag, (dotted, _) in flags.items():
            if flag in given and match[0] in (dotted, f"{dotted}_s", f"{dotted}_bps"):
                is_label = text.startswith(f"{match[0]}: ")  # said once is enough
                return f"{flag}{text[len(match[0]) :]}" if is_label else f"{flag}: {text}"
    return text


def _settings_to_resume(layers: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """The settings of the run that is to be resumed, as a layer below all others."""

    def wish(section: str, key: str) -> Any:
        dotted = f"{section}.{key}" if section else key
        found = None
        for layer in layers:
            nested = layer.get(section)
            if isinstance(nested, Mapping) and nested.get(key) is not None:
                found = nested[key]
            if layer.get(dotted) is not None:
                found = layer[dotted]
        return found

    resume = wish("checkpoint", "resume")
    if not resume:
        return None
    from ray_pipe.saved_settings import saved_settings

    return saved_settings(
        os.path.expanduser(str(resume)),
        out=os.path.expanduser(str(wish("", "out") or RunConfig().out)),
        name=str(wish("", "name") or ""),
        folder=wish("checkpoint", "dir"),
    )


def _help(dotted: str) -> str:
    if dotted == BATCH_SIZE:
        return "Samples per step, instead of --micro-batch-size. (default: 64)"
    section_name, _, key = dotted.rpartition(".")
    config = RunConfig()
    owner: Any = getattr(config, section_name) if section_name else config
    kind: type = type(owner)
    field = next(
        field for field in dataclasses.fields(kind) if field.name in (key, f"{key}_bps", f"{key}_s")
    )
    text = option_docs(kind).get(field.name, "")
    choices = option_types(kind)[field.name].choices
    if not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(choices)}."
    value = show_option(field, getattr(owner, field.name))[1]
    if (field.name == "name" and owner is config) or value is None or value is False:
        return text
    shown = ",".join(value) if isinstance(value, list) else value
    return f"{text} (default: {shown})"
