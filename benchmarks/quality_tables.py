"""Arms of several seeds as one table: loss, gap to fp32 of the same seed, error, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import bench
import numpy as np
from quality import ArmRun

HEADER = [
    "",
    "train loss",
    "gap to fp32",
    "activation error",
    "bytes/step, fw + bw",
    "against fp32",
]


def shown(runs: Iterable[ArmRun], total: int) -> Iterator[ArmRun]:
    """Each run as it comes, with a line on the terminal."""
    for number, run in enumerate(runs, 1):
        print(
            f"[{number}/{total}] {run.spec.name}, seed {run.spec.seed}: {run.final_loss:.4f} "
            f"({run.seconds:.0f} s)",
            flush=True,
        )
        yield run


def summary(runs: Iterable[ArmRun]) -> list[dict[str, Any]]:
    """One row for each arm name, in the order of appearance; the first is the reference."""
    by_name: dict[str, list[ArmRun]] = {}
    for run in runs:
        by_name.setdefault(run.spec.name, []).append(run)
    reference = next(iter(by_name.values()))
    exact = {run.spec.seed: run.final_loss for run in reference}
    rows = []
    for name, same in by_name.items():
        gaps = [run.final_loss - exact[run.spec.seed] for run in same]
        forward, backward = same[0].spec.forward, same[0].spec.backward
        edges = same[0].errors
        rows.append(
            {
                "name": name,
                "forward": _codec(forward),
                "backward": _codec(backward),
                "mutation": same[0].spec.mutation,
                "seeds": [run.spec.seed for run in same],
                "loss": float(np.mean([run.final_loss for run in same])),
                "loss_by_seed": [run.final_loss for run in same],
                "loss_by_epoch": np.mean([run.losses for run in same], axis=0).tolist(),
                "gap": float(np.mean(gaps)),
                "gap_spread": (max(gaps) - min(gaps)) / 2,
                "gap_by_seed": gaps,
                "error_epoch_2": float(np.mean([run.mean_error(2) for run in same])),
                "error_last": float(np.mean([run.mean_error(-1) for run in same])),
                "error_by_edge_and_epoch": {
                    edge: np.mean([run.errors[edge] for run in same], axis=0).tolist()
                    for edge in edges
                },
                "activation_bytes_per_step": _per_step(same, "activation"),
                "gradient_bytes_per_step": _per_step(same, "gradient"),
                "seconds": sum(run.seconds for run in same),
                "core": same[0].core,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    exact = rows[0]["activation_bytes_per_step"] + rows[0]["gradient_bytes_per_step"]
    lines = []
    for row in rows:
        forward, backward = row["activation_bytes_per_step"], row["gradient_bytes_per_step"]
        losses = row["loss_by_seed"]
        spread = (max(losses) - min(losses)) / 2
        is_exact = row is rows[0]
        lines.append(
            [
                row["name"],
                f"{row['loss']:.4f} ± {spread:.4f}",
                "" if is_exact else f"{row['gap']:+.4f} ± {row['gap_spread']:.4f}",
                "0"
                if row["error_last"] == 0
                else f"{row['error_epoch_2']:.3f} → {row['error_last']:.3f}",
                f"{forward / 1e3:.0f} + {backward / 1e3:.0f} kB",
                f"{exact / (forward + backward):.1f}x fewer" if not is_exact else "",
            ]
        )
    note = (
        "Training loss of the last epoch in nats, mean of seeds and half the range; the gap is "
        "taken seed by seed. Error ‖received - h‖/‖h‖ in epoch 2 and in the last, mean of all "
        "edges. Bytes as counted at the links, first visits included."
    )
    return f"{bench.markdown(HEADER, lines)}\n\n{note}"


def _codec(spec: Any) -> dict[str, Any]:
    if spec.name == "fp32":
        return {"name": spec.name}
    found = {"name": spec.name, "bits": spec.bits, "rounding": spec.rounding}
    if "reference" not in spec.name:
        found |= {"grid": spec.grid, "group": spec.group}
    if spec.name.startswith("acsgd"):
        found |= {"first_visit_bits": spec.first_visit_bits, "rows": spec.rows}
    return found


def _per_step(runs: list[ArmRun], kind: str) -> float:
    return float(np.mean([run.nbytes[kind] / run.num_steps for run in runs]))
