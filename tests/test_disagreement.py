"""Ranks that agree about nothing: random programs, checked against a plain model and numpy."""

from __future__ import annotations

import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import disagreement_programs as programs
import numpy as np
from disagreement_programs import STATS, Model
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank import History, jsonlines
from everyrank.ranks.local import in_process
from everyrank.records import STATISTIC, Record
from everyrank.testing import MemoryBackend, run_ranks

#: The numbers that a rank handed over at one step; rows of texts alone have no part in anything.
Row = tuple[int, dict[str, float]]


def same(a: Any, b: Any) -> bool:
    """Say whether two values are equal, where NaN is equal to itself."""
    if any(isinstance(each, np.ndarray | list) for each in (a, b)):
        return np.array_equal(np.asarray(a, float), np.asarray(b, float), equal_nan=True)
    return bool(a == b or (a != a and b != b))


def log_of(directory: Path, rank: int | None = None) -> list[Record]:
    """Read the run's log, or that of one rank, in which no line may be broken."""
    pattern = "*.jsonl" if rank is None else f"ranks/rank-{rank:05d}.jsonl"
    problems: list[jsonlines.Problem] = []
    records = [
        r for path in directory.glob(pattern) for r in jsonlines.read(path, problems=problems)
    ]
    assert problems == []
    return records


def split(record: Record) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Give a rank's own values, and the statistics of each name."""
    own: dict[str, Any] = {}
    statistics: dict[str, dict[str, float]] = {}
    for name, value in record.values.items():
        if match := STATISTIC.search(name):
            statistics.setdefault(name[: match.start()], {})[match[1]] = value
        else:
            own[name] = value
    return own, statistics


# ------------------------------------------------------------------------------ own rows


def check_rows(records: Sequence[Record], model: Model) -> None:
    """See that all that a rank told stands in a log, in order, each row once."""
    found = [(r.step, r.generation, own) for r in records if (own := split(r)[0])]
    expected = [row for row in model.rows if row[2]]
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (*_, mine), (*_, theirs) in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(same(mine[name], theirs[name]) for name in mine), (mine, theirs)


def check_live(seen: dict[str, list[Any]], model: Model) -> None:
    """See that a rank reads back what it told, without what was superseded."""
    for name in (*programs.NAMES, "n"):
        expected = [value for _, value in model.live(name)]
        values = seen.get(name, [])
        assert len(values) == len(expected), name
        assert all(map(same, values, expected)), (name, values, expected)


# ------------------------------------------------------------------------------ statistics


def numbers(records: Sequence[Record]) -> list[Row]:
    """Give the rows of one rank that have a part in statistics."""
    rows = []
    for record in records:
        row = {
            n: as_float(v) for n, v in record.values.items() if isinstance(v, bool | int | float)
        }
        if row:
            rows.append((record.step, row))
    return rows


def as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def recomputed(values: Any, ranks: Sequence[int], weights: Any) -> dict[str, float]:
    """Give the statistics of one name over some ranks."""
    with np.errstate(all="ignore"):
        mean = np.where(weights == 0, 0.0, weights * values).sum() / weights.sum()
        return {
            "mean": mean,
            "max": values.max(),
            "min": values.min(),
            "std": values.std(),
            "p50": np.quantile(values, 0.5),
            "max_rank": ranks[int(np.argmax(values))],
            "min_rank": ranks[int(np.argmin(values))],
        }


def explains(
    parts: dict[int, dict[str, float]],
    statistics: dict[str, dict[str, float]],
    world: int,
    weighted: bool,
) -> bool:
    """Say whether a record's statistics are those over just these rows."""
    if {name for row in parts.values() for name in row} != statistics.keys():
        return False
    for name, found in statistics.items():
        ranks = [rank for rank, row in parts.items() if name in row]
        values = np.array([parts[rank][name] for rank in ranks])
        weights = np.ones(len(ranks))
        if weighted and name == "a" and any("w" in parts[rank] for rank in ranks):
            weights = np.array([parts[rank].get("w", 0.0) for rank in ranks])
        expected = recomputed(values, ranks, weights)
        if len(ranks) != world:
            expected["ranks"] = len(ranks)
        if nonfinite := int((~np.isfinite(values)).sum()):
            expected["nonfinite"] = nonfinite
        scale = np.abs(values, where=np.isfinite(values), out=np.zeros(len(values))).max()
        if found.keys() != expected.keys():
            return False
        if not all(near(found[stat], value, scale) for stat, value in expected.items()):
            return False
    return True


def near(found: float, expected: float, scale: float) -> bool:
    if not (math.isfinite(found) and math.isfinite(expected)):
        return same(found, float(expected))
    return abs(found - expected) <= 1e-9 * scale


def unused(records: Sequence[Record], rows: Sequence[list[Row]], weighted: bool) -> int | None:
    """Find rows whose statistics are those of the log, each used once and in order.

    Give the number of rows that have a part in no statistics; None if no rows explain the log.
    """
    lines = [(r.step, statistics) for r in records if (statistics := split(r)[1])]

    def search(line: int, at: tuple[int, ...]) -> int | None:
        if line == len(lines):
            return 0
        step, statistics = lines[line]
        choices = []
        for mine, first in zip(rows, at, strict=True):
            here = [i for i in range(first, len(mine)) if mine[i][0] == step]
            choices.append([*here[:3], None])
        for picks in product(*choices):
            parts = {r: rows[r][i][1] for r, i in enumerate(picks) if i is not None}
            if explains(parts, statistics, len(rows), weighted):
                after = tuple(old if i is None else i + 1 for old, i in zip(at, picks, strict=True))
                if (rest := search(line + 1, after)) is not None:
                    return rest - len(parts)
        return None

    used = search(0, (0,) * len(rows))
    return None if used is None else sum(map(len, rows)) + used


# ------------------------------------------------------------------------------ the laws


def together(works: Sequence[Callable[[], object]], seconds: float = 60.0) -> None:
    """Do everything at once, each on a thread of its own; raise what was raised, or that it hangs."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "it hangs"


def works(
    rng: random.Random, histories: Sequence[History], models: Sequence[Model]
) -> list[Callable[[], object]]:
    """Make programs that each play at their own pace, or one that plays all in random turns."""
    ranks = range(len(histories))
    calls = [programs.program(rng, 30) for _ in ranks]
    orders = [[rank] * len(calls[rank]) for rank in ranks]
    if rng.random() < 0.5:
        turns = [rank for order in orders for rank in order]
        rng.shuffle(turns)
        orders = [turns]
    queues = [iter(each) for each in calls]

    def work(order: Sequence[int]) -> None:
        for rank in order:
            programs.play(histories[rank], models[rank], *next(queues[rank]))

    return [partial(work, order) for order in orders]


def check(
    directory: Path, models: Sequence[Model], healths: Sequence[Any], *, weighted: bool, whole: bool
) -> None:
    """See that nothing failed, and that every number in every log is one that somebody told.

    `whole` says that the first rank heard the others to their end: then only what came late has no
    part in any statistics.
    """
    for health in healths:
        assert health["failures"] == 0
        assert all(backend["failures"] == 0 for backend in health["backends"].values())
    logs = [log_of(directory, rank) for rank in range(len(models))]
    for log, model in zip([log_of(directory), *logs], [models[0], *models], strict=True):
        check_rows(log, model)
    left = unused(log_of(directory), [numbers(log) for log in logs], weighted)
    assert left is not None, "a statistic is over no rows that there were"
    if whole:
        assert left <= healths[0].get("late_rows", 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_law_whatever_ranks_do_each_number_is_accounted_for(seed: int, world: int):
    """No program hangs or fails; every own value is there; every statistic is that of some rows."""
    rng = random.Random(seed)
    memory, models = MemoryBackend(), [Model() for _ in range(world)]
    weighted, timeout = rng.random() < 0.5, rng.choice([0.02, 0.2])
    with tempfile.TemporaryDirectory() as directory:
        histories = [
            History(
                outdir=directory,
                group=member,
                stats=STATS,
                sync_every=rng.randrange(1, 8),
                timeout=20,
                per_rank=True,
                backends=[memory],
            )
            for member in in_process(world, stats=STATS, timeout=timeout, grace=0.02)
        ]
        for history in histories if weighted else ():
            history.declare("a", weight="w")
        together(works(rng, histories, models))
        whole = not models[0].closed
        for history, model in reversed(list(zip(histories, models, strict=True))):
            together([history.close])
            model.close()
        healths = [history.health() for history in histories]
        check(Path(directory), models, healths, weighted=weighted, whole=whole)
        assert len(memory.records) == len(log_of(Path(directory)))
    for history, model in zip(histories, models, strict=True):
        check_live(history.history, model)


def test_law_the_same_over_processes(tmp_path):
    """Random programs over sockets: the same promises, with three real ranks."""
    seeds = [str(random.randrange(2**32)) for _ in range(12)]
    seen = run_ranks(
        programs.several, 3, str(tmp_path), seeds, backend=None, start_method="forkserver"
    )
    for seed, ranks in zip(seeds, zip(*seen, strict=True), strict=True):
        models = [model for model, *_ in ranks]
        for model, history, _, delivered, _ in ranks:
            assert delivered, seed
            check_live(history, model)
        healths = [health for _, _, health, _, _ in ranks]
        try:
            check(tmp_path / seed, models, healths, weighted=ranks[0][-1], whole=False)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
