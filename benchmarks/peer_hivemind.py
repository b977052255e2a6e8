"""hivemind's averaging of one vector among processes on this machine; started by peer_allreduce.

    PYTHON-with-hivemind benchmarks/peer_hivemind.py REPLICAS PARAMETERS ROUNDS

Prints the slowest peer's seconds of each round as JSON. Imports nothing of ours: hivemind pins
other versions of what we share, so it runs in an environment of its own.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
from typing import Any


def peer(rank: int, num: int, size: int, rounds: int, first: Any, barrier: Any, out: Any) -> None:
    import hivemind
    import torch

    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=first, start=True)
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.full((size,), float(rank))],
        dht,
        prefix="peer",
        target_group_size=num,
        min_group_size=num,
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        start=True,
    )
    times = []
    for _ in range(rounds):
        with averager.get_tensors() as tensors:
            tensors[0].fill_(float(rank))
        # Matchmaking is a wait of its own; what is timed begins when the group is complete.
        barrier.wait()
        start = time.perf_counter()
        step = averager.step(wait=False, timeout=120, require_trigger=True)
        while step.stage.name == "LOOKING_FOR_GROUP":
            time.sleep(0.002)
        barrier.wait()
        ready = time.perf_counter()
        step.allow_allreduce()
        step.result(timeout=120)
        done = time.perf_counter()
        with averager.get_tensors() as tensors:
            assert abs(float(tensors[0][size // 3]) - sum(range(num)) / num) < 1e-4
        times.append((done - ready, done - start))
    out.put(times)
    barrier.wait()
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    num, size, rounds = map(int, sys.argv[1:4])
    import hivemind

    dht = hivemind.DHT(start=True)
    first = [str(address) for address in dht.get_visible_maddrs()]
    context = mp.get_context("fork")
    barrier, out = context.Barrier(num), context.Queue()
    processes = [
        context.Process(target=peer, args=(rank, num, size, rounds, first, barrier, out))
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    found = [out.get(timeout=300) for _ in range(num)]
    for process in processes:
        process.join(30)
    dht.shutdown()
    print(json.dumps([max(one[0] for one in column) for column in zip(*found, strict=True)]))


if __name__ == "__main__":
    main()
