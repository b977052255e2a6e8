"""An arm's numbers as plain values, so that a resumed run's results are those of an unbroken one.

Rows, ledger, losses and the prediction go into a checkpoint beside the weights. Wall time goes on
from where it was: the time between the stop and the resume is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ray_pipe.metrics import ArmMeter
from ray_pipe.planner.cost import Prediction
from ray_pipe.step_row import row_from
from stages.rehearsal import StageCosts

EvalLosses = list[tuple[float, int, float | None]]


def progress_of(
    meter: ArmMeter, eval_losses: Sequence[Any], prediction: Prediction | None, *, num_steps: int
) -> dict[str, Any]:
    """The arm as far as it came, for `checkpoint_files.Numbers`: the rows are the meter's own."""
    return {
        "arm": meter.name,
        "num_steps": num_steps,
        "rows": meter.rows,
        "overtime": meter.overtime,
        "ledger": meter.ledger.by_link(),
        "eval_losses": [list(one) for one in eval_losses],
        "prediction": None if prediction is None else asdict(prediction),
    }


def restore_meter(meter: ArmMeter, progress: Mapping[str, Any]) -> None:
    """Give a new meter the rows and bytes of before; they are written to its sink again."""
    meter.restore(
        rows=map(row_from, progress["rows"]),
        overtime=map(row_from, progress["overtime"]),
        sent=progress["ledger"],
    )


def eval_losses_of(progress: Mapping[str, Any]) -> EvalLosses:
    return [(wall_s, step, loss) for wall_s, step, loss in progress["eval_losses"]]


def prediction_of(progress: Mapping[str, Any]) -> Prediction | None:
    """What was predicted for an arm that is done; one that goes on is measured again."""
    saved = progress["prediction"]
    if saved is None:
        return None
    shapes = saved.get("cut_shapes", ())
    return Prediction(
        **{
            **{key: value for key, value in saved.items() if key != "sample_shape"},
            "costs": tuple(StageCosts(**costs) for costs in saved["costs"]),
            "cut_shapes": tuple(tuple(shape) for shape in shapes),
            "homes": tuple((node, cores) for node, cores in saved.get("homes", ())),
        }
    )
