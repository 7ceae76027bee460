"""Resident memory of this process while it saves, restores and trains; prints JSON. python memory.py creep|start RUN_DIR"""

# ruff: noqa: E402 (the devices are chosen before anything asks JAX for them)
import json
import sys

from jaxckpt.distributed.start import use_cpu_devices

use_cpu_devices(2)

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxckpt import Run, Snapshots, make_mesh
from jaxckpt.distributed.sync import Group
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.state.plan import make_plan, shardings
from jaxckpt.state.train_state import TrainState

WIDTH = 2048


def memory(kind):
    """Bytes of VmRSS (now) or VmHWM (the peak)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(kind))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def creep(run_dir):
    """Resident bytes after 40, 80, ... saves of a state of 4 MiB and some small leaves, each donated in between."""
    state = TrainState(jnp.int32(0), {"w": jnp.ones((1024, 1024)), "b": jnp.ones(64)}, None, {}, {})
    plan = make_plan(jax.eval_shape(lambda: state), make_mesh())
    state = jax.device_put(state, shardings(plan))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    found = []
    with Snapshots(run_dir, keep=1, timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        for number in range(1, 201):
            snapshots.save(Snapshot(state, {}, {"format": FORMAT, "step": number, "leaves": leaf_table(plan)}))
            state = step(state)
            if number % 40 == 0:
                snapshots.wait()
                gc.collect()
                found.append(memory("VmRSS"))
    return {"resident": found}


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class Examples:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": np.full(WIDTH, i, np.float32)}


def start(run_dir):
    """The peak of the first two steps, over what was there before the state, and the size of the state."""
    run = Run(
        model=lambda rngs: Wide(rngs),
        loss=lambda model, batch: (jnp.square(model(batch["x"])).sum(), batch["x"].shape[0]),
        optimizer=optax.adam(1e-3),
        data=Examples(),
        global_batch=4,
        snapshots=Snapshots(run_dir, every=1000, timeout_s=60),
    )
    with run:
        run._program.start()
        run._program.wait(lambda: False)  # the compiler's memory is not what is measured
        gc.collect()
        before = memory("VmRSS")
        run.open()
        forget_peak()
        list(run.train(run.step + 2))
        peak = memory("VmHWM") - before
    return {"peak": peak, "state": sum(x.nbytes for x in jax.tree.leaves(run.state)), "step": run.step}


print(json.dumps({"creep": creep, "start": start}[sys.argv[1]](sys.argv[2])))
