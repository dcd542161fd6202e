"""Random programs: what ranks that agree about nothing hand over, and a plain model of each rank."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

import everyrank

NAMES = ("a", "b", "c/d", "w", "t")
STATS = ("mean", "max", "min", "std", "p50", "max_rank", "min_rank")
ODD = (
    *(math.nan, math.inf, -math.inf, 0, 3, True, False, 2**53 + 1, 2**70, -(10**400), None),
    *("a text", "", [1, 2, 3], [], np.array([[1.0, math.nan]]), np.float32(0.1), np.int64(-7)),
)


class Model:
    """What a rank has told its History, by the rules of the documentation and no other."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, dict[str, Any]]] = []  # step, generation, values
        self.closed = False
        self._rewinds: list[tuple[int, int]] = []  # (rows before it, the step it went back to)
        self._notes: dict[str, Any] = {}
        self._reached: dict[str, int] = {}  # the step that each name has come to
        self._last: int | None = None

    def note(self, name: str, value: Any) -> None:
        if not self.closed:
            self._notes[name] = value

    def update(self, values: dict[str, Any], step: int | None) -> None:
        if self.closed:
            return
        values, self._notes = {**self._notes, **values}, {}
        own = values.pop("step", None)
        self._place(own if step is None else step, values)

    def close(self) -> None:
        if self._notes:
            self.update({}, None)
        self.closed = True

    def live(self, name: str) -> list[tuple[int, Any]]:
        """Give step and value of every row of a name that no later one supersedes."""
        seen: list[tuple[int, Any]] = []
        rewinds = dict(self._rewinds)
        for i, (step, _, values) in enumerate(self.rows):
            if i in rewinds:
                seen = [each for each in seen if each[0] < rewinds[i]]
            if name in values:
                seen = [each for each in seen if each[0] < step]
                seen.append((step, values[name]))
        return seen

    def _place(self, step: int | None, values: dict[str, Any]) -> None:
        last = self._last
        here = {name for name, reached in self._reached.items() if reached == last}
        if step is None:
            step = 0 if last is None else last + bool(here & values.keys())
        if last is None or step > last:
            self._last = step
        elif step < last and here & values.keys():
            self._last = step
            self._rewinds.append((len(self.rows), step))
            self._reached = {name: at for name, at in self._reached.items() if at < step}
        self._reached |= dict.fromkeys(values, step)
        self.rows.append((step, len(self._rewinds), values))


def value(rng: random.Random, name: str) -> Any:
    """Give a value; most are numbers that no other row has."""
    if name == "w":
        return rng.choice([0, 1, 2, 0.5, 3])
    if rng.random() < 0.25:
        return rng.choice(ODD)
    return rng.randrange(-(10**9), 10**9) / 1024


def program(rng: random.Random, most: int) -> list[tuple[Any, ...]]:
    """Make the calls of one rank."""
    step, calls = 0, []
    every = rng.choice([1, 1, 2, 5])  # steps between two updates, where they are given
    counted = rng.random() < 0.3
    for _ in range(rng.randrange(most + 1)):
        names = rng.sample(NAMES, rng.randrange(len(NAMES) + 1))
        values = {name: value(rng, name) for name in names}
        step += every
        if rng.random() < 0.08:
            step = rng.randrange(step + 1)
        given = None if counted or rng.random() < 0.1 else step
        if given is not None and rng.random() < 0.1:
            values["step"], given = given, None
        calls.append(("update", values, given))
        if rng.random() < 0.1:
            calls.append(("note", "n", value(rng, "n")))
        if rng.random() < 0.1:
            calls.append((rng.choice(["flush", "read", "print", "health"]),))
    if rng.random() < 0.1:
        calls.insert(rng.randrange(len(calls) + 1), ("close",))
    calls += [(end,) for end in rng.choices(["flush", "close", "finalize"], k=rng.randrange(3))]
    return calls


def play(history: everyrank.History, model: Model, what: str, *about: Any) -> None:
    """Make one call, and tell the model of it."""
    if what == "update":
        history.update(about[0].copy(), step=about[1])
        model.update(*about)
    elif what == "note":
        history.note(*about)
        model.note(*about)
    elif what == "flush":
        history.flush(0.05)
    elif what == "read":
        len(history)
    elif what == "print":
        str(history.update({"a": 0.5}))
        model.update({"a": 0.5}, None)
    elif what == "health":
        history.health()
    elif what == "close":
        history.close(30)
        model.close()
    else:
        history.finalize()
        model.close()


def several(rank: int, outdir: str, seeds: list[str]) -> list[Any]:
    """Play a random program for each seed, and give what the rank told and what it then saw."""
    seen = []
    for seed in seeds:
        common = random.Random(seed)
        weighted = common.random() < 0.5
        model, rng = Model(), random.Random(f"{seed} on rank {rank}")
        history = everyrank.History(
            outdir=f"{outdir}/{seed}",
            sync_every=rng.randrange(1, 8),
            stats=STATS,
            timeout=common.choice([0.3, 2.0]),
            per_rank=True,
        )
        if weighted:
            history.declare("a", weight="w")
        for call in program(rng, 30):
            play(history, model, *call)
        delivered = history.close(30)
        model.close()
        seen.append((model, history.history, history.health(), delivered, weighted))
    return seen
