"""`python -m ray_pipe.monitoring DIR`: the files for Prometheus and Grafana, ready to use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ray_pipe.monitoring.catalogue import markdown_table
from ray_pipe.monitoring.provisioning import PROMETHEUS_URL, RAY_DIR, make_files, write_files

NEXT = """\
{count} files in {folder}. Next, on the cluster's head node:
  prometheus --config.file={folder}/prometheus/prometheus.yml
  grafana-server --config {folder}/grafana/grafana.ini --homepath /usr/share/grafana
Everything about it: docs/monitoring.md
"""


def main(
    argv: Sequence[str] | None = None,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """The whole command; returns its exit status."""
    out, err = stdout or sys.stdout, stderr or sys.stderr
    parser = argparse.ArgumentParser(
        prog="python -m ray_pipe.monitoring",
        description="Write a Prometheus configuration, and Grafana's data source, provider and "
        "dashboard, for the metrics that runs export on a Ray cluster.",
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", help="folder to write to; made if new")
    parser.add_argument(
        "--ray-dir",
        metavar="DIR",
        default=RAY_DIR,
        help="Ray's temporary folder on the head node, where Ray lists its nodes (%(default)s)",
    )
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        default=PROMETHEUS_URL,
        help="where Grafana finds Prometheus (%(default)s)",
    )
    parser.add_argument(
        "--seen-as",
        metavar="DIR",
        help="where Prometheus and Grafana find the folder, if not at its own path, as in "
        "containers",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of metrics as Markdown and stop"
    )
    args = parser.parse_args(argv)
    if args.table:
        out.write(markdown_table())
        return 0
    if args.folder is None:
        err.write("error: which folder? python -m ray_pipe.monitoring DIR\n")
        return 2
    folder = Path(args.folder).resolve()
    files = make_files(
        seen_as=args.seen_as or str(folder), ray_dir=args.ray_dir, prometheus=args.prometheus
    )
    try:
        write_files(folder, files)
    except OSError as error:
        err.write(f"error: {folder} cannot be written: {error.strerror or error}\n")
        return 2
    out.write(NEXT.format(count=len(files), folder=folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
