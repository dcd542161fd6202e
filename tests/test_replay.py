"""A run read back from its files is the run that was written."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everyrank import jsonlines
from everyrank.backends.jsonl import Jsonl
from everyrank.columns import Columns
from everyrank.jsonlines import Problem
from everyrank.records import Batch, Record
from everyrank.replay import batches, fill

NUMBERS = {
    "float": st.one_of(st.floats(), st.integers(-3, 3).map(float)),
    "int": st.integers(-(2**53) + 1, 2**53 - 1).map(float),
    "bool": st.booleans().map(float),
}
WIDE = st.sampled_from([2**53, 2**53 + 1, -(2**60), 2**63, 2**70, 10**400])
BESIDE = st.one_of(
    st.none(), st.text(max_size=3), st.integers(1, 3).map(lambda n: np.arange(n) / 2)
)


@st.composite
def packed(draw: st.DrawFn) -> Batch:
    """Draw some rows as a window packs them: what is no number stands beside the columns."""
    names = tuple(draw(st.permutations("abcd")))[: draw(st.integers(0, 3))]
    kinds = tuple(draw(st.sampled_from(["float", "int", "int", "bool"])) for _ in names)
    rows = draw(st.integers(1, 5))
    columns = [draw(st.lists(NUMBERS[kind], min_size=rows, max_size=rows)) for kind in kinds]
    others = st.sampled_from([name for name in "abcdef" if name not in names])
    extras = draw(
        st.dictionaries(
            st.integers(0, rows - 1), st.dictionaries(others, BESIDE, min_size=1, max_size=2)
        )
    )
    for name, kind in zip(names, kinds, strict=True):
        if kind == "int" and draw(st.booleans()):
            extras.setdefault(draw(st.integers(0, rows - 1)), {})[name] = draw(WIDE)
    return Batch(
        np.array(draw(st.lists(st.integers(-3, 12), min_size=rows, max_size=rows)), np.int64),
        np.array(draw(st.lists(st.floats(), min_size=rows, max_size=rows))),
        names,
        np.array(columns).T.reshape(rows, len(names)),
        kinds,
        extras,
    )


def written(path: Path, *parts: Batch) -> Path:
    """Write batches as a run does."""
    path.unlink(missing_ok=True)
    log = Jsonl(path)
    for record in itertools.chain(*parts):
        log.write(record)
    log.close()
    return path


def as_plain(value: Any) -> Any:
    """Give a value as something that compares by value and by type, NaN included."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind, value.shape, list(map(repr, value.ravel().tolist()))
    return type(value), value if isinstance(value, int) else repr(value)


def everything(columns: Columns) -> Any:
    """Give all that columns can tell."""
    series = columns.all_series()
    return {
        "names": columns.names,
        "steps": columns.steps.tolist(),
        "series": [
            (n, s.steps.tolist(), s.values.dtype, list(map(as_plain, s.values.tolist())))
            for n, s in series.items()
        ],
        "rows": [
            [list(map(as_plain, part.tolist())) for part in columns.all_rows(name)]
            for name in columns.names
        ],
        "records": [
            (r.step, repr(r.time), r.generation, [(n, as_plain(v)) for n, v in r.values.items()])
            for r in columns.records()
        ],
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the file is written anew
)
@given(
    lives=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(-4, 12)), st.lists(packed(), max_size=4)),
        max_size=3,
    )
)
def test_law_the_columns_are_those_of_the_run(
    lives: list[tuple[int | None, list[Batch]]], tmp_path: Path
):
    """Whatever a run wrote in however many lives, its columns come back as they were."""
    direct, rows, generations = Columns(), [], []
    for generation, (after_step, parts) in enumerate(lives):
        generations.append({"generation": generation, "after_step": after_step})
        if after_step is not None and parts:
            direct.rewind(after_step)
        for part in parts:
            rows.append(replace(part, generation=generation))
            direct.append(rows[-1])
    path = written(tmp_path / "history.jsonl", *rows)
    replayed = Columns()
    fill(replayed, path, generations)
    assert everything(replayed) == everything(direct)
    # The batches hold the very records of the file, and runs of them that look alike.
    found = [record for batch in batches(path) for record in batch]
    expected = list(jsonlines.read(path))
    assert [as_values(record) for record in found] == [as_values(record) for record in expected]


def as_values(record: Record) -> Any:
    """Give a record as something that compares, its values by name in any order."""
    values = sorted((name, as_plain(value)) for name, value in record.values.items())
    return record.step, repr(record.time), record.generation, str(values)


def a_batch(steps: range, generation: int = 0, **values: float) -> Batch:
    """Make a batch in which each name has one value throughout."""
    kinds = {bool: "bool", int: "int", float: "float"}
    return Batch(
        np.array(steps, np.int64),
        np.zeros(len(steps)),
        tuple(values),
        np.tile(np.array(list(values.values()), float), (len(steps), 1)),
        tuple(kinds[type(value)] for value in values.values()),  # type: ignore[misc]
        generation=generation,
    )


def test_rows_that_look_alike_are_one_batch_of_a_bounded_size(tmp_path: Path):
    """Thousands of rows share a batch, and never more than fit into memory with ease."""
    path = written(tmp_path / "a.jsonl", a_batch(range(5000), loss=0.5, n=3, ok=True))
    assert [(len(b), b.names, b.kinds) for b in batches(path)] == [
        (4096, ("loss", "n", "ok"), ("float", "int", "bool")),
        (904, ("loss", "n", "ok"), ("float", "int", "bool")),
    ]
    many = {f"m{i}": 1.0 for i in range(20_000)}
    path = written(tmp_path / "b.jsonl", a_batch(range(30), **many))
    assert max(batch.numbers.size for batch in batches(path)) <= 1 << 18


def test_a_batch_ends_where_names_kinds_or_generation_change(tmp_path: Path):
    """A batch is of one set of names, one kind for each, and one generation."""
    parts = [
        a_batch(range(3), x=1.0),
        a_batch(range(3), x=1),
        a_batch(range(3), x=1, y=2),
        a_batch(range(3), y=2, x=1),
        a_batch(range(3), y=2, x=1, generation=1),
        a_batch(range(3), 1),
    ]
    found = list(batches(written(tmp_path / "a.jsonl", *parts)))
    assert [(b.names, b.kinds, b.generation, len(b)) for b in found] == [
        (p.names, p.kinds, p.generation, 3) for p in parts
    ]


def test_a_value_that_is_now_and_then_no_number_does_not_end_a_batch(tmp_path: Path):
    """None, NaN, texts and wide ints among numbers stand in the batch of their neighbours."""
    values = [1, None, 2**53 + 1, "many", -(2**70), 10**400, 2]
    path = tmp_path / "history.jsonl"
    with path.open("wb") as file:
        file.writelines(
            jsonlines.encode(Record(i, 0.0, {"loss": math.nan if i else 0.5, "n": n}))
            for i, n in enumerate(values)
        )
    (batch,) = batches(path)
    assert (batch.names, batch.kinds) == (("loss", "n"), ("float", "int"))
    assert [record.values["n"] for record in batch] == values
    assert sorted(batch.extras) == [1, 2, 3, 4, 5]


def test_a_checkpoint_supersedes_what_came_after_it(tmp_path: Path):
    """The rows of a generation supersede earlier ones past its step, as soon as there are some."""
    lives = [
        {"generation": 0, "after_step": None},
        {"generation": 1, "after_step": 3},
        {"generation": 2, "after_step": 0},
    ]
    path = tmp_path / "a.jsonl"
    written(path, a_batch(range(8), loss=0.5, lr=1.0), a_batch(range(4, 6), 1, loss=0.25))
    columns = Columns()
    fill(columns, path, lives)
    assert columns.series("loss").steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert columns.series("lr").steps.tolist() == [0, 1, 2, 3]
    without = Columns()
    fill(without, path)
    assert without.series("lr").steps.tolist() == list(range(8))


def test_foreign_lines_are_kept_as_they_are_or_told(tmp_path: Path):
    """Lists and objects of another program are extras, and lines that are no records are named."""
    path = tmp_path / "history.jsonl"
    path.write_bytes(
        b'{"step":0,"time":0,"a":[1,null],"b":{"c":1}}\n'
        b"nonsense\n"
        b'{"step":1,"time":0,"a":0.5,"b":null}\n'
        b'{"step":2,"ti'
    )
    problems: list[Problem] = []
    columns = Columns()
    fill(columns, path, problems=problems)
    assert list(columns.series("a")) == [[1, None], 0.5]
    assert list(columns.series("b")) == [{"c": 1}, None]
    assert [problem.line for problem in problems] == [2]


def test_an_empty_log_has_no_batches(tmp_path: Path):
    """Before the first line is written there is nothing, and no error."""
    path = tmp_path / "history.jsonl"
    path.touch()
    assert list(batches(path)) == []
    with pytest.raises(FileNotFoundError):
        fill(Columns(), tmp_path / "none.jsonl")
