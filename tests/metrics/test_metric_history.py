"""Metrics handed over to a History: synced, computed and reset with its own reduction."""

from __future__ import annotations

import json
import logging
import math

import metric_programs as programs
import numpy as np
import pytest
import torch

from everyrank import History
from everyrank.errors import MetricError
from everyrank.handed import MARK
from everyrank.metrics import Collection, DeclaredMetric, Last, Max, Mean, Running, State, Std, Sum
from everyrank.metrics.catalogue.sketch import Histogram
from everyrank.testing import MemoryBackend, run_ranks


def run(fn, n, *args):
    return run_ranks(fn, n, *args, start_method="forkserver")


@pytest.fixture
def history(tmp_path):
    with History(outdir=tmp_path / "run") as history:
        yield history


def test_a_metric_is_recorded_and_begins_its_next_window(history):
    """Beside plain values, step by step; its name holds the value."""
    accuracy = Mean()
    for step in range(3):
        accuracy.update(torch.tensor([step, step + 1.0]))
        history.update({"train/acc": accuracy, "loss": 0.5})
    assert list(history["train/acc"]) == [0.5, 1.5, 2.5]
    assert list(history["loss"]) == [0.5] * 3
    assert accuracy.compute().isnan()
    assert dict(history.latest.values) == {"train/acc": 2.5, "loss": 0.5}


def test_a_collection_is_handed_over_as_one(tmp_path):
    """Its metrics are named under its own name, in their order."""
    memory = MemoryBackend()
    history = History(outdir=tmp_path / "run", backends=[memory])
    train = Collection(loss=Mean(), high=Max(), sd=Std(), n=Sum(), last=Last())
    train.update({name: torch.tensor(3.0) for name in train})
    history.update({"before": 1, "train": train, "after": 2})
    assert dict(history.latest.values) == {
        "before": 1, "train/loss": 3, "train/high": 3, "train/sd": 0, "train/n": 3,
        "train/last": 3, "after": 2,
    }  # fmt: skip
    assert list(memory.wait_for(1)[0].values) == [
        "before", "train/loss", "train/high", "train/sd", "train/n", "train/last", "after",
    ]  # fmt: skip
    assert math.isnan(train.read()["loss"])
    history.close()


def test_metrics_may_stand_in_nested_dicts_and_by_themselves(history):
    """Also one of a collection, whose others go on."""
    pair = Collection(a=Mean(), b=Mean())
    pair.update({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    history.update({"train": {"a": pair["a"], "deep": {"s": Sum()}}})
    assert dict(history.latest.values) == {"train/a": 1, "train/deep/s": 0}
    assert math.isnan(pair.read()["a"])
    assert pair.read()["b"] == 2
    history.update(pair)
    assert history["b"].values[-1] == 2


def test_a_metric_of_what_came_lately_goes_on(history):
    """Handing it over is no reset."""
    running = Running(Mean(), 2)
    for step in range(4):
        running.update(float(step))
        history.update({"running": running})
    assert list(history["running"]) == [0, 0.5, 1.5, 2.5]


def test_what_has_many_numbers_is_an_array_or_has_a_name_for_each(history):
    """A vector is recorded as one, and a sketch by its parts."""

    class Pair(DeclaredMetric):
        pair = State("sum", 2)

        def batch(self, values):
            return {"pair": values}

        def finish(self, pair):
            return pair / pair.sum()

    pair, sketch = Pair(), Histogram(error=0.1, smallest=1e-3, largest=1e3)
    pair.update(torch.tensor([1.0, 3.0]))
    sketch.update(torch.tensor([1.0, 5.0, -2.0]))
    history.update({"pair": pair, "sketch": sketch})
    assert history["pair"].values[-1].tolist() == [0.25, 0.75]
    assert history["sketch/counts"].values[-1].sum() == 3
    assert history["sketch/nans"].values[-1] == 0


def test_the_printed_line_has_the_value(history):
    """Before the window closes as well as after it."""
    metric = Mean()
    metric.update(0.25)
    assert str(history.update({"loss": metric, "n": 3})) == "step=0 loss=0.250000 n=3"
    with History(outdir=history.outdir.parent / "other", sync_every=10) as other:
        metric.update(0.5)
        row = other.update({"loss": metric})
        assert str(row) == "step=0 loss=0.500000"


def test_backends_and_log_get_values_and_no_states(tmp_path):
    """Whoever reads the file sees numbers under plain names."""
    memory, metric = MemoryBackend(), Mean()
    with History(outdir=tmp_path / "run", backends=[memory], per_rank=True) as history:
        for value in (1.0, float("nan")):
            metric.update(value)
            history.update({"loss": metric})
    assert memory.records[0].values == {"loss": 1}
    for path in (tmp_path / "run").rglob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["loss"] for row in rows] == [1, None]
        assert json.loads(rows[1]["nonfinite"]) == {"loss": "NaN"}
        assert set(rows[0]) == {"step", "time", "loss"}


def test_an_update_that_is_refused_leaves_the_metric_as_it_was(history):
    """Nothing of its window is lost."""
    metric = Mean()
    metric.update(1.0)
    with pytest.raises(MetricError):
        history.update({"loss": metric, "bad": object()})
    with pytest.raises(MetricError):
        history.update({"loss": metric}, step=2**70)
    metric.update(3.0)
    history.update({"loss": metric})
    assert list(history["loss"]) == [2]


def test_the_same_name_may_hold_another_metric_later(history):
    """States of different metrics are never mixed up, also within one window."""
    history.declare("m", unit="nats")
    for metric in (Mean(), Max(), Std(), Std(correction=1), Mean()):
        metric.update(torch.tensor([1.0, 3.0]))
        history.update({"m": metric})
    assert list(history["m"]) == [2, 3, 1, pytest.approx(2**0.5), 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: synced(), "'m' was brought together by a sync of its own"),
        (lambda: programs.MaxMetric(), "'m' is a metric that does not declare its states"),
        (
            lambda: Collection(hand=programs.MaxMetric(), ours=Mean()),
            r"'m' holds metrics that do not declare their states \(hand\)",
        ),
        (lambda: Large(), "'m' has 100,000 numbers, too many to travel with every update"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_with_the_way_out(history, make, message):
    """It would be counted once for each rank, or has no states."""
    with pytest.raises(MetricError, match=message) as caught:
        history.update({"m": make()})
    assert "compute" in str(caught.value)


def synced():
    metric = Mean()
    metric.update(1.0)
    metric.sync()
    return metric


class Large(DeclaredMetric):
    many = State("sum", 100_000)

    def finish(self, many):
        return many.sum()


def test_a_metric_is_no_note(history):
    """A note is a value that waits; a metric would be reset while it does."""
    with pytest.raises(MetricError, match="'m' is a metric, and no note"):
        history.note("m", Mean())


def test_a_loaded_metric_is_handed_over_like_any_other(history):
    """A resumed run goes on with what its window had."""
    metric, again = Mean(), Mean()
    metric.update(1.0)
    again.load_state_dict(metric.state_dict())
    again.update(3.0)
    history.update({"loss": again})
    assert list(history["loss"]) == [2]


def test_a_formula_that_fails_costs_its_own_value_only(history, caplog):
    """It is said once, with what went wrong."""

    class Broken(DeclaredMetric):
        total = State("sum")

        def batch(self, values):
            return {"total": values}

        def finish(self, total):
            raise ZeroDivisionError("no luck")

    broken = Broken()
    with caplog.at_level(logging.WARNING, logger="everyrank"):
        for _ in range(3):
            broken.update(1.0)
            history.update({"broken": broken, "loss": 0.5})
        assert list(history["loss"]) == [0.5] * 3
        history.flush()
    assert "broken" not in history
    said = [r.getMessage() for r in caplog.records if "no luck" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "'broken' has no values, or not all of them: ZeroDivisionError: no luck"
    )


def test_a_name_that_looks_like_a_state_is_refused(history):
    """Nobody else's column can be taken for one."""
    with pytest.raises(MetricError, match="begins as states in transit do"):
        history.update({f"{MARK}a": 1.0})
    history.update({"\0a": 1.0})


# ------------------------------------------------------------------------------- over ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(programs.in_history, 3, str(tmp_path_factory.mktemp("history") / "run"))


def test_all_ranks_record_the_value_over_all_ranks(ranks):
    """Of every sample, however many each rank had: not the mean of the ranks' means."""
    values = [
        float(10 * rank + i + step) for step in (2,) for rank in range(3) for i in range(rank + 1)
    ]
    for _, record, series in ranks:
        assert record["train/loss"] == pytest.approx(np.mean(values), rel=1e-14)
        assert record["train/sd"] == pytest.approx(np.std(values), rel=1e-14)
        assert record["train/high"] == 24
        assert record["weighted"] == pytest.approx((0 * 1 + 1 * 3 + 2 * 6) / 10)
        assert record["running"] == 1.5
        assert series["train/loss"] == pytest.approx([np.mean(values) - 2 + s for s in range(3)])


def test_a_metric_that_only_one_rank_has_is_recorded_on_all(ranks):
    """As where the last stage of a pipeline has the loss; it says over how many ranks it is."""
    for _, record, series in ranks:
        assert record["spread"] == 4
        assert record["spread/ranks"] == 1
        assert series["spread"] == [4] * 3


def test_values_of_metrics_stand_in_the_printed_line(ranks):
    """Beside the plain ones with their statistics."""
    for rank, (text, *_) in enumerate(ranks):
        assert f"plain={rank}.000000 plain/mean=1.000000" in text
        assert "train/loss=" in text
        assert "spread=4.000000 spread/ranks=1" in text


def test_no_collective_is_started(tmp_path):
    """States travel with the rows of their window."""
    for values, collectives in run(programs.collectives_in_history, 2, str(tmp_path / "run")):
        assert values == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert collectives == []


def test_metrics_that_only_share_a_name_are_not_merged(tmp_path):
    """Each is of the ranks that had it; the record says of how many."""
    for record in run(programs.disagreeing_metrics, 2, str(tmp_path / "run")):
        assert record == {"loss": 1, "loss/ranks": 1}


# ------------------------------------------------------------------------------- what a review found


class Odd(DeclaredMetric):
    """A metric whose value is whatever its formula likes."""

    total = State("sum")

    def __init__(self, give):
        self.give = give

    def batch(self, values):
        return {"total": values}

    def finish(self, total):
        return self.give(float(total))


@pytest.mark.parametrize(
    ("give", "names"),
    [
        (lambda x: "text", {}),
        (lambda x: 1j, {}),
        (lambda x: {"a": {"b": x}, "c": [x, x]}, {"m/a/b": [1, 2]}),
        (
            lambda x: {"pos" if x > 1 else "neg": x},
            {"m/neg": [1, math.nan], "m/pos": [math.nan, 2]},
        ),
        (lambda x: x / (x - 1), {"m": [math.nan, 2]}),
    ],
)
def test_whatever_a_formula_gives_costs_its_own_values_only(tmp_path, give, names):
    """Other metrics and steps are recorded, and what can be of its own."""
    with History(outdir=tmp_path / "run", sync_every=2) as history:
        for value in (1.0, 2.0):
            odd, mean = Odd(give), Mean()
            odd.update(value)
            mean.update(value)
            history.update({"m": odd, "mean": mean, "x": value})
        history.flush()
        assert list(history["x"]) == list(history["mean"]) == [1, 2]
        for name, values in names.items():
            np.testing.assert_equal(history[name].values, values)


def test_a_sketch_in_a_collection_is_recorded_by_its_parts(history):
    """As one that is handed over alone."""
    metrics = Collection(total=Sum(), sketch=Histogram(error=0.5))
    metrics.update(torch.tensor([1.0, 2.0]))
    history.update({"t": metrics, "loss": 0.5})
    assert history["t/sketch/counts"].values[-1].sum() == 2
    assert history["loss"].values[-1] == 0.5


def test_metrics_that_say_the_same_of_themselves_are_not_mixed_up(history):
    """Each is finished by its own formula."""

    def make(factor):
        class Scaled(Sum):
            def finish(self, total):
                return total * factor

        return Scaled()

    ones, tens = make(1), make(10)
    ones.update(1.0)
    tens.update(1.0)
    history.update({"ones": ones, "tens": tens})
    assert dict(history.latest.values) == {"ones": 1, "tens": 10}


@pytest.mark.parametrize(
    ("key", "row", "message"),
    [
        ("t", {"t": Collection(mean=Mean())}, r"the key 't/mean' ends in '/mean'"),
        (
            "a",
            {"a/loss": 0.5, "a": Collection(loss=Mean())},
            r"'a' holds a metric 'loss', and a/loss",
        ),
    ],
)
def test_the_names_of_members_are_looked_at_as_well(history, key, row, message):
    """As those of plain values are."""
    with pytest.raises(MetricError, match=message):
        history.update(row)


def test_an_update_after_the_end_takes_no_window_away(tmp_path):
    """Nothing is recorded, so nothing begins anew."""
    metric = Mean()
    metric.update(3.0)
    history = History(outdir=tmp_path / "run")
    history.close()
    history.update({"m": metric})
    assert metric.compute() == 3


def test_a_member_is_handed_over_with_its_next_window_waiting(history):
    """What came between trigger and wait is handed over by the next update."""
    metrics, again = Collection(x=Sum(), y=Sum()), Collection(x=Sum(), y=Sum())
    metrics.update({"x": torch.tensor(1.0), "y": torch.tensor(1.0)})
    metrics.trigger_sync()
    metrics.update({"x": torch.tensor(100.0), "y": torch.tensor(100.0)})
    again.load_state_dict(metrics.state_dict())
    for _ in range(3):
        history.update({"x": again["x"]})
    assert list(history["x"]) == [1, 100, 0]


def test_members_that_were_reset_after_a_sync_are_handed_over_again(history):
    """Nothing of the sync is left in them."""
    metrics = Collection(a=Sum(), b=Sum())
    metrics.sync()
    for metric in metrics.values():
        metric.reset()
    metrics.update({"a": 1.0, "b": 2.0})
    history.update({"t": metrics})
    assert dict(history.latest.values) == {"t/a": 1, "t/b": 2}


def test_the_rank_that_writes_records_what_only_others_have(tmp_path):
    """It has never touched a metric itself."""
    for found in run(programs.metric_on_the_last_rank, 2, str(tmp_path / "run")):
        assert found == ({"loss": 2, "loss/ranks": 1}, [1, 1], 0)


def test_a_metric_here_and_a_number_there_lose_no_step(tmp_path):
    """The number stays, and it is said once."""
    for found in run(programs.metric_and_number, 2, str(tmp_path / "run")):
        assert found["x/mean"] == [0.5, 0.5]
        assert found["loss/ranks"] == [1, 1]
