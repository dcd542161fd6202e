"""Lines on a terminal or in a job's output, each field where it stood in the line before.

    step=41 loss=2.301234 loss/mean=2.300900 loss/max=2.310400 loss/min=2.291300 lr=3.00e-04
    step=42 loss=2.298811 loss/mean=2.299127 loss/max=2.309150 loss/min=2.288420 lr=3.00e-04

With `total_steps` the line begins with how far the run is, at which rate, and for how long yet:

    [  42/1000   4%  12.3 it/s  eta  1m18s] loss=2.298811 loss/mean=2.299127 ...

Where that is wider than the terminal, a metric and its statistics share one field, the mean with
the range over ranks behind it; and if that is still too wide, the last fields are counted only:

    [  42/1000   4%  12.3 it/s  eta  1m18s] loss=2.299127 (2.288..2.309) lr=3.00e-04 +7 more

Colour is used on a terminal only, and not if NO_COLOR is set; FORCE_COLOR asks for it elsewhere.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TextIO

import numpy as np

from everyrank.environment import switched_on
from everyrank.errors import OptionError
from everyrank.records import STATISTIC, Description, Record, show

_DIM, _BOLD, _RED, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
_LONGEST_TEXT = 40
_LONGEST_SPAN = 1000 * 86400.0  # seconds; a guess of years is none
_NO_DESCRIPTION = Description()


class _Field(NamedTuple):
    """A name with what is shown for it, and whether that should catch the eye."""

    name: str
    text: str
    alarm: bool


class Console:
    """Print one aligned line for each record.

    `only` names the metrics to show, with `*` for any text: `only=["loss", "eval/*"]`. Rates come
    from the times of the records, so a replayed log shows the rates of the run.
    """

    name = "console"

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        total_steps: int | None = None,
        precision: int = 6,
        only: Iterable[str] | None = None,
        descriptions: Mapping[str, Description] | None = None,
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise OptionError(
                f"`total_steps` must be at least 1, but is {total_steps}. Leave it out if the "
                "number of steps is not known."
            )
        if precision < 0:
            raise OptionError(f"`precision` must be at least 0 decimals, but is {precision}.")
        self._stream = stream
        self._progress = _Progress(total_steps) if total_steps else None
        self._precision = precision
        self._only = None if only is None else tuple([only] if isinstance(only, str) else only)
        self._shown: dict[str, bool] = {}
        self._descriptions = {} if descriptions is None else descriptions
        self._wide = _Columns()
        self._compact = _Columns()
        self._is_compact = False
        self._room: int | None = None

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Show units and formats as declared, unless the console was given its own."""
        self._descriptions = self._descriptions or descriptions

    def write(self, record: Record) -> None:
        """Print one line."""
        stream = self._stream or sys.stdout
        terminal = bool(getattr(stream, "isatty", bool)())
        head = self._progress.show(record) if self._progress else f"step={record.step}"
        values = {key: value for key, value in record.values.items() if self._is_shown(key)}
        room = shutil.get_terminal_size().columns if terminal else None
        line = self._line(head, values, room, colour=_colour(terminal))
        try:
            stream.write(line + "\n")
        except UnicodeEncodeError as error:  # a stream of ASCII or an old code page
            safe = line.encode(error.encoding, "backslashreplace").decode(error.encoding)
            stream.write(safe + "\n")

    def flush(self) -> None:
        """Show what was printed."""
        (self._stream or sys.stdout).flush()

    def close(self) -> None:
        """Show what was printed; the stream stays open, it is not ours."""
        self.flush()

    def _is_shown(self, key: str) -> bool:
        if self._only is None:
            return True
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = any(fnmatchcase(key, pattern) for pattern in self._only)
        return shown

    def _line(self, head: str, values: Mapping[str, Any], room: int | None, *, colour: bool) -> str:
        if room != self._room:  # the window was resized: try the full line again
            self._room, self._is_compact = room, False
        if not self._is_compact:
            fields = [self._field(key, value) for key, value in values.items()]
            line = self._wide.line(head, fields, room, colour=colour)
            if line is not None:
                return line
            self._is_compact = True  # and stay so: lines that alternate do not align
        return self._compact.cut(head, self._compact_fields(values), room or 0, colour=colour)

    def _field(self, key: str, value: Any) -> _Field:
        match = STATISTIC.search(key)
        base = key[: match.start()] if match else key
        description = self._descriptions.get(base, _NO_DESCRIPTION)
        text = _text(value, self._precision, description.format)
        if description.unit and not match and value is not None:
            text += description.unit if description.unit == "%" else f" {description.unit}"
        name = key if key.isprintable() else repr(key)[1:-1]  # a name has no second line either
        return _Field(name, text, _alarms(value))

    def _compact_fields(self, values: Mapping[str, Any]) -> list[_Field]:
        """Make one field of a metric and its statistics."""
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            match = STATISTIC.search(key)
            base, statistic = (key[: match.start()], match[1]) if match else (key, "")
            groups.setdefault(base, {})[statistic] = value
        return [self._group(base, group) for base, group in groups.items()]

    def _group(self, base: str, group: Mapping[str, Any]) -> _Field:
        statistic = next((name for name in ("mean", "", *group) if name in group), "")
        # A mean stands for its metric here, under the metric's name and with its unit.
        name = base if statistic in ("", "mean") else f"{base}/{statistic}"
        field = self._field(name, group[statistic])
        text = field.text
        if "min" in group and "max" in group:
            text += f" ({_short(group['min'])}..{_short(group['max'])})"
        elif "std" in group:
            text += f" (+-{_short(group['std'])})"
        if group.get("ranks"):
            text += f" {group['ranks']} ranks"
        return _Field(field.name, text, any(_alarms(value) for value in group.values()))


class _Columns:
    """How wide each field has been so far, so that lines below one another align."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}

    def line(
        self, head: str, fields: list[_Field], room: int | None, *, colour: bool
    ) -> str | None:
        """Lay out one line, or give None if there is no room for it."""
        pads = self._pads(fields)
        if pads:
            pads[-1] = 0  # no spaces at the end of a line
        if room is not None and len(head) + sum(map(_width, fields, pads)) > room:
            return None
        return _laid_out(head, fields, pads, colour=colour)

    def cut(self, head: str, fields: list[_Field], room: int, *, colour: bool) -> str:
        """Lay out one line with as many fields as there is room for, and count the others."""
        line = self.line(head, fields, room, colour=colour)
        if line is not None:
            return line
        pads, width, shown = self._pads(fields), len(head), -1
        for i, field in enumerate(fields):
            if width + len(_more(len(fields) - i)) > room:
                break
            shown = i
            width += _width(field, pads[i])
        if shown < 0:
            return head[:room]
        line = _laid_out(head, fields[:shown], pads[:shown], colour=colour)
        return line + _more(len(fields) - shown)

    def _pads(self, fields: list[_Field]) -> list[int]:
        """Say how many spaces each field lacks to be as wide as its column."""
        pads = []
        for field in fields:
            size = max(self._widths.get(field.name, 0), len(field.text))
            self._widths[field.name] = size
            pads.append(size - len(field.text))
        return pads


def _laid_out(head: str, fields: list[_Field], pads: list[int], *, colour: bool) -> str:
    cells = [
        _cell(field, colour=colour) + " " * pad for field, pad in zip(fields, pads, strict=True)
    ]
    return " ".join([f"{_BOLD}{head}{_RESET}" if colour else head, *cells])


def _width(field: _Field, pad: int) -> int:
    return len(field.name) + len(field.text) + pad + 2  # the space before it, and its "="


def _more(fields: int) -> str:
    return f" +{fields} more"


class _Progress:
    """How far the run is: the last records give the rate, so that a pause is forgotten."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._recent: deque[tuple[int, float]] = deque(maxlen=64)
        self._width = 0
        self._first: int | None = None

    def show(self, record: Record) -> str:
        """Take note of a record and show where it stands."""
        if self._recent and record.step < self._recent[-1][0]:
            self._recent.clear()  # the run went back: the time to here is not the time of the way
        if not self._recent or record.step > self._recent[-1][0]:
            self._recent.append((record.step, record.time))
        if self._first is None:
            self._first = min(record.step, 1)  # steps count from 0 or from 1
        done = record.step - self._first + 1
        rate = self._rate()
        left = None if rate is None else max(0, self._total - done) / rate
        share = max(0, min(100, 100 * done // self._total))
        speed = _speed(rate)
        self._width = max(self._width, len(speed), 9)
        step = str(done).rjust(len(str(self._total)))
        return f"[{step}/{self._total} {share:>3}% {speed:>{self._width}}  eta {_span(left):>6}]"

    def _rate(self) -> float | None:
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        if not (last > first and end > start):
            return None
        return (last - first) / (end - start) or None  # of a clock that jumped to infinity


def _speed(rate: float | None) -> str:
    if rate is None:
        return "-- it/s"
    number, unit = (1 / rate, "s/it") if rate < 1 else (rate, "it/s")
    digits = ".1f" if number < 1000 else ".0f" if number < 1e6 else ".0e"
    return f"{number:{digits}} {unit}"


def _span(seconds: float | None) -> str:
    """Show a time as a person says it: 18s, 1m18s, 2h05m, 3d04h."""
    if seconds is None or not seconds < _LONGEST_SPAN:
        return "--"
    whole = round(seconds)
    for name, size, part, below in (
        ("d", 86400, 3600, "h"),
        ("h", 3600, 60, "m"),
        ("m", 60, 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // part:02d}{below}"
    return f"{whole}s"


def _cell(field: _Field, *, colour: bool) -> str:
    if not colour:
        return f"{field.name}={field.text}"
    text = f"{_RED}{field.text}{_RESET}" if field.alarm else field.text
    return f"{_DIM}{field.name}={_RESET}{text}"


def _text(value: Any, precision: int, format: str | None) -> str:
    """Show a value in one word, or as good as one: never a second line, never a control code."""
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, float):
        return show(value, precision=precision, format=format)
    return _short(value)


def _array_text(array: np.ndarray[Any, Any]) -> str:
    if array.size <= 4 or array.dtype.kind not in "iufb":
        items = " ".join(_short(item) for item in array.ravel()[:4].tolist())
        return f"[{items}]" if array.size <= 4 else f"[{items} ...]"
    size = "x".join(str(n) for n in array.shape)
    return f"[{size}: {_short(array.min().item())}..{_short(array.max().item())}]"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        short = _cut(value)
        return short if short.isprintable() and " " not in short and short else repr(short)
    if isinstance(value, int) and value.bit_length() > 128:
        return _cut(hex(value))  # Python refuses to write out thousands of decimal digits
    return show(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def _alarms(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _colour(terminal: bool) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if switched_on("FORCE_COLOR"):
        return True
    return terminal and os.environ.get("TERM") != "dumb"
