"""What a reader gets of one metric: its live values beside their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.records import show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The live values of one metric, with the step of each.

    It reads like the array `values`, and may be handed to numpy as one; `steps` is the other axis
    of a plot, strictly increasing and read-only. `values` holds float64, or int64 or bool if every
    value was one, or objects if some are texts, None, arrays or ints past 2**53.

        >>> loss = Series("loss", np.array([0, 1]), np.array([0.5, 0.25]))
        >>> list(loss)
        [0.5, 0.25]
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[Any]

    def empty(self, name: str) -> Series:
        """Give the series of another name that has no values yet."""
        return Series(name, self.steps[:0], np.empty(0))

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        """Yield plain Python values, so that a list of them can be printed or written as JSON."""
        return iter(plain_values(self.values))

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        if copy is None:  # numpy 1 has no "copy if needed" in np.array
            return np.asarray(self.values, dtype=dtype)
        return np.array(self.values, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> Any:
        """Compare value by value, as the array does."""
        return self.values == (other.values if isinstance(other, Series) else other)

    __hash__ = None  # type: ignore[assignment]  # like the array, it has no single truth

    def __repr__(self) -> str:
        if not len(self):
            return f"Series({self.name}: no values yet)"
        last = show(plain_values(self.values[-1:])[0])
        return (
            f"Series({self.name}: {len(self):,} values of {self.values.dtype}, "
            f"steps {self.steps[0]} to {self.steps[-1]}, last {last})"
        )


def plain_values(values: NDArray[Any]) -> list[Any]:
    """Give an array as Python values; arrays inside it stay what they are."""
    return list(values) if values.dtype == object else values.tolist()
