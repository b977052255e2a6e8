"""The report's section on replicas: where each one is, what it waited for, what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_pipe.replica_table import fate, sentence, show_shrunk, show_waits
from ray_pipe.report_markup import MISSING, Markup, table, tag
from ray_pipe.report_page import section
from stages.record import KINDS


def replicas_section(arms: Sequence[Mapping[str, Any]]) -> Markup:
    """Nothing where there is one replica."""
    arms = [arm for arm in arms if arm.get("replicas")]
    if not arms:
        return Markup("")
    members = [
        (
            f"{arm['name']} · replica {member['replica']}",
            str(member["iteration"]),
            str(member["run"]),
            str(member["skipped"]),
            show_waits(member["waited_s"]) or MISSING,
            fate(member),
        )
        for arm in arms
        for member in arm["replicas"]["members"]
    ]
    used = [k for k in KINDS if any((arm.get("bytes_total") or {}).get(k) for arm in arms)]
    sent = [(str(arm["name"]), *(show_shrunk(arm, kind) for kind in used)) for arm in arms]
    return section(
        "Replicas",
        table(
            ("replica", "iteration", "steps run", "skipped", "waited for", ""),
            members,
            caption="Where each replica came to, and what it waited for besides computing.",
        ),
        table(("arm", *used), sent, caption="Bytes by kind; in fp32 they would have been more."),
        *(tag("p", sentence(arm), class_="note") for arm in arms),
        *(
            tag("p", tag("b", str(arm["name"])), " ", event, class_="note")
            for arm in arms
            for event in arm["replicas"]["events"]
        ),
        explain="Copies of the pipeline, each on its own share of the samples. In the pictures and "
        "tables of links, stage s of replica r is numbered r times the number of stages plus s; "
        "the last number is the Group Generator’s.",
    )
