"""What the replicas of an arm did, for the progress line, the table and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_pipe.ledger import Sent
from stages.record import StepRecord


@dataclass(kw_only=True)
class FleetBook:
    """Fed by the driver, step by step; read at any time."""

    strategy: str
    iterations: dict[int, int] = field(default_factory=dict)
    """Steps that each replica has ended, skipped ones included."""

    largest_gap: int = 0
    """Most iterations that two replicas were ever apart when a step ended."""

    events: list[str] = field(default_factory=list)
    dead: dict[int, int] = field(default_factory=dict)
    """Replicas that died, and in which iteration."""

    joined: dict[int, int] = field(default_factory=dict)
    generator: dict[str, float] = field(default_factory=dict)
    """The Group Generator's counters, over all its lives."""

    _life: int = 0
    _before: Counter[str] = field(default_factory=Counter)
    _heard: Sent = field(default_factory=dict)
    """Bytes that the Group Generator has sent in this life, as far as they were counted."""

    _uncounted: Sent = field(default_factory=dict)

    fp32_nbytes: Counter[str] = field(default_factory=Counter)
    """What tensors of each kind would have taken in fp32."""

    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The latest of each leader."""

    def ended(self, replica: int, step: int, records: Sequence[StepRecord]) -> None:
        """A replica has ended a step, or skipped it."""
        self.iterations[replica] = step + 1
        alive = [k for other, k in self.iterations.items() if other not in self.dead]
        self.largest_gap = max(self.largest_gap, max(alive) - min(alive))
        for record in records:
            self.fp32_nbytes["replica"] += int(record.sync.get("fp32_bytes", 0))
            for edge, seen in record.codec.items():
                source, _, target = edge.partition("->")
                kind = "activation" if int(source) < int(target) else "gradient"
                self.fp32_nbytes[kind] += int(seen.get("fp32_bytes", 0))
        self.numbers[replica] = dict(records[0].sync)

    def died(self, replica: int, text: str) -> None:
        """A replica is gone."""
        self.dead[replica] = self.iterations.get(replica, 0)
        self.events.append(text)

    def came(self, replica: int, since: int, text: str) -> None:
        """A replica takes part from iteration `since` on."""
        self.dead.pop(replica, None)
        self.joined[replica] = since
        self.iterations[replica] = since
        self.events.append(text)

    def heard_generator(self, stats: dict[str, Any]) -> bool:
        """The Group Generator's counters; whether it has been restarted since they were heard."""
        own = {k: float(v) for k, v in stats.items() if k not in ("epoch", "pid", "sent")}
        reborn = bool(stats["epoch"] != self._life)
        if reborn:
            self._before = Counter(self.generator)
            self._life = stats["epoch"]
            self._heard = {}
            self.events.append(
                "the Group Generator was restarted, empty; replicas went on alone meanwhile"
            )
        total = Counter(self._before)
        for name, value in own.items():
            total[name] += value  # type: ignore[assignment]
        self.generator = dict(total)
        for link, kinds in stats.get("sent", {}).items():
            before = self._heard.get(link, {})
            into = self._uncounted.setdefault(link, {})
            for kind, nbytes in kinds.items():
                into[kind] = into.get(kind, 0) + nbytes - before.get(kind, 0)
            self._heard[link] = dict(kinds)
        return reborn

    def take_sent(self) -> Sent:
        """What the Group Generator has sent and nobody has counted yet; it is counted once."""
        sent, self._uncounted = self._uncounted, {}
        return sent

    def now(self) -> dict[str, Any]:
        """For the row of a step: where all living replicas are, and what they did so far."""
        alive = {r: k for r, k in sorted(self.iterations.items()) if r not in self.dead}
        numbers = [self.numbers[replica] for replica in alive if replica in self.numbers]
        waits: Counter[str] = Counter()
        for one in numbers:
            waits.update(one.get("waited", {}))
        found: dict[str, Any] = {
            "iterations": alive,
            "gap": max(alive.values()) - min(alive.values()) if alive else 0,
            "largest_gap": self.largest_gap,
            "skipped": sum(int(one.get("skipped", 0)) for one in numbers),
            "waited_s": {cause: s / len(numbers) for cause, s in waits.items()},
        }
        if self.generator:
            for name in ("groups", "conflicts"):
                found[name] = int(self.generator.get(name, 0))
            found["orphaned"] = sum(int(one.get("orphaned", 0)) for one in numbers)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The arm's entry `replicas` of results.json."""
        waits: Counter[str] = Counter()
        for numbers in self.numbers.values():
            waits.update(numbers.get("waited", {}))
        return {
            "strategy": self.strategy,
            "num_replicas": len(self.iterations),
            "largest_gap": self.largest_gap,
            "waited_s": dict(waits),
            "skipped": sum(int(n.get("skipped", 0)) for n in self.numbers.values()),
            "interrupted": sum(int(n.get("interrupted", 0)) for n in self.numbers.values()),
            "orphaned": sum(int(n.get("orphaned", 0)) for n in self.numbers.values()),
            "generator": dict(self.generator),
            "fp32_bytes": dict(self.fp32_nbytes),
            "events": list(self.events),
            "members": [
                {
                    "replica": replica,
                    "iteration": iteration,
                    "run": int(self.numbers.get(replica, {}).get("run", 0)),
                    "skipped": int(self.numbers.get(replica, {}).get("skipped", 0)),
                    "waited_s": dict(self.numbers.get(replica, {}).get("waited", {})),
                    "numbers": {
                        name: value
                        for name, value in self.numbers.get(replica, {}).items()
                        if isinstance(value, float)
                    },
                    "died_at": self.dead.get(replica),
                    "joined_at": self.joined.get(replica),
                }
                for replica, iteration in sorted(self.iterations.items())
            ],
        }
