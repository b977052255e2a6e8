"""What a chunk's utility is multiplied by before chunks are ranked, when a table is pruned.

The n-th column of chunks weighs `n ** -taper`: the first columns of rows that are used little come
before the last ones of rows that are used much. A row that is not used at all any more has no claim
to that. Its utility decays with each prune; when half of it is gone the row's first columns begin
to lose their advance as well, until they weigh what everybody's last one does. So rows that become
hot get all their chunks back from those that were.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

HALF = 0.5
"""Of its utility: down to there a row keeps all of its advance. Rows of a long tail are used once
in many periods, and are to keep theirs between two uses."""

LEAST = 0.01
"""Share of the advance below which nothing changes any more."""

MAX_PERIODS = 4096


def column_weights(chunks: int, *, taper: float, decay: float) -> npt.NDArray[np.float32]:
    """[periods without use, chunks]; the last line is for all longer ones."""
    place = np.arange(1, chunks + 1, dtype=np.float64)
    lines = []
    for periods in count():
        advance = min(1.0, decay**periods / HALF)
        lines.append(place ** (-taper * advance) * float(chunks) ** (-taper * (1.0 - advance)))
        if advance < LEAST or decay == 1.0 or taper == 0.0 or periods + 1 == MAX_PERIODS:
            return np.stack(lines).astype(np.float32)
    raise AssertionError
