"""Asks the nodes of a cluster what a run whose driver was killed has left there.

`ray_pipe.taking_up` calls it; `stages.left_boxes` is what runs on the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ray_pipe.cluster import START_TIMEOUT_S, ask_nodes, nodes
from stages.left_boxes import LeftBox, look, nbytes_of

NODES_PATIENCE_S = 60.0
"""For nodes that are not there yet: after `ray up` they join half a minute after the head."""

READ_NBYTES_PER_S = 50 << 20
"""At least; every byte of a box is read and checked."""

LOOK_S = 1.0


def await_nodes(
    wanted: Collection[str],
    *,
    folder: Path,
    on_phase: Callable[[str], None],
    on_warning: Callable[[str], None],
    patience_s: float = NODES_PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the nodes with these addresses: the boxes on them are worth nothing one by one, and
    a run that goes on without them has the others removed."""
    until_s, told = clock() + patience_s, ""
    while missing := sorted(set(wanted) - {node.ip for node in nodes()}):
        listed = ", ".join(missing)
        if clock() >= until_s:
            on_warning(
                f"node {listed}, where stages of {folder} were, did not join the cluster within "
                f"{patience_s:.0f} s"
            )
            return
        if listed != told:
            told = listed
            on_phase(f"waiting for node {listed}, where stages of {folder} were")
        pause(LOOK_S)


def find_boxes(
    note: Mapping[str, Any], num_stages: int, *, on_warning: Callable[[str], None]
) -> dict[str, list[LeftBox]]:
    """What each node has, by its id; `note` is an arm's entry in unfinished.json.

    Nodes are first asked how much it is: whoever has much to read is given time for it.
    """
    where = {"run": note["run"], "num_stages": num_stages, "spill": note["spill"]}
    setting = note["black_box"]

    def heard(answers: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for node, answer in answers.items():
            if isinstance(answer, BaseException):
                on_warning(f"node {node[:8]} did not tell which black boxes it has: {answer}")
            else:
                found[node] = answer
        return found

    sizes = heard(ask_nodes(nbytes_of, setting, **where))
    holders = [node for node, size in sizes.items() if size is not None]
    if not holders:
        return {}
    most = max(sizes[node] for node in holders)
    timeout_s = START_TIMEOUT_S + most / READ_NBYTES_PER_S
    return heard(ask_nodes(look, setting, among=holders, timeout_s=timeout_s, **where))
