"""Small messages: matched by turn, repeated when asked, never confused with older ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compressors.frame import FrameHeader, unpack
from netsim.clock import run_virtual
from stages.control import Control
from stages.ends import StageTimeout
from stages.plan import Turn

NOW = Turn(0, 5, 0)


class Pair:
    """Two stages whose links lose what `lose` says."""

    def __init__(self, lose: set[int] | None = None) -> None:
        self.lose = lose or set()
        self.count = 0
        self.requests: list[FrameHeader] = []
        self.ends = [self._make(0), self._make(1)]
        for end in self.ends:
            end.begin(NOW)

    def _make(self, index: int) -> Control:
        pair = self

        class Line:
            def send(self, frame: Any, *, kind: str) -> None:
                assert kind == "control"
                pair.count += 1
                if pair.count not in pair.lose:
                    loop = asyncio.get_running_loop()
                    loop.call_later(0.1, pair.ends[1 - index].on_message, unpack(frame)[0])

        links: Any = {1 - index: Line()}
        return Control(index=index, links=links, on_request=self.requests.append)


def hear(pair: Pair, op: str = "go", turn: Turn = NOW, deadline_s: float = 8.0, **k: Any) -> Any:
    return pair.ends[1].hear(op, turn, source=0, deadline_s=deadline_s, **k)


def test_a_message_is_heard_whether_it_came_before_or_comes_after() -> None:
    async def main() -> None:
        pair = Pair()
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 0.5})
        await asyncio.sleep(1)
        assert (await hear(pair))["factor"] == 0.5
        asyncio.get_running_loop().call_later(
            1, pair.ends[0].tell, 1, NOW, {"op": "norms", "sums": [1.5]}
        )
        assert (await hear(pair, "norms"))["sums"] == (1.5,)

    run_virtual(main())


def test_a_lost_message_is_asked_for_and_repeated() -> None:
    async def main() -> None:
        pair = Pair(lose={1})
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 0.5})

        assert (await hear(pair))["factor"] == 0.5
        assert asyncio.get_running_loop().time() == pytest.approx(1.2)
        assert pair.ends[0].events == ["stage 0: 'go' of step 5 was told to stage 1 again"]

    run_virtual(main())


def test_lost_questions_and_lost_answers_are_asked_again() -> None:
    async def main() -> None:
        pair = Pair(lose={1, 2, 4, 5})
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 0.5})

        assert (await hear(pair))["factor"] == 0.5
        assert len(pair.ends[0].events) == 2

    run_virtual(main())


def test_who_never_answers_is_named_after_the_deadline() -> None:
    async def main() -> None:
        pair = Pair()
        with pytest.raises(
            StageTimeout,
            match=r"stage 1 waited 8.0 s for 'go' of step 5 from stage 0; .* raise `deadline_s`",
        ):
            await hear(pair)
        assert asyncio.get_running_loop().time() == pytest.approx(8.0)

    run_virtual(main())


def test_a_message_that_follows_many_waits_has_as_many_deadlines() -> None:
    async def main() -> None:
        pair = Pair()
        loop = asyncio.get_running_loop()
        loop.call_later(30, pair.ends[0].tell, 1, NOW, {"op": "seen"})
        await hear(pair, "seen", num_deadlines=4)

        with pytest.raises(StageTimeout, match=r"waited 24\.0 s for 'go'"):
            await hear(pair, num_deadlines=3)
        assert loop.time() == pytest.approx(30.1 + 24)

    run_virtual(main())


def test_messages_of_earlier_turns_are_dropped_and_of_later_ones_kept() -> None:
    async def main() -> None:
        pair = Pair()
        later = Turn(0, 6, 0)
        for turn in (Turn(0, 4, 0), later):
            pair.ends[0].tell(1, turn, {"op": "go", "factor": turn.step})
        await asyncio.sleep(1)
        assert list(pair.ends[1]._heard) == [("go", later)]
        pair.ends[1].begin(later)

        assert (await hear(pair, turn=later))["factor"] == 6

    run_virtual(main())


def test_a_repeat_that_comes_late_leaves_nothing_behind() -> None:
    async def main() -> None:
        pair = Pair()
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 1.0})
        await hear(pair)
        pair.ends[1].begin(Turn(0, 6, 0))
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 1.0})
        await asyncio.sleep(1)

        assert pair.ends[1]._heard == {}

    run_virtual(main())


def test_an_old_answer_is_still_to_be_had_by_who_missed_it() -> None:
    async def main() -> None:
        pair = Pair(lose={1})
        pair.ends[0].tell(1, NOW, {"op": "go", "factor": 0.25})
        later = Turn(1, 6, 0)
        for end in pair.ends:
            end.begin(later)

        assert (await hear(pair, ask_first=True))["factor"] == 0.25

    run_virtual(main())


def test_only_the_turn_that_was_asked_for_is_repeated() -> None:
    async def main() -> None:
        pair = Pair()
        pair.ends[0].tell(1, Turn(0, 4, 0), {"op": "go", "factor": 1.0})
        with pytest.raises(StageTimeout):
            await hear(pair, ask_first=True)

    run_virtual(main())


def test_requests_for_frames_go_to_the_edges() -> None:
    async def main() -> None:
        pair = Pair()
        pair.ends[1].request(0, NOW, {"op": "nack", "seq": 3, "kind": "activation"})
        await asyncio.sleep(1)

        assert [dict(header.body) for header in pair.requests] == [
            {"op": "nack", "seq": 3, "kind": "activation"}
        ]

    run_virtual(main())


@pytest.mark.parametrize("body", [{}, {"op": 3}, {"op": "again"}, {"op": "again", "what": "x"}])
def test_a_message_that_makes_no_sense_does_no_harm(body: dict[str, Any]) -> None:
    async def main() -> None:
        pair = Pair()
        header = FrameHeader(kind="control", source=0, target=1, step=5, body=body)
        pair.ends[1].on_message(header)
        await asyncio.sleep(1)

        assert pair.count == 0

    run_virtual(main())
