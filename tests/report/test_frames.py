"""The columns as a DataFrame and as a Dataset."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.columns import Columns
from everyrank.errors import MissingPackage
from everyrank.records import Batch
from everyrank.report.frames import to_pandas, to_xarray

pd = pytest.importorskip("pandas")
xr = pytest.importorskip("xarray")


def is_plain_number(value: Any) -> bool:
    """Say whether a batch holds the value in its matrix, rather than among the extras."""
    return type(value) in (bool, float) or (type(value) is int and abs(value) <= 2**53)


def filled(*rows: tuple[int, dict[str, Any]]) -> Columns:
    """Make columns of (step, values), a batch for each."""
    columns = Columns()
    for step, values in rows:
        numbers = {k: v for k, v in values.items() if is_plain_number(v)}
        others = {k: v for k, v in values.items() if k not in numbers}
        columns.append(
            Batch(
                steps=np.array([step]),
                times=np.zeros(1),
                names=tuple(numbers),
                numbers=np.array([list(numbers.values())], float),
                kinds=tuple(type(v).__name__ for v in numbers.values()),  # type: ignore[misc]
                extras={0: others} if others else {},
            )
        )
    return columns


def test_a_frame_has_a_row_per_step_and_a_column_per_name():
    """The index is the sorted live steps, the columns are the names as first seen."""
    frame = to_pandas(filled((0, {"loss": 2.0, "lr": 0.1}), (3, {"loss": 1.0, "lr": 0.1})))
    assert (frame.index.name, frame.index.tolist()) == ("step", [0, 3])
    assert list(frame.columns) == ["loss", "lr"]
    assert frame["loss"].tolist() == [2.0, 1.0]


def test_missing_values_are_nan():
    """An int stays an int where every step has one; with gaps, its column is floats and NaN."""
    frame = to_pandas(filled((0, {"n": 1, "k": 1, "ok": True}), (1, {"n": 2}), (2, {"n": 3})))
    assert frame["n"].dtype == np.int64
    assert frame["k"].dtype == frame["ok"].dtype == np.float64
    np.testing.assert_array_equal(frame["k"], [1.0, np.nan, np.nan])


def test_texts_and_arrays_are_objects_in_a_frame():
    """What is no number stands in the frame as it was recorded."""
    vector = np.arange(3)
    frame = to_pandas(filled((0, {"note": "hm"}), (1, {"note": None, "v": vector}), (2, {"x": 1})))
    assert frame["note"].dtype == object
    assert frame["note"][0] == "hm"
    assert frame["note"][1] is None
    assert np.isnan(frame["note"][2])
    assert frame["v"][1] is vector


def test_an_empty_frame():
    """Before the first row, the frame is empty and its index is called step."""
    frame = to_pandas(Columns())
    assert (frame.shape, frame.index.name) == ((0, 0), "step")


def test_superseded_rows_are_not_in_a_frame():
    """A frame holds what is live, also for a name of which nothing is left."""
    columns = filled((0, {"loss": 1.0}), (1, {"loss": 0.5, "late": 3}))
    columns.rewind(0)
    frame = to_pandas(columns)
    assert frame.index.tolist() == [0]
    assert frame["late"].isna().all()


def test_groups_have_step_coordinates_of_their_own():
    """What is recorded under eval/ lies along its own steps, and is not padded with NaN."""
    rows = [(step, {"loss": 1.0 / (step + 1), "loss/mean": 1.0}) for step in range(4)]
    dataset = to_xarray(
        filled(*rows, (3, {"eval/loss": 0.5, "eval/loss/mean": 0.6})), attrs={"run": "r1"}
    )
    assert dataset["loss"].dims == dataset["loss.mean"].dims == ("step",)
    assert dataset["eval.loss"].dims == dataset["eval.loss.mean"].dims == ("step_eval",)
    assert dataset["step_eval"].values.tolist() == [3]
    assert dataset["step"].values.tolist() == [0, 1, 2, 3]
    assert dataset.attrs == {"run": "r1"}
    assert dataset["eval.loss.mean"].attrs["name"] == "eval/loss/mean"


def test_a_statistic_without_its_metric_is_a_group_like_any_other():
    """Only what is a statistic of a recorded metric belongs to that metric's group."""
    dataset = to_xarray(filled((0, {"loss": 1.0, "loss/p99.9": 2.0}), (5, {"eval/mean": 1.0})))
    assert dataset["loss.p99.9"].dims == ("step",)
    assert dataset["eval.mean"].dims == ("step_eval",)


def test_names_that_would_be_spelled_alike_stay_apart():
    """Each variable is distinct, and its attribute tells the name that was recorded."""
    names = ["a/b", "a.b", "step", "step_a", "/", "a/c\n", ".x"]
    dataset = to_xarray(filled((0, {name: float(i) for i, name in enumerate(names)})))
    found = {v.attrs["name"]: float(v[0]) for v in dataset.data_vars.values()}
    assert found == {name: float(i) for i, name in enumerate(names)}
    assert dataset["a.b"].attrs["name"] == "a.b"


def test_everything_numeric_is_float64():
    """Ints, bools, large ints and None are float64 in a dataset, None as NaN."""
    dataset = to_xarray(filled((0, {"n": 1, "ok": True, "big": 2**60}), (1, {"big": None})))
    assert {v.dtype for v in dataset.data_vars.values()} == {np.dtype(np.float64)}
    np.testing.assert_array_equal(dataset["big"], [2.0**60, np.nan])


def test_arrays_of_one_shape_become_more_dimensions():
    """A vector metric has a dimension besides its steps, and NaN where it has no value."""
    rows = [(0, {"loss": 1.0}), (1, {"v": np.arange(3)}), (2, {"v": None}), (3, {"v": np.ones(3)})]
    dataset = to_xarray(filled(*rows))
    assert dataset["v"].dims == ("step", "v_dim1")
    nan = [np.nan] * 3
    np.testing.assert_array_equal(dataset["v"], [nan, [0, 1, 2], nan, [1, 1, 1]])


def test_a_dimension_and_a_metric_of_its_name_stay_apart():
    """A metric that is called as the dimension of a vector would be is a variable like any other."""
    dataset = to_xarray(
        filled((0, {"v": np.ones(2), "v_dim1": 1.0, "step_eval": 2.0, "eval/x": 3}))
    )
    assert {v.attrs["name"] for v in dataset.data_vars.values()} == {
        "v",
        "v_dim1",
        "step_eval",
        "eval/x",
    }
    assert dataset["v"].dims == ("step", "v_dim1_2")


@pytest.mark.parametrize(
    "values",
    [
        ["hm", 1.0],
        [np.zeros(2), np.zeros(3)],
        [np.zeros(2), 1.0],
        [np.array(["a", "b"])],
        [10**400],
        [{"a": 1}],
    ],
    ids=["text", "ragged", "mixed", "text array", "huge", "dict"],
)
def test_what_is_not_numbers_is_left_out_and_said(values: list[Any]):
    """A metric that float64 cannot hold is named in the attributes, and the others are there."""
    rows = [(step, {"odd/one": value, "x": 1.0}) for step, value in enumerate(values)]
    dataset = to_xarray(filled(*rows))
    assert list(dataset.data_vars) == ["x"]
    assert dataset.attrs["left_out"] == "odd/one"


def test_an_empty_dataset():
    """Before the first row, the dataset is empty and keeps the attributes given."""
    dataset = to_xarray(Columns(), attrs={"run": "r1"})
    assert (dict(dataset.sizes), dataset.attrs) == ({}, {"run": "r1"})


def test_a_dataset_survives_its_file(tmp_path):
    """Written as netCDF and read again, the dataset is the same."""
    pytest.importorskip("scipy")
    rows = [(0, {"loss": 1.0, "note": "hm"}), (1, {"loss": 0.5, "eval/loss": 2.0, "v": np.ones(2)})]
    dataset = to_xarray(filled(*rows))
    dataset.to_netcdf(tmp_path / "run.nc", engine="scipy")
    with xr.open_dataset(tmp_path / "run.nc", engine="scipy") as again:
        xr.testing.assert_equal(again, dataset)
        assert again.attrs == dataset.attrs
        assert again["eval.loss"].attrs["name"] == "eval/loss"


@pytest.mark.parametrize("package", ["pandas", "xarray"])
def test_a_missing_package_is_named(monkeypatch, package: str):
    """Without the package, the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    call = {"pandas": to_pandas, "xarray": to_xarray}[package]
    with pytest.raises(MissingPackage, match=rf'pip install "everyrank\[{package}\]"'):
        call(Columns())


NAMES = st.text(st.sampled_from("ab/._ 1"), min_size=1, max_size=4)
VALUES = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-9, 9),
    st.none(),
    st.text(max_size=1),
    st.just(2**70),
    st.integers(1, 2).map(np.ones),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.dictionaries(NAMES, VALUES, max_size=4)), max_size=6)
)
def test_law_every_name_is_in_both_frames(rows: list[tuple[int, dict[str, Any]]]):
    """Whatever is recorded, no name is lost or taken for another."""
    columns = filled(*rows)
    frame, dataset = to_pandas(columns), to_xarray(columns)
    assert list(frame.columns) == list(columns.names)
    assert frame.index.tolist() == columns.steps.tolist()
    kept = {v.attrs["name"]: v for v in dataset.data_vars.values()}
    assert len(kept) == len(dataset.data_vars)
    for name in columns.names:
        if name in kept:
            series = columns.series(name)
            (step_dim,) = [dim for dim in kept[name].dims if dim in dataset.coords]
            found = kept[name].sel({step_dim: series.steps})
            for value, there in zip(series, found.values, strict=True):
                np.testing.assert_array_equal(there, np.nan if value is None else value)
        else:
            assert name in dataset.attrs["left_out"]
