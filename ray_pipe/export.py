"""`python -m ray_pipe.export CHECKPOINT out.safetensors`: the trained model as plain weights.

The file's ending says its format: safetensors, or torch's own for .pt, .pth and .bin. The names are
those of `nn.Sequential(*blocks).load_state_dict(...)`; nothing of stages, optimizer or codecs is
left. `CHECKPOINT` is a checkpoint, or a run's folder (then its newest one). Of a click run that is
the dense network; the rows stay on record as rows: `rec.Embeddings.load` reads them from the
checkpoint, and its `export` writes them for serving.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import TextIO

import torch
from safetensors.torch import save
from torch import Tensor

from ray_pipe.checkpoint_files import Checkpoint, CheckpointError, locate
from ray_pipe.errors import RayPipeError
from stages.recut import whole_model
from stages.storage import Folder, StorageError


def model_state(path: str, *, arm: str | None = None) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in the newest one of a run (of an arm, if it has several)."""
    return weights_of(_choose(path, arm))


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights of a checkpoint, every byte of it checked."""
    return whole_model(checkpoint.states())


def _in_torchs_format(weights: dict[str, Tensor], notes: dict[str, str]) -> bytes:
    """As `torch.load` reads it, with `weights_only=True` too; it has no place for notes."""
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


FORMATS: dict[str, Callable[[dict[str, Tensor], dict[str, str]], bytes]] = {
    ".safetensors": save,
    ".pt": _in_torchs_format,
    ".pth": _in_torchs_format,
    ".bin": _in_torchs_format,
}
"""What a file's ending promises."""


def export(path: str, out: str, *, arm: str | None = None) -> Checkpoint:
    """Write the model of a checkpoint to one file, local or behind a URI, in the format that its
    ending says."""
    ending = PurePosixPath(out).suffix
    if ending not in FORMATS:
        raise CheckpointError(
            f"{out}: the ending {ending or '(none)'} is of no format that is written here; use "
            ".safetensors, or .pt, .pth or .bin for torch.load."
        )
    chosen = _choose(path, arm)
    place, _, name = out.rpartition("/")
    notes = {
        "ray_pipe": str(chosen.manifest.code.get("ray_pipe", "")),
        "arm": chosen.manifest.arm,
        "step": str(chosen.step),
        "model": str(chosen.manifest.config.get("model", {}).get("name", "")),
        "embedding_rows": "not included" if chosen.shard_files() else "none",
    }
    try:
        Folder(place or ".").write(name, [FORMATS[ending](weights_of(chosen), notes)])
    except StorageError as error:
        raise CheckpointError(f"{error}.") from error
    return chosen


def _choose(path: str, arm: str | None) -> Checkpoint:
    store, chosen = locate(path, asked="")
    if chosen is not None:
        return chosen
    arms = store.arms()
    if arm is None and len(arms) > 1:
        raise CheckpointError(
            f"{store} holds checkpoints of {', '.join(arms)}; say which one with --arm {arms[-1]}, "
            "or give a checkpoint."
        )
    name = arm or arms[0]
    if name not in arms:
        raise CheckpointError(f"{store} has no arm {name}; it holds {', '.join(arms)}.")
    newest, troubles = store.newest(name)
    if newest is None:
        raise CheckpointError(f"no checkpoint of {name} in {store} is whole: {' '.join(troubles)}")
    return newest


def main(argv: Sequence[str] | None = None, *, out: TextIO | None = None) -> int:
    """The command; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="python -m ray_pipe.export",
        description="Write the model of a checkpoint as plain weights, named as in "
        "nn.Sequential(*blocks).state_dict(): safetensors, or torch's own format for a file that "
        "ends in .pt, .pth or .bin.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a run (its newest)")
    parser.add_argument("out", help="the file to write, or its URI, such as model.safetensors")
    parser.add_argument("--arm", help="which arm, where a run has several, such as acsgd")
    args = parser.parse_args(argv)
    try:
        chosen = export(args.checkpoint, args.out, arm=args.arm)
    except RayPipeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    (out or sys.stdout).write(
        f"{args.out}: the weights of {chosen.manifest.arm} after {chosen.step} steps\n"
    )
    if chosen.shard_files():
        (out or sys.stdout).write(
            "That is the dense network. The embedding rows are not in it: "
            f"rec.Embeddings(tables).load({chosen.path!r}) reads them, and its export(folder) "
            "writes them for serving (docs/embeddings.md).\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
