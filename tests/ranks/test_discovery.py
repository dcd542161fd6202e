"""Who reduces with whom: what is asked first, and what a group may be."""

from __future__ import annotations

import os
import tempfile

import discovery_programs
import numpy as np
import pytest

from everyrank.errors import OptionError
from everyrank.ranks import discover
from everyrank.ranks.launcher import LAUNCHERS
from everyrank.ranks.store import DirectoryStore
from everyrank.testing import run_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Whatever started the tests, they begin as one process."""
    for launcher in LAUNCHERS:
        names = (launcher.rank, launcher.world_size, launcher.local_rank, launcher.job)
        for name in (name for group in names for name in group):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    """Be rank 1 of 4 by the environment of torchrun."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def torch_world():
    """Be rank 2 of 4 by torch.distributed, with a process group that talks to nobody."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield dist
    dist.destroy_process_group()


def test_without_anybody_else_there_is_one_process():
    """It is rank 0 of 1, and needs no place to meet."""
    peers = discover()
    assert (peers.identity.rank, peers.identity.world_size) == (0, 1)
    assert peers.identity.source == "one process"
    assert (peers.ranks, peers.first, peers.store) == ((0,), 0, None)


def test_a_launchers_environment_is_asked_without_a_framework(launched, tmp_path):
    """Its ranks meet in a directory: the run's own, which they may share over a network."""
    peers = discover(directory=tmp_path)
    assert peers.identity.source == "torchrun"
    assert peers.ranks == (0, 1, 2, 3)
    store = peers.store()
    store.leave("key", "note")
    assert list((tmp_path / ".everyrank").iterdir())
    assert isinstance(store, DirectoryStore)


def test_ranks_of_a_host_meet_also_if_they_were_told_different_directories(
    launched, tmp_path, monkeypatch
):
    """A place among the temporary files is one for each user, also for one who has no name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("USER", raising=False)
    place = tmp_path / "temporary" / f"everyrank-{os.getuid()}" / ".everyrank"
    assert str(discover().store()) == str(place)
    (tmp_path / "temporary").mkdir()
    discover(directory=tmp_path / "run").store().leave("key", "note")
    assert discover().store().look("key") == "note"
    assert discover(directory=tmp_path / "another").store().look("key") == "note"


def test_an_initialised_torch_distributed_is_asked_before_the_launcher(launched, torch_world):
    """Who the program says it is counts more than how it was started."""
    peers = discover()
    assert peers.identity.source == "torch.distributed"
    assert (peers.identity.rank, peers.identity.world_size) == (2, 4)
    assert peers.identity.local_world_size == 1
    assert peers.ranks == (0, 1, 2, 3)


def test_torch_tells_the_rank_and_the_launcher_the_place(monkeypatch, launched, torch_world):
    """Where both mean the same rank, its place on the host is known."""
    monkeypatch.setenv("RANK", "2")
    assert discover().identity.local_rank == 1
    assert discover().identity.local_world_size == 2


def test_torch_that_is_not_initialised_is_not_asked(launched):
    """An imported framework is none that the program uses to talk to other ranks."""
    import torch.distributed  # noqa: F401

    assert discover().identity.source == "torchrun"


def test_an_initialised_jax_distributed_is_found_and_its_service_is_where_ranks_meet():
    """Two processes of jax.distributed: who they are, a note, and means over both."""
    first, second = run_ranks(
        discovery_programs.meet_in_jax, 2, backend=None, start_method="forkserver"
    )
    assert first["who"] == ("jax.distributed", 0, 2, 0, 2)
    assert second["who"] == ("jax.distributed", 1, 2, 1, 2)
    assert first["notes"] == second["notes"] == [None, "new"]
    assert first["means"] == second["means"] == [(0, 0.5), (1, 1.5)]


def test_the_torch_store_keeps_notes_for_every_rank():
    """What one rank leaves the others find; nobody waits for what is not there."""
    results = run_ranks(discovery_programs.notes_in_torch, 2, start_method="forkserver")
    assert results == [[None, "new", "the store of torch.distributed"]] * 2


# ---------------------------------------------------------------- groups


def test_a_process_group_restricts_the_ranks(torch_world):
    """Its members are told by their ranks in the whole program."""
    peers = discover(group=torch_world.new_group([1, 2]))
    assert (peers.identity.rank, peers.ranks, peers.first) == (2, (1, 2), 1)


def test_a_slice_of_a_device_mesh_holds_the_ranks_of_our_row(torch_world):
    """With named dimensions, the statistics are over one of them."""
    mesh = torch_world.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert discover(group=mesh["dp"]).ranks == (0, 2)
    assert discover(group=mesh["tp"]).ranks == (2, 3)
    assert discover(group=mesh).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "group", [[3, 1], (1, 3, 3), range(1, 4, 2), [np.int64(1), np.int64(3)]], ids=repr
)
def test_a_sequence_of_ranks_needs_no_framework(launched, group):
    """In any order, with repetitions, as any kind of whole number."""
    assert discover(group=group).ranks == (1, 3)


def test_a_group_without_this_rank_is_refused(launched):
    """The message names its ranks, ours, and what to do."""
    with pytest.raises(OptionError, match=r"group=\[0, 2\] holds the ranks \[0, 2\], and this is"):
        discover(group=[0, 2])
    with pytest.raises(OptionError, match=r"holds the ranks \[\], and this is rank 1. Create the"):
        discover(group=[])


def test_what_new_group_gives_to_outsiders_is_refused(torch_world):
    """A rank outside the group is told so, and not that the group is of a wrong kind."""
    outside = torch_world.new_group([0, 1])
    with pytest.raises(OptionError, match=r"holds the ranks \[\], and this is rank 2"):
        discover(group=outside)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(launched, rank):
    """Nobody would ever report under it."""
    with pytest.raises(OptionError, match=f"names rank {rank}, but the ranks are 0 to 3 by torchr"):
        discover(group=[1, rank])


@pytest.mark.parametrize("group", ["01", 1, {0, 1}, [0.0, 1.0], [None], 3.0], ids=repr)
def test_what_is_no_group_is_refused(launched, group):
    """The message says what would be one."""
    with pytest.raises(OptionError, match=r"must be a ProcessGroup, a DeviceMesh or a sequence"):
        discover(group=group)
