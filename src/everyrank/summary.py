"""What `update` returns: a text that is worked out when somebody prints it.

    >>> print(History().update({"loss": 0.25}))
    step=0 loss=0.250000

It holds the values of the update as they were, and the statistics over ranks if its window is
closed: these are waited for a little, since printing is asking for them.
"""

from __future__ import annotations

from collections import UserString
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everyrank.records import STATISTIC, Description, show
from everyrank.window import Row, values_of

if TYPE_CHECKING:
    from everyrank.run import Run

_NO_DESCRIPTION = Description()


class Summary(UserString):
    """A text like `step=42 loss=0.123456 loss/mean=0.123400`, with the methods of one.

    It prints and formats as such; for what takes nothing but a str, such as `file.write`, make it
    one: `str(summary)`.

    Until it is looked at it costs nothing: no device is read and no other rank is asked.
    """

    _asks: tuple[Any, Row, int] | None
    _text = ""

    def __init__(self, run: Run | object, row: Row | None = None, precision: int = 6) -> None:
        # A text instead of a run comes from the methods of UserString, which make new ones of it.
        if row is None:
            self._asks, self._text = None, str(run)
        else:
            self._asks = (run, row, precision)

    @property
    def data(self) -> str:  # type: ignore[override]
        """The text, from the first look on always the same."""
        asks = self._asks
        if asks is not None:
            self._text = _tell(*asks)
            self._asks = None  # not earlier: another thread may look at the same time
        return self._text

    def __format__(self, spec: str) -> str:
        return format(self.data, spec)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.data,)  # a copy, also one for another process, is a plain text


def line(
    step: int,
    values: Mapping[str, Any],
    *,
    precision: int,
    descriptions: Mapping[str, Description],
) -> str:
    """Write out one step: floats with exactly `precision` decimals, or in their declared format."""
    words = [f"step={step}"]
    for name, value in values.items():
        form = descriptions.get(STATISTIC.sub("", name), _NO_DESCRIPTION).format
        words.append(f"{name}={show(value, precision=precision, format=form)}")
    return " ".join(words)


def _tell(run: Run, row: Row, precision: int) -> str:
    record = run.flow.recorded(row)
    values = values_of(row) if record is None else record.values
    return line(row.step, values, precision=precision, descriptions=run.descriptions)
