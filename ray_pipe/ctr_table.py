"""What a click run found, for the eye: columns of the table, the verdict, a line of progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_pipe.results_table import NONE, number, show_amount, show_seconds

Arm = Mapping[str, Any]
BASELINE = "fp32"
CLOSE_AUC = 0.003
"""A difference in AUC up to which we say that quality was kept: 0.3 points."""


def _when(key: str, show: Callable[[float], str]) -> Callable[[Arm], str]:
    def cell(arm: Arm) -> str:
        value = number(arm.get(key))
        return NONE if value is None else show(value)

    return cell


MAX_AGES = 4


def _staleness(arm: Arm) -> str:
    parts = _ages(arm.get("staleness_histogram") or {})
    return "\n".join(" ".join(parts[at : at + 2]) for at in range(0, len(parts), 2)) or NONE


def _ages(counts: Mapping[str, int]) -> list[str]:
    """How many updates were how stale: `0:63% 1:30% 2:7%`. Of many ages the most frequent ones,
    and the largest."""
    histogram = {int(age): num for age, num in counts.items() if num}
    total = sum(histogram.values())
    frequent = sorted(sorted(histogram, key=lambda age: -histogram[age])[:MAX_AGES])
    parts = [f"{age}:{_share(histogram[age] / total)}" for age in frequent]
    return [*parts, f"max {max(histogram)}"] if len(histogram) > MAX_AGES else parts


def _share(share: float) -> str:
    return "<1%" if share < 0.005 else f"{100 * share:.0f}%"


def _size(nbytes: float) -> str:
    return show_amount(nbytes, "B")


COLUMNS: tuple[tuple[str, Callable[[Arm], str]], ...] = (
    ("AUC", _when("auc", "{:.4f}".format)),
    ("best\nreachable", _when("best_auc", "{:.4f}".format)),
    ("log-\nloss", _when("log_loss", "{:.4f}".format)),
    ("samples\nper s", _when("samples_per_s", show_amount)),
    ("speed-\nup", _when("speedup_samples", "{:.2f}x".format)),
    ("step\ntime", _when("step_s", show_seconds)),
    ("bytes per\nsample", _when("bytes_per_sample", _size)),
    ("rows", _when("rows", show_amount)),
    ("rows'\nmemory", _when("row_bytes", _size)),
    ("resident\nmemory", _when("resident_bytes", _size)),
    ("staleness", _staleness),
)


def compare_arms(arms: Sequence[dict[str, Any]]) -> None:
    """Fill in what needs the synchronous fp32 arm."""
    base = next((arm for arm in arms if arm["name"] == BASELINE), None)
    for arm in arms:
        arm["speedup_samples"] = arm["auc_gap"] = None
        if base is None:
            continue
        theirs, ours = number(base.get("samples_per_s")), number(arm.get("samples_per_s"))
        if theirs and ours:
            arm["speedup_samples"] = ours / theirs
        if arm.get("auc") is not None and base.get("auc") is not None:
            arm["auc_gap"] = arm["auc"] - base["auc"]


def verdict(results: Mapping[str, Any]) -> str:
    """What hybrid training gained here, and what it cost; where rows had no room, that too."""
    return " ".join([_gain(results), *filter(None, map(_room, results.get("arms", ())))])


def _room(arm: Arm) -> str:
    """A sentence if not all rows were in memory."""
    rows, spilled = int(arm.get("rows") or 0), int(arm.get("spilled_rows") or 0)
    recalled, evicted = int(arm.get("recalled_rows") or 0), int(arm.get("evicted_rows") or 0)
    if spilled or recalled:
        return (
            f"{arm['name']}: {spilled:,} of {rows:,} rows are in the spill folder, {recalled:,} "
            "came back from it."
        )
    if evicted:
        return (
            f"{arm['name']}: {evicted:,} rows were dropped for want of memory and began anew when "
            "they were seen again; raise --capacity, or keep them with --spill."
        )
    return ""


def _gain(results: Mapping[str, Any]) -> str:
    arms = list(results.get("arms", ()))
    done = [arm for arm in arms if number(arm.get("auc")) is not None]
    if not done:
        return "No arm was scored, so there is nothing to compare."
    base = next((arm for arm in done if arm["name"] == BASELINE), None)
    own = done[-1]
    best = number(own.get("best_auc"))
    reach = f", of at most {best:.4f} that these clicks allow" if best else ""
    if base is None or own is base:
        return f"AUC {own['auc']:.4f}{reach}, at {show_amount(own['samples_per_s'])} samples/s."
    gain, gap = number(own.get("speedup_samples")) or 0.0, 100 * (own["auc"] - base["auc"])
    less = (number(base["bytes_per_sample"]) or 0.0) / (number(own["bytes_per_sample"]) or 1.0)
    kept = "the same AUC" if abs(gap) <= 100 * CLOSE_AUC else "another AUC"
    return (
        f"Hybrid training sees {gain:.2f}x the samples per second of synchronous fp32 and sends "
        f"{less:.2f}x fewer bytes a sample, at {kept} ({gap:+.2f} points{reach})."
    )


def progress_text(row: Mapping[str, Any]) -> str:
    """Of a step's line of metrics.jsonl: what loss, speed and link do not say."""
    embedding = row.get("embedding") or {}
    if not embedding:
        return ""
    samples = max(1, int(row.get("num_tokens") or 1))
    sent = row.get("bytes") or {}
    parts = [f"{sum(sent.values()) / samples:.0f} B/sample"]
    if embedding.get("rows"):
        memory = show_amount(float(embedding.get("row_bytes") or 0), "B")
        parts.append(f"{show_amount(float(embedding['rows']))} rows ({memory})")
    staleness = embedding.get("staleness") or {}
    if staleness:
        shown = " ".join(_ages(staleness)) if len(staleness) > 1 else next(iter(staleness))
        parts.append(f"stale {shown} of {embedding.get('tau')}")
    if (auc := number(embedding.get("auc"))) is not None:
        parts.append(f"AUC {auc:.4f}")
    if (log_loss := number(embedding.get("log_loss"))) is not None:
        parts.append(f"log-loss {log_loss:.4f}")
    return "  ".join(parts)
