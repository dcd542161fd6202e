"""JAX values: taken where they are, copied by one dispatch, safe from donation."""

from __future__ import annotations

import math
import re
import socket
from typing import Any

import numpy as np
import pytest
import stage_programs

from everyrank.errors import MetricError
from everyrank.intake import Intake
from everyrank.testing import run_ranks
from everyrank.window import Window, pack, values_of

jax = pytest.importorskip("jax")
jnp = jax.numpy


class Taken:
    """An intake, and the windows that it hands on."""

    def __init__(self, sync_every: int = 1) -> None:
        self.windows: list[Window] = []
        self.intake = Intake(
            self.windows.append, sync_every=sync_every, went_back=lambda last, step: 0
        )
        self.add = self.intake.add

    def values(self, name: str = "x") -> list[Any]:
        """Give what came of one name, as the background thread would."""
        self.intake.hand_over()
        for window in self.windows:
            while not window.ready():
                pass
        batches = [batch for window in self.windows for batch in pack(window.rows)]
        return [record.values[name] for batch in batches for record in batch]


def through(value: Any) -> Any:
    """Hand over one value, and give what comes out."""
    taken = Taken()
    taken.add({"x": value})
    (out,) = taken.values()
    return out


FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
INTS = ["int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32"]


@pytest.mark.parametrize("name", [*FLOATS, *INTS, "bool_"])
def test_values_of_any_dtype_come_out(name: str):
    """Floats come out as floats, ints as ints, bools as bools, alone and in arrays."""
    dtype = getattr(jnp, name)
    kind = bool if name == "bool_" else float if name in FLOATS else int
    for shape in ((), (1,), (1, 1)):
        out = through(jnp.ones(shape, dtype))
        assert (type(out), out) == (kind, 1)
    out = through(jnp.arange(6).reshape(2, 3).astype(dtype).T)
    assert out.dtype.kind in {bool: "b", int: "iu", float: "f"}[kind]
    assert out.tolist() == np.arange(6).reshape(2, 3).T.astype(kind).tolist()


@pytest.mark.parametrize("name", ["float64", "int64", "uint64"])
def test_wide_values_stay_exact(name: str):
    """With 64 bits switched on, floats keep their digits and ints all of theirs."""
    with jax.enable_x64(True):
        dtype = np.dtype(name)
        top = 0.1 if name == "float64" else int(np.iinfo(dtype).max)
        taken = Taken(sync_every=2)
        taken.add({"x": jnp.array(top, dtype), "v": jnp.array([top, 1], dtype)})
        assert taken.values() == [top]
        assert taken.values("v")[0].tolist() == [top, 1]


def test_infinities_and_nan_come_out():
    """A loss that is no number is reported as such."""
    assert (through(jnp.inf * jnp.ones(())), through(-jnp.inf * jnp.ones(()))) == (
        math.inf,
        -math.inf,
    )
    assert math.isnan(through(jnp.nan * jnp.ones(())))


def test_empty_arrays_come_out():
    """A vector without elements keeps its shape."""
    assert [through(jnp.ones(shape)).shape for shape in ((0,), (2, 0))] == [(0,), (2, 0)]


@pytest.mark.parametrize("shape", [(), (1,), (5,)], ids=str)
def test_what_was_handed_over_may_be_donated(shape: tuple[int, ...]):
    """An array that is deleted or donated after the call is still reported."""
    taken = Taken(sync_every=2)
    deleted, donated = jnp.full(shape, 2.0), jnp.full(shape, 3.0)
    taken.add({"x": deleted})
    taken.add({"x": donated})
    deleted.delete()
    jax.jit(lambda v: v * 0 - 1, donate_argnums=0)(donated).block_until_ready()
    first, second = taken.values()
    assert (np.array(first) == 2.0).all()
    assert (np.array(second) == 3.0).all()


def test_what_changes_its_look_is_looked_at_again():
    """A value may change dtype and shape from step to step."""
    values = [jnp.float32(1.5), jnp.int32(2), jnp.array([2.5]), jnp.arange(2), jnp.arange(3)]
    taken = Taken(sync_every=4)
    for value in values:
        taken.add({"y": jnp.float32(0.5), "x": value, "lr": 0.1})
    outs = [np.array(out).tolist() for out in taken.values()]
    assert outs == [1.5, 2, 2.5, [0, 1], [0, 1, 2]]
    assert taken.values("y") == [0.5] * 5


def test_an_update_is_one_dispatch_for_each_dtype():
    """Twenty numbers of one dtype are one copy, however many keys they have."""
    taken = Taken(sync_every=2)
    row = taken.add({f"m{i}": jnp.float32(i) for i in range(20)} | {"n": jnp.int32(3)})
    assert len(row.parts) == 2
    assert values_of(row) == {**{f"m{i}": i for i in range(20)}, "n": 3}


def test_a_noted_array_is_copied_when_it_is_noted():
    """An array that is noted for the next update may be donated in the meantime."""
    taken = Taken()
    number, vector = jnp.float32(1.0), jnp.ones(2)
    taken.intake.note("number", number)
    taken.intake.note("vector", vector)
    number.delete()
    vector.delete()
    taken.add({"x": 0.5})
    assert (taken.values("number"), taken.values("vector")[0].tolist()) == ([1.0], [1.0, 1.0])


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_tracer_has_no_value(transform: str):
    """An update inside a transformed function is refused with the way out, and takes no step."""
    taken = Taken(sync_every=9)

    def step(x: Any) -> Any:
        taken.add({"x": x.sum()})
        return x.sum()

    argument = jnp.ones(2) if transform != "vmap" else jnp.ones((2, 2))
    with pytest.raises(
        MetricError, match=r"'x' is a tracer: .* Return the value from the function"
    ):
        getattr(jax, transform)(step)(argument)
    assert taken.add({"x": 1.0}).step == 0


def test_a_constant_inside_jit_has_no_copy_there():
    """Within a trace a copy would be a tracer, also of an array that has a value."""
    taken, constant = Taken(sync_every=9), jnp.float32(2.0)
    taken.add({"x": constant})

    def step(x: Any) -> Any:
        taken.add({"x": constant})
        return x

    with pytest.raises(MetricError, match="'x' is a tracer"):
        jax.jit(step)(jnp.ones(2))
    assert taken.values() == [2.0]


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (
            lambda: jnp.complex64(1j),
            r"'x' is an array of complex64, which are no real numbers.*abs",
        ),
        (
            lambda: jax.random.key(0),
            r"'x' is .* \(of type PRNGKeyArray\): neither a number, nor an array",
        ),
        (lambda: jnp.zeros((256, 257)), r"'x' is an array of shape \(256, 257\).*x\.mean\(\)"),
        (lambda: [jnp.float32(1)], r"'x' is a list of jax values.*example jnp\.stack\(x\)"),
        (lambda: jax.ShapeDtypeStruct((), jnp.float32), "neither a number, nor an array"),
    ],
    ids=["complex", "key", "large", "list", "shape"],
)
def test_what_is_no_metric_is_refused(make: Any, pattern: str):
    """What has no real numbers, or too many, is named with a way out."""
    with pytest.raises(MetricError, match=pattern):
        through(make())


@pytest.mark.parametrize("before", [False, True], ids=["at first", "later"])
def test_a_deleted_array_is_named(before: bool):
    """An array that was donated before the call is refused by its name."""
    taken = Taken(sync_every=9)
    if before:
        taken.add({"y": jnp.float32(1), "x": jnp.float32(1)})
    gone = jnp.float32(2)
    gone.delete()
    with pytest.raises(MetricError, match="'x' was deleted, or donated to a jitted function"):
        taken.add({"y": jnp.float32(1), "x": gone})


def test_arrays_on_several_devices_are_copied_where_they_are():
    """Arrays of one device, of another, of both and in parts on each come out alike."""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ((devices, out),) = run_ranks(
        stage_programs.two_devices, 1, backend=None, start_method="forkserver", env=env
    )
    assert devices == 2
    assert out == [{"one": 1.5, "other": 2.5, "both": 3.5, "parts": [0, 1, 2, 3]}] * 2


def test_a_global_array_is_taken_if_this_process_holds_all_of_it():
    """Of an array over two processes, a replicated one is a number, and a part of one is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    pattern = re.escape(
        "'x' is a global array of shape (2,) that this process holds a part of only"
    )
    for out, message in run_ranks(
        stage_programs.two_processes, 2, port, backend=None, start_method="forkserver", env=env
    ):
        assert out == [{"x": 2.5}] * 2
        assert re.match(pattern, message)
        assert "x.addressable_data(0)" in message
