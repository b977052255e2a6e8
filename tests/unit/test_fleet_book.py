"""What the replicas did: gap, deaths, joins, the generator's lives; and how it is shown."""

from __future__ import annotations

from io import StringIO
from typing import Any

from test_replica_rows import record

from ray_pipe.fleet_book import FleetBook
from ray_pipe.progress import plain_console
from ray_pipe.replica_table import where_replicas_are
from ray_pipe.report_replicas import replicas_section
from ray_pipe.results_table import show_results


def test_the_gap_counts_the_living_only() -> None:
    book = FleetBook(strategy="ripples")
    for replica, step in ((0, 0), (1, 0), (0, 1), (0, 2)):
        book.ended(replica, step, [record(replica, step)])
    assert book.largest_gap == 2

    book.died(1, "replica 1 died")
    for step in (3, 4, 5):
        book.ended(0, step, [record(0, step)])

    assert book.largest_gap == 2
    assert book.as_dict()["members"][1]["died_at"] == 1


def test_counters_of_a_generator_add_up_over_its_lives() -> None:
    book = FleetBook(strategy="ripples")

    assert not book.heard_generator({"groups": 5.0, "epoch": 0, "pid": 1})
    assert book.heard_generator({"groups": 2.0, "epoch": 900, "pid": 2})
    assert not book.heard_generator({"groups": 3.0, "epoch": 900, "pid": 2})

    assert book.generator == {"groups": 8.0}
    assert len(book.events) == 1


def results() -> dict[str, Any]:
    book = FleetBook(strategy="hop")
    codec = {"0->1": {"fp32_bytes": 800.0}, "1->0": {"fp32_bytes": 80.0}}
    book.ended(0, 0, [record(0, 0, codec=codec)])
    book.ended(1, 0, [record(1, 0)])
    book.died(1, "replica 1, stage 0 died in step 1: killed; the last one goes on without it")
    kinds = {"activation": 100, "gradient": 80, "replica": 200, "embedding": 0, "control": 7}
    arm = {"name": "acsgd", "bytes_total": kinds, "replicas": book.as_dict(), "final_loss": 2.0}
    return {"arms": [arm]}


def test_the_table_shows_each_replica_and_how_far_each_kind_of_bytes_shrank() -> None:
    out = StringIO()

    show_results(plain_console(out), results(), None)

    text = out.getvalue()
    assert "the mean 100 ms" in text
    assert "died in step 1" in text
    assert "activation   100 B, 1/8.0 of fp32" in text
    assert "replica      200 B, 1/4.0 of fp32" in text
    assert "gradient                     80 B" in text  # nothing was gained there
    assert "acsgd, hop: largest gap 0 iterations, 0 updates skipped" in text
    assert "the last one goes on without it" in text


def test_the_report_has_the_same() -> None:
    html = replicas_section(results()["arms"])

    assert "acsgd · replica 1" in html
    assert "1/8.0 of fp32" in html
    assert replicas_section([{"name": "fp32"}]) == ""


def test_the_progress_line_says_where_all_replicas_are_and_what_they_waited_for() -> None:
    book = FleetBook(strategy="ripples")
    for replica, step in ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1)):
        book.ended(replica, step, [record(replica, step)])
    book.heard_generator({"groups": 5.0, "conflicts": 1.0, "epoch": 0, "pid": 1, "sent": {}})

    # A row of shared work may be steps of replica 0 alone: the line shows everybody.
    line = where_replicas_are(book.now())

    assert line == ("replicas at 3 2 1, gap 2, 5 groups, 1 conflict, waited for the mean 100 ms")
    book.numbers[1]["orphaned"] = 3.0
    assert ", 1 conflict, 3 without an answer, waited for" in where_replicas_are(book.now())


def test_the_progress_line_names_the_busiest_links() -> None:
    book = FleetBook(strategy="allreduce")
    book.ended(0, 0, [record(0, 0)])
    sent = {
        "0->1": {"activation": 1000, "control": 500},
        "1->2": {"replica": 2_000_000},
        "2->0": {"replica": 3000},
    }

    line = where_replicas_are(book.now(), sent)

    assert line.endswith("busiest of 3 links: 1->2 2.00 MB, 2->0 3.00 kB")


def test_the_progress_line_of_replicas_in_step_is_short() -> None:
    book = FleetBook(strategy="allreduce")
    assert where_replicas_are(book.now()) == ""

    for replica in range(3):
        book.ended(replica, 3, [record(replica, 3)])
    book.died(1, "replica 1 died")

    line = where_replicas_are(book.now())
    assert line == "2 replicas in step at 4, waited for the mean 100 ms"


def test_bytes_of_the_group_generator_are_counted_once_over_all_its_lives() -> None:
    book = FleetBook(strategy="ripples")
    life = {"groups": 1.0, "pid": 1}

    book.heard_generator({**life, "epoch": 0, "sent": {"8->0": {"control": 70}}})
    assert book.take_sent() == {"8->0": {"control": 70}}
    book.heard_generator({**life, "epoch": 0, "sent": {"8->0": {"control": 100}}})
    book.heard_generator({**life, "epoch": 900, "sent": {"8->0": {"control": 40}}})

    assert book.take_sent() == {"8->0": {"control": 30 + 40}}
    assert book.take_sent() == {}
