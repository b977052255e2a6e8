"""What only shows when settings meet each other, the machine or the data.

Each check raises `ConfigError` where the run cannot work, and returns sentences where it can but
the user should know something. Free of torch, so that a bad flag is refused at once.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ray_pipe.ctr_section import check_ctr
from ray_pipe.errors import ConfigError
from ray_pipe.idle_options import (
    check_codec_options,
    check_fault_options,
    check_losses,
    check_optim_options,
)
from ray_pipe.row_memory import remembers
from ray_pipe.sections import LINK_OPTIONS

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig


def check_run(config: RunConfig, *, num_blocks: int | None = None) -> list[str]:
    """All checks that need neither torch nor the corpus."""
    check_replicas(config)
    check_links(config)
    check_losses(config)
    check_codec_options(config)
    check_optim_options(config)
    check_fault_options(config)
    if config.task == "ctr":
        return [*check_ctr(config), *check_lasting(config.out)]
    check_stages(config, num_blocks=num_blocks)
    check_topology(config)
    check_data_source(config.data.source)
    check_folder(config.out, flag="--out")
    check_saves(config)
    if config.codec.spill_dir is not None and remembers(config):
        check_folder(config.codec.spill_dir, flag="--set codec.spill_dir")
    if config.codec.spill_dir is None and config.codec.spill_ram != type(config.codec)().spill_ram:
        raise ConfigError(
            "codec.spill_ram is set, but nothing is spilled; name a folder with "
            "codec.spill_dir, or use codec.memory_cap to remember less."
        )
    return [
        *check_quality(config),
        *_single_pass(config),
        *_reference_last(config),
        *_no_links(config),
        *check_lasting(config.out),
    ]


def check_arms(config: RunConfig) -> None:
    """Every codec of the comparison exists, once, and the one given alone is among them."""
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(
            f"steps={config.steps} and epochs={config.epochs} are both given; keep one of them."
        )
    for name in config.compare:
        if config.compare.count(name) > 1:
            raise ConfigError(f"compare: {name!r} is listed twice; once is enough.")
    if config.compare and config.codec.name not in config.compare:
        raise ConfigError(
            f"codec.name is {config.codec.name!r} but compare lists {', '.join(config.compare)}, "
            "so it would not be trained; add it to compare, or leave one of the two out."
        )


def check_name(name: str) -> None:
    """The name of a run is the name of its folder."""
    if not re.fullmatch(r"[\w.+-][\w.+ -]{0,99}", name) or set(name) <= {"."}:
        raise ConfigError(
            f"name is {name!r}; it becomes a folder, so use up to 100 letters, digits, "
            "spaces and . _ + - (the folder above it is --out)."
        )


def check_stages(config: RunConfig, *, num_blocks: int | None = None) -> None:
    """No more stages than blocks to give them."""
    stages = config.pipeline.stages
    blocks = config.model.size.layers if num_blocks is None else num_blocks
    if stages <= blocks:
        return
    if num_blocks is not None:
        raise ConfigError(
            f"--stages {stages}: the model has {blocks} blocks and each stage needs at least one; "
            f"use --stages {blocks} or fewer, or cut the model into more blocks."
        )
    raise ConfigError(
        f"--stages {stages}: {config.model.name} has {blocks} blocks and each stage needs at least "
        f"one; use --stages {blocks} or fewer, or a deeper model (--set model.layers={stages}, or "
        f"--model)."
    )


def check_replicas(config: RunConfig) -> None:
    """The strategy, its graph and its options fit the number of replicas."""
    sync = config.sync
    if sync != type(sync)():
        from ray_pipe.replica_plans import check_sync  # loads torch, which one pipeline need not

        check_sync(config)


def check_topology(config: RunConfig) -> None:
    """The topology file can be read and fits the number of stages."""
    path = config.network.topology
    if path is None:
        return
    from netsim.topology import Topology

    try:
        Topology.load(path, config.sync.replicas * config.pipeline.stages)
    except ValueError as error:
        raise ConfigError(f"--topology: {' '.join(str(error).split())}") from None


def check_links(config: RunConfig) -> None:
    """A topology is the only word on links, and what else was given would not be used."""
    path = config.network.topology
    if path is None:
        return
    for name, value in config.network.said.items():
        raise ConfigError(
            f"network.{name} is {value:g}, but --topology {path} describes all links, so it would "
            f"not be used; write it as `{LINK_OPTIONS[name]}` under `default:` in that file."
        )


def check_data_source(source: str) -> None:
    """A file or folder that exists, can be read and looks like UTF-8 text."""
    if source == "pydoc":
        return
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"--data {source}: there is no such file or folder; give a UTF-8 text file, a folder "
            "of them, or pydoc for the text that comes with Python."
        )
    if path.is_dir():
        try:
            if not any(item.is_file() for item in path.rglob("*")):
                raise ConfigError(f"--data {source}: the folder holds no file; add UTF-8 text.")
        except OSError as error:
            raise ConfigError(f"--data {source}: cannot be read, {error.strerror}.") from None
        return
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"--data {source}: cannot be read, {error.strerror}.") from None
    if not head:
        raise ConfigError(f"--data {source}: the file is empty; give a UTF-8 text file.")
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else only the last character is cut
            raise ConfigError(
                f"--data {source}: is not UTF-8 text (byte {error.start} is "
                f"0x{head[error.start]:02x}); convert it, for example with iconv -t UTF-8."
            ) from None


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def check_folder(path: str, *, flag: str, may_write: Callable[[Path], bool] = _may_write) -> None:
    """The folder can be written to, or be made. Makes nothing."""
    if "://" in path:
        raise ConfigError(
            f"{flag} {path}: is a URI, and this must be a folder of this machine; only checkpoints "
            "can be kept elsewhere, with --checkpoint-dir."
        )
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{flag} {path}: is a file; name a folder.")
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not may_write(there):
        raise ConfigError(
            f"{flag} {path}: cannot be written, {there} is not writable for this account; "
            f"choose another folder with {flag}."
        )


def check_saves(config: RunConfig) -> None:
    """Somewhere to save to, if anything will be saved; no word on how, if nothing will."""
    saves, usual = config.checkpoint, type(config.checkpoint)()
    by_time = saves.automatic_s > 0 and config.sync.replicas == 1  # replicas meet to be saved
    if saves.every is None and not by_time and saves.resume is None:
        given = {"dir": saves.dir, "keep": saves.keep}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"checkpoint.{name} is {value}, but nothing will be saved; add "
                    "--checkpoint-every 20, or leave it out."
                )
    if saves.automatic_s != usual.automatic_s and saves.resume is None:
        if saves.every is not None:
            raise ConfigError(
                f"checkpoint.automatic_s is {saves.automatic_s:g}, but every {saves.every} steps "
                "are saved, so it would not be used; keep one of the two."
            )
        if config.sync.replicas > 1 and saves.automatic_s:
            raise ConfigError(
                f"checkpoint.automatic_s is {saves.automatic_s:g}, but replicas are saved by steps "
                "only; use --checkpoint-every instead."
            )
    if saves.dir is not None and "://" not in saves.dir and (saves.every or by_time):
        check_folder(saves.dir, flag="--checkpoint-dir")


def check_lasting(out: str) -> list[str]:
    """What is written must outlive the job: `--working-dir` is unpacked to a folder of Ray's own,
    another one after each change of a file."""
    folder = Path(out).absolute()
    if "working_dir_files" not in folder.parts:
        return []
    return [
        f"--out {out} is {folder}, in Ray's own copy of --working-dir: Ray removes it, with "
        "results and checkpoints, when it needs the room, and a resumed job does not find it once "
        "a file has changed; give a folder that stays, as --out '~/runs'."
    ]


def make_run_folder(out: str, name: str, *, fresh: bool) -> Path:
    """The folder out/name, made; with `fresh`, one that did not exist before (`name-2`, ...)."""
    try:
        for number in itertools.count(1):
            folder = Path(out) / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True, exist_ok=not fresh)
            except FileExistsError:
                if not fresh:
                    raise
            else:
                return folder
    except OSError as error:
        raise ConfigError(
            f"--out {out}: the folder {name} cannot be made, {error.strerror}; "
            "choose another folder with --out."
        ) from None
    raise AssertionError("numbers do not end")


def check_quality(config: RunConfig) -> list[str]:
    """Settings that work and are known to hurt."""
    codec, warnings = config.codec, []
    bases = {arm.name.split("+")[0] for arm in config.arms}
    if codec.grid == "symmetric" and codec.fw_bits == 2 and bases & {"acsgd", "directq"}:
        warnings.append(
            "codec.fw_bits is 2 on the symmetric grid, which leaves three levels; "
            "codec.grid=signed uses all four."
        )
    if codec.bw_bits < 4 and bases & {"reference", "acsgd-reference"}:
        warnings.append(
            f"codec.bw_bits is {codec.bw_bits} on the reference grid, which diverges at 3 bits; "
            "use codec.bw_bits=4 or more, or directq or acsgd with their own grid."
        )
    return warnings


def check_repeat_visits(config: RunConfig, num_samples: int) -> list[str]:
    """AC-SGD needs samples to come back. The driver calls this once it knows the corpus."""
    num_samples //= config.sync.replicas
    per_pass = -(-num_samples // config.pipeline.samples_per_step)
    if config.steps is None or config.steps > per_pass or not remembers(config):
        return []
    return [
        f"{config.steps} steps of {config.pipeline.samples_per_step} samples are no more than one "
        f"pass over {num_samples} samples, so acsgd meets no sample twice and gains nothing; use "
        f"--codec directq for single-pass data, or more than {per_pass} steps."
    ]


def check_corpus(config: RunConfig, num_samples: int, *, dataset: str = "") -> None:
    """At least one whole batch. `dataset` is the class of a user's own."""
    need = config.pipeline.samples_per_step
    replicas = config.sync.replicas
    if num_samples // replicas >= need:
        return
    step = (
        f"one step takes {need} ({config.pipeline.micro_batches} micro-batches of "
        f"{config.pipeline.micro_batch_size})"
    )
    if replicas > 1 and num_samples >= need:
        more = "more samples" if dataset else "more text (data.num_samples)"
        raise ConfigError(
            f"--replicas {replicas}: each gets {num_samples // replicas} of {num_samples} samples, "
            f"but {step}; give {more}, or lower --replicas, --micro-batches or --micro-batch-size."
        )
    if dataset:
        kept_out = " to train on, without those that eval keeps out" if config.eval else ""
        raise ConfigError(
            f"the dataset {dataset} has {num_samples} samples{kept_out}, but {step}; give more "
            "samples, or lower pipeline.micro_batches or pipeline.micro_batch_size."
        )
    context = config.model.size.context
    kept_out = " to train on, without those that --eval keeps out" if config.eval else ""
    more = "give more text"
    if config.data.num_samples is not None or config.data.source == "pydoc":
        enough = -(-10 * need // 9) if config.eval else need  # a tenth is held out
        more = f"use more of it (--set data.num_samples={enough})"
    raise ConfigError(
        f"--data {config.data.source}: makes {num_samples} samples of {context} tokens{kept_out}, "
        f"but {step}; {more}, or lower --micro-batches, --micro-batch-size or model.context."
    )


def _single_pass(config: RunConfig) -> list[str]:
    if config.epochs != 1 or not remembers(config):
        return []
    text = (
        "epochs is 1, so acsgd meets no sample twice and gains nothing; "
        "use --codec directq for single-pass data, or --epochs 2 and more."
    )
    if not config.compare or config.compare == (config.codec.name,):
        raise ConfigError(text)
    return [text]


def _no_links(config: RunConfig) -> list[str]:
    """A pipeline of one stage sends nothing, so there is nothing to shape or to compress."""
    is_compressed = config.codec.is_said and config.codec.name != "fp32"
    asked = len(config.arms) > 1 or is_compressed or config.links_are_given
    if config.pipeline.stages > 1 or config.sync.replicas > 1 or not asked:
        return []
    alike = ", and all arms train alike" if len(config.arms) > 1 else ""
    return [
        "--stages 1: one stage has no links, so nothing is sent, slowed down or compressed"
        f"{alike}; use --stages 2 or more."
    ]


def _reference_last(config: RunConfig) -> list[str]:
    before = config.compare[: config.compare.index("fp32")] if "fp32" in config.compare else ()
    if not before:
        return []
    better = ",".join(["fp32", *(name for name in config.compare if name != "fp32")])
    return [
        f"fp32 is trained after {', '.join(before)}: an arm that ends a little above its final "
        "loss trains on until it has reached it only if that is known; put it first, "
        f"--compare {better}"
    ]
