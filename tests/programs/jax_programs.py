"""What the tests of the JAX room run in processes of their own, with more devices than there are."""

from __future__ import annotations

import os
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import everyrank.jax as er
from everyrank.errors import EveryrankError
from everyrank.jax.programs import packed

P = PartitionSpec
WAYS = {"mean": er.reduce_mean, "sum": er.reduce_sum, "max": er.reduce_max, "min": er.reduce_min}
COLLECTIVES = {
    "mean": er.reduce_mean_collective,
    "sum": er.reduce_sum_collective,
    "max": er.reduce_max_collective,
    "min": er.reduce_min_collective,
}


def simulate_devices(count):
    """Be a process with that many devices; JAX asks when the first of them is used."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    jax.config.update("jax_platforms", "cpu")


def a_mesh(shape=(8,), names=("batch",), kind=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def spread(value, spec=("batch",), mesh=None):
    return jax.device_put(value, NamedSharding(mesh or a_mesh(), P(*spec)))


def plain(tree):
    """Bring a tree of results to this process's parent."""
    return jax.tree.map(lambda x: np.asarray(x)[()] if isinstance(x, jax.Array) else x, tree)


def fifty(seed=0):
    random = np.random.default_rng(seed)
    return {f"m{i}": spread(random.random(16, np.float32)) for i in range(50)}


class Compiled:
    """How many programs were compiled within a block."""

    count = 0

    @staticmethod
    @cache  # a listener stays for good
    def listen():
        def hear(event, _seconds, **_):
            Compiled.count += event == "/jax/core/compile/backend_compile_duration"

        jax.monitoring.register_event_duration_secs_listener(hear)

    def __enter__(self):
        self.listen()
        self.before = Compiled.count
        return self

    def __exit__(self, *_):
        self.programs = Compiled.count - self.before


def all_reduces(text):
    return text.count(" all-reduce(") + text.count(" all-reduce-start(")


# ---------------------------------------------------------------- whole arrays


def fifty_metrics():
    """Reduce 50 sharded metrics eagerly and under jit, other values then and other names."""
    metrics, others = fifty(), fifty(1)
    expected = {name: float(np.asarray(x).mean(dtype=float)) for name, x in metrics.items()}
    with Compiled() as first:
        got = er.reduce_mean({**metrics, "step": 1, "phase": "warmup"})
    with Compiled() as again:
        er.reduce_mean({**others, "step": 2, "phase": "decay"})
        got_others = er.reduce_mean({f"other_{name}": x for name, x in others.items()})
    jax.block_until_ready(got_others)
    same = {name: abs(float(got[name]) - expected[name]) < 1e-6 for name in expected}
    return first.programs, again.programs, all(same.values()), got["step"], got["phase"]


def all_reduces_of(ways):
    """Count the all-reduces of 50 metrics with these operators in turn: eager, and under jit."""
    metrics = fifty()
    operators = {name: ways[i % len(ways)] for i, name in enumerate(metrics)}
    shardings = tuple(x.sharding for x in metrics.values())
    eager = packed(tuple(operators.values()), shardings).lower([(x,) for x in metrics.values()])
    jitted = jax.jit(lambda tree: er.reduce_custom(tree, operators)).lower(metrics)
    return [all_reduces(program.compile().as_text()) for program in (eager, jitted)]


def placements():
    """Reduce arrays on meshes of one and two axes, cut in every way, beside arrays that are not."""
    random = np.random.default_rng(2)
    x, weights = random.normal(size=(2, 8, 4)).astype(np.float32)
    cuts = [("a",), (("b", "a"),), ("a", "b"), (None, "b"), ()]
    wrong = []
    for kind, spec in [(AxisType.Auto, cut) for cut in cuts] + [
        (AxisType.Explicit, cut) for cut in cuts[1:3]
    ]:
        mesh = a_mesh((4, 2), ("a", "b"), kind)
        leaves = {
            "x": spread(x, spec, mesh),
            "copied": spread(x > 0, (), mesh),
            "half": spread(x.astype(np.float16), ("a",), mesh),
            "elsewhere": jnp.asarray(x),
            "host": x,
        }
        tree = dict.fromkeys(WAYS, leaves)
        want = {
            name: {key: getattr(np.asarray(v, float), name)() for key, v in leaves.items()}
            for name in WAYS
        }
        want["weighted"] = np.average(x, weights=weights)

        def reduce(tree):
            got = er.reduce_custom(tree, {name: name for name in WAYS})
            return {**got, "weighted": er.reduce_weighted_mean(tree["sum"]["x"], weights)}

        for how, got in (("eager", reduce(tree)), ("jit", jax.jit(reduce)(tree))):
            close = jax.tree.map(lambda a, b: np.isclose(float(a), b, 2e-3, 1e-5), got, want)
            wrong += [] if jax.tree.all(close) else [(str(kind), spec, how, close)]
    return wrong


def nan_on_each_device():
    """Give what max and min make of a NaN, by its place among the elements of 8 devices."""
    found = set()
    for place in range(16):
        x = np.arange(16, dtype=np.float32)
        x[place] = np.nan
        for dtype in (jnp.float32, jnp.bfloat16):
            sharded = spread(jnp.asarray(x, dtype))
            for way in ("max", "min"):
                found |= {
                    str(WAYS[way]({"x": sharded})["x"]),
                    str(jax.jit(WAYS[way])({"x": sharded})["x"]),
                    str(mapped(COLLECTIVES[way])(sharded)[place % 2]),
                }
    return found


def where_results_lie():
    """Use a result together with the array it came from, as one can use that of jnp.mean."""
    x = spread(np.arange(8.0, dtype=np.float32))
    result = er.reduce_mean({"x": x})["x"]
    return plain(jax.jit(lambda a, b: a - b)(x, result)).tolist(), result.is_fully_replicated


def other_devices():
    """Reduce one dict with arrays on the mesh, on parts of it, on one device and on the host."""
    half = Mesh(np.array(jax.devices()[4:]), ("batch",))
    tree = {
        "mesh": spread(np.arange(8.0, dtype=np.float32)),
        "half": spread(np.arange(4.0, dtype=np.float32), mesh=half),
        "last": jax.device_put(jnp.arange(2.0), jax.devices()[7]),
        "anywhere": jnp.arange(3.0),
        "host": np.arange(9.0),
    }
    weights = {**dict.fromkeys(tree, 2), "mesh": jnp.arange(8.0), "last": spread(np.float32(2), ())}
    return plain(er.reduce_sum(tree)), plain(er.reduce_weighted_mean(tree, weights))


def another_mesh_is_set():
    """Reduce over one mesh while the program has set another, or is inside a shard_map."""
    x = spread(np.arange(8.0, dtype=np.float32))
    with jax.set_mesh(a_mesh((4, 2), ("a", "b"))):
        under_another = er.reduce_mean({"x": x})["x"]
    with jax.set_mesh(x.sharding.mesh):
        under_its_own = er.reduce_mean({"x": x})["x"]
    captured = mapped(lambda part: part + er.reduce_mean({"x": x})["x"])(x)
    local = mapped(lambda part: er.reduce_mean({"x": part})["x"][None])(spread(np.arange(16.0)))
    return [plain(v).tolist() for v in (under_another, under_its_own, captured, local)]


def in_flax():
    """Reduce in nnx.jit under a mesh, with a module and with leaves that are no arrays."""
    from flax import nnx

    mesh = a_mesh()
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    x = np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32)

    def metrics_of(model, x):
        out = model(x)
        return {"out": {"raw": out, "first": out[0, 0]}, "large": x > 1, "lr": 0.1, "none": None}

    @nnx.jit
    def step(model, x):
        metrics = metrics_of(model, x)
        reduced = [reduce(metrics) for reduce in WAYS.values()]
        passed = all(one["lr"] == 0.1 and one["none"] is None for one in reduced)
        return reduced, er.reduce_weighted_mean(metrics, {"out": 1.0, "large": x**2}), passed

    with jax.set_mesh(mesh):
        reduced, weighted, passed = step(model, spread(x))
    eager = metrics_of(model, spread(x))
    expected = [reduce(eager) for reduce in WAYS.values()]
    same = jax.tree.map(np.allclose, plain(reduced), plain(expected))
    want = np.average(x > 1, weights=x**2)
    return jax.tree.all(same), bool(passed), bool(np.isclose(weighted["large"], want))


def law_of_eight_devices():
    """Whatever the values and their dtype, 8 devices make of them what numpy makes of the whole."""

    @settings(max_examples=40, deadline=None, database=None)
    @given(arrays())
    def law(x):
        sharded, atol = spread(x), 1e-5 * float(np.abs(x.astype(float)).max())
        whole, each = x.astype(float), x.astype(float).reshape(8, 2)
        for name in WAYS:
            got = WAYS[name]({"x": sharded})["x"], mapped(COLLECTIVES[name])(sharded)
            want = getattr(whole, name)(), getattr(each, name)(axis=0)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_allclose(np.asarray(one, float), other, 1e-5, atol, err_msg=name)

    law()


@st.composite
def arrays(draw):
    """Draw 16 elements whose sum has a place in what JAX sums them up in."""
    dtype = draw(st.sampled_from([np.float32, np.int32, np.int8, np.bool_]))
    elements = {
        np.float32: st.floats(-1e3, 1e3, width=32),
        np.int32: st.integers(-(2**26), 2**26),
        np.int8: st.integers(-128, 127),
        np.bool_: st.booleans(),
    }
    return np.array(draw(st.lists(elements[dtype], min_size=16, max_size=16)), dtype)


# ---------------------------------------------------------------- collectives


@cache
def mapped(function, shape=(8,), axes=("batch",)):
    """Map over the devices of a mesh; what a collective gives is the same on all of them."""
    out = P() if function in COLLECTIVES.values() else P(axes)
    mesh = a_mesh(shape, axes)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(axes), out_specs=out))


def collectives_of_a_tree(names):
    """Reduce a tree of all kinds of leaves on each device, over one or both axes of a mesh."""

    def leaves(x):
        return {
            "vector": x,
            "nested": {"matrix": jnp.outer(x, x).astype(jnp.bfloat16), "none": None},
            "number": x[0].astype(jnp.int32),
            "truth": x[0] > 7,
            "constant": np.ones(2, np.int64),
        }

    def reduce(x):
        # Text is no value of JAX: it passes through inside, but not out.
        results = {
            name: way({**leaves(x), "text": "t"}, names) for name, way in COLLECTIVES.items()
        }
        assert all(result.pop("text") == "t" for result in results.values())
        results["weighted"] = er.reduce_weighted_mean_collective(leaves(x), x[1], names)
        return jax.tree.map(lambda value: value[None], results)

    pieces = np.arange(16, dtype=np.float32).reshape(8, 2)
    got = mapped(reduce, (4, 2), ("a", "b"))(jnp.asarray(pieces.ravel()))
    return plain(got), [plain(leaves(piece)) for piece in pieces], pieces[:, 1]


def collectives_in_the_program():
    """Count the all-reduces and all-gathers of 20 metrics of three dtypes on each device."""
    x = spread(np.arange(16, dtype=np.float32))

    def leaves(x):
        dtypes = (jnp.float32, jnp.bfloat16, jnp.int32)
        return {f"m{i}": (x * i).astype(dtypes[i % 3]) for i in range(20)}

    counts = {}
    for name, way in COLLECTIVES.items():
        text = mapped(lambda x, way=way: way(leaves(x))).lower(x).compile().as_text()
        counts[name] = all_reduces(text)
    text = mapped(lambda x: er.all_gather(leaves(x))).lower(x).compile().as_text()
    return counts, text.count(" all-gather(")


def gathered():
    """Gather on each device what all hold: with pmap, and over two axes with shard_map."""

    def gather(x):
        tree = {"row": x, "number": x.sum(), "true": x.sum() > 3, "text": "t", "none": None}
        got = er.all_gather(tree)
        assert got.pop("text") == "t"
        return got

    pmapped = jax.pmap(gather, axis_name="batch")(jnp.arange(16.0).reshape(8, 2))
    mesh = a_mesh((4, 2), ("a", "b"))
    both = jax.shard_map(
        lambda x: er.all_gather({"x": x}, ("a", "b"))["x"].reshape(-1),
        mesh=mesh,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
    )(jnp.arange(8.0))
    everywhere = jax.shard_map(
        lambda x: er.all_gather({"x": x[0]}, "a")["x"],
        mesh=a_mesh((8,), ("a",)),
        in_specs=P("a"),
        out_specs=P(),
        check_vma=False,
    )(jnp.arange(8.0))
    return plain(pmapped), plain(both).reshape(8, 8), plain(everywhere)


def under_pmap():
    """Reduce in pmap, by the axis they name "batch"."""
    x = jnp.arange(8)
    return {name: plain(jax.pmap(way, axis_name="batch")(x)) for name, way in COLLECTIVES.items()}


def refusals():
    """Give the messages of axes that are not there."""
    mesh = a_mesh((4, 2), ("a", "b"))

    def said(function, names, map_over=None):
        try:
            call = (lambda x: function(x, names)) if names else function
            if map_over:
                call = jax.shard_map(
                    call, mesh=mesh, axis_names=map_over, in_specs=P("a"), out_specs=P("a")
                )
            jax.jit(call)(jnp.arange(8.0))
        except EveryrankError as error:
            return type(error).__name__, str(error)

    both = {"a", "b"}
    return {
        "unknown": said(er.reduce_mean_collective, "rows", both),
        "one of two": said(er.reduce_max_collective, ("a", "rows"), both),
        "default": said(er.all_gather, None, both),
        "not mapped": said(er.reduce_sum_collective, "b", {"a"}),
        "a number": said(er.reduce_sum_collective, 1, both),
    }


# ---------------------------------------------------------------- to the host


def collected():
    """Split what pmap and shard_map returned, and count the transfers to the host."""
    calls = []
    real = jax.device_get

    def counted(tree):
        calls.append(len(tree))
        return real(tree)

    out = jax.pmap(lambda x: {"x": x, "row": jnp.stack([x, -x])})(jnp.arange(8.0))
    tree = {"pmap": out, "sharded": spread(np.arange(8)), "one": jnp.float32(1), "text": "t"}
    jax.device_get = counted
    try:
        # Whatever reached the host by another way than device_get would be refused.
        with jax.transfer_guard_device_to_host("disallow"):
            got = er.collect_from_devices(tree)
    finally:
        jax.device_get = real
    return plain(got), calls


# ---------------------------------------------------------------- processes


def two_processes(rank):
    """Reduce over the devices of two processes, two each."""
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    full = np.arange(8, dtype=np.float32)

    def held(value):
        sharding = NamedSharding(mesh, P("batch"))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    broken = full.copy()
    broken[6] = np.nan
    tree = {"x": held(full), "nested": {"i": held(full.astype(np.int32))}, "lr": 0.1, "own": None}
    tree["own"] = np.full(3, float(rank))
    results = {name: way(tree) for name, way in WAYS.items()}
    results["jit"] = jax.jit(er.reduce_mean)({"x": tree["x"], "nested": tree["nested"]})
    results["weighted"] = er.reduce_weighted_mean({"x": tree["x"]}, held(full))
    results["nan"] = er.reduce_max({"x": held(broken)})
    collective = jax.jit(
        jax.shard_map(
            lambda x: er.reduce_weighted_mean_collective({"x": x.sum()}, x[0]),
            mesh=mesh,
            in_specs=P("batch"),
            out_specs=P(),
        )
    )
    results["collective"] = collective(tree["x"])
    results = plain(results)
    try:
        er.collect_from_devices(tree)
    except EveryrankError as error:
        results["refused"] = str(error)
    jax.distributed.shutdown()
    return len(jax.local_devices()), results
