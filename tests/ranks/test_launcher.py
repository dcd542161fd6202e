"""Who we are by a launcher's environment, for each launcher and for what is wrong with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import as_told_by, first_host, from_environment, master_address

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[003-004],login1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-123@1",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PALS_RANKID": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PMI_LOCAL_SIZE": "2",
    "PALS_APID": "abc",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}


def who(environ):
    me = from_environment(environ)
    return me and (me.source, me.rank, me.world_size, me.local_rank, me.local_world_size)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_no_launcher_says_nothing():
    """A process that nobody launched is told so by None, whatever else is set."""
    assert from_environment({}) is None
    assert from_environment({"RANK": "0", "LOCAL_RANK": "0", "HOME": "/root"}) is None
    assert from_environment({"RANK": "", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("environ", "expected", "job"),
    [
        (TORCHRUN, ("torchrun", 5, 8, 1, 4), "none.29500"),
        (SLURM, ("slurm", 9, 11, 1, 3), "77.0"),
        (OPENMPI, ("openmpi", 3, 4, 1, 2), "prterun-node1-123@1"),
        (HYDRA, ("pmi", 3, 4, 1, 2), ""),
        (PALS, ("pmi", 3, 4, 1, 2), "abc"),
        (MVAPICH, ("pmi", 3, 4, 1, 2), ""),
    ],
)
def test_each_launcher_is_understood(environ, expected, job):
    """Rank, world size and place on the host, by each launcher's own variables."""
    assert who(environ) == expected
    assert from_environment(environ).job == job


@pytest.mark.parametrize("inner", [TORCHRUN, OPENMPI, HYDRA])
def test_whatever_runs_inside_slurm_wins(inner):
    """A SLURM task may be the daemon that started the ranks, and is none of them."""
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert who(daemon | inner) == who(inner)


@pytest.mark.parametrize(
    "few", [{"RANK": "9", "WORLD_SIZE": "11"}, {"PMI_RANK": "9", "PMI_SIZE": "11"}]
)
def test_the_local_rank_is_filled_in_by_whoever_means_the_same_rank(few):
    """A script that exports RANK from SLURM_PROCID, or srun with some of PMI, uses every GPU."""
    assert who(SLURM | few) == ("slurm", 9, 11, 1, 3)
    assert who(SLURM | few | {"SLURM_PROCID": "8"})[3:] == (0, 1)


def test_a_restart_on_one_node_does_not_part_it_from_the_others():
    """Each node counts the restarts that it caused for itself, so they do not name the job."""
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert from_environment(again) == from_environment(TORCHRUN)


@pytest.mark.parametrize("step", [None, "", "batch", "4294967290", "4294967291"])
def test_a_batch_script_is_one_process(step):
    """It has SLURM's rank 0 and number of tasks, but it is none of the tasks."""
    environ = SLURM | {"SLURM_PROCID": "0"}
    environ = without(environ, "SLURM_STEP_ID") if step is None else environ
    assert from_environment(environ | ({} if step is None else {"SLURM_STEP_ID": step})) is None


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("4", "0", 4),
        ("4(x2),3", "0", 4),
        ("4(x2),3", "1", 4),
        ("4(x2),3", "2", 3),
        ("2,3(x2),4", "3", 4),
        ("4(x2),3", "7", 3),
        ("4(x1000000000)", "5", 4),
        ("4(x2)", "", 4),
    ],
)
def test_slurm_lists_the_tasks_of_all_nodes(tasks, node, expected):
    """The number of this node is looked up, and a list that is too short ends with its last."""
    environ = SLURM | {
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": "0",
    }
    assert from_environment(environ).local_world_size == expected


@settings(deadline=None)
@given(counts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_the_list_means_what_it_means_written_out(counts):
    """`4(x2),3` is 4, 4 and 3, on every node."""
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in counts)
    written_out = [tasks for tasks, nodes in counts for _ in range(nodes)]
    for node, expected in enumerate(written_out):
        environ = SLURM | {
            "SLURM_STEP_NUM_TASKS": "1000",
            "SLURM_STEP_TASKS_PER_NODE": text,
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": "0",
        }
        assert from_environment(environ).local_world_size == expected


def test_a_host_has_no_more_ranks_than_there_are_and_no_fewer_than_are_known():
    """What an allocation says of tasks does not go past the step, nor below our own place."""
    few = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert from_environment(few).local_world_size == 2
    unsaid = without(TORCHRUN, "LOCAL_WORLD_SIZE")
    assert from_environment(unsaid | {"LOCAL_RANK": "3"}).local_world_size == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "one"}, "RANK='one' must be a number, 0 or more."),
        ({"RANK": "-1"}, "RANK='-1' must be a number, 0 or more."),
        ({"RANK": "8"}, "RANK='8' must be below the world size 8."),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be at least 1."),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK='8' must be below the world size 8."),
        ({"LOCAL_WORLD_SIZE": "4x"}, "LOCAL_WORLD_SIZE='4x' is not a number of tasks a node."),
    ],
)
def test_values_that_make_no_sense_are_warned_about_once(wrong, message, caplog):
    """The launcher counts as absent then, and the next one is asked."""
    environ = TORCHRUN | wrong
    assert from_environment(environ) is None
    assert who(environ | OPENMPI) == who(OPENMPI)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{message} The torchrun environment is ignored."]


def test_a_framework_knows_who_we_are_and_the_launcher_where(monkeypatch):
    """The launcher's place on the host counts only if it counts the same ranks."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    told = as_told_by("jax.distributed", 5, 8)
    assert (told.local_rank, told.local_world_size, told.source) == (1, 4, "jax.distributed")
    assert as_told_by("jax.distributed", 0, 2) == Identity(0, 2, source="jax.distributed")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("gpu[003-010,12],login1", "gpu003"),
        ("a1,a2", "a1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu[7]-ib", "gpu7-ib"),
    ],
)
def test_the_first_of_slurms_hosts(hosts, first):
    """Leading zeros stay, and so does what follows the brackets."""
    assert first_host(hosts) == first


def test_the_address_of_rank_0():
    """What is set counts, then the loopback on one host, then SLURM's first, else nobody knows."""
    assert master_address(TORCHRUN) == "node1"
    assert master_address({}) == "127.0.0.1"
    assert master_address(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == "127.0.0.1"
    assert master_address(SLURM) == "gpu003"
    assert master_address(OPENMPI | {"SLURM_JOB_NODELIST": "n[1-2]"}) == "n1"
    assert master_address(OPENMPI) is None
