"""Emulated link speed against the speed asked for, in real time on a real loop.

Claim: from 1 Mbps to 1 Gbps the emulated rate is within 3 % of the asked one.
Prints the table and writes `benchmarks/results/link_rate.json`. About half a minute.

    python benchmarks/link_rate.py [--seconds 2] [--out FILE]

Three senders: `burst` hands everything over at once, `window` keeps four frames in flight (as a
pipeline does), `two links` bursts over two links that share one uplink. `late` is how long after
its due time a frame was delivered, which is the machine's timer and load, not the link's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from netsim.clock import LoopThread
from netsim.link import Link
from netsim.shaper import Uplink
from netsim.topology import LinkSpec
from netsim.units import parse_bandwidth, show_bandwidth, show_duration, show_size

LIMIT = 0.03
LATENCY_S = 0.02
WINDOW = 4
# Frames that take 5 to 100 ms: activations of the default model, raw and compressed.
RATES = [("1Mbps", 4_000), ("10Mbps", 12_500), ("100Mbps", 312_000), ("1Gbps", 1_250_000)]
SMALL = [("100Mbps", 16_000), ("1Gbps", 64_000)]


async def measure(
    rate_bps: float, frame_nbytes: int, sender: str, seconds: float
) -> dict[str, Any]:
    """Send for about `seconds`; time from the first send to the last arrival, latency taken off."""
    loop = asyncio.get_running_loop()
    num_links = 2 if sender == "two links" else 1
    # A window cannot fill a link whose latency it does not cover.
    window = WINDOW + math.ceil(LATENCY_S * rate_bps / 8 / frame_nbytes)
    num_frames = max(10, round(seconds * rate_bps / 8 / frame_nbytes))
    arrivals: list[float] = []
    done = loop.create_future()
    unsent = num_frames
    payload = bytes(frame_nbytes)

    def send_next() -> None:
        nonlocal unsent
        if unsent:
            unsent -= 1
            links[unsent % num_links].send(payload, kind="activation")

    def deliver(frame: bytes) -> None:
        arrivals.append(loop.time())
        if sender == "window":
            send_next()
        if len(arrivals) == num_frames:
            done.set_result(None)

    uplink = Uplink(rate_bps)
    spec = LinkSpec(latency_s=LATENCY_S)
    links = [Link(spec, uplink, deliver, name=f"link-{n}") for n in range(num_links)]
    started = loop.time()
    for _ in range(min(window, num_frames) if sender == "window" else num_frames):
        send_next()
    await done

    took_s = arrivals[-1] - started - LATENCY_S
    measured_bps = 8 * sum(link.sent["activation"] for link in links) / took_s
    due = sorted(span.arrive for link in links for span in link.drain_spans())
    late = sorted(at - when for at, when in zip(arrivals, due, strict=True))
    return {
        "asked_bps": rate_bps,
        "measured_bps": measured_bps,
        "error": measured_bps / rate_bps - 1,
        "frame_nbytes": frame_nbytes,
        "num_frames": num_frames,
        "sender": sender,
        "late_p50_s": late[len(late) // 2],
        "late_p99_s": late[int(len(late) * 0.99)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="per row of the table")
    default_out = Path(__file__).parent / "results" / "link_rate.json"
    parser.add_argument("--out", type=Path, default=default_out)
    args = parser.parse_args()

    cases = [(rate, nbytes, sender) for rate, nbytes in RATES for sender in ("burst", "window")]
    cases += [(rate, nbytes, "window") for rate, nbytes in SMALL]
    cases += [(rate, nbytes, "two links") for rate, nbytes in RATES]
    thread = LoopThread("link-rate")
    rows = []
    print(f"{'asked':>8} {'measured':>12} {'error':>8} {'frame':>9} {'sender':>10} "
          f"{'late p50':>9} {'late p99':>9}")  # fmt: skip
    for rate, nbytes, sender in cases:
        rate_bps = parse_bandwidth(rate)
        row = thread.submit(measure(rate_bps, nbytes, sender, args.seconds)).result()
        rows.append(row)
        print(
            f"{rate:>8} {show_bandwidth(row['measured_bps'], digits=5):>12} {row['error']:>+8.2%} "
            f"{show_size(nbytes):>9} {sender:>10} {show_duration(row['late_p50_s'], digits=2):>9} "
            f"{show_duration(row['late_p99_s'], digits=2):>9}"
        )
    thread.stop()

    worst = max(abs(row["error"]) for row in rows)
    verdict = "within" if worst <= LIMIT else "NOT within"
    print(f"worst error {worst:.2%}, {verdict} the limit of {LIMIT:.0%}")
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    result = {"limit": LIMIT, "worst_error": worst, "latency_s": LATENCY_S, "machine": machine}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
