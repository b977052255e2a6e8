"""What is trained: a model as blocks, a loss, and samples. A named GPT or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ray_pipe.config import RunConfig
from ray_pipe.data import Samples, TextSamples, read_text
from ray_pipe.errors import ConfigError
from ray_pipe.models.gpt import GPTShape, gpt_block, gpt_flops
from ray_pipe.planner.partition import partition
from stages.loss import LossFn, cross_entropy

PYDOC_SAMPLES = 160
"""Of the text that comes with Python: what a first look at ray_pipe has time for."""

PLAIN_LISTS = (nn.Sequential, nn.ModuleList)
NAMED_CLASSES = 4
"""So many classes of blocks name a user's model."""

NAMED_FILES = 3

BlocksFn = Callable[[], Sequence[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model that can be cut, and what to train it on."""

    costs: tuple[float, ...]
    """Relative cost of each block: what the cut balances."""

    build: Callable[[int, int], nn.Module]
    """Blocks `start` up to `stop` as one module; runs inside the stage's actor."""

    loss: LossFn
    samples: Samples
    name: str = "own model"
    """The model's, or the classes of a user's own blocks."""

    dataset: str = ""
    """The class of a user's own dataset; empty: what `config.data` says."""

    blocks: tuple[nn.Module, ...] = ()
    """The user's own modules, if the model was given as such and not as a function."""

    fresh_masks: tuple[str, ...] = ()
    """The user's layers that draw a new dropout mask on each visit."""

    tied: tuple[tuple[str, ...], ...] = ()
    """All names of each parameter that several blocks share, as in `nn.Sequential(*blocks)`."""

    num_held_out: int = 0
    """The last samples, kept out of training for `--eval`."""

    notes: tuple[str, ...] = ()
    """What the user should know of it."""

    outputs: tuple[int, ...] = ()
    """Values of one sample after each block of a user's own model, if that could be told."""

    @property
    def is_own(self) -> bool:
        """Whether model and dataset are a user's own, not those that the settings name."""
        return bool(self.dataset)

    @property
    def num_train(self) -> int:
        return len(self.samples) - self.num_held_out

    @property
    def num_blocks(self) -> int:
        return len(self.costs)

    def cuts(self, num_stages: int) -> list[range]:
        """The blocks of each stage."""
        return partition(self.costs, num_stages)

    def row_elements(self, num_stages: int) -> int | None:
        """Values of a sample at the widest cut; None where `outputs` does not tell."""
        ends = [cut.stop - 1 for cut in self.cuts(num_stages)[:-1]]
        return max((self.outputs[end] for end in ends), default=None) if self.outputs else None

    def check_ties(self, num_stages: int) -> None:
        """Refuse a cut between blocks that share a parameter: each stage would train its own."""
        cuts = self.cuts(num_stages)
        for names in self.tied:
            blocks = [int(name.split(".")[0]) for name in names]
            homes = [next(i for i, cut in enumerate(cuts) if block in cut) for block in blocks]
            if len(set(homes)) > 1:
                where = " and ".join(
                    f"{name} (stage {home})" for name, home in zip(names, homes, strict=True)
                )
                raise ConfigError(
                    f"blocks {' and '.join(map(str, blocks))} share one parameter, {where}, and a "
                    "cut lies between them: each stage would train a copy of its own, silently; "
                    f"untie them (for example blocks[{blocks[-1]}] with a clone of the weight), or "
                    "use fewer stages, so that they stay together."
                )

    def stage_builders(self, num_stages: int) -> list[Callable[[], nn.Module]]:
        """For each stage, a function that builds its part of the model, and carries no other."""
        return [
            partial(_build_from_list, self.blocks[cut.start : cut.stop])
            if self.blocks
            else partial(self.build, cut.start, cut.stop)
            for cut in self.cuts(num_stages)
        ]


def gpt_workload(config: RunConfig) -> Workload:
    """The named GPT on the text behind `--data`."""
    size = config.model.size
    shape = GPTShape(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        context=size.context,
        dropout=config.model.dropout,
    )
    skipped: list[Path] = []
    text = read_text(config.data.source, on_skip=skipped.append)
    samples = TextSamples(text, context=size.context)
    count = config.data.num_samples
    if count is None and config.data.source == "pydoc":
        count = min(PYDOC_SAMPLES * config.sync.replicas, len(samples))
    if count is not None:
        samples = samples.first(count)
    held_out = held_out_samples(len(samples)) if config.eval else 0
    return Workload(
        costs=tuple(gpt_flops(shape, index) for index in range(shape.layers)),
        build=partial(_build_gpt, shape, config.seed),
        loss=cross_entropy,
        samples=samples,
        num_held_out=held_out,
        name=config.model.name,
        notes=(_left_out(config.data.source, skipped),) if skipped else (),
    )


def _left_out(source: str, skipped: Sequence[Path]) -> str:
    names = [str(path.relative_to(source)) for path in skipped[:NAMED_FILES]]
    more = ["…"] if len(skipped) > NAMED_FILES else []
    return (
        f"--data {source}: {len(skipped)} file{'s are' if len(skipped) > 1 else ' is'} not UTF-8 "
        f"text and left out ({', '.join([*names, *more])}); convert what should be read, for "
        "example with iconv."
    )


def held_out_samples(num_samples: int) -> int:
    """How many samples `--eval` keeps out of training: a tenth, at least one."""
    return max(1, num_samples // 10)


def blocks_workload(
    blocks: Sequence[nn.Module] | BlocksFn,
    *,
    loss: LossFn,
    samples: Samples,
    seed: int,
    held_out: int = 0,
) -> Workload:
    """A user's model: modules whose outputs feed each other, or a function that makes them."""
    if isinstance(blocks, nn.Module):
        if not isinstance(blocks, PLAIN_LISTS):
            raise ConfigError(
                f"the model is one {type(blocks).__name__}, which cannot be cut; give a list of "
                "modules that feed each other, an nn.Sequential, or a function that makes them"
            )
        own_class = type(blocks).__name__ if type(blocks) not in PLAIN_LISTS else ""
        blocks = list(blocks)
    else:
        own_class = ""
    made = list(blocks() if callable(blocks) else blocks)
    if not made:
        raise ConfigError("the model has no blocks; give at least one nn.Module")
    for index, block in enumerate(made):
        if not isinstance(block, nn.Module):
            raise ConfigError(
                f"block {index} is a {type(block).__name__}, expected a torch.nn.Module"
            )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in block.parameters()):
            raise ConfigError(
                f"block {index} ({type(block).__name__}) has parameters without a shape, which the "
                "cut and every stage need; run one sample through the blocks first, or name its "
                "input size"
            )
    costs = tuple(float(sum(p.numel() for p in block.parameters()) or 1) for block in made)
    if callable(blocks):
        build = partial(_build_from_fn, blocks, seed)
        own: tuple[nn.Module, ...] = ()
    else:
        build = partial(_build_part, made)
        own = tuple(made)
    return Workload(
        costs=costs,
        build=build,
        loss=loss,
        samples=samples,
        name=own_class or class_names(made),
        dataset=getattr(samples, "name", type(samples).__name__),
        blocks=own,
        fresh_masks=tuple(fresh_masks(made)),
        tied=tied_names(made),
        num_held_out=held_out,
        outputs=output_sizes(made, samples),
    )


def class_names(blocks: Sequence[nn.Module]) -> str:
    """The classes of some blocks, each once: `Embedding, TransformerEncoderLayer, Linear`."""
    names = list(dict.fromkeys(type(block).__name__ for block in blocks))
    return ", ".join([*names[:NAMED_CLASSES], *(["…"] if len(names) > NAMED_CLASSES else [])])


def output_sizes(blocks: Sequence[nn.Module], samples: Samples) -> tuple[int, ...]:
    """Values of one sample after each block, without computing any: on torch's meta device.

    Empty where a block needs more than shapes, or where there is no sample.
    """
    sizes = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value: Tensor = samples.batch((0,)).inputs.to("meta")
            for block in blocks:
                held = [*block.named_parameters(), *block.named_buffers()]
                meta = {name: tensor.to("meta") for name, tensor in held}
                value = torch.func.functional_call(block, meta, (value,), tie_weights=False)
                sizes.append(math.prod(value.shape[1:]))
    except Exception:  # whatever a user's code says to a tensor without values
        return ()
    return tuple(sizes)


def tied_names(blocks: Sequence[nn.Module]) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that more than one block holds, one name for each block."""
    names: dict[int, dict[int, str]] = {}
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            names.setdefault(id(parameter), {})[index] = f"{index}.{name}"
    return tuple(tuple(found.values()) for found in names.values() if len(found) > 1)


def fresh_masks(blocks: Sequence[nn.Module]) -> list[str]:
    """Layers that draw a new dropout mask on each visit: changes that AC-SGD must send.

    Found are torch's dropout layers and all others that keep a probability in an attribute named
    after dropout, as attention and recurrent layers do; not a bare `F.dropout(x)` in a `forward`.
    """
    return [
        f"{index}.{name}".rstrip(".")
        for index, block in enumerate(blocks)
        for name, module in block.named_modules()
        if _draws_masks(module)
    ]


def _draws_masks(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return False  # torch drops between layers only
    return any(
        isinstance(value, (int, float)) and value > 0
        for name, value in vars(module).items()
        if "dropout" in name
    )


def _build_gpt(shape: GPTShape, seed: int, start: int, stop: int) -> nn.Module:
    return nn.Sequential(*(gpt_block(shape, index, seed=seed) for index in range(start, stop)))


def _build_from_fn(blocks: BlocksFn, seed: int, start: int, stop: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*list(blocks())[start:stop])


def _build_part(blocks: list[nn.Module], start: int, stop: int) -> nn.Module:
    return nn.Sequential(*blocks[start:stop])


def _build_from_list(blocks: tuple[nn.Module, ...]) -> nn.Module:
    return nn.Sequential(*blocks)
