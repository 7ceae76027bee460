"""Small runs in this process, and what each of their steps did, to the bit."""

import jax
import numpy as np
import optax

from jaxckpt import Run, Snapshots
from tiny import Examples, Mlp, mesh_of, squared_error

MESH = mesh_of(data=2)


def model(rngs):
    return Mlp(rngs, dropout=0.2, has_norm=True)


def make_run(run_dir=None, *, every=2, keep=10, policy=None, **args):
    """A Run over 20 examples, 4 a step, that saves every second step to `run_dir`; `policy`: more of Snapshots."""
    args = {
        "model": model,
        "loss": squared_error,
        "optimizer": optax.adam(1e-2),
        "data": Examples(20),
        "global_batch": 4,
        "mesh": MESH,
        "snapshots": Snapshots(run_dir, every=every, keep=keep, timeout_s=60, **(policy or {})) if run_dir else None,
        "timeout_s": 20.0,
        **args,
    }
    return Run(**args)


def train(run_dir, until, **args):
    """(reports, final state as numpy, the closed run)."""
    with make_run(run_dir, **args) as run:
        reports = list(run.train(until))
        return reports, jax.tree.map(np.asarray, run.state), run


def bits(reports):
    return [(r.step, r.loss_bits, r.batch_digest, r.grad_norm) for r in reports]
