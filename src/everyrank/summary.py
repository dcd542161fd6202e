"""What `update` returns: a text that is worked out when somebody prints it.

    >>> str(Summary(lambda: "step=0 loss=0.250000"))
    'step=0 loss=0.250000'
"""

from __future__ import annotations

from collections import UserString
from collections.abc import Callable, Mapping
from typing import Any

from everyrank.records import Description, show

_NO_DESCRIPTION = Description()


class Summary(UserString):
    """A text like `step=42 loss=0.123456 loss/mean=0.123400`; whatever a str can do, it can do.

    Until it is looked at it costs nothing: no device is read and no other rank is asked.
    """

    def __init__(self, tell: Callable[[], str]) -> None:  # not UserString's: that wants the text
        self._tell: Callable[[], str] | None = tell
        self._text = ""

    @property
    def data(self) -> str:  # type: ignore[override]
        """The text, from the first look on always the same."""
        if self._tell is not None:
            self._text, self._tell = self._tell(), None
        return self._text

    def __format__(self, spec: str) -> str:
        return format(self.data, spec)


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
        form = descriptions.get(name, _NO_DESCRIPTION).format
        words.append(f"{name}={show(value, precision=precision, format=form)}")
    return " ".join(words)
