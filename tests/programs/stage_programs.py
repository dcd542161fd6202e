"""What the tests of the stages run in processes of their own."""

from __future__ import annotations

import os
import sys
import threading

from everyrank.intake import Intake
from everyrank.window import pack


def taken(*updates):
    """Hand over some updates, and give the values that come out."""
    windows = []
    intake = Intake(windows.append, sync_every=len(updates), went_back=lambda last, step: 0)
    for update in updates:
        intake.add(update)
    return [dict(r.values) for window in windows for batch in pack(window.rows) for r in batch]


def frameworks_of_floats(rank):
    """Hand over values of the host; give what was imported for them."""
    import numpy as np

    taken({"x": 1.0, "n": 3, "v": np.ones(3), "l": [1, 2], "note": None})
    return sorted({"torch", "jax", "jaxlib"} & set(sys.modules))


def two_devices(rank):
    """Hand over arrays that lie on one of two devices, on both, and in parts on each."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    mesh = Mesh(devices, ("x",))
    update = {
        "one": jax.device_put(jnp.float32(1.5), devices[0]),
        "other": jax.device_put(jnp.float32(2.5), devices[1]),
        "both": jax.device_put(jnp.float32(3.5), NamedSharding(mesh, PartitionSpec())),
        "parts": jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("x"))),
    }
    out = taken(update, update)
    return len(devices), [{**values, "parts": values["parts"].tolist()} for values in out]


def two_processes(rank, port):
    """Hand over a global array that every process holds, and one that each holds a part of."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from everyrank.errors import MetricError

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    mesh = Mesh(jax.devices(), ("x",))

    def spread(spec, shape, full):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: full[index])

    whole = spread(PartitionSpec(), (), np.array(2.5, np.float32))
    part = spread(PartitionSpec("x"), (2,), np.arange(2.0, dtype=np.float32))
    try:
        taken({"x": part})
    except MetricError as error:
        return taken({"x": whole}, {"x": whole}), str(error)


def fork_while_locked(rank):
    """Fork while another thread is in the middle of an update; give what the child could do."""
    intake = Intake(lambda window: None, sync_every=9, went_back=lambda last, step: 0)
    held, done = threading.Event(), threading.Event()

    def hold():
        with intake._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        os._exit(intake.add({"x": 1.0}).step + 7)
    status = os.waitpid(pid, 0)[1]
    done.set()
    holder.join()
    return os.waitstatus_to_exitcode(status), intake.add({"x": 1.0}).step
