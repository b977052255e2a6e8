"""Whether what AC-SGD remembers is of any use: changes as large as the values are none.

‖Δ‖/‖h‖ of an edge falls as training settles. Where it stays near 1 (unrelated rows: √2), samples
come back as strangers: fresh dropout masks, augmentation, ids that do not belong to their samples.
Then the codec without memory sends the same for less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ray_pipe.codec_names import backward_codec, has_memory
from stages.record import StepRecord

NEAR_ONE = 0.9
MIN_STEPS = 8


class DeltaWatch:
    """Looks at an arm's records, and says once for each edge that memory gains nothing there."""

    def __init__(self, codec: str, *, steps_per_epoch: int) -> None:
        self._codec = codec
        self._window = max(MIN_STEPS, steps_per_epoch)
        self._ratios: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def look(self, records: Iterable[StepRecord]) -> list[str]:
        """What deserves a warning after these records of one step."""
        if not has_memory(self._codec):
            return []
        found = []
        for record in records:
            for edge, stats in record.codec.items():
                ratio = stats.get("delta_ratio")  # only where samples were met again
                if ratio is None or edge in self._told:
                    continue
                ratios = self._ratios.setdefault(edge, deque(maxlen=self._window))
                ratios.append(ratio)
                if len(ratios) == self._window and min(ratios) >= NEAR_ONE:
                    self._told.add(edge)
                    found.append(self._text(edge, ratios))
        return found

    def _text(self, edge: str, ratios: Sequence[float]) -> str:
        mean = sum(ratios) / len(ratios)
        return (
            f"edge {edge}: for {len(ratios)} steps the changes that {self._codec} sends were "
            f"{mean:.2f} times as large as the activations themselves (useful: well below "
            f"{NEAR_ONE:g}), so its memory gains nothing; use --codec "
            f"{backward_codec(self._codec)}, which remembers nothing, or find out why a sample "
            "looks new on each visit (dropout, augmentation, ids that change)."
        )
