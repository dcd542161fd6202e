"""The front door on several ranks: real processes, as a launcher would start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import history_programs as programs
import numpy as np
import pytest

from everyrank import History, OptionError
from everyrank.ranks.local import in_process
from everyrank.testing import Died, run_ranks

torch = pytest.importorskip("torch")

ALL = ("mean", "max", "min", "std", "p50", "max_rank", "min_rank")


def ranks(fn, n, *args, **options):
    return run_ranks(fn, n, *args, **{"start_method": "forkserver", **options})


def log_of(directory):
    (path,) = Path(directory).glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(n, steps, stat):
    """Recompute a statistic over ranks with numpy."""
    values = np.array([[programs.value(r, s, "loss") for s in range(steps)] for r in range(n)])
    return {
        "mean": values.mean(axis=0),
        "max": values.max(axis=0),
        "min": values.min(axis=0),
        "std": values.std(axis=0),
        "p50": np.quantile(values, 0.5, axis=0),
        "max_rank": np.full(steps, n - 1.0),
        "min_rank": np.zeros(steps),
    }[stat]


@pytest.mark.parametrize(("n", "sync_every"), [(1, 1), (2, 1), (2, 7), (4, 1), (4, 50)])
def test_statistics_over_ranks_are_those_of_the_concatenated_values(tmp_path, n, sync_every):
    """N processes give what one would give that saw all values, whatever the window."""
    seen = ranks(programs.together, n, str(tmp_path), sync_every, 20, ALL)
    for rank, mine in enumerate(seen):
        assert mine["loss"][1] == [programs.value(rank, s, "loss") for s in range(20)]
        for stat in ALL:
            steps, values = mine[f"loss/{stat}"]
            assert steps == list(range(20))
            np.testing.assert_allclose(values, expected(n, 20, stat), rtol=1e-13)
    if n > 1:
        assert all(mine["loss/std"] == seen[0]["loss/std"] for mine in seen), "to the last bit"
        assert [row["step"] for row in log_of(tmp_path)] == list(range(20))


def test_the_same_over_ranks_in_one_process(tmp_path):
    """The reference gives the same numbers without a second process."""
    members = in_process(3)
    histories = [History(outdir=tmp_path / str(m.identity.rank), group=m) for m in members]
    for step in range(5):
        for rank, history in enumerate(histories):
            history.update({"loss": programs.value(rank, step, "loss")})
    for history in histories:
        assert history.flush(60)
        np.testing.assert_allclose(history["loss/std"].values, expected(3, 5, "std"), rtol=1e-13)
    for history in histories:
        history.close()


def test_ranks_in_one_process_agree_on_the_statistics(tmp_path):
    """Asking for others than they reduce is an error, rather than others than were asked for."""
    first, _ = in_process(2)
    with pytest.raises(OptionError, match=r"Pass the same to in_process\(n, stats=...\)"):
        History(outdir=tmp_path, group=first, stats=("mean",))


def test_std_does_not_cancel(tmp_path):
    """At 1e5 +- 1e-3 it is exact to twelve digits."""
    values = [1e5 + 1e-3 * delta for delta in (-1.0, 0.25, 0.75)]
    tables = [[(0, {"a": value})] for value in values]
    seen = ranks(programs.tables, 3, str(tmp_path), 1, tables, False, backend=None)
    exact = np.std(np.array(values, np.longdouble))
    np.testing.assert_allclose(seen[0][0][1]["a/std"], float(exact), rtol=1e-12)


def test_a_mean_can_be_weighted(tmp_path):
    """sum(w x) / sum(w), a rank without weight having no say."""
    tables = [[(0, {"a": a, "w": w})] for a, w in ((1.0, 10), (2.0, 30), (float("nan"), 0))]
    seen = ranks(programs.tables, 3, str(tmp_path), 1, tables, True, backend=None)
    for mine in seen:
        assert mine[0][1]["a/mean"] == (10 + 60) / 40


def test_training_and_metrics_share_no_collective(tmp_path):
    """Training's own all-reduces give what they should, with updates in between."""
    for sums, means in ranks(programs.interleaved, 4, str(tmp_path), 1, 30):
        assert sums == [4.0 * step + 6 for step in range(30)]
        assert means == [step + 1.5 for step in range(30)]


def test_a_rank_that_is_behind_costs_no_record(tmp_path):
    """Windows that wait are reduced together, and every step is there."""
    assert ranks(programs.slow_rank, 3, str(tmp_path), 2000, backend=None) == [True] * 3


def test_windows_of_many_ranks_travel_in_few_messages(tmp_path):
    """One message each way a window: the frames that rank 1 sends are counted."""
    steps, sync_every = 200, 20
    sent = ranks(programs.frames_sent, 2, str(tmp_path), sync_every, steps, backend=None)
    assert 1 <= sent[1]["ROWS"] <= steps / sync_every + 1
    assert 1 <= sent[0]["REDUCED"] <= steps / sync_every + 1
    for counts in sent:
        assert sum(counts.values()) <= 3 * steps / sync_every


# ------------------------------------------------------------------------------ disagreement


def test_ranks_may_log_other_keys_in_another_order(tmp_path):
    """Statistics are over the ranks that reported, and say how many those were."""
    for seen in ranks(programs.other_keys, 2, str(tmp_path), backend=None):
        assert seen["loss/mean"][1] == [500 + s + 0.25 for s in range(8)]
        assert seen["rank0/mean"][1] == [s + 1 / 16 for s in range(8)]
        assert seen["rank1/mean"][1] == [1000 + s + 1 / 16 for s in range(8)]
        assert seen["rank1/ranks"][1] == [1] * 8


def test_ranks_may_log_other_numbers_of_updates(tmp_path):
    """Steps that only some ranks have are recorded on all, with the number of ranks."""
    seen, *_ = ranks(programs.other_numbers, 3, str(tmp_path), backend=None)
    assert seen["loss"][0] == [0, 1, 2, 3]
    assert seen["loss/max"][0] == list(range(8))
    assert seen["loss/ranks"] == ([4, 5, 6, 7], [2, 2, 1, 1])
    assert [row["step"] for row in log_of(tmp_path)] == list(range(8))


def test_a_history_on_rank_0_only_works_with_local_statistics(tmp_path):
    """The others have none, and training's barrier works as ever."""
    seen, nothing = ranks(programs.on_rank_0_only, 2, str(tmp_path))
    assert nothing is None
    assert seen["loss/mean"][1] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert seen["loss/ranks"][1] == [1] * 5


def test_a_rank_that_logs_nothing_hangs_nobody(tmp_path):
    """It is left out once the others' patience ends."""
    seen, _ = ranks(programs.nothing_on_rank_1, 2, str(tmp_path), backend=None)
    assert seen["loss/mean"][1] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert seen["loss/ranks"][1] == [1] * 5


def test_rank_0_may_finalize_alone(tmp_path):
    """What comes on the others afterwards is theirs alone, and ends as quietly."""
    first, second = ranks(programs.finalize_on_rank_0_only, 2, str(tmp_path))
    assert first["loss/max"][1] == [programs.value(1, s, "loss") for s in range(10)]
    assert second["loss"][1] == [programs.value(1, s, "loss") for s in range(10)] + [-1.0]
    assert second["loss/max"][1][-1] == -1.0


def test_histories_find_their_own_peers(tmp_path):
    """One more History on rank 0, or two that log the same names, are never mixed up."""
    for seen in ranks(programs.two_at_once, 2, str(tmp_path), backend=None):
        assert seen[0]["loss/mean"][1] == [0.5] * 5
        assert seen[1]["loss/mean"][1] == [10.5] * 5


def test_histories_that_are_kept_in_other_places_are_told_apart(tmp_path):
    """Two that are opened in another order on another rank meet by where they are kept."""
    for seen in ranks(programs.in_other_order, 2, str(tmp_path), backend=None):
        assert seen == {"a": [0.5], "b": [10.5]}


def test_own_values_can_be_read_before_other_ranks_are_there(tmp_path):
    """Only statistics wait for others; until they come they are empty, and no error."""
    seen, _ = ranks(programs.late, 2, str(tmp_path))
    assert seen == ([0.0, 1.0, 2.0], 0, 3, 1)


def test_a_history_may_be_opened_in_branches(tmp_path):
    """Rank 0 opens it on another line than the others, with options of its own."""
    for seen in ranks(programs.branches, 3, str(tmp_path), False, backend=None):
        assert seen["loss/mean"] == ([0], [pytest.approx((1.0 + 3.0 + 3.0) / 3)])


def test_histories_that_cannot_be_told_apart_are_not_mixed_up(tmp_path):
    """Where it is open which of two was meant, each rank records its own values, and says so."""
    first, second = ranks(programs.branches, 2, str(tmp_path), True, backend=None)
    assert first["loss/mean"] == ([0], [1.0])
    assert second["loss/mean"] == ([0], [3.0])


@pytest.mark.parametrize("kind", ["mesh", "group", "ranks"])
def test_a_group_restricts_statistics(tmp_path, kind):
    """Each half sees the mean of its own; the half without rank 0 writes beside the other."""
    assert ranks(programs.groups, 4, str(tmp_path), kind) == [[0.5] * 3] * 2 + [[2.5] * 3] * 2
    assert log_of(tmp_path)[0]["loss/mean"] == 0.5
    assert log_of(tmp_path / "group-of-rank-2")[0]["loss/mean"] == 2.5


@pytest.mark.parametrize("name", ["EVERYRANK_NO_DISTRIBUTED_HISTORY", "EVERYRANK_LOCAL_HISTORY"])
def test_the_environment_can_keep_statistics_to_each_rank(tmp_path, name):
    """Whoever launches a run can switch the others off, without touching the program."""
    seen = ranks(programs.environment_off, 2, str(tmp_path), backend=None, env={name: "1"})
    assert seen == [([0.0], None), ([1.0], None)]


# ------------------------------------------------------------------------------ death


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_left_out_and_named(tmp_path, victim):
    """The others go on to the end; before the death all were counted, after it all but one."""
    seen = ranks(programs.killed, 3, str(tmp_path), victim, 10, may_die=[victim])
    assert isinstance(seen[victim], Died)
    for rank in {0, 1, 2} - {victim}:
        (told, without) = seen[rank]
        assert told["loss"][1] == [programs.value(rank, s, "loss") for s in range(30)]
        mean = expected(3, 30, "mean")
        assert told["loss/mean"][1][:11] == mean[:11].tolist()
        if victim == 1:
            assert told["loss/mean"][1][-1] == (29 + 2029) / 2 + 0.25
            assert without[-1] == 2
        else:  # the rank that reduces is gone: each records its own, and says so
            assert told["loss/mean"][1][-1] == programs.value(rank, 29, "loss")
            assert without[-1] == 1


def test_tearing_down_in_any_order_is_quiet(tmp_path, capfd):
    """torch.distributed may be destroyed before the history is closed."""
    seen = ranks(programs.destroyed_first, 2, str(tmp_path), start_method="spawn")
    for delivered, means in seen:
        assert delivered
        assert means == [0.5] * 5
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------ on disk


def test_per_rank_logs_hold_each_rank_s_own_values(tmp_path):
    """They are found beside the run's log, also by ranks that were not told where that is."""
    seen = ranks(programs.per_rank, 2, str(tmp_path), backend=None)
    assert seen[0] == seen[1]
    for rank in range(2):
        lines = (tmp_path / "ranks" / f"rank-0000{rank}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["loss"] for row in rows] == [programs.value(rank, s, "loss") for s in range(10)]
        assert set(rows[0]) == {"step", "time", "loss"}


def test_facts_name_the_world(tmp_path):
    """run.json says how many ranks there were, and on which hosts."""
    ranks(programs.together, 2, str(tmp_path), 1, 3, ("mean",), backend=None)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["world_size"], facts["launcher"], len(facts["hosts"])) == (2, "torchrun", 1)


def test_resume_on_several_ranks_supersedes_what_the_earlier_life_wrote(tmp_path):
    """Rows past the checkpoint are kept in the file, and every reader sees one value a step."""
    first = ranks(programs.life, 2, str(tmp_path), 0, 25, None, 1.0, backend=None)
    checkpoint = {**first[0][0], "step": 14}
    second = ranks(programs.life, 2, str(tmp_path), 15, 20, checkpoint, 5.0, backend=None)
    steps, values = second[0][1]["loss"]
    assert steps == list(range(20))
    assert values == [1.0] * 15 + [5.0] * 5
    assert second[0][1]["eval/loss"] == ([9, 19], [1.0, 5.0])
    rows = log_of(tmp_path)
    assert sum("loss" in row for row in rows) == 25 + 5
    assert {row.get("generation", 0) for row in rows} == {0, 1}


# ------------------------------------------------------------------------------ launchers


def test_the_quick_start_runs_as_it_stands_under_torchrun(tmp_path):
    """A real launcher, two processes, and the program as its documentation has it."""
    program = Path(programs.__file__)
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(program.parent)!r})\n"
        "import everyrank, history_programs\n"
        "lines, run_id = history_programs.quickstart(0, sys.argv[1])\n"
        "print(lines[0], run_id, sep='|')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], timeout=170, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step=0 loss=1.000000 loss/mean=1.500000" in done.stdout
    (log,) = (tmp_path / "outputs").glob("*.jsonl")
    assert len(log.read_text().splitlines()) == 100
    assert "Traceback" not in done.stderr
