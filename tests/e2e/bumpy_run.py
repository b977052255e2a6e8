"""`python -m ray_pipe.run` on a network that loses one frame of each arm: for what is rare."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from ray_pipe import driver
from ray_pipe.plans import Arm, arms_of
from ray_pipe.run import main
from stages.mishap import LinkFault

# The first frames are of the small evaluation by which messages are priced: no step has them.
LOST = (0, LinkFault(target=1, action="drop", kind="activation", nth=20))


def bumpy(config: Any, work: Any) -> list[Arm]:
    return [replace(arm, link_faults=(LOST,)) for arm in arms_of(config, work)]


if __name__ == "__main__":
    driver.arms_of = bumpy  # type: ignore[attr-defined]
    sys.exit(main())
