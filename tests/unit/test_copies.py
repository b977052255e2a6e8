"""Who copies and who writes are two threads, and either may come first."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest

from stages.copies import Copies


class Taker(Thread):
    """Takes a copy in a thread of its own."""

    def __init__(self, copies: Copies[str], key: str) -> None:
        super().__init__(daemon=True)
        self._copies, self._key = copies, key
        self.found: Any = "nothing yet"
        self.start()
        with copies._changed:  # it waits by then, or has not begun: either is right
            pass

    def run(self) -> None:
        try:
            self.found = self._copies.take(self._key)
        except Exception as error:
            self.found = error

    def end(self) -> Any:
        self.join(20.0)
        assert not self.is_alive(), "it waits for ever"
        return self.found


def test_a_copy_that_is_there_is_taken_once() -> None:
    copies: Copies[str] = Copies()
    copies.put("a", "state a")
    copies.put("b", "state b")

    assert (copies.take("a"), copies.take("b"), len(copies)) == ("state a", "state b", 0)


def test_who_writes_waits_for_who_copies() -> None:
    copies: Copies[str] = Copies()
    taker = Taker(copies, "a")
    copies.put("a", "state a")

    assert taker.end() == "state a"


def test_what_could_not_be_copied_is_told_to_who_writes() -> None:
    copies: Copies[str] = Copies()
    copies.put("a", ValueError("it has committed step 0, not 1"))

    with pytest.raises(ValueError, match="step 0, not 1"):
        copies.take("a")
    assert len(copies) == 0


def wait_until_it_waits(copies: Copies[str]) -> None:
    while not copies._changed._waiters:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("deed", ["a later copy comes", "all is forgotten"])
def test_nobody_waits_for_ever_for_a_copy_that_will_not_come(deed: str) -> None:
    copies: Copies[str] = Copies()
    taker = Taker(copies, "a")
    wait_until_it_waits(copies)
    if deed == "a later copy comes":
        copies.put("b", "state b")
    else:
        assert copies.clear() == []

    assert "it was not copied" in str(taker.end())
    assert len(copies) == (deed == "a later copy comes")


def test_what_is_forgotten_is_handed_out_to_be_closed() -> None:
    copies: Copies[str] = Copies()
    copies.put("a", "state a")
    copies.put("b", ValueError("no"))

    assert copies.clear() == ["state a"]
    assert len(copies) == 0


def test_a_copy_that_is_there_outlives_the_word_that_there_is_none() -> None:
    copies: Copies[str] = Copies()
    copies.put("a", "state a")
    for key in "ab":
        copies.put_if_missing(key, ValueError("stage 0 gave up"))

    assert copies.take("a") == "state a"
    with pytest.raises(ValueError, match="stage 0 gave up"):
        copies.take("b")


def test_what_comes_for_a_copy_that_was_given_up_disturbs_nobody_and_is_handed_back() -> None:
    """The driver gave it up when stage 0 died; stage 0's own order was still on its way."""
    copies: Copies[str] = Copies()
    copies.put_if_missing("a", ValueError("stage 0 is gone"))
    with pytest.raises(ValueError, match="stage 0 is gone"):
        copies.take("a")
    taker = Taker(copies, "b")
    wait_until_it_waits(copies)

    assert copies.put("a", "state a") is False
    copies.put_if_missing("a", ValueError("stage 0 is gone"))
    assert copies.put("b", "state b") is True
    assert taker.end() == "state b"
    assert len(copies) == 0
