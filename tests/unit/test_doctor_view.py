"""The doctor's words, line by line."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

from doctor_patients import (
    SOFTWARE,
    VERSIONS,
    healthy,
    healthy_link,
    with_link,
    with_node,
    without_bandwidth,
)
from rich.console import Console

from ray_pipe.doctor_judge import judge
from ray_pipe.doctor_reports import Checkup
from ray_pipe.doctor_view import Watching, links_table, make_console, nodes_table, show


def text_of(checkup: Checkup, *, topology_path: str | None = None) -> str:
    out = io.StringIO()
    show(make_console(out), checkup, judge(checkup, topology_path=topology_path))
    return out.getvalue()


def rows(table: object) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return [line.split() for line in out.getvalue().splitlines()]


def test_a_healthy_cluster_reads_like_this() -> None:
    expected = r"""
here       Python 3.11.7, ray 2.60.0, torch 2.13.0+cpu, numpy 2.4.6, ray_pipe 0.1.0
source     5eed, the same on every node; native core, avx2
dashboard  http://10.0.0.10:8265
metrics    10.0.0.10:8090, 10.0.0.11:8090

 node     address     host    cores   load    memory    disk   GPUs   clock   core
 ───────────────────────────────────────────────────────────────────────────────────
 0 head   10.0.0.10   host0       4    0.5   17.2 GB   80 GB      -    same   native
 1        10.0.0.11   host1       4    0.5   17.2 GB   80 GB      -    same   native


 from \ to      node 0      node 1
 ─────────────────────────────────
 node 0              -   94.8 Mbps
                           20.0 ms
 node 1      94.8 Mbps           -
               20.0 ms


All is well.  2 nodes, 2 links measured, the slowest is 0 -> 1 with 94.8 Mbps
Next:
  # train on this cluster, on its links as they are
  python -m ray_pipe.run --address 10.0.0.10:6379 --stages 2 --bandwidth unlimited
"""

    assert text_of(healthy(2)) == expected


def test_a_fault_is_shown_with_its_way_out_and_the_command_to_look_again() -> None:
    text = text_of(with_node(healthy(), 1, software=replace(SOFTWARE, source="bad1")))

    words = " ".join(text.split())
    assert "fault node 1 (10.0.0.11): other source than here" in words
    assert "-> install the same version everywhere" in words
    assert "1 fault. 3 nodes" in words
    assert text.endswith("  python -m ray_pipe.doctor --address 10.0.0.10:6379\n")


def test_faults_and_warnings_are_counted_apart() -> None:
    checkup = with_node(with_node(healthy(), 0, load=99.0), 1, load=99.0)

    assert "1 fault and 1 warning." in text_of(with_link(checkup, 0, 1, error="torn"))


def test_what_differs_gets_a_column_and_what_is_the_same_none() -> None:
    other = replace(SOFTWARE, source="bad1", versions=VERSIONS | {"torch": "2.12.0"})

    header, _, *body = rows(nodes_table(with_node(healthy(), 1, software=other)))[1:6]

    assert header[-2:] == ["torch", "source"]
    assert [line[-2:] for line in body] == [
        ["2.13.0+cpu", "5eed"],
        ["2.12.0", "bad1"],
        ["2.13.0+cpu", "5eed"],
    ]


def test_a_node_without_a_probe_is_shown_as_not_reached() -> None:
    line = next(x for x in text_of(with_node(healthy(), 1, error="x")).splitlines() if "host1" in x)

    assert line.split() == ["1", "10.0.0.11", "host1", "not", "reached"]


def test_an_unreachable_link_stands_out_in_the_matrix() -> None:
    table = rows(links_table(with_link(healthy(2), 1, 0, error="torn")))

    assert ["node", "1", "unreachable", "-"] in table


def test_quick_shows_latency_alone() -> None:
    text = text_of(without_bandwidth(healthy(2)))

    assert "Mbps" not in text
    assert ["node", "0", "-", "20.0", "ms"] in [line.split() for line in text.splitlines()]
    assert "2 links, bandwidth not measured" in text


def test_many_nodes_show_their_slowest_links_first() -> None:
    checkup = with_link(healthy(9), 3, 7, bandwidth_bps=1.5e6)
    checkup = with_link(checkup, 8, 0, error="torn")

    table = rows(links_table(checkup))

    assert ["slowest", "of", "72", "links", "rate", "latency"] in table
    assert table[3] == ["8", "->", "0", "unreachable", "20.0", "ms"]
    assert table[4] == ["3", "->", "7", "1.5", "Mbps", "20.0", "ms"]


def test_a_clock_that_is_off_says_which_way() -> None:
    checkup = with_node(with_node(healthy(), 0, clock_offset_s=0.0821), 1, clock_offset_s=-3.5)

    text = text_of(checkup)

    assert "+82.1 ms" in text
    assert "-3.50 s" in text


def test_a_command_is_never_wrapped() -> None:
    path = "/a/very/long/path" * 20

    assert f"--topology {path}\n" in text_of(healthy(), topology_path=path)


def test_lines_tell_how_it_goes_and_how_long_it_will_take() -> None:
    now = [0.0]
    out = io.StringIO()
    watching = Watching(out, clock=lambda: now[0])
    events: list[tuple[float, Callable[[], None]]] = [
        (1.0, lambda: watching.on_phase("looking at 2 nodes")),
        (2.0, lambda: watching.on_links(2, 3.2)),
        (5.0, lambda: watching.on_link(healthy_link(0, 1))),
        (8.0, lambda: watching.on_link(healthy_link(1, 0))),
    ]

    for now[0], event in events:
        event()

    assert out.getvalue().splitlines() == [
        "[   1.0 s] looking at 2 nodes",
        "[   2.0 s] measuring 2 links, about 3 s",
        "[   5.0 s] link 1/2  0 -> 1: 94.8 Mbps, about 3 s left",
        "[   8.0 s] link 2/2  1 -> 0: 94.8 Mbps",
    ]


def test_a_terminal_sees_a_bar_and_the_time_left() -> None:
    now = [0.0]
    out = io.StringIO()
    watching = Watching(out, clock=lambda: now[0])
    watching.on_links(4, 8.0)
    now[0] = 1.0

    def line() -> str:
        seen = io.StringIO()
        Console(file=seen, width=120).print(watching.render())
        return " ".join(seen.getvalue().split())

    assert "0/4 links about 7 s left" in line()
    now[0] = 3.0
    watching.on_link(healthy_link(0, 1))
    assert "1/4 links 0 -> 1: 94.8 Mbps about 9 s left" in line()
    now[0] = 5.0
    assert "1/4 links 0 -> 1: 94.8 Mbps about 7 s left" in line()
