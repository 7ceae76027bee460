"""State in pinned host memory streams through the update in buckets, in place, and to the same bits as on the device."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.state.init import initialise
from jaxckpt.state.plan import Placement, make_plan, shardings
from jaxckpt.state.train_state import take_apart
from tiny import IN, OUT, batch_of, differing, make_step, mesh_of, on_mesh, to_numpy

STEPS = 3


class Deep(nnx.Module):
    """Eight layers, so that small buckets are many."""

    def __init__(self, rngs):
        widths = [IN, *[16] * 7, OUT]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(widths)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


class Noisy(Deep):
    """Draws from a key in its own state."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.key = nnx.Variable(rngs.params())

    def __call__(self, x):
        self.key[...] = jax.random.split(self.key[...])[0]
        x = super().__call__(x)
        return x + jax.random.normal(self.key[...], x.shape)


def trained(tx, tier, *, model=Deep, devices=8, bad_step=None, **args):
    """(state and metrics after some steps, whether every host buffer is where it was)."""
    mesh = mesh_of(data=2, fsdp=4) if devices == 8 else mesh_of()
    placement = Placement(master=tier, opt_state=tier, bucket_bytes=1500)
    step, state, plan, _ = make_step(model, tx, rows=16, mesh=mesh, placement=placement, **args)
    away = lambda state: [x for x in jax.tree.leaves((state.master, state.opt_state)) if x.ndim]
    # Adafactor's placeholders, of one element, are made anew: nobody reads them.
    large = lambda state: [x for x in away(state) if x.size > 1]
    places = lambda state: [s.data.unsafe_buffer_pointer() for x in large(state) for s in x.addressable_shards]
    before = places(state)
    for i in range(STEPS):
        batch = batch_of(16 * i, 16)
        if i == bad_step:
            batch["x"][0, 0] = np.inf
            batch["mask"][0, 0] = 1
        state, metrics = step(state, on_mesh(batch, mesh))
        assert bool(metrics["finite"]) == (i != bad_step)
    assert {x.sharding.memory_kind for x in away(state)} == {tier}
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(plan)]
    return to_numpy((state, metrics)), before == places(state)


@pytest.mark.parametrize(
    "tx, args",
    [
        (optax.adamw(1e-2, weight_decay=0.1), {"max_grad_norm": 0.1, "accumulation_steps": 2}),
        (optax.adamw(1e-2), {"compute_dtype": "bfloat16", "nonfinite": "skip", "bad_step": 1}),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adafactor(1e-2, min_dim_size_to_factor=4)), {}),
        (optax.adamw(1e-2), {"model": Noisy, "devices": 1}),
    ],
    ids=[
        "clipped and accumulated",
        "master weights and a skipped step",
        "a norm inside the optimizer",
        "on one device",
    ],
)
def test_many_buckets_in_host_memory_give_the_bits_of_optax_on_the_device(tx, args):
    on_device, _ = trained(tx, "device", **args)
    streamed, is_in_place = trained(tx, "pinned_host", **args)
    assert not differing(on_device, streamed)
    assert is_in_place


def test_an_optimizer_that_mixes_all_state_is_refused_by_name():
    tx = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
    with pytest.raises(PlanError, match=r"(?s)updates/layers/0/bias.*max_grad_norm"):
        make_step(Deep, tx, placement=Placement(opt_state="pinned_host"))
    make_step(Deep, tx)


def test_state_off_the_device_is_initialised_in_parts_to_the_same_bits():
    _, abstract, make = take_apart(Deep, optax.adamw(1e-3), seed=3, compute_dtype="bfloat16")
    tiers = Placement(params="pinned_host", master="pinned_host", opt_state="pinned_host")
    plan = make_plan(abstract, mesh_of(fsdp=4), placement=tiers)
    state = initialise(make, plan, to_disk=dict, part_bytes=2000)
    whole = jax.jit(make, out_shardings=shardings(make_plan(abstract, mesh_of(fsdp=4))))()
    assert not differing(state, whole)
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(plan)]
    assert jnp.any(tree.flatten(state)["master/layers/0/kernel"])
