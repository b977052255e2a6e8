"""Graphs of replicas: weights that keep the mean, eigenvalues, repair, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sync.mixing import (
    GRAPHS,
    Graph,
    GraphError,
    complete,
    directed_ring,
    double_ring,
    make_graph,
    parse_graph,
    ring,
    ring_based,
)

Weights = Mapping[int, Mapping[int, float]]


def column_and_row_errors(weights: Weights) -> tuple[float, float]:
    rows = max(abs(sum(row.values()) - 1) for row in weights.values())
    columns = {
        j: sum(row.get(j, 0.0) for row in weights.values()) for row in weights.values() for j in row
    }
    return max(abs(total - 1) for total in columns.values()), rows


def mix(weights: Weights, values: dict[int, float], rounds: int) -> dict[int, float]:
    for _ in range(rounds):
        values = {
            i: sum(weight * values[j] for j, weight in row.items()) for i, row in weights.items()
        }
    return values


def star(num: int) -> Graph:
    return Graph(range(num), [e for i in range(1, num) for e in ((0, i), (i, 0))])


def test_neighbours_of_the_named_graphs() -> None:
    assert ring(5).into(0) == (1, 4)
    assert ring_based(8).into(1) == (0, 2, 5)
    assert double_ring(8).into(1) == (0, 2, 3, 5)
    assert complete(4).into(2) == (0, 1, 3)
    assert directed_ring(4).into(0) == (3,)
    assert directed_ring(4).out_of(0) == (1,)


@pytest.mark.parametrize(
    ("name", "degree", "second"),
    [
        ("ring", 2, 0.949),
        ("ring-based", 3, 0.854),
        ("double-ring", 4, 0.600),
        ("complete", 15, 0.0),
    ],
)
def test_eigenvalues_of_sixteen_replicas_are_those_of_the_papers_graphs(
    name: str, degree: int, second: float
) -> None:
    graph = make_graph(name, 16)

    assert {len(graph.into(i)) for i in graph.nodes} == {degree}
    assert graph.second_eigenvalue == pytest.approx(second, abs=5e-4)
    assert graph.spectral_gap == pytest.approx(1 - second, abs=5e-4)


@pytest.mark.parametrize("name", list(GRAPHS))
@pytest.mark.parametrize("num", [1, 2, 3, 4, 6, 7, 16])
def test_weights_are_doubly_stochastic(name: str, num: int) -> None:
    if name == "double-ring" and (num % 2 or num < 4):
        with pytest.raises(GraphError, match="even number of replicas, 4 or more"):
            make_graph(name, num)
        return

    assert max(column_and_row_errors(make_graph(name, num).weights)) < 1e-12


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_any_connected_symmetric_graph_keeps_the_mean_and_agrees(num: int, seed: int) -> None:
    source = random.Random(seed)
    pairs = {(i, source.randrange(i)) for i in range(1, num)}
    pairs |= {(a, b) for a in range(num) for b in range(a) if source.random() < 0.2}
    graph = Graph(range(num), [e for a, b in pairs for e in ((a, b), (b, a))])

    assert max(column_and_row_errors(graph.weights)) < 1e-12
    assert graph.second_eigenvalue < 1 - 1e-6


def test_a_star_agrees_on_the_mean() -> None:
    limit = mix(star(8).weights, {i: float(i) for i in range(8)}, 2000)

    assert limit == pytest.approx(dict.fromkeys(range(8), 3.5))


def test_mutant_one_over_degree_plus_one_agrees_on_something_else() -> None:
    graph = star(8)
    mutant = {
        i: {j: 1 / (len(graph.into(i)) + 1) for j in (i, *graph.into(i))} for i in graph.nodes
    }

    assert column_and_row_errors(mutant)[0] > 0.1
    assert mix(mutant, {i: float(i) for i in range(8)}, 2000)[3] == pytest.approx(2.545, abs=5e-4)


@pytest.mark.parametrize("name", list(GRAPHS))
def test_after_a_death_the_weights_keep_the_mean_of_the_survivors(name: str) -> None:
    graph = make_graph(name, 8).without(3)

    assert graph.nodes == (0, 1, 2, 4, 5, 6, 7)
    assert max(column_and_row_errors(graph.weights)) < 1e-12
    assert graph.second_eigenvalue < 1 - 1e-6


def test_mutant_repairing_rows_only_after_a_death_moves_the_mean() -> None:
    graph = star(8)
    rows = {i: dict(row) for i, row in graph.weights.items() if i != 3}
    for row in rows.values():
        lost = row.pop(3, 0.0)
        for j in row:
            row[j] /= 1 - lost

    assert column_and_row_errors(rows)[0] > 0.01


def test_neighbours_of_a_dead_replica_are_joined_when_it_was_the_only_way() -> None:
    graph = star(5).without(0)

    assert sorted(graph.edges) == [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3)]
    assert ring(4).without(1).edges == {(2, 3), (3, 2), (3, 0), (0, 3)}  # still connected


def test_a_newcomer_stands_between_its_neighbours_in_order() -> None:
    graph = ring(4).without(2).with_node(2)

    assert graph.into(2) == (1, 3)
    assert ring(4).with_node(4).into(4) == (0, 3)
    assert max(column_and_row_errors(graph.weights)) < 1e-12
    with pytest.raises(GraphError, match="replica 1 is in the graph already"):
        ring(4).with_node(1)


@given(st.integers(3, 10), st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=12))
def test_no_sequence_of_deaths_and_births_breaks_the_graph(
    num: int, events: list[tuple[bool, int]]
) -> None:
    graph = ring_based(num)
    for is_birth, number in events:
        if is_birth and number not in graph.nodes:
            graph = graph.with_node(number)
        elif not is_birth and len(graph.nodes) > 1:
            graph = graph.without(graph.nodes[number % len(graph.nodes)])

    assert max(column_and_row_errors(graph.weights)) < 1e-12


def test_distances_count_edges_along_the_arrows() -> None:
    assert directed_ring(5).distances(3) == {3: 0, 4: 1, 0: 2, 1: 3, 2: 4}


def test_a_graph_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("# a line of three\n0<->1\n1 <-> 2  # the end\n\n")

    assert make_graph(str(path), 3).into(1) == (0, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0<->1", "not connected: nothing that replica 0 sends reaches replica 2"),
        ("0->1\n1->2", "nothing that replica 1 sends reaches replica 0"),
        ("0-1", "line 1: '0-1' is not '0<->1' or '0->1'"),
        ("0<->3", "names replica 3; there are 3 replicas, 0 to 2"),
        ("1<->1", "joins replica 1 to itself"),
    ],
)
def test_a_graph_that_cannot_work_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_graph(text, 3)


def test_an_irregular_directed_graph_is_refused() -> None:
    graph = parse_graph("0->1\n1->2\n2->0\n0->2", 3)

    with pytest.raises(GraphError, match="one-way edges and degrees from 1 to 2"):
        _ = graph.weights


def test_an_unknown_graph_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(GraphError, match="did you mean 'ring-based'"):
        make_graph("ring-base", 8)


def test_eigenvalues_agree_with_the_matrix_itself() -> None:
    graph = star(6)
    matrix = np.array([[graph.weights[i].get(j, 0.0) for j in range(6)] for i in range(6)])

    assert sorted(abs(np.linalg.eigvalsh(matrix)))[-2] == pytest.approx(graph.second_eigenvalue)
