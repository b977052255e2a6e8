"""Every benchmark that the README quotes, one after the other, then the README's tables.

Takes about an hour on two cores, and wants the machine to itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (
    "link_rate.py",
    "codec_kernels.py",
    "speed.py",
    "prediction.py",
    "peer_pipelining.py",
    "transports.py",
    "quality_wikitext.py",
    "sync_strategies.py",
    "hybrid.py",
    "row_store.py",
    "capacity.py",
    "readme.py",
)


def main() -> int:
    for script in SCRIPTS:
        print(f"\n=== {script}", flush=True)
        code = subprocess.run([sys.executable, str(HERE / script)], check=False).returncode
        if code:
            print(f"{script} failed with status {code}")
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
