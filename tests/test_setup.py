"""The two calls that get a script going: what they set up, and what they survive."""

from __future__ import annotations

import sys
import types
import uuid
import zlib

import pytest
import setup_programs

import everyrank
from everyrank.errors import MissingPackage, OptionError
from everyrank.ranks.launcher import LAUNCHERS
from everyrank.setup import wandb_disabled
from everyrank.testing import run_ranks

FORKED = {"backend": None, "start_method": "forkserver"}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Whatever started the tests, they begin as one process without switches."""
    for launcher in LAUNCHERS:
        for name in (*launcher.rank, *launcher.world_size):
            monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- torch


def test_processes_of_one_launch_join_and_begin_alike():
    """Each is told its rank, collectives work at once, and the seed is the same everywhere."""
    first, second = run_ranks(setup_programs.join, 2, -3, **FORKED)
    assert first["total"] == second["total"] == 1.0
    assert first["noise"] == second["noise"]
    assert first["backend"] == "gloo"
    assert (first["again"], second["again"]) == (0, 1)


def test_where_to_meet_is_filled_in_where_the_launcher_leaves_it_open():
    """On one host the loopback, and a port that all ranks derive from the job."""
    job = uuid.uuid4().hex
    env = {"TORCHELASTIC_RUN_ID": job}
    first, second = run_ranks(setup_programs.join_without_an_address, 2, env=env, **FORKED)
    port = str(15000 + zlib.crc32(job.encode()) % 15000)
    assert first["master"] == second["master"] == ("127.0.0.1", port)
    assert first["total"] == 1.0


def test_a_single_process_is_rank_0_and_initialises_nothing():
    """The same script runs without a launcher, with the seed it asks for."""
    import torch

    assert everyrank.setup_torch(seed=5) == 0
    noise = torch.rand(1).item()
    assert everyrank.setup_torch(seed=5) == 0
    assert torch.rand(1).item() == noise
    assert not torch.distributed.is_initialized()


def test_ranks_of_several_hosts_need_an_address(monkeypatch):
    """Where no launcher says on which host rank 0 is, the message says how to tell it."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(OptionError, match=r"MASTER_ADDR is not set, and the pmi environment does"):
        everyrank.setup_torch()


def test_without_torch_the_message_says_how_to_get_it(monkeypatch):
    """It is an ImportError that names the extra."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match=r'pip install "everyrank\[torch\]"'):
        everyrank.setup_torch()


# ---------------------------------------------------------------- wandb


@pytest.fixture
def wandb(monkeypatch):
    """Stand in for the package: `init` notes its options, or fails as it is told."""
    module = types.ModuleType("wandb")
    module.calls = []
    module.error = None

    def init(**options):
        module.calls.append(options)
        if module.error is not None:
            raise module.error
        return "the run"

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_rank_0_gets_a_run(wandb, caplog):
    """The options are those of wandb.init, and the project comes first."""
    assert everyrank.setup_wandb("a project", config={"lr": 1}) == "the run"
    assert everyrank.setup_wandb(project="another") == "the run"
    assert everyrank.setup_wandb() == "the run"
    assert wandb.calls == [
        {"project": "a project", "config": {"lr": 1}},
        {"project": "another"},
        {"project": None},
    ]
    assert said(caplog) == []


def test_other_ranks_get_none(wandb, monkeypatch, caplog):
    """One run for all, and nothing to say about it elsewhere."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert everyrank.setup_wandb("a project") is None
    assert wandb.calls == []
    assert said(caplog) == []


def test_without_the_package_training_goes_on(monkeypatch, caplog):
    """A warning says what is missing and how to get it."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed, where it is
    assert everyrank.setup_wandb("a project") is None
    (warning,) = said(caplog)
    assert warning.startswith(
        'setup_wandb needs the package wandb: pip install "everyrank[wandb]". W&B is off for this '
        "run. ("
    )


@pytest.mark.parametrize("error", [RuntimeError("no network"), ImportError("half installed")])
def test_whatever_wandb_raises_training_goes_on(wandb, error, caplog):
    """A failure of W&B is a warning with its reason."""
    wandb.error = error
    assert everyrank.setup_wandb("a project") is None
    (warning,) = said(caplog)
    assert "W&B is off for this run" in warning
    assert str(error) in warning


def test_an_interrupt_is_not_swallowed(wandb):
    """Who presses ^C at W&B's question wants the program to end."""
    wandb.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        everyrank.setup_wandb("a project")


@pytest.mark.parametrize(
    ("environ", "mode", "off"),
    [
        ({}, None, False),
        ({"WANDB_DISABLED": "1"}, None, True),
        ({"WANDB_DISABLED": "true"}, "online", True),
        ({"WANDB_DISABLED": " False "}, None, False),
        ({"WANDB_MODE": "disabled"}, None, True),
        ({"WANDB_MODE": "disabled"}, "offline", False),
        ({"WANDB_MODE": "offline"}, None, False),
        ({}, "disabled", True),
    ],
)
def test_a_user_may_switch_wandb_off(wandb, monkeypatch, caplog, environ, mode, off):
    """By its own variables or by `mode`, and without a word."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert wandb_disabled(mode) == off
    options = {} if mode is None else {"mode": mode}
    assert (everyrank.setup_wandb("a project", **options) is None) == off
    assert said(caplog) == []
