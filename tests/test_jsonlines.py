"""The lines of a log: every record survives them, every reader can read them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from everyrank import jsonlines
from everyrank.errors import MetricError
from everyrank.jsonlines import NotALog, Problem, decode, encode, last, read, repair
from everyrank.records import ROW_KEYS, Record


@pytest.fixture(params=["orjson", "standard library"], autouse=True)
def _encoder(request: pytest.FixtureRequest):
    """Run every test with orjson and without it."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonlines, "orjson", None)
        yield


NAMES = st.one_of(
    st.sampled_from(
        ["loss", "a/b", 'quo"te', "new\nline", "tab\t", "é", "\U0001f600", "nul\0", "{"]
    ),
    st.text(min_size=1, max_size=5),
).filter(lambda name: name not in ROW_KEYS)
WIDE = st.sampled_from([2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**63, 2**70, -(10**400)])
FLOATS = st.one_of(st.floats(), st.sampled_from([-0.0, math.nan, math.inf, -math.inf, 5e-324]))
SCALARS = st.one_of(FLOATS, WIDE, st.integers(), st.booleans(), st.none(), st.text(max_size=5))
DTYPES = ["f2", "f4", "f8", "i1", "u4", "i8", "u8", "?"]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw a small array of any dtype that is recorded, with the extremes of its dtype in it."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(1,), (3,), (2, 2), (1, 3, 1)]))
    if dtype.kind == "f":
        items = st.one_of(FLOATS, st.sampled_from([float(np.finfo(dtype).max)]))
    elif dtype.kind == "b":
        items = st.booleans()
    else:
        items = st.sampled_from([np.iinfo(dtype).min, 0, 7, np.iinfo(dtype).max])
    size = math.prod(shape)
    with np.errstate(over="ignore"):
        flat = draw(st.lists(items, min_size=size, max_size=size))
        return np.array(flat, dtype).reshape(shape)


VALUES = st.one_of(SCALARS, arrays())


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Draw a record with anything in it that a record may hold."""
    return Record(
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(FLOATS),
        draw(st.dictionaries(NAMES, VALUES, max_size=5)),
        draw(st.sampled_from([0, 0, 1, 2**31 - 1])),
    )


def assert_equal(found: Any, expected: Any) -> None:
    """Compare two values bit for bit, but an array without regard to its width."""
    if isinstance(expected, np.ndarray):
        assert found.dtype.kind in {"b": "b", "f": "f"}.get(expected.dtype.kind, "iu")
        np.testing.assert_array_equal(found, expected)
        if expected.dtype.kind == "f":
            same_sign = np.signbit(found) == np.signbit(expected)
            assert (same_sign | np.isnan(expected)).all()
        return
    assert type(found) is type(expected)
    if isinstance(expected, str):
        expected = expected.encode("utf-8", "backslashreplace").decode()
    assert repr(found) == repr(expected) if isinstance(expected, float) else found == expected


def strictly(line: bytes) -> Any:
    """Read a line as RFC 8259 has it: without NaN, and with no name twice."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)


@settings(max_examples=150, deadline=None)
@given(records())
@example(Record(0, 0.0, {"x": "lone \ud800 half", "n": 2**70, "inf": -math.inf, "null": None}))
def test_law_a_record_survives_its_line(record: Record):
    """Whatever a record holds, its line is one line of valid JSON and reads back as the record."""
    line = encode(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    row = strictly(line)
    assert list(row)[:2] == ["step", "time"]
    assert all(not isinstance(value, dict) for value in row.values())
    again = decode(line)
    assert (again.step, again.generation) == (record.step, record.generation)
    assert_equal(again.time, record.time)
    names = [name.encode("utf-8", "backslashreplace").decode() for name in record.values]
    assert list(again.values) == names
    for name, value in zip(names, record.values.values(), strict=True):
        assert_equal(again.values[name], value)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=30).map(lambda text: text.encode())))
@example(b'{"step":1,"time":1' + b"0" * 400 + b"}")
@example(b'{"step":1,"time":0,"v":[1' + b"0" * 400 + b",0.5]}")
@example(b'{"step":1' + b"0" * 5000 + b',"time":0}')
@example(b'{"step":1,"time":0,"v":' + b"[" * 5000 + b"]" * 5000 + b"}")
@example(b'{"step":1,"time":0,"v":' + b"[" * 90 + b"]" * 90 + b"}")
@example(
    b'{"step":1,"time":0,"v":[1,2],"nonfinite":"{\\"v\\":[[1180591620717411303424,\\"NaN\\"]]}"}'
)
@example(b'{"step":1,"time":0,"v":[1,2],"nonfinite":"{\\"v\\":[[0.5,\\"NaN\\"]]}"}')
@example(b'{"step":1,"time":0,"v":7,"nonfinite":"{\\"v\\":[[5,[]]]}"}')
@example(b'{"step":1,"time":0,"v":[1],"nonfinite":"{\\"v\\":[[0,\\"many\\"]]}"}')
@example(b'{"step":true,"time":0}')
@example(b'{"step":9223372036854775808,"time":0}')
@example(b'{"step":1,"time":0,"generation":4294967296}')
@example(b"\0\0\0\0")
def test_law_no_line_harms_the_reader(line: bytes):
    """Any bytes at all are a record, or a ValueError that says why they are none."""
    record, reason = None, ""
    try:
        record = decode(line)
    except ValueError as error:
        reason = str(error)
    if record is None:
        assert reason
    else:
        assert (type(record.step), type(record.time)) == (int, float)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the file is written anew
)
@given(rows=st.lists(records(), min_size=1, max_size=3), data=st.data())
def test_law_a_cut_loses_the_last_line_only(
    rows: list[Record], data: st.DataObject, tmp_path: Path
):
    """Wherever a log is cut off, all lines before the cut are read, and a repair takes the rest."""
    lines = [encode(record) for record in rows]
    log = b"".join(lines)
    cut = data.draw(st.integers(0, len(log)))
    whole = [i for i in range(len(lines)) if len(b"".join(lines[: i + 1])) - 1 <= cut]
    path = tmp_path / "history.jsonl"
    path.write_bytes(log[:cut])
    problems: list[Problem] = []
    assert [record.step for record in read(path, problems=problems)] == [
        rows[i].step for i in whole
    ]
    assert problems == []
    repair(path)
    assert path.read_bytes() == b"".join(lines[: len(whole)])


def test_the_examples_of_the_docstring_are_what_is_written():
    """A number that JSON lacks is null in its column, and a text beside it says what it was."""
    assert encode(Record(7, 1.5, {"loss": math.nan})) == (
        b'{"step":7,"time":1.5,"loss":null,"nonfinite":"{\\"loss\\":\\"NaN\\"}"}\n'
    )
    assert encode(Record(8, 1.6, {"v": np.array([1.0, -math.inf])})) == (
        b'{"step":8,"time":1.6,"v":[1.0,null],"nonfinite":"{\\"v\\":[[1,\\"-Infinity\\"]]}"}\n'
    )


def test_a_generation_is_written_only_where_there_is_one():
    """Rows of a run that never went back do not say so on every line."""
    assert "generation" not in json.loads(encode(Record(0, 0.0)))
    assert json.loads(encode(Record(0, 0.0, {}, 3)))["generation"] == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (np.float16(65504), 65504.0),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(2.5), 2.5),
        (np.array(math.nan, np.float32), math.nan),
        (np.longdouble(0.5), 0.5),
    ],
)
def test_a_single_number_comes_back_as_pythons_own(value: Any, expected: Any):
    """What numpy holds of one number is read back as that number, bit for bit."""
    assert_equal(decode(encode(Record(0, 0.0, {"x": value}))).values["x"], expected)


def test_an_int_of_any_length_comes_back():
    """An int with more digits than Python itself writes out is written, and read back."""
    for number in (10**5000, -(10**5000)):
        assert decode(encode(Record(0, 0.0, {"x": number}))).values["x"] == number


@pytest.mark.parametrize("texts", [["a", "b"], [["a\nb"], ["\ud800"]]])
def test_texts_in_arrays_come_back(texts: Any):
    """An array of texts is one again, half a surrogate pair in it as its visible escape."""
    found = decode(encode(Record(0, 0.0, {"x": np.array(texts)}))).values["x"]
    plain = [[t.encode("utf-8", "backslashreplace").decode() for t in row] for row in texts]
    assert found.tolist() == (texts if isinstance(texts[0], str) else plain)


def test_an_empty_array_comes_back_empty():
    """An empty array keeps that it is empty, and is then one of floats."""
    found = decode(encode(Record(0, 0.0, {"x": np.empty(0, np.int64)}))).values["x"]
    assert (found.shape, found.dtype) == ((0,), np.float64)


def test_foreign_lines_keep_what_numpy_would_bend():
    """Lists that everyrank never writes are read as the lists that they are."""
    line = b'{"step":1,"time":0,"a":[[1],[2,3]],"b":["x",1],"c":[1,null],"d":[{}]}'
    assert dict(decode(line).values) == {
        "a": [[1], [2, 3]],
        "b": ["x", 1],
        "c": [1, None],
        "d": [{}],
    }
    assert math.isnan(decode(b'{"step":1,"time":0,"x":NaN}').values["x"])


@dataclasses.dataclass
class _Thing:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": 1}, "a dict: it is of another type"),
        (_Thing(), "a _Thing: it is of another type"),
        (datetime.datetime(2026, 1, 1), "a datetime: it is of another type"),
        (1j, "a complex: it is of another type"),
        (
            np.array([1j]),
            r"an array of complex128 of shape \(1,\): arrays of complex128 are not rec",
        ),
        (np.array(["2026"], "M8[Y]"), "arrays of datetime64"),
        ([1.0, None], "a list: arrays of object are not recorded"),
    ],
)
def test_what_no_line_can_hold_is_named(value: Any, what: str):
    """A value of another kind is an error that names key, value and what to do."""
    with pytest.raises(MetricError, match=rf"`odd/one` must be a number.*{what}.*Convert it first"):
        encode(Record(0, 0.0, {"fine": 1.0, "odd/one": value}))


@pytest.mark.parametrize("name", ROW_KEYS)
def test_a_column_of_every_log_is_no_name(name: str):
    """A metric cannot be called what every line has already."""
    with pytest.raises(MetricError, match=rf"`{name}` cannot be the name.*`train/{name}`"):
        encode(Record(0, 0.0, {name: 1.0}))


ROWS = [
    Record(0, 0.5, {"loss": 0.25, "n": 1}),
    Record(1, 1.0, {"loss": math.nan, "n": 2**70}),
    Record(2, 1.5, {"loss": -math.inf, "n": 2**63 - 1, 'late "name"\n': "x\ud800"}),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a small log with everything difficult in it."""
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(map(encode, ROWS)))
    return path


def test_pandas_reads_the_file_as_it_is(log: Path):
    """In pandas the columns are numbers, with NaN for what JSON has no place for."""
    frame = pd.read_json(log, lines=True)
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["loss"].dtype == np.float64
    np.testing.assert_array_equal(frame["loss"], [0.25, math.nan, math.nan])
    assert frame["nonfinite"][2] == '{"loss":"-Infinity"}'


def test_polars_reads_the_file_as_it_is(log: Path):
    """In polars the columns are numbers, and names that come late are there."""
    frame = pl.read_ndjson(log, infer_schema_length=None)
    assert frame["step"].to_list() == [0, 1, 2]
    assert frame["loss"].to_list() == [0.25, None, None]
    assert frame["n"].to_list() == [1, None, 2**63 - 1]
    assert frame['late "name"\n'].to_list() == [None, None, "x\\ud800"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_reads_the_file_as_it_is(log: Path):
    """The line of the docstring selects rows with jq."""
    command = ["jq", "-c", "select(.step < 2) | [.step, .loss]", str(log)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "[0,0.25]\n[1,null]\n"


def test_reading_tells_what_it_skips(tmp_path: Path):
    """Lines that are no records are skipped and named, but not blank ones, nor the last half."""
    path = tmp_path / "history.jsonl"
    good = encode(ROWS[0])
    bad = [
        b"[1]",
        b'{"time":0}',
        b'{"step":1}',
        b'{"step":1,"time":0,"generation":-1}',
        b'{"step":1,"time":0,"nonfinite":7}',
        b'{"step":1,"time":0,"v":1,"nonfinite":"{\\"w\\":[[0,\\"NaN\\"]]}"}',
        b'{"step"',
        b'{"step":1,"time":0,"v":' + b"[" * 100_000,
    ]
    path.write_bytes(good + b"\n".join([*bad, b"", b""]) + good + b'{"step":9')
    problems: list[Problem] = []
    assert [record.step for record in read(path, problems=problems)] == [0, 0]
    assert [record.step for record in read(path)] == [0, 0]
    assert [problem.line for problem in problems] == list(range(2, 10))
    reasons = [
        "not a JSON object",
        "no `step`",
        "no number `time`",
        "a `generation` that is no count",
        "`nonfinite` is not the text that everyrank writes",
        "`nonfinite` does not fit `w`",
    ]
    for problem, reason in zip(problems, reasons, strict=False):
        assert reason in problem.reason
    assert all(problem.reason for problem in problems)


def test_the_last_record_is_found_from_the_end(log: Path):
    """The last whole record is read past a torn line, and past blocks that are longer than one."""
    assert last(log).step == 2  # type: ignore[union-attr]
    long = Record(3, 0.0, {"text": "x" * 200_000})
    with log.open("ab") as file:
        file.write(encode(long) + b'{"step":4,"text":"' + b"y" * 200_000)
    assert last(log) == long


def test_a_file_that_is_no_log_has_no_last_record(tmp_path: Path):
    """An empty file has none, and a large file of other lines is not searched to its beginning."""
    path = tmp_path / "other.jsonl"
    path.write_bytes(b"")
    assert last(path) is None
    path.write_bytes(encode(ROWS[0]) + b'{"text":"other"}\n' * 20_000)
    assert last(path) is None


@pytest.mark.parametrize(
    ("torn", "removed"),
    [
        (b"", 0),
        (b'{"step":3,"ti', 13),
        (b"\0" * 9, 9),
        (b"  ", 2),
        (b'{"step":3,"v":"' + b"x" * 99, 114),
    ],
    ids=["whole", "torn", "zeros", "blank", "in a text"],
)
def test_a_repair_takes_the_torn_line_away(log: Path, torn: bytes, removed: int):
    """What a killed process left at the end is gone, and nothing else is touched."""
    whole = log.read_bytes()
    log.write_bytes(whole + torn)
    assert repair(log) == removed
    assert log.read_bytes() == whole


def test_a_line_that_lacks_its_newline_only_is_kept(log: Path):
    """A record that is all there gets its end, so that the next one begins a line."""
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])
    assert repair(log) == 0
    assert log.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [b"# notes\n", b'{\n  "a": 1\n}\n', b'{\n  "a": 1\n}', b"step,loss\n0,1", b"{}\nnotes", b"["],
)
def test_another_file_is_not_repaired(tmp_path: Path, content: bytes):
    """A file of another kind is refused, and stays as it is."""
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(NotALog, match=r"the line at byte \d+ begins with b'"):
        repair(path)
    assert path.read_bytes() == content
