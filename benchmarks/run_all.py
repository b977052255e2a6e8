"""Every benchmark that the README quotes, one after the other, then the README's tables.

    python benchmarks/run_all.py                 all of them, some hours on two cores
    python benchmarks/run_all.py speed hybrid    some of them, then the tables

Wants the machine to itself. Each entry runs as a process of its own; the first that fails ends it.
`LEFT_OUT` says which benchmarks are not run here, and why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNS: dict[str, tuple[str, ...]] = {
    "demo_time": ("demo_time.py",),
    "link_rate": ("link_rate.py",),
    "codec_kernels": ("codec_kernels.py",),
    "speed": ("speed.py",),
    "prediction": ("prediction.py",),
    "peer_pipelining": ("peer_pipelining.py",),
    "transports": ("transports.py",),
    "quality_wikitext": ("quality_wikitext.py",),
    "sync_strategies": ("sync_strategies.py",),
    "sync_scale": ("sync_strategies.py", "--scale", "125,250,500,1000"),
    "sync_quality": ("sync_quality.py",),
    "compare_sync": ("-m", "ray_pipe.compare_sync"),
    "hybrid": ("hybrid.py",),
    "embedding_quality": ("embedding_quality.py",),
    "row_store": ("row_store.py",),
    "capacity": ("capacity.py",),
}
"""Words for Python, from this folder; the scripts write to results/ by themselves."""

LEFT_OUT = {
    "embedding_quality --set movielens, books": "needs wheels with data that are not ours to ship",
    "movielens": "needs a wheel with MovieLens-100k",
    "ctr_reference": "plain torch alone; embedding_quality.py trains the same beside ours",
    "compare_sync --real": "half an hour on Ray for a table of docs/replicas.md",
    "peer_allreduce": "docs/replicas.md; hivemind needs an environment of its own",
    "peer_hivemind": "started by peer_allreduce.py",
    "ray_floor": "part of peer_allreduce.py",
    "sync_unlike": "part of sync_quality.py",
    "real_network": "needs root and network namespaces",
    "end_to_end": "quoted in docs/replicas.md only",
    "black_box": "quoted in docs/lab-notes.md only",
    "sample_buffers": "quoted in docs/decisions/0014-row-store.md only",
    "wire_speed": "quoted nowhere yet: kernels of rows on the wire against numpy",
    "hybrid_adult": "virtual time; quoted in docs/embeddings.md only",
    "click_sets": "the sets of embedding_quality.py",
    "quality_stories": "quoted in docs/lab-notes.md only",
}


def main(wanted: list[str]) -> int:
    unknown = [name for name in wanted if name not in RUNS]
    if unknown:
        print(f"there is no benchmark {', '.join(unknown)}; known are {', '.join(RUNS)}")
        return 2
    for name in wanted or RUNS:
        print(f"\n=== {name}", flush=True)
        code = run_compare_sync() if name == "compare_sync" else run(*RUNS[name])
        if code:
            print(f"{name} failed with status {code}")
            return code
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    print("\n=== readme", flush=True)
    return run("readme.py")


def run(*words: str) -> int:
    """The exit status of one benchmark."""
    script = [str(HERE / words[0]) if words[0].endswith(".py") else words[0], *words[1:]]
    return subprocess.run([sys.executable, *script], cwd=HERE.parent, check=False).returncode


def run_compare_sync() -> int:
    """A command of the product: it writes where it is told, and its JSON is copied to results/."""
    with tempfile.TemporaryDirectory() as folder:
        code = run(*RUNS["compare_sync"], "--out", folder)
        if code == 0:
            shutil.copy(Path(folder) / "compare_sync.json", HERE / "results")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
