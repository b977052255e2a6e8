"""Your own model, loss and dataset over a slow link: `python examples/own_model.py`.

On a cluster: `ray submit cluster.yaml examples/own_model.py --address auto`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ray_pipe


class Copying(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences to be reversed. Map-style: the index is the stable sample id."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, 32, generator=generator)
        return x, x.flip(0)


def blocks() -> list[nn.Module]:
    """Modules that feed each other. Each stage builds its own part of this list."""
    layer = {"d_model": 32, "nhead": 4, "dim_feedforward": 128, "dropout": 0.0, "batch_first": True}
    return [nn.TransformerEncoderLayer(**layer) for _ in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a Ray cluster; without it, a Ray of our own")
    args = parser.parse_args()
    trainer = ray_pipe.PipelineTrainer(
        blocks,
        loss=nn.functional.mse_loss,
        dataset=Copying(),
        config=ray_pipe.RunConfig(
            address=args.address,
            compare=(),
            epochs=4,
            codec=ray_pipe.CodecConfig(name="acsgd", fw_bits=4, bw_bits=4),
            pipeline=ray_pipe.PipelineConfig(stages=2, micro_batches=4, micro_batch_size=8),
            network=ray_pipe.NetworkConfig(bandwidth_bps=20e6, latency_s=0.02),
        ),
    )
    result = trainer.fit()
    model = nn.Sequential(*blocks())
    model.load_state_dict(result.model_state)
    print(f"loss {result.metrics['final_loss']:.4f}, report in {result.path}/report.html")


if __name__ == "__main__":
    main()
