"""Pipeline training over slow links on Ray: AC-SGD, compressed changes of activations.

Users import from here only. Names are loaded when they are first used, so that `import ray_pipe`
and `python -m ray_pipe.run --help` load neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_pipe.checkpoint_files import Checkpoint, CheckpointError
    from ray_pipe.config import (
        CheckpointConfig,
        CodecConfig,
        DataConfig,
        EmbeddingConfig,
        FaultsConfig,
        ModelConfig,
        NetworkConfig,
        OptimConfig,
        PipelineConfig,
        RunConfig,
        SyncConfig,
    )
    from ray_pipe.errors import (
        ClusterError,
        ConfigError,
        DataError,
        RayPipeError,
        StageDied,
        TrainingError,
    )
    from ray_pipe.rec_link import Link
    from ray_pipe.rec_pipeline import Pipeline
    from ray_pipe.trainer import PipelineTrainer, Result
    from stages.dropout import SampleDropout

__version__ = "0.1.0"

_HOMES = {
    "ray_pipe.checkpoint_files": ("Checkpoint", "CheckpointError"),
    "ray_pipe.config": (
        "CheckpointConfig",
        "CodecConfig",
        "DataConfig",
        "EmbeddingConfig",
        "FaultsConfig",
        "ModelConfig",
        "NetworkConfig",
        "OptimConfig",
        "PipelineConfig",
        "RunConfig",
        "SyncConfig",
    ),
    "ray_pipe.errors": (
        "ClusterError",
        "ConfigError",
        "DataError",
        "RayPipeError",
        "StageDied",
        "TrainingError",
    ),
    "ray_pipe.rec_link": ("Link",),
    "ray_pipe.rec_pipeline": ("Pipeline",),
    "ray_pipe.trainer": ("PipelineTrainer", "Result"),
    "stages.dropout": ("SampleDropout",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "ClusterError",
    "CodecConfig",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EmbeddingConfig",
    "FaultsConfig",
    "Link",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "Pipeline",
    "PipelineConfig",
    "PipelineTrainer",
    "RayPipeError",
    "Result",
    "RunConfig",
    "SampleDropout",
    "StageDied",
    "SyncConfig",
    "TrainingError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ray_pipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
