"""The accelerator's own collectives as a transport, here those of gloo."""

from __future__ import annotations

import device_programs as programs
import pytest

from everyrank.testing import Died, run_ranks

pytest.importorskip("torch")


def ranks(fn, n, *args, **options):
    return run_ranks(fn, n, *args, **{"start_method": "forkserver", **options})


@pytest.mark.parametrize(("n", "sync_every"), [(2, 1), (2, 8), (4, 10)])
def test_it_gives_the_numbers_of_the_default_transport(tmp_path, n, sync_every):
    """Mean and std over ranks, the same on every rank to the last bit, and the run's name."""
    seen = ranks(programs.together, n, str(tmp_path), sync_every, 40)
    means, stds, _, run_id = seen[0]
    assert means == pytest.approx([500.0 * (n - 1) + step for step in range(40)])
    assert stds == pytest.approx([{2: 500.0, 4: 1118.033988749895}[n]] * 40)
    assert all(each[:2] == (means, stds) and each[3] == run_id for each in seen)


def test_a_window_costs_one_collective_however_many_metrics(tmp_path):
    """300 metrics and 200 steps in windows of 20: few rounds of one all_gather each."""
    for _, _, collectives, _ in ranks(programs.together, 2, str(tmp_path), 20, 200, 300):
        assert collectives <= 3 * 200 / 20


def test_ranks_may_disagree_about_keys_and_steps(tmp_path):
    """As over the default transport, statistics are over those who reported."""
    for mean, short, mine in ranks(programs.disagree, 2, str(tmp_path)):
        assert mean == [500.0 + s for s in range(5)] + [1005.0, 1006.0, 1007.0]
        assert short == [1, 1, 1]
        assert mine == [1.0] * 8


def test_a_flush_brings_the_open_windows_of_others(tmp_path):
    """Windows of 100 steps are handed over after seven when everybody asks."""
    for done, seen in ranks(programs.flushed, 2, str(tmp_path)):
        assert done
        assert seen == [500.0 + step for step in range(7)]


def test_a_rank_that_does_not_take_part_is_named_at_the_deadline(tmp_path, capfd):
    """The run goes on with local records that say so."""
    (loss, reporting), _ = ranks(
        programs.absent, 2, str(tmp_path), may_die=[1], start_method="spawn"
    )
    assert (loss, reporting) == ([1.0, 2.0], [1, 1])
    assert "rank 1 did not take part" in capfd.readouterr().err


def test_a_rank_that_dies_costs_its_values_only(tmp_path):
    """Whoever is left records its own from there on."""
    (loss, alone), died = ranks(programs.killed, 2, str(tmp_path), may_die=[1])
    assert isinstance(died, Died)
    assert loss == [programs.value(0, step) for step in range(20)]
    assert alone == [1] * 10


def test_it_needs_torch_distributed(tmp_path):
    """The error says how to get it, and that the default does without."""
    said = ranks(programs.without_torch_distributed, 2, str(tmp_path), backend=None)
    assert "needs torch.distributed to be initialised first" in said[0]
