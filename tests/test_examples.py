"""The examples run as they stand, as their users would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENT = 150  # seconds; only there to end a hang


def start(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process):
    out, err = process.communicate(timeout=PATIENT)
    assert process.returncode == 0, err
    return out


def test_the_jax_example_learns_on_eight_devices(tmp_path):
    """Every sample is seen once, and the accuracy is that of all devices."""
    lines = output(start(EXAMPLES / "train_jax.py", cwd=tmp_path)).splitlines()
    assert lines[0] == "8 devices in 1 processes"
    assert lines[1].endswith("over 12800 samples")
    assert float(lines[1].split()[3]) > 0.9


def test_the_jax_example_learns_on_two_processes(tmp_path):
    """The same numbers as on one: what both processes have seen counts once."""
    alone = output(start(EXAMPLES / "train_jax.py", cwd=tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    both = [
        start(EXAMPLES / "train_jax.py", address, "2", str(i), cwd=make(tmp_path / "two"))
        for i in range(2)
    ]
    found = [output(process).splitlines()[-1] for process in both]
    assert found == [alone.splitlines()[-1]] * 2


def make(directory):
    directory.mkdir(exist_ok=True)
    return directory


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example):
    """One can read it at a glance."""
    assert len(example.read_text().splitlines()) <= 95
