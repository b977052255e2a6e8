"""What AC-SGD's rows need on each node, and who is refused for want of it."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_pipe import doctor_probe
from ray_pipe.config import ConfigError, RunConfig, check_memory, check_memory_cap
from ray_pipe.data import Order
from ray_pipe.plans import arms_of
from ray_pipe.row_memory import ROWS_IN_LOG, Room, expected_hits, memory_need, rooms_of
from ray_pipe.workload import blocks_workload, output_sizes
from stages import box_places, room
from stages.loss import cross_entropy


def here(memory_nbytes: int, **more: Any) -> list[Room]:
    """All four stages on one node."""
    return [Room(node="10.0.0.1", stages=(0, 1, 2, 3), memory_nbytes=memory_nbytes, **more)]


def test_rows_need_what_the_formula_says() -> None:
    config = RunConfig()  # gpt-tiny: 128 tokens of 128 channels, 4 stages, bf16

    assert memory_need(config, 1000) == 2 * 3 * 1000 * 128 * 128 * 2
    assert memory_need(config.with_overrides(["codec.rows=fp32"]), 1000) == 393_216_000
    assert memory_need(config.with_overrides(["codec.rows=int8"]), 1000) == 6000 * (16384 + 256)
    assert memory_need(config.with_overrides(["codec.memory_cap=1MB"]), 1000) == 6_000_000
    assert memory_need(config.with_overrides(["codec=directq"]), 1000) == 0
    assert memory_need(config.with_overrides(["pipeline.stages=1"]), 1000) == 0
    assert memory_need(config, 1000, row_elements=10) == 120_000


def test_too_little_memory_is_refused_with_the_node_the_need_and_the_flags_that_lower_it() -> None:
    config = RunConfig()

    with pytest.raises(ConfigError) as caught:
        check_memory(config, 1_000_000, here(8_000_000_000))

    assert str(caught.value) == (
        "node 10.0.0.1 (stages 0, 1, 2, 3): acsgd remembers 1000000 samples at 6 ends of links "
        "there and needs 197GB, but only 8GB of memory are available; lower it with --set "
        "codec.memory_cap=666MB, --set codec.rows=int8, --set codec.spill_dir=FOLDER, or --codec "
        "directq, which remembers nothing."
    )
    check_memory(config, 1_000_000, here(memory_need(config, 1_000_000)))
    check_memory(config.with_overrides(["codec=directq"]), 1_000_000, here(0))


def test_each_node_must_have_room_for_its_own_stages_and_for_no_others() -> None:
    end = 1000 * 128 * 128 * 2
    rooms = [
        Room(node="10.0.0.1", stages=(0,), memory_nbytes=end),
        Room(node="10.0.0.2", stages=(1, 2), memory_nbytes=4 * end),
        Room(node="10.0.0.3", stages=(3,), memory_nbytes=end),
    ]
    check_memory(RunConfig(), 1000, rooms)  # on one node it would be six times as much

    for index, words in enumerate(
        [r"\(stage 0\).* 1 end ", r"\(stages 1, 2\).* 4 ends ", "stage 3"]
    ):
        poor = [*rooms]
        poor[index] = Room(
            node=rooms[index].node,
            stages=rooms[index].stages,
            memory_nbytes=rooms[index].memory_nbytes - 1,
        )
        with pytest.raises(ConfigError, match=f"node 10.0.0.{index + 1} .*{words}"):
            check_memory(RunConfig(), 1000, poor)


def test_the_logs_of_black_boxes_count_where_they_lie(tmp_path: Path) -> None:
    config, rows = RunConfig(), memory_need(RunConfig(), 1000)
    check_memory(config, 1000, here(rows))
    check_memory(config, 1000, here((1 + ROWS_IN_LOG) * rows, log_in="memory"))
    with pytest.raises(ConfigError, match=r"with the logs of their black boxes.*black_box=FOLDER"):
        check_memory(config, 1000, here((1 + ROWS_IN_LOG) * rows - 1, log_in="memory"))

    spilled = config.with_overrides([f"codec.spill_dir={tmp_path}", "codec.spill_ram=1MB"])
    full = (1 + ROWS_IN_LOG) * rows
    check_memory(spilled, 1000, here(6_000_000, spill_nbytes=full, log_in="spill"))
    with pytest.raises(ConfigError, match=f"are free in {tmp_path}"):
        check_memory(spilled, 1000, here(6_000_000, spill_nbytes=full - 1, log_in="spill"))
    with pytest.raises(ConfigError, match="of memory are available"):
        check_memory(spilled, 1000, here(5_999_999, spill_nbytes=full, log_in="spill"))


def test_the_driver_counts_a_logs_rows_as_the_stages_do() -> None:
    assert ROWS_IN_LOG == box_places.ROWS_IN_LOG


def test_nodes_are_told_by_what_their_stages_found() -> None:
    def info(node: str, memory: int, log_in: str = "") -> dict[str, Any]:
        found = {"memory_nbytes": memory, "spill_nbytes": None, "log_in": log_in}
        return {"node": node, "room": found}

    infos = [info("a", 7), info("a", 5, "memory"), info("b", 9), info("b", 9)]

    assert rooms_of(infos, num_stages=2, addresses={"a": "10.0.0.1"}) == [
        Room(node="10.0.0.1", stages=(0, 1), memory_nbytes=5, log_in="memory"),
        Room(node="b", stages=(0, 1), memory_nbytes=9),  # the second replica
    ]


def test_the_memory_cap_that_the_message_names_is_enough() -> None:
    config = RunConfig().with_overrides(["codec.memory_cap=666MB"])

    check_memory(config, 1_000_000, here(8_000_000_000))


def test_a_memory_cap_that_holds_too_little_is_warned_of_with_numbers() -> None:
    def warnings(cap: str, **more: Any) -> list[str]:
        return check_memory_cap(RunConfig(**more).with_overrides([f"codec.memory_cap={cap}"]), 640)

    assert warnings("1MB") == [
        "codec.memory_cap=1MB holds 30 of 640 samples (32.8kB each, one step has 64): not even "
        "those of one step, so that about 0 % of the visits find their row and all others are sent "
        "as first visits of 8 bits; 21MB hold all, or keep them on disk with codec.spill_dir."
    ]
    assert "holds 320 of 640 samples" in warnings("10500kB")[0]
    assert "the last ones, so that about 15 % of the visits" in warnings("10500kB")[0]
    assert warnings("20MB") == []
    assert warnings("1MB", compare=("fp32", "directq")) == []
    assert check_memory_cap(RunConfig(), 640) == []


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
def test_expected_hits_are_those_of_least_recently_used_rows_under_shuffles(share: float) -> None:
    order = Order(num_samples=400, micro_batches=1, micro_batch_size=1, seed=0)
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for step in range(12 * 400):
        ((sample,),) = order.at(step)
        hits += step >= 400 and sample in held
        held.pop(sample, None)
        held[sample] = None
        if len(held) > share * 400:
            held.popitem(last=False)

    assert hits / (11 * 400) == pytest.approx(expected_hits(share), abs=0.02)


def test_spilled_rows_need_disk_instead_of_memory(tmp_path: Path) -> None:
    config = RunConfig().with_overrides([f"codec.spill_dir={tmp_path / 'new'}"])

    check_memory(config, 100, here(10**9, spill_nbytes=10**9))
    with pytest.raises(ConfigError, match=f"are free in {tmp_path}"):
        check_memory(config, 10**12, here(10**18, spill_nbytes=10**9))


class Pictures:
    """Samples that are wider than the settings' model."""

    digest = "pictures"

    def __len__(self) -> int:
        return 64

    def batch(self, ids: Any) -> Any:
        from ray_pipe.data import Batch

        return Batch(
            inputs=torch.zeros(len(ids), 8), targets=torch.zeros(len(ids), dtype=torch.long)
        )


def wide_blocks() -> list[nn.Module]:
    return [nn.Linear(8, 4096), nn.Dropout(0.1), nn.Linear(4096, 1 << 19), nn.Linear(1 << 19, 2)]


def test_a_models_own_rows_are_counted_by_their_own_size_and_nothing_is_computed() -> None:
    samples: Any = Pictures()
    before = torch.get_rng_state()
    with torch.device("meta"):  # two gigabytes otherwise
        work = blocks_workload(wide_blocks(), loss=cross_entropy, samples=samples, seed=0)
    config = RunConfig.from_dict({"compare": [], "codec.name": "acsgd", "pipeline.stages": 2})
    (arm,) = arms_of(config, work)

    assert work.outputs == (4096, 4096, 1 << 19, 2)
    assert arm.row_elements == work.outputs[work.cuts(2)[0].stop - 1] == 1 << 19
    assert arm.specs()[0].rows_nbytes == 2 * 64 * (1 << 19) * 2  # 134 MB, not the settings' 4
    assert torch.equal(before, torch.get_rng_state())


def test_a_block_that_looks_at_values_gives_no_sizes() -> None:
    class Looks(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * value.sum().item()

    samples: Any = Pictures()

    assert output_sizes([Looks()], samples) == ()


def test_the_probes_copy_of_the_memory_question_is_the_stages() -> None:
    ours = inspect.getsource(room.free_memory_nbytes)

    assert inspect.getsource(doctor_probe.free_memory_nbytes) == ours


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /mnt/my\\040disk tmpfs rw 0 0
/dev/vdb /mnt/my\\040disk xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/home/x", "ext4"), ("/dev/shm/boxes/a", "tmpfs"), ("/dev/shmx", "ext4"),
     ("/mnt/my disk/rows", "xfs")],
)  # fmt: skip
def test_what_kind_of_disk_a_path_is_on(path: str, kind: str) -> None:
    assert room.file_system(Path(path), mounts=MOUNTS) == kind


def test_a_stage_tells_what_its_node_has(tmp_path: Path) -> None:
    found = room.room_for(spill=str(tmp_path / "rows"), log=tmp_path / "box")

    assert found["memory_nbytes"] > 0
    assert found["spill_nbytes"] > 0
    assert found["log_in"] in ("spill", "memory")  # /tmp may be memory
    assert room.room_for(spill=None, log=None)["log_in"] == ""
