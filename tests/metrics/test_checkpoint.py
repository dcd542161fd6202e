"""Metrics in checkpoints: kept on every rank, brought back on as many ranks or on others."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import subprocess
import sys
import warnings

import metric_programs as programs
import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

from everyrank.errors import MetricError
from everyrank.metrics import Collection, Ema, Last, Max, Mean, Running, Sum
from everyrank.metrics.catalogue.sketch import Histogram
from everyrank.testing import run_ranks


def run(fn, n, *args):
    return run_ranks(fn, n, *args, start_method="forkserver")


@pytest.fixture
def dcp():
    """Give torch.distributed.checkpoint, which warns that there is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield importlib.import_module("torch.distributed.checkpoint")


def about(values):
    return pytest.approx(values, rel=1e-13)


@pytest.mark.parametrize("synced", [False, True], ids=["never synced", "synced before"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 3), (3, 1)])
def test_the_global_value_survives_on_any_number_of_ranks(tmp_path, before, after, synced):
    """Every rank had something else, and nothing of it is lost or counted twice."""
    (values, total), *others = run(programs.save, before, str(tmp_path), synced)
    assert all(other == (values, total) for other in others)
    for loaded, sum_of_all, _ in run(programs.load, after, str(tmp_path)):
        assert loaded == about(values)
        assert sum_of_all == total


def test_on_as_many_ranks_each_has_its_own_again(tmp_path):
    """What a rank shows before a sync is what it had itself."""
    run(programs.save, 3, str(tmp_path), False)
    assert [local for *_, local in run(programs.load, 3, str(tmp_path))] == [1, 2, 4]


def test_saving_on_one_rank_asks_no_other(tmp_path):
    """A plain torch.save, while the other rank does something else."""
    path = tmp_path / "metric.pt"
    run(programs.torch_save_on_one, 2, str(path))
    assert torch.load(path)["states"].tolist() == [[0.0] * 6]


def test_what_is_saved_in_the_background_is_as_of_the_call(tmp_path, dcp):
    """An update after the call to async_save is not in the checkpoint."""
    run(programs.save_async, 2, str(tmp_path))
    alone = Sum()
    dcp.load({"alone": alone}, checkpoint_id=str(tmp_path))
    assert alone.compute() == 3


def test_one_process_without_a_group_saves_and_loads(tmp_path, dcp):
    """As anybody does on a laptop."""
    metrics = programs.make()
    programs.fill(metrics, 1)
    dcp.save({"metrics": metrics}, checkpoint_id=str(tmp_path))
    again = programs.make()
    dcp.load({"metrics": again}, checkpoint_id=str(tmp_path))
    assert again.read() == metrics.read()


def test_another_metric_does_not_break_an_old_checkpoint(tmp_path, caplog, dcp):
    """It begins empty and is named, like the one that nobody takes up."""
    values, _ = run(programs.save, 1, str(tmp_path), False)[0]
    metrics = Collection(new=Mean(), mean=Mean(), high=Max(), last=Last())
    with caplog.at_level(logging.WARNING, logger="everyrank"):
        dcp.load({"metrics": metrics}, checkpoint_id=str(tmp_path))
    found = metrics.read()
    assert found.pop("new") != found.get("mean")
    assert found == {name: values[name] for name in found}
    assert "the checkpoint has nothing for new/total, new/count: they begin empty." in caplog.text
    assert "has std/moments, spread/high, spread/low, which no metric here takes up" in caplog.text


def test_a_metric_of_another_size_is_refused_with_both_sizes():
    """Nothing of it is loaded."""
    metric = Histogram(error=0.05)
    with pytest.raises(
        MetricError, match=r"the checkpoint has \d+ numbers merged by sum for .*but"
    ):
        metric.load_state_dict(Histogram(error=0.01).state_dict())


def test_what_is_no_checkpoint_of_ours_is_refused():
    """The message names the keys that were given."""
    with pytest.raises(MetricError, match=r"the state with the keys \['max_val'\] is none that"):
        Mean().load_state_dict({"max_val": torch.ones(())})


def test_a_metric_is_stateful():
    """torch.distributed.checkpoint takes it as it is."""
    for metric in (Mean(), Collection(a=Mean()), programs.MaxMetric()):
        assert isinstance(metric, Stateful)


@pytest.mark.parametrize("how", ["as it is", "pickled", "copied"])
def test_loading_and_saving_share_no_memory(how):
    """Neither the metric that was saved nor the state goes on changing the one that was loaded."""
    metric, again = Mean(), Mean()
    metric.update(1.0)
    state = metric.state_dict()
    if how == "pickled":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)  # with weights only: what is saved is a plain tensor
        assert type(state["states"]) is torch.Tensor
    elif how == "copied":
        state = copy.deepcopy(state)
    again.load_state_dict(state)
    metric.update(100.0)
    state["states"].fill_(7.0)
    again.update(3.0)
    assert again.compute() == 2


@pytest.mark.parametrize("waited", [False, True])
def test_a_checkpoint_in_the_middle_of_a_cycle_keeps_both_windows(waited):
    """What belongs to the next window still does, whether the sync was waited for or not."""
    metric, again = Mean(), Mean()
    metric.update(1.0)
    metric.trigger_sync()
    metric.update(100.0)
    if waited:
        metric.wait_sync()
    again.load_state_dict(metric.state_dict())
    assert again.compute() == 1
    again.reset()
    assert again.compute() == 100


def test_a_window_that_has_ended_is_not_brought_back():
    """After a reset in flight the checkpoint has the next window only."""
    for waited in (False, True):
        metric, again = Mean(), Mean()
        metric.update(1.0)
        metric.trigger_sync()
        metric.reset()
        metric.update(100.0)
        if waited:
            metric.wait_sync()
            metric.update(200.0)
        again.load_state_dict(metric.state_dict())
        assert again.compute() == (150 if waited else 100)


def test_a_member_of_a_collection_is_saved_and_loaded_by_itself():
    """The others keep what they have."""
    metrics, again = Collection(a=Mean(), b=Sum()), Collection(a=Mean(), b=Sum())
    metrics.update({"a": 1.0, "b": 2.0})
    again.update({"a": 5.0, "b": 7.0})
    again["a"].load_state_dict(metrics["a"].state_dict())
    assert again.read() == {"a": 1, "b": 7}


def test_moving_metrics_come_back_as_one_update():
    """Which goes as the others come."""
    metrics = Collection(running=Running(Sum(), 3), fading=Ema(Mean(), 0.5))
    for value in (1.0, 2.0, 4.0):
        metrics.update({"running": value, "fading": value})
    metrics.sync()
    again = Collection(running=Running(Sum(), 3), fading=Ema(Mean(), 0.5))
    again.load_state_dict(metrics.state_dict())
    assert again.read() == metrics.read()
    seen = []
    for _ in range(4):
        again.update({"running": 1.0, "fading": 1.0})
        seen.append(again.read()["running"])
    assert seen == [8, 9, 3, 3]


def test_metrics_do_not_import_what_only_checkpoints_need():
    """Programs that have imported it and used gloo may be ended by a signal at their exit."""
    program = (
        "import sys, torch\n"
        "from everyrank.metrics import Collection, Mean, Last\n"
        "metrics = Collection(a=Mean(), b=Last())\n"
        "metrics.update(torch.ones(3))\n"
        "metrics.sync()\n"
        "metrics.load_state_dict(metrics.state_dict())\n"
        "assert metrics.read() == {'a': 1, 'b': 1}\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_rows_of_all_ranks_in_one_matrix_are_read_by_rank():
    """As torch's own converters write a distributed checkpoint into one file."""
    metrics = [Mean(), Mean()]
    for i, metric in enumerate(metrics):
        metric.update(float(i))
    states = [metric.state_dict() for metric in metrics]
    matrix = torch.cat([state["states"].as_subclass(torch.Tensor) for state in states])
    again = Mean()
    again.load_state_dict({"layout": states[0]["layout"], "states": matrix})
    assert again.compute() == 0.5
    with pytest.raises(
        MetricError, match=r"have the shape .*, but by its 'layout' they are rows of 6"
    ):
        again.load_state_dict({"layout": states[0]["layout"], "states": matrix[:, 1:]})


def test_what_was_read_survives_a_copy(tmp_path, dcp):
    """Also where the state was not taken up yet, as in a script that looks into a checkpoint."""
    metric = Mean()
    metric.update(5.5)
    dcp.save({"m": metric.state_dict()}, checkpoint_id=str(tmp_path))
    state = {"m": Mean().state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for other in (copy.deepcopy(state), torch.load(file)):
        again = Mean()
        again.load_state_dict(other["m"])
        assert again.compute() == 5.5
