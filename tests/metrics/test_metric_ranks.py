"""Metrics on several real ranks."""

from __future__ import annotations

import math

import metric_programs as programs
import numpy as np
import pytest
import torch

from everyrank.testing import run_ranks


def run(fn, n, *args, **options):
    return run_ranks(fn, n, *args, **{"start_method": "forkserver", **options})


def nan(values):
    return {name for name, value in values.items() if math.isnan(value)}


def test_a_metric_written_by_hand_runs_as_it_is():
    """With its own collective, alone and in a collection next to declared ones."""
    for alone, values, again, hand in run(programs.by_hand, 2):
        assert alone == 1
        assert values == again == {"hand": 1, "ours": 1}
        assert hand == 1


def test_the_weighted_mean_goes_through_its_cycle():
    """Local before the sync, of all ranks after it, nothing after the reset."""
    found = run(programs.weighted_mean_by_hand, 2)
    assert found == [(1, (3 * 1 + 2 * 6) / 9, True), (2, (3 * 1 + 2 * 6) / 9, True)]


@pytest.fixture(scope="module")
def cycles():
    return run(programs.cycle, 3)


def test_before_a_sync_each_rank_shows_its_own(cycles):
    """And after it all show the same."""
    firsts = [shown[0]["mean"] for shown in cycles]
    assert firsts == [1, 2, 3]
    for shown in zip(*cycles, strict=True):
        if shown[0]["mean"] != 1:
            same = [{n: v for n, v in each.items() if not math.isnan(v)} for each in shown]
            assert same[0] == same[1] == same[2]


def test_what_comes_between_trigger_and_wait_is_of_the_next_window(cycles):
    """Looking in between waits, and shows the window that was triggered."""
    for shown in cycles:
        for values in shown[1:3]:
            assert {n: values[n] for n in ("total", "mean", "high", "low")} == {
                "total": 6, "mean": 2, "high": 3, "low": 1,
            }  # fmt: skip
            assert values["std"] == pytest.approx(math.sqrt(2 / 3), rel=1e-15)
            assert values["last"] == 3
            assert values["running"] == 6


def test_a_second_sync_counts_each_value_once(cycles):
    """The hundreds come in, the others are not counted again."""
    for shown in cycles:
        assert shown[3]["total"] == 306
        assert shown[3]["mean"] == 51
        assert shown[3]["low"] == 1
        assert shown[3]["last"] == 100
        assert shown[3]["running"] == 306


def test_a_reset_forgets_all_of_it(cycles):
    """What is left is what nothing gives."""
    for shown in cycles:
        assert nan(shown[4]) == set(shown[4]) - {"total", "running"}
        assert shown[4]["total"] == 0


def test_ranks_without_an_update_take_part(cycles):
    """One rank's value is everybody's, however often they sync."""
    for shown in cycles:
        assert shown[5]["total"] == 7
        assert shown[5]["mean"] == 7
        assert shown[5]["low"] == shown[5]["high"] == shown[5]["last"] == 7


def test_a_reset_in_flight_begins_the_next_window(cycles):
    """The sync after it has only what came since."""
    for shown in cycles:
        assert shown[6]["total"] == 15
        assert shown[6]["mean"] == 5


def test_a_nan_on_one_rank_is_seen_on_all():
    """No backend's maximum swallows it."""
    for values in run(programs.extremes_with_nan, 3):
        assert nan(values) == {"high", "low"}
        assert values["other"] == 4


def test_spread_over_ranks_is_exact_far_from_zero():
    """1e5 +- 1e-3, of which a sum of squares would leave nothing."""
    values = 1e5 + 1e-3 * np.random.default_rng(0).normal(size=3000)
    parts = [torch.tensor(part) for part in np.split(values, [100, 2000])]
    exact = np.std(values.astype(np.longdouble) - 100_000)
    for std in run(programs.far_from_zero, 3, parts):
        assert std == pytest.approx(float(exact), rel=1e-9)


def test_a_sync_is_one_collective_however_many_metrics():
    """One for sums and whatever merges as a whole, one more for extremes; nothing else is sent."""
    for means, mixed in run(programs.collectives, 2, 20):
        assert means == {"c10d::allreduce_": 1}
        assert mixed == {"c10d::allreduce_": 2}


def test_a_rank_that_is_gone_is_an_error_and_costs_nothing():
    """It surfaces where the sync is waited for, and this rank's values are still there."""
    found, _ = run(programs.broken, 2, may_die=(1,), timeout=60.0)
    text, value, ours = found
    assert text.startswith("metrics could not be brought together: ")
    assert text.endswith("What this rank has is kept, and compute() gives it.")
    assert value == 10
    assert ours


def test_ranks_are_named_by_group_mesh_or_dims():
    """A sum over data-parallel ranks is not multiplied by their tensor-parallel peers."""
    found = run(programs.groups, 4)
    everyone = 1111
    for rank, sums in enumerate(found):
        rows, columns = [11, 1100][rank // 2], [101, 1010][rank % 2]
        assert sums["all"]["sum"] == sums["dp and tp"]["sum"] == sums["dp, tp"]["sum"] == everyone
        assert sums["group"]["sum"] == sums["tp"]["sum"] == rows
        assert sums["dp"]["sum"] == columns
        assert sums["all"]["std"] == pytest.approx(sums["dp and tp"]["std"], rel=1e-14)
        assert sums["all"]["high"] == sums["dp and tp"]["high"] == 1000
        assert sums["message"].startswith("context='dp' must be a ProcessGroup, a DeviceMesh slice")


def test_looking_on_one_rank_sends_nothing():
    """All collectives of a sync are started by its trigger, so that none comes between training's."""
    found = run(programs.a_look_in_flight, 8)
    for rank, (total, grad) in enumerate(found):
        assert total == sum(10.0**r for r in range(8) if r % 2 == rank % 2)
        assert grad == 2


def test_a_rank_outside_of_the_group_syncs_with_nobody():
    """As torch's own collectives have it."""
    assert run(programs.outside_of_the_group, 2) == [1, 1]
