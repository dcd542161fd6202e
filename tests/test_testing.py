from __future__ import annotations

import os
import sys
import threading
import types

import pytest
import rank_programs

from everyrank.backends.base import Backend
from everyrank.errors import EveryrankError, OptionError
from everyrank.records import Record
from everyrank.testing import Died, MemoryBackend, RanksFailed, run_ranks


def ranks(fn, n, *args, **options):
    options = {"backend": None, "start_method": "forkserver", **options}
    return run_ranks(fn, n, *args, **options)


def defined_in_a_test_module(rank):
    return rank


def test_every_rank_finds_the_environment_of_torchrun_on_one_host():
    """Each process is told its rank, the world size and where rank 0 is."""
    for rank, seen in enumerate(ranks(rank_programs.who, 3)):
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_a_call_is_a_job_of_its_own():
    """The ranks of one call agree on the run id, and no other call has it."""
    first, second = ranks(rank_programs.job, 2), ranks(rank_programs.job, 2)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_env_is_what_the_ranks_see(monkeypatch):
    """`env` wins over the environment of the parent, which is that of the call."""
    monkeypatch.setenv("EVERYRANK_TEST_A", "parent")
    monkeypatch.setenv("EVERYRANK_TEST_B", "parent")
    env = {"EVERYRANK_TEST_B": "child"}
    assert ranks(rank_programs.variable, 1, "EVERYRANK_TEST_A", env=env) == ["parent"]
    assert ranks(rank_programs.variable, 1, "EVERYRANK_TEST_B", env=env) == ["child"]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_with_a_backend_torch_distributed_is_ready(start_method):
    """A collective works inside the function without more ado, however processes are started."""
    results = run_ranks(rank_programs.total, 2, 10, start_method=start_method)
    assert results == [21.0, 21.0]


def test_without_a_backend_torch_is_not_imported():
    """A rank that asks for no backend does not pay for torch."""
    assert run_ranks(rank_programs.imported, 1, "torch", backend=None) == [False]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_rank_keeps_to_one_core(start_method):
    """However torch came into the process, it computes with one thread."""
    assert run_ranks(rank_programs.threads, 1, start_method=start_method) == [1]


def test_the_traceback_of_every_failed_rank_is_shown():
    """The error names the ranks that failed, each with its own message, and no other."""
    with pytest.raises(RanksFailed, match="2 of 3 ranks of fail_on failed") as caught:
        ranks(rank_programs.fail_on, 3, [0, 2])
    assert sorted(caught.value.failures) == [0, 2]
    for rank in (0, 2):
        assert f"ValueError: rank {rank} has had enough" in str(caught.value)
    assert "rank_programs.py" in str(caught.value)
    assert isinstance(caught.value, EveryrankError)


def test_ranks_that_wait_for_a_failed_one_are_ended():
    """A failure in one rank ends a collective that the others are in, long before the timeout."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank_programs.fail_and_hang, 2, start_method="forkserver")
    assert "rank 0 has had enough" in caught.value.failures[0]
    assert 1 in caught.value.failures


def test_a_rank_that_dies_by_a_signal_is_named():
    """A killed process leaves no traceback, so the message names rank and signal."""
    with pytest.raises(RanksFailed, match="rank 1 died by SIGKILL"):
        ranks(rank_programs.kill_on, 2, [1])


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_exits_without_returning_is_named(code):
    """An exit from inside the function is a failure, also with code 0."""
    with pytest.raises(RanksFailed, match=f"rank 0 exited with code {code} before it returned"):
        ranks(rank_programs.exit_on, 1, [0], code)


def test_a_rank_that_may_die_leaves_a_mark():
    """The death of a rank that may die is a result, and the others' results are untouched."""
    assert ranks(rank_programs.kill_on, 3, [1], may_die=[1]) == [0, Died(-9), 2]


def test_a_rank_that_may_die_may_live():
    """A rank that may die and returns gives what it returned."""
    assert ranks(rank_programs.fail_on, 2, [], may_die=[1]) == [0, 1]


def test_a_rank_that_may_die_may_raise():
    """An exception is a way to die as well, and its traceback is kept."""
    _, died = ranks(rank_programs.fail_on, 2, [1], may_die=[1])
    assert died.exitcode == 1
    assert "rank 1 has had enough" in died.report


def test_a_hanging_rank_is_ended_at_the_timeout_and_shows_where_it_was():
    """At the timeout the error names the ranks that ran on, and the line where each of them is."""
    with pytest.raises(RanksFailed, match=r"rank 1 was still running after 2 s") as caught:
        ranks(rank_programs.hang_on, 2, [1], timeout=2)
    assert "a_place_to_hang" in str(caught.value)
    assert sorted(caught.value.failures) == [1]


def test_a_rank_that_returns_but_does_not_exit_is_a_failure():
    """A thread that keeps the process alive is found, and named in the stacks."""
    with pytest.raises(RanksFailed, match="still running after 2 s"):
        ranks(rank_programs.leave_a_thread_behind, 1, timeout=2)


def test_nothing_is_left_of_the_ranks(tmp_path):
    """After a failure no process and no temporary directory of the call exists."""
    with pytest.raises(RanksFailed):
        ranks(rank_programs.pid_then_hang, 2, str(tmp_path), timeout=2, env={"TMPDIR": "x"})
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_the_temporary_directory_of_a_call_is_removed(tmp_path, monkeypatch):
    """A call leaves nothing where it kept its rendezvous and its stacks."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_ranks(rank_programs.total, 2, 0, start_method="forkserver")
    assert list(tmp_path.iterdir()) == []


def test_a_large_result_arrives():
    """A result larger than what a pipe holds does not block the rank."""
    assert [len(result) for result in ranks(rank_programs.large, 2, 3_000_000)] == [3_000_000] * 2


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_rank():
    """The error says that it is the result that could not be pickled."""
    with pytest.raises(RanksFailed, match="cannot pickle"):
        ranks(rank_programs.unpicklable, 1)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_function_that_a_new_process_cannot_import_is_said_so(start_method, monkeypatch):
    """A function of a test module gives an error with the way out."""
    module = types.ModuleType("known_to_the_parent_alone")
    module.defined_in_a_test_module = defined_in_a_test_module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(defined_in_a_test_module, "__module__", module.__name__)
    with pytest.raises(RanksFailed, match="ranks 0, 1 could not import the function"):
        ranks(defined_in_a_test_module, 2, start_method=start_method)


def test_a_local_function_is_refused_at_the_call():
    """A lambda cannot reach another process, and no process is started for it."""
    with pytest.raises(OptionError, match="Define it with `def`"):
        run_ranks(lambda rank: rank, 2)


def test_no_ranks_are_refused():
    """A world has at least one rank."""
    with pytest.raises(OptionError, match="n=0 must be at least 1"):
        run_ranks(rank_programs.who, 0)


def record(step):
    return Record(step=step, time=0.0, values={"loss": 1.0 / (step + 1)})


def test_the_memory_backend_is_a_backend():
    """It has what the History asks of any backend."""
    assert isinstance(MemoryBackend(), Backend)


def test_the_memory_backend_keeps_records_in_order():
    """What is written can be read back as it was."""
    memory = MemoryBackend()
    for step in range(3):
        memory.write(record(step))
    memory.close()
    assert memory.records == [record(step) for step in range(3)]
    assert memory.closed


def test_waiting_for_records_ends_when_they_are_there():
    """A test can wait for what a background thread writes, without sleeping."""
    memory = MemoryBackend()
    writer = threading.Thread(target=lambda: [memory.write(record(step)) for step in range(5)])
    writer.start()
    assert memory.wait_for(5) == [record(step) for step in range(5)]
    writer.join()


def test_waiting_for_records_that_cannot_come_says_how_many_came():
    """A closed backend takes no more, so waiting for more ends at once."""
    memory = MemoryBackend()
    memory.write(record(0))
    memory.close()
    with pytest.raises(TimeoutError, match="2 records were awaited, but 1 "):
        memory.wait_for(2)


def test_a_closed_memory_backend_takes_no_records():
    """Writing after close breaks a backend's contract, and the double says so."""
    memory = MemoryBackend()
    memory.close()
    with pytest.raises(ValueError, match="closed before step 3"):
        memory.write(record(3))
