"""The columns of a run as a pandas DataFrame or an xarray Dataset.

Both are copies as of one moment, aligned by step, and neither fails because of what was recorded.
"""

from __future__ import annotations

import itertools
import re
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.errors import MissingPackage, OptionError
from everyrank.records import STATISTIC

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    import pandas as pd
    import xarray as xr
    from numpy.typing import NDArray

    from everyrank.columns import Columns
    from everyrank.series import Series


def to_pandas(columns: Columns) -> pd.DataFrame:
    """Give a DataFrame with a row for each live step and a column for each name.

    A step at which a name has no value holds NaN; ints and bools stay what they are only where
    every step has one, and are float64 otherwise. Times are left out, so that the mean or the plot
    of the whole frame means something; `columns.records()` has them.

        >>> to_pandas(Columns()).index.name
        'step'
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackage("to_pandas", "pandas", "pandas") from error
    every = columns.all_series()
    steps = _union(every.values())
    index = pd.Index(steps, name="step")
    data = {}
    for name, series in every.items():
        values = _aligned(series.steps, series.values, steps)
        # Without its dtype, pandas 3 would guess another one for texts.
        data[name] = pd.Series(values, index=index, dtype=values.dtype)
    return pd.DataFrame(data, index=index)


def to_xarray(columns: Columns, attrs: Mapping[str, Any] | None = None) -> xr.Dataset:
    """Give a Dataset of float64, in which each group of names has a step coordinate of its own.

    `loss` and its statistics over ranks lie along `step`; `eval/loss` lies along `step_eval`, for
    `eval/` is recorded less often. A "/" means a group to netCDF, so that the variable of
    `eval/loss` is called `eval.loss`; its attribute `name` holds the true name. Arrays of one shape
    become variables of more dimensions. What is not numbers is left out, and the attribute
    `left_out` names it.
    """
    try:
        import xarray as xr
    except ImportError as error:
        raise MissingPackage("to_xarray", "xarray", "xarray") from error
    every = columns.all_series()
    groups: dict[str, list[Series]] = {}
    for name, series in every.items():
        groups.setdefault(_group(name, every), []).append(series)
    distinct = _Distinct()
    dims = {group: distinct(f"step_{_safe(group)}" if group else "step") for group in groups}
    # Who is spelled as it is called comes first: `a.b` keeps its name, and `a/b` becomes `a.b_2`.
    spelled = {name: distinct(_safe(name)) for name in sorted(every, key=lambda n: _safe(n) != n)}
    coords, data, left_out = {}, {}, []
    for group, members in groups.items():
        dim, steps = dims[group], _union(members)
        coords[dim] = (dim, steps, {"group": group})
        for series in members:
            numbers = _numbers(series.values)
            if numbers is None:
                left_out.append(series.name)
                continue
            variable = spelled[series.name]
            inner = [distinct(f"{variable}_dim{i}") for i in range(1, numbers.ndim)]
            values = _aligned(series.steps, numbers, steps)
            data[variable] = ((dim, *inner), values, {"name": series.name})
    # One text: netCDF 3, which is what xarray writes where there is scipy alone, has no lists.
    about = {"left_out": ", ".join(left_out)} if left_out else {}
    return xr.Dataset(data, coords=coords, attrs={**(attrs or {}), **about})


def after_warmup(dataset: xr.Dataset, warmup: float) -> xr.Dataset:
    """Leave out the first steps of each group: a fraction below 1, or a number of them.

    after_warmup(to_xarray(columns), 0.05)
    """
    if not warmup >= 0:
        raise OptionError(
            f"warmup={warmup!r} must be a fraction below 1, or a number of steps from 1 on. "
            "warmup=0.05 leaves out the first twentieth."
        )
    steps = [name for name in dataset.coords if "group" in dataset.coords[name].attrs]
    drop = {
        name: int(warmup * dataset.sizes[name]) if warmup < 1 else int(warmup) for name in steps
    }
    return dataset.isel({name: slice(n, None) for name, n in drop.items()})


def _union(every: Iterable[Series]) -> NDArray[np.int64]:
    # Names that are recorded together share one array of steps, so that few are merged.
    axes = {id(series.steps): series.steps for series in every}
    return np.unique(np.concatenate([np.empty(0, np.int64), *axes.values()]))


def _aligned(at: NDArray[np.int64], values: NDArray[Any], steps: NDArray[np.int64]) -> NDArray[Any]:
    """Spread values over all steps, with NaN where there is none."""
    if len(at) == len(steps):
        return values
    dtype = object if values.dtype == object else np.float64
    spread = np.full((len(steps), *values.shape[1:]), np.nan, dtype)
    spread[np.searchsorted(steps, at)] = values
    return spread


def _numbers(values: NDArray[Any]) -> NDArray[np.float64] | None:
    """Give values as float64, None as NaN and arrays of one shape as one; None if that fails."""
    if values.dtype != object:
        return values.astype(np.float64)
    some = [(i, value) for i, value in enumerate(values) if value is not None]
    shapes = {value.shape if isinstance(value, np.ndarray) else () for _, value in some}
    if len(shapes) > 1 or not all(_numeric(value) for _, value in some):
        return None
    numbers = np.full((len(values), *(shapes.pop() if shapes else ())), np.nan)
    try:
        for i, value in some:
            numbers[i] = value
    except OverflowError:  # an int past 1e308
        return None
    return numbers


def _numeric(value: Any) -> bool:
    return value.dtype.kind in "biuf" if isinstance(value, np.ndarray) else isinstance(value, Real)


def _group(name: str, known: Container[str]) -> str:
    """Give the first part of a path; the statistics of a metric are in the metric's group."""
    base = STATISTIC.sub("", name)
    if base != name and base in known:
        return _group(base, known)
    return name.partition("/")[0] if "/" in name else ""


def _safe(name: str) -> str:
    """Spell a name as netCDF allows: "/" is a group there, and a letter or digit comes first."""
    safe = re.sub(r"[/\x00-\x1f\x7f]", ".", name).strip()
    return safe if re.match(r"\w", safe) else f"_{safe}"


class _Distinct:
    """Give each name as it is, or with a number if it was given before."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, name: str) -> str:
        numbered = (f"{name}_{i}" for i in itertools.count(2))
        while name in self._given:
            name = next(numbered)
        self._given.add(name)
        return name
