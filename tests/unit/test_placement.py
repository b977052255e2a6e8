"""One stage per node where there are enough, neighbours together where not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_pipe.errors import ClusterError
from ray_pipe.planner.placement import Node, Placement, at_home, move, place, spare_homes


def make(
    count: int, *, gpus: float = 0.0, first: int = 10, head: bool = True, cpus: float = 2.0
) -> list[Node]:
    return [
        Node(
            id=f"n{i}",
            ip=f"10.0.0.{first + i}",
            num_cpus=cpus,
            num_gpus=gpus,
            is_head=head and i == 0,
        )
        for i in range(count)
    ]


def ips(placement: Placement) -> list[str]:
    return [node.ip.rpartition(".")[2] for node in placement.nodes]


def test_as_many_nodes_as_stages_give_each_stage_its_own_the_head_first() -> None:
    placement = place(4, make(4))

    assert ips(placement) == ["10", "11", "12", "13"]
    assert placement.strategy == "STRICT_SPREAD"
    assert placement.notes() == []


def test_with_a_node_to_spare_the_head_is_left_to_its_own_work() -> None:
    assert ips(place(3, make(4))) == ["11", "12", "13"]


def test_addresses_are_ordered_as_numbers_whatever_order_ray_names_them_in() -> None:
    nodes = make(3, first=9, head=False)

    assert ips(place(3, nodes[::-1])) == ["9", "10", "11"]


def test_too_few_nodes_are_shared_by_neighbours_and_the_user_is_told() -> None:
    placement = place(5, make(2))

    assert ips(placement) == ["10", "10", "10", "11", "11"]
    assert placement.strategy == "SPREAD"
    assert placement.notes() == [
        "5 stages on 2 nodes: stages 0, 1, 2 share 10.0.0.10; stages 3, 4 share 10.0.0.11. "
        "Between them nothing crosses the network; for one stage per node add nodes or use "
        "--stages 2."
    ]


def test_a_head_without_cpus_takes_no_stage() -> None:
    head = Node(id="h", ip="10.0.0.1", num_cpus=0, is_head=True)

    assert ips(place(2, [head, *make(2, head=False)])) == ["10", "11"]


def test_gpus_are_used_where_they_are_one_per_stage() -> None:
    placement = place(2, [*make(2), *make(2, gpus=1, first=20, head=False)])

    assert ips(placement) == ["20", "21"]
    assert placement.num_gpus == 1.0


def test_no_node_gets_more_stages_than_it_has_gpus() -> None:
    nodes = [
        Node(id="a", ip="10.0.0.1", num_gpus=1),
        Node(id="b", ip="10.0.0.2", num_gpus=4),
    ]

    assert ips(place(4, nodes)) == ["1", "2", "2", "2"]


def test_too_few_gpus_stay_idle_and_the_user_is_told() -> None:
    placement = place(3, make(3, gpus=0) + make(1, gpus=2, first=30, head=False))

    assert placement.num_gpus == 0.0
    assert placement.notes() == [
        "2 GPUs are too few for 3 stages, one each, so all stages compute on CPUs; use --stages 2 "
        "for GPUs."
    ]


def test_a_node_that_failed_is_avoided() -> None:
    assert ips(place(2, make(3), avoid={"n1"})) == ["10", "12"]


def test_an_empty_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="no node that could take a stage"):
        place(1, make(1), avoid={"n0"})


def test_a_stage_that_died_starts_again_on_its_own_node() -> None:
    nodes = make(3)

    assert ips(move(place(3, nodes), [1], nodes)) == ["10", "11", "12"]


def test_a_stage_whose_node_died_takes_a_spare_node() -> None:
    nodes = make(4)
    before = place(3, nodes)

    assert ips(before) == ["11", "12", "13"]
    assert ips(move(before, [1], [nodes[0], nodes[1], nodes[3]])) == ["11", "10", "13"]


def test_without_a_spare_it_moves_in_with_its_neighbour() -> None:
    nodes = make(4)
    moved = move(place(4, nodes), [3], nodes, avoid={"n3"})

    assert ips(moved) == ["10", "11", "12", "12"]
    assert moved.strategy == "SPREAD"


def test_two_stages_of_one_dead_node_may_both_move() -> None:
    nodes = make(2)
    before = place(4, nodes)

    assert ips(before) == ["10", "10", "11", "11"]
    assert ips(move(before, [2, 3], nodes[:1])) == ["10"] * 4


def test_a_lost_gpu_is_not_replaced_by_one_in_use() -> None:
    nodes = make(2, gpus=1)

    with pytest.raises(ClusterError, match=r"stage 1 lost its node 10\.0\.0\.11.*a free GPU"):
        move(place(2, nodes), [1], nodes[:1])


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 3))
def test_runs_are_contiguous_even_and_within_the_gpus(
    num_stages: int, num_nodes: int, gpus: int
) -> None:
    placement = place(num_stages, make(num_nodes, gpus=gpus))
    counts = [placement.nodes.count(node) for node in dict.fromkeys(placement.nodes)]
    changes = sum(a != b for a, b in pairwise(placement.nodes))

    assert len(placement.nodes) == num_stages
    assert changes == len(counts) - 1, "a node was left and entered again"
    assert max(counts) - min(counts) <= 1
    if placement.num_gpus:
        assert max(counts) <= gpus


def test_spares_are_where_the_black_boxes_are_and_where_a_lost_stage_would_go() -> None:
    nodes = make(6)
    placement = place(3, nodes)

    homes = spare_homes(placement, nodes)

    assert [node.ip for node in homes] == ["10.0.0.11", "10.0.0.12", "10.0.0.13", "10.0.0.10"]
    assert move(placement, [1], [n for n in nodes if n.id != "n2"]).nodes[1] in homes


def test_no_spare_is_kept_for_a_node_that_is_gone_or_keeps_off() -> None:
    nodes = make(3)
    keeps_off = Node(id="off", ip="10.0.0.99", num_cpus=0.0)

    assert spare_homes(place(3, nodes), nodes[1:]) == nodes[1:]
    assert spare_homes(place(3, nodes), [*nodes, keeps_off]) == nodes


def test_with_gpus_a_spare_needs_one_that_is_left() -> None:
    nodes = make(2, gpus=1.0, head=False)
    roomy = Node(id="big", ip="10.0.0.50", num_gpus=3.0)

    assert spare_homes(place(2, nodes), nodes) == []
    assert spare_homes(place(2, nodes), [*nodes, roomy]) == [roomy]


def test_stages_go_to_the_nodes_where_something_of_theirs_lies() -> None:
    nodes = make(4)
    placement = place(3, nodes)
    assert ips(placement) == ["11", "12", "13"]

    moved, homeless = at_home(placement, {0: ["n1", "n2"], 1: ["n0"], 2: ["n2", "n3"]}, nodes)

    assert (ips(moved), homeless) == (["11", "10", "13"], [])  # who is at home stays


def test_a_stage_whose_home_is_gone_or_has_no_gpu_left_is_named() -> None:
    nodes = make(3, gpus=1.0)
    placement = place(2, nodes)

    assert at_home(placement, {0: ["n1"], 1: ["lost"]}, nodes)[1] == [1]
    assert at_home(placement, {0: ["n1"]}, nodes)[1] == [1]
    assert at_home(placement, {0: ["n1"], 1: ["n1"]}, nodes)[1] == [1]
    assert at_home(replace(placement, num_gpus=0.0), {0: ["n1"], 1: ["n1"]}, nodes)[1] == []


def test_stages_with_a_gpu_each_find_home_though_their_places_were_exchanged() -> None:
    # n2 died in the run before, so its stage 1 went to the head. Now n2 is still gone.
    nodes = [node for node in make(4, gpus=1.0) if node.id != "n2"]
    placement = place(3, nodes)
    assert [node.id for node in placement.nodes] == ["n0", "n1", "n3"]

    moved, homeless = at_home(placement, {0: ["n1"], 1: ["n0"], 2: ["n3"]}, nodes)

    assert homeless == []
    assert [node.id for node in moved.nodes] == ["n1", "n0", "n3"]


def test_a_stage_with_two_homes_makes_way_for_one_that_has_no_other() -> None:
    nodes = make(3, gpus=1.0)
    placement = place(2, nodes)
    first, second = (node.id for node in placement.nodes)

    moved, homeless = at_home(placement, {0: [first, second], 1: [first]}, nodes)

    assert homeless == []
    assert [node.id for node in moved.nodes] == [second, first]
