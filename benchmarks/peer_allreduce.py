"""All-reduce of a 10M-parameter model at unlimited bandwidth, against torch.distributed on gloo.

    python benchmarks/peer_allreduce.py                        both, 2 and 4 processes
    python benchmarks/peer_allreduce.py --hivemind PYTHON      and hivemind's averaging, run by that
                                                               interpreter (it has pins of its own)

Ours is the product's path: `Exchange`, `Post`, links without limits, couriers of Ray actors. The
peer is `torch.distributed`: one process each, `all_reduce` of the same vector in DDP's buckets of
25 MiB, then the division. One torch thread each; runs alternate, so a busy machine slows both;
a time is that of the slowest process, from a barrier on, and the ratio is that of the medians.
"Plain refs" is what is left when everything of ours is taken away (ray_floor.py).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import arguments, markdown, write
from ray_floor import Bare

BUCKET = 25 * 2**20 // 4


class Replica:
    """One replica of the product with nothing but its exchange; a Ray actor holds it."""

    def __init__(self, index: int) -> None:
        import ray
        import torch

        from netsim.loop_thread import LoopThread
        from netsim.shaper import Uplink
        from stages.courier import Courier
        from stages.lanes import ThreadLane, Unrecorded
        from stages.sync.exchange import Exchange
        from stages.sync.payload import VectorCoder
        from stages.sync.post import Post

        torch.set_num_threads(1)
        self.index = index
        self.loop = LoopThread(f"replica {index}")
        self._peers: list[Any] = []
        self._links: dict[int, Any] = {}
        self._uplink = Uplink()
        self._courier = Courier(index, self._complain, put=ray.put)
        self._post = Post(replica=index, link_to=self._link_to)
        lane = ThreadLane("sync", Unrecorded())
        self._exchange = self.loop.submit(
            self._made(lambda: Exchange(self._post, VectorCoder(), lane=lane))
        ).result()

    def meet(self, peers: list[Any]) -> None:
        self._peers = peers

    def deliver_letter(self, generation: int, frame: Any) -> None:
        self.loop.call_soon(self._post.on_frame, frame)

    def run(self, size: int, rounds: int, first: int, route: str) -> tuple[list[float], float]:
        """Seconds of each round, and one value of the last mean."""
        import torch

        vector = torch.full((size,), float(self.index))
        times = []
        value = 0.0
        for number in range(first, first + rounds):
            self._reduce(torch.zeros(len(self._peers)), 2 * number, "direct")  # a barrier
            start = time.perf_counter()
            mean = self._reduce(vector, 2 * number + 1, route)
            times.append(time.perf_counter() - start)
            value = float(mean[size // 3])
        return times, value

    def _reduce(self, vector: Any, number: int, route: str) -> Any:
        from stages.sync.strategy import SyncPlan

        plan = SyncPlan(
            epoch=0, number=number, op="reduce", peers=tuple(range(len(self._peers))),
            route=route,  # type: ignore[arg-type]
        )  # fmt: skip

        async def whole() -> Any:
            return (await self._exchange.finish(self._exchange.begin(plan, vector))).value

        return self.loop.submit(whole()).result()

    async def _made(self, make: Any) -> Any:
        return make()

    def _link_to(self, target: int) -> Any:
        from netsim.link import Link
        from netsim.topology import LinkSpec

        if target not in self._links:
            peer = self._peers[target]
            self._links[target] = Link(
                LinkSpec(), self._uplink, lambda frame: self._courier.post(peer, target, 0, frame)
            )
        return self._links[target]

    def _complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Actors:
    """Members on a Ray of our own: replicas with our exchange, or bare ones."""

    def __init__(self, num: int, member: type[Replica] | type[Bare]) -> None:
        import ray

        from stages.remote import own_copy

        cls: Any = type(member.__name__, (member,), {})
        mark = ray.method(concurrency_group="net", num_returns=0, enable_task_events=False)
        door = "deliver_letter" if member is Replica else "deliver"
        setattr(cls, door, mark(own_copy(getattr(member, door))))
        decorate: Any = ray.remote
        remote = decorate(num_cpus=0, concurrency_groups={"net": 1})(cls)
        self._ray = ray
        self.handles = [remote.remote(index) for index in range(num)]
        ray.get([handle.meet.remote(self.handles) for handle in self.handles])
        self._count = 0

    def run(self, size: int, rounds: int, route: str = "") -> list[float]:
        """The slowest member's seconds of each round."""
        more = (self._count, route) if route else ()
        found = self._ray.get(
            [h.run.remote(size, rounds, *more) for h in self.handles], timeout=300
        )
        self._count += rounds
        expected = sum(range(len(self.handles))) / len(self.handles)
        assert all(value == expected for _, value in found), found
        return [max(times) for times in zip(*(times for times, _ in found), strict=True)]

    def close(self) -> None:
        for handle in self.handles:
            self._ray.kill(handle)


def run_gloo(num: int, size: int, rounds: int) -> list[float]:
    """The slowest process's seconds of each round."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gloo.json"
        command = [
            sys.executable, __file__, "--port", str(port), "--replicas", str(num),
            "--parameters", str(size), "--rounds", str(rounds), "--out", str(out),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(num)
        ]
        codes = [process.wait(timeout=300) for process in processes]
        if any(codes):
            raise SystemExit(f"the peer failed: exit codes {codes}")
        found: list[float] = json.loads(out.read_text())
    return found


def gloo_process(rank: int, num: int, port: int, size: int, rounds: int, out: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num
    )
    vector = torch.full((size,), float(rank))
    times = []
    for _ in range(rounds):
        work = vector.clone()
        dist.barrier()
        start = time.perf_counter()
        handles = [dist.all_reduce(bucket, async_op=True) for bucket in work.split(BUCKET)]
        for handle in handles:
            handle.wait()
        work /= num
        times.append(time.perf_counter() - start)
        assert float(work[size // 3]) == sum(range(num)) / num
    everybody: list[Any] = [None] * num
    dist.all_gather_object(everybody, times)
    if rank == 0:
        out.write_text(json.dumps([max(column) for column in zip(*everybody, strict=True)]))
    dist.destroy_process_group()


def run_hivemind(python: str, num: int, size: int, rounds: int) -> list[float]:
    """Its DecentralizedAverager over localhost, one process each."""
    script = Path(__file__).with_name("peer_hivemind.py")
    command = [python, str(script), str(num), str(size), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        raise SystemExit(f"hivemind failed: {done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = arguments("peer_allreduce", __doc__ or "")
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=8, help="of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, alternating")
    parser.add_argument("--hivemind", help="an interpreter that has hivemind")
    parser.add_argument("--rank", type=int, help="internal: one process of the peer")
    parser.add_argument("--port", type=int, help="internal")
    args = parser.parse_args()
    size = args.parameters
    if args.rank is not None:
        gloo_process(args.rank, int(args.replicas), args.port, size, args.rounds, args.out)
        return
    from ray_pipe.cluster import connect

    found, rows = [], []
    with connect(None):
        for num in map(int, args.replicas.split(",")):
            ours, bare = Actors(num, Replica), Actors(num, Bare)
            seconds: dict[str, list[float]] = {}
            for turn in range(args.turns):
                seconds.setdefault("gloo", []).extend(run_gloo(num, size, args.rounds)[1:])
                for route in ("ring", "direct"):
                    times = ours.run(size, args.rounds, route)
                    seconds.setdefault(route, []).extend(times[1:])
                seconds.setdefault("refs", []).extend(bare.run(size, args.rounds)[1:])
                if args.hivemind and turn == 0:
                    times = run_hivemind(args.hivemind, num, size, args.rounds)
                    seconds.setdefault("hivemind", []).extend(times[1:])
            ours.close()
            bare.close()
            middle = {name: median(times) for name, times in seconds.items()}
            ratio = {name: middle[name] / middle["gloo"] for name in middle}
            found.append(
                {"replicas": num, "parameters": size, "median_s": middle, "over_gloo": ratio,
                 "all_s": seconds}
            )  # fmt: skip
            rows.append(
                [
                    str(num),
                    f"{1e3 * middle['gloo']:.0f} ms",
                    *(
                        f"{1e3 * middle[name]:.0f} ms, {ratio[name]:.2f}x"
                        if name in middle
                        else "-"
                        for name in ("ring", "direct", "refs", "hivemind")
                    ),
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    head = ["replicas", "gloo", "ours, ring", "ours, direct", "plain refs", "hivemind"]
    print("\n" + markdown(head, rows))
    write(args.out, {"runs": found})


if __name__ == "__main__":
    main()
