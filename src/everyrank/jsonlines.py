r"""Records as lines of JSON, and back, exactly.

One record is one flat object: `step`, `time`, `generation` if the run ever went back, then the
values in their order. Every line is valid JSON (RFC 8259), so pandas, polars and jq read the file
as it is:

    pandas.read_json(path, lines=True)
    polars.read_ndjson(path, infer_schema_length=None)  # None: see names that come late, too
    jq -c 'select(.loss < 2) | [.step, .loss]' history.jsonl

JSON has no NaN and no infinity, and an int past 64 bits stops pandas and polars. Such a number is
written as `null`, which keeps its column numeric, and one more text column says what it was:

    {"step":7,"time":1.5,"loss":null,"nonfinite":"{\"loss\":\"NaN\"}"}
    {"step":8,"time":1.6,"v":[1.0,null],"nonfinite":"{\"v\":[[1,\"-Infinity\"]]}"}

`decode` puts these numbers back, so a record survives the round trip bit for bit. Two things come
back as their equals: an array is int64, uint64, bool or float64, whatever its width was (float64 if
it is empty); and half a surrogate pair in a text, which is no Unicode and stops jq, becomes its
visible escape.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.records import ROW_KEYS, Record

try:
    import orjson
except ImportError:  # the core runs without it: 15 us a record of 20 floats instead of 2
    orjson = None  # type: ignore[assignment]
    _OPTIONS = 0
else:
    # Strict integers (53 bits) send the wide ones to the careful path at no cost to the others, and
    # so do objects that are no metrics.
    _OPTIONS = (
        orjson.OPT_APPEND_NEWLINE
        | orjson.OPT_STRICT_INTEGER
        | orjson.OPT_PASSTHROUGH_DATETIME
        | orjson.OPT_PASSTHROUGH_DATACLASS
    )

_BLOCK = 1 << 16
_INT64 = 1 << 63
_INT32 = 1 << 31
_TRIES = 64
_NULL = b"null"
_NOWHERE = np.zeros(0, dtype=np.intp)
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Problem(NamedTuple):
    """A line that is no record: where it stands, counted from 1, and why it was skipped."""

    line: int
    reason: str


class NotALog(ValueError):  # noqa: N818 - reads as what it says
    """A file that is something else than a log of records, and so is not for us to change."""


# ---------------------------------------------------------------------------------------- writing


def encode(record: Record) -> bytes:
    """Write one record as one line of JSON, newline included."""
    row = _row(record)
    if orjson is None:
        return _encode_with_care(row)
    try:
        line = orjson.dumps(row, _bare, _OPTIONS)
    except TypeError:
        return _encode_with_care(row)
    # orjson writes NaN as null, and dicts as they are: look twice only at lines that have one
    # (0.1 us for the others).
    return _encode_with_care(row) if _NULL in line or line.find(b"{", 1) > 0 else line


def _row(record: Record) -> dict[str, Any]:
    step, time, values, generation, _ = record
    head: dict[str, Any] = {"step": step, "time": time}
    if generation:
        head["generation"] = generation
    if type(values) is not MappingProxyType and type(values) is not dict:
        values = dict(values)
    row: dict[str, Any] = head | values  # half the price of {**values}
    if len(row) != len(head) + len(values) or "generation" in values or "nonfinite" in values:
        name = next(key for key in ROW_KEYS if key in values)
        raise MetricError(
            f"`{name}` cannot be the name of a metric: it is a column of every log. Choose another "
            f"name, for example `train/{name}`."
        )
    return row


def _encode_with_care(row: Mapping[str, Any]) -> bytes:
    """Encode any record: with numbers that JSON lacks, wide ints, texts that are no Unicode."""
    plain: dict[str, Any] = {}
    marks: dict[str, Any] = {}
    for key, value in row.items():
        name = _unicode(key)
        try:
            plain[name], mark = _plain(value)
        except (TypeError, ValueError) as error:
            raise MetricError(
                f"`{name}` must be a number, a text, None or an array of these, but is "
                f"{_describe(value)}: {error}. Convert it first, for example to a float or a text."
            ) from error
        if mark is not None:
            marks[name] = mark
    if marks:
        plain["nonfinite"] = _dumps(marks).decode()
    return _dumps(plain) + b"\n"


def _plain(value: Any) -> tuple[Any, Any]:
    """Give what JSON can hold of a value, and the mark that restores the rest."""
    if value is None or isinstance(value, bool):
        return value, None
    if isinstance(value, str):
        return _unicode(value), None
    if isinstance(value, float):
        number = float(value)  # numpy's float64 is a float too
        return (number, None) if math.isfinite(number) else (None, _name(number))
    if isinstance(value, int):
        number = int(value)
        return (number, None) if -_INT64 <= number < _INT64 else (None, _name(number))
    return _plain_array(_array(value))


def _plain_array(array: NDArray[Any]) -> tuple[Any, Any]:
    if array.ndim == 0:
        return _plain(array.item())
    if array.dtype.kind == "U":
        texts = array.astype(object)
        texts.flat[:] = [_unicode(text) for text in texts.flat]
        return texts.tolist(), None
    if array.dtype.kind == "f":
        where = np.flatnonzero(~np.isfinite(array))
    else:
        where = np.flatnonzero(array >= _INT64) if array.dtype == np.uint64 else _NOWHERE
    if not where.size:
        return array.tolist(), None
    items = array.astype(object)
    marks = [[index, _name(items.flat[index])] for index in where.tolist()]
    items.flat[where] = None
    return items.tolist(), marks


def _array(value: Any) -> NDArray[Any]:
    """Give numpy's array or scalar, or a list, as an array of a type that `decode` restores."""
    if not isinstance(value, np.ndarray | np.generic | list | tuple):
        raise TypeError("it is of another type")
    array = np.asarray(value)
    if array.dtype.kind in "iubU":
        return array
    if array.dtype.kind in "cOMmS":
        raise TypeError(f"arrays of {array.dtype} are not recorded")
    return array.astype(np.float64)  # float16, float32 and bfloat16 all fit exactly


def _bare(value: Any) -> Any:
    """Turn numpy's values into Python's, for orjson."""
    # By way of float64: orjson would write a float32 in the shortest digits of a float32, which
    # read back as another number.
    return _array(value).tolist()


def _name(number: float) -> str:
    """Write out a number that JSON readers have no place for."""
    if isinstance(number, int):
        # Python refuses to write out thousands of decimal digits, but not hexadecimal ones.
        return str(number) if number.bit_length() <= 1024 else hex(number)
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _unicode(text: str) -> str:
    text = str.__str__(text)  # numpy's str_ is a subclass that orjson refuses as a name
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


def _dumps(plain: Mapping[str, Any]) -> bytes:
    if orjson is not None:
        return orjson.dumps(plain)
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


# ---------------------------------------------------------------------------------------- reading


def decode(line: bytes) -> Record:
    """Read one line back as the record that it was; a ValueError says why it is none."""
    row = _loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    marks = row.pop("nonfinite", None)
    if marks is not None:
        _restore(row, marks)
    step, time = row.pop("step", None), row.pop("time", None)
    generation = row.pop("generation", 0)
    if type(step) is not int or not -_INT64 <= step < _INT64:
        raise ValueError("no `step` that is an integer of 64 bits")
    if type(generation) is not int or not 0 <= generation < _INT32:
        raise ValueError("a `generation` that is no count")
    if type(time) is not float and (type(time) is not int or time.bit_length() > 64):
        raise ValueError("no number `time`")
    if b"[" in line:
        for key, value in row.items():
            if type(value) is list:
                row[key] = _from_list(value)
    return Record(step, float(time), MappingProxyType(row), generation)


def read(
    path: str | os.PathLike[str], *, problems: list[Problem] | None = None
) -> Iterator[Record]:
    """Read the records of a log in the order of the file, also while it is being written.

    A last line without its end is one that is being written, or that a killed process left: it is
    passed over in silence. Any other line that is no record is skipped and told in `problems`.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = decode(line)
            except ValueError as error:
                if problems is not None and line.endswith(b"\n") and line.strip():
                    problems.append(Problem(number, str(error)))
                continue
            yield record


def last(path: str | os.PathLike[str]) -> Record | None:
    """Read the last whole record of a log from its end, however long the log is.

    None if there is none among its last lines: then the file is no log, and may be huge.
    """
    with Path(path).open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        for _ in range(_TRIES):
            if not end:
                break
            start = _line_start(file.fileno(), end)
            try:
                return decode(os.pread(file.fileno(), end - start, start))
            except ValueError:
                end = max(0, start - 1)  # before the newline of the line before
    return None


def _loads(line: bytes | str) -> Any:
    if orjson is not None:
        try:
            return orjson.loads(line)
        except ValueError:
            pass  # the standard library also reads the NaN that other programs write
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _restore(row: dict[str, Any], text: Any) -> None:
    """Put back the numbers that `nonfinite` names."""
    marks = _loads(text) if isinstance(text, str) else None
    if not isinstance(marks, dict):
        raise ValueError("`nonfinite` is not the text that everyrank writes")
    for key, mark in marks.items():
        if isinstance(mark, str):
            row[key] = _number(mark)
            continue
        try:
            items = np.array(row[key], dtype=object)
            numbers = [_number(name) for _, name in mark]
            for (index, _), number in zip(mark, numbers, strict=True):
                items.flat[operator.index(index)] = number
            # numpy itself would take a list of such ints for floats.
            wide = any(type(number) is int for number in numbers)
            row[key] = items.astype(np.uint64) if wide else items.tolist()
        except (KeyError, TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"`nonfinite` does not fit `{key}`") from error


def _number(name: str) -> float:
    number = _NUMBERS.get(name)
    return int(name, 0) if number is None else number


def _from_list(items: list[Any]) -> Any:
    """Give the items as an array; what `encode` never writes stays what it is."""
    try:
        array = np.array(items)
    except (ValueError, OverflowError):  # ragged, or too wide
        return items
    if array.dtype.kind == "U":  # numpy makes texts of numbers that stand beside texts
        same = all(type(item) is str for item in np.array(items, dtype=object).flat)
        return array if same else items
    return items if array.dtype == object else array


# -------------------------------------------------------------------------------------- repairing


def repair(path: str | os.PathLike[str]) -> int:
    """Take away the torn last line that a killed process left; give the number of bytes removed.

    A last line that lacks nothing but its newline gets one. Only the end of the file is read.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        return repair_open(descriptor)
    finally:
        os.close(descriptor)


def repair_open(descriptor: int) -> int:
    """Repair a file that is open for reading and writing; raise NotALog rather than harm another.

    A log begins with `{`, and so do its last lines, unless a power cut left zeros in their place.
    """
    end = os.fstat(descriptor).st_size
    start = _line_start(descriptor, end)
    for position in {0, _line_start(descriptor, start - 1), start}:
        first = os.pread(descriptor, 1, position)
        if first.strip(b"{\0 \r\n"):
            raise NotALog(f"the line at byte {position} begins with {first!r}")
    if start == end:
        return 0
    try:
        _loads(os.pread(descriptor, end - start, start))
    except ValueError:
        os.ftruncate(descriptor, start)
        return end - start
    os.pwrite(descriptor, b"\n", end)
    return 0


def _line_start(descriptor: int, end: int) -> int:
    """Find where the line that ends at `end` begins, reading backwards."""
    position = end
    while position > 0:
        size = min(_BLOCK, position)
        block = os.pread(descriptor, size, position - size)
        newline = block.rfind(b"\n")
        if newline >= 0:
            return position - size + newline + 1
        position -= size
    return 0
