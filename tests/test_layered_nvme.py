"""Parameters in pinned host memory or on local disks, master weights and moments on disks: the bits of all in host memory."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxckpt.errors import PlanError
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.planning.subject import parts_of
from jaxckpt.state import tree
from jaxckpt.state.nvme import resident
from jaxckpt.state.plan import Placement, make_plan, shardings, unannotated
from jaxckpt.state.train_state import take_apart
from jaxckpt.update.choose import make_any_eval_step, make_any_step
from jaxckpt.update.compiling import kind_of
from jaxckpt.update.moved import disk_bytes
from test_layered import PARTS, WIDTH, Block, Stack, begun, head, pointers, rows, structs
from tiny import differing, mesh_of, to_numpy

ADAMW = optax.adamw(0.01, weight_decay=0.1)
HOST = Placement(
    params="pinned_host", master="pinned_host", opt_state="pinned_host", grads="pinned_host", bucket_bytes=1 << 20
)


class Tall(Stack):
    """Layers whose kernels are worth a file each, 288 KiB in float32 or what `width` makes of it; their biases and the table
    are not."""

    def __init__(self, rngs, depth, width):
        super().__init__(rngs)
        self.body = nnx.Dict(blocks=nnx.List([Block(width, rngs) for _ in range(depth)]))


def on_disks(tmp_path, **changes):
    return dataclasses.replace(HOST, **{"master": "nvme", "opt_state": "nvme", "nvme_dir": (str(tmp_path),), **changes})


def make(
    placement: Placement,
    *,
    tx=ADAMW,
    fsdp=1,
    compute_dtype: str | None = "bfloat16",
    layers: Any = PARTS,
    depth=1,
    width=4608,
    **args,
):
    """(step, state, plan, batch structs, store or None); the store is open."""
    mesh = mesh_of(fsdp=fsdp)
    model, abstract, _ = take_apart(lambda rngs: Tall(rngs, depth, width), tx, seed=0, compute_dtype=compute_dtype)
    plan = make_plan(abstract, mesh, annotations=model.annotations, placement=placement)
    like = structs(rows(0), mesh)
    leaves = on_disk(tree.flatten(plan))
    assert bool(leaves) == bool(placement.nvme_dir)
    store = NvmeStore(placement.nvme_dir, leaves, run_id="run") if leaves else None
    args = {"seed": 0, "gathered": unannotated(plan, (), model.annotations), "compute_dtype": compute_dtype, **args}
    args |= {"layers": layers, "store": store, "placement": placement}
    loss: Any = None  # that of the layers is taken
    step = make_any_step(model, loss, tx, plan, like, **args)
    state = begun(abstract, plan)
    if store is not None:
        store.open()
        flat = tree.flatten(state)
        state = tree.unflatten(state, flat | store.write_arrays({path: flat[path] for path in leaves}))
    return step, state, plan, like, store


def end_of(placement, batches, **args):
    """(state, metrics of all steps) as numpy arrays; checks that host buffers are written in place."""
    step, state, plan, like, store = make(placement, **args)
    compiled = step.trace(plan, like).lower().compile()
    before, metrics = pointers(resident(state)), []
    for batch in batches:
        state, found = compiled(state, jax.device_put(batch, shardings(like)))
        metrics.append(to_numpy(found))
    assert before and pointers(resident(state)) == before
    assert on_disk(tree.flatten(state)).keys() == on_disk(tree.flatten(plan)).keys()
    end = jax.tree.map(np.asarray, state)
    if store is not None:
        planned = disk_bytes(step)
        assert planned.read <= step.moved.bytes_read < 1.01 * planned.read + 4096 * len(store.paths), "and checksums"
        assert step.moved.bytes_written >= planned.written > 0
        step.close()
        store.close()
    return end, metrics


KINDS = {
    "clipped and skipping, 8 devices": {"fsdp": 8, "max_grad_norm": 0.05, "nonfinite": "skip"},
    "accumulated": {"accumulation_steps": 2},
    # Two layers: with one, a first bucket that shares a gradient with the global phase showed in no bit.
    "clipped by optax and by us, float32, some moments on disk": {
        **{"depth": 2, "compute_dtype": None},
        "tx": optax.chain(optax.clip_by_global_norm(0.05), optax.scale_by_adam(), optax.scale_by_learning_rate(0.01)),
        "max_grad_norm": 0.1,
        "lr": optax.constant_schedule(0.01),
        "tiers": {"opt_state": "pinned_host", "paths": (("opt_state/.*/nu/.*up/", "nvme"),)},
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_state_on_disk_beside_parameters_in_host_memory_gives_the_bits_of_all_in_host_memory(name, tmp_path):
    args = dict(KINDS[name])
    tiers = args.pop("tiers", {})
    is_skipping = "nonfinite" in args
    batches = [rows(i, poison=is_skipping and i == 1) for i in range(3)]
    expected = end_of(HOST, batches, **args)
    found = end_of(on_disks(tmp_path, **tiers), batches, **args)
    assert not differing(expected, found)
    assert [bool(m["finite"]) for m in found[1]] == [True, not is_skipping, True]


def test_the_traced_step_tells_its_programs_and_what_it_closes_over(tmp_path):
    secret = jax.device_put(np.arange(24, dtype=np.float32))
    texts = []
    for bias, rate in [(0, 0.1), (0, 0.2), (secret, 0.1)]:
        layers = dataclasses.replace(
            PARTS, head=lambda m, x, batch, bias=bias: (head(m, x, batch)[0] + jnp.sum(bias), 9)
        )
        tx = optax.sgd(rate, momentum=0.9)
        step, _, plan, like, store = make(on_disks(tmp_path), tx=tx, layers=layers, accumulation_steps=4)
        if store is not None:
            store.close()
        traced = step.trace(plan, like)
        jaxpr = traced.jaxpr
        texts.append(str(jaxpr))
        found = [np.asarray(x) for x in jaxpr.consts if np.shape(x) == (24,)]
        assert len(found) == (bias is secret) and all(np.array_equal(x, secret) for x in found)
    assert len(set(texts)) == 3
    parts = {name: part.times for name, part in parts_of(traced).items()}
    assert parts == {"gradients": 4, "global phase": 1, "update of a bucket": 1}


WIDE = {"params": "nvme"}
ON_DISK = {
    "float32, clipped and skipping, 2 devices": {
        **{"compute_dtype": None, "fsdp": 2, "depth": 2, "max_grad_norm": 0.05, "nonfinite": "skip"},
        "tiers": {**WIDE, "master": "device"},
    },
    "accumulated, all on disk, the first buckets cached": {
        **{"width": 9216, "depth": 3, "accumulation_steps": 2},
        "tiers": {**WIDE, "nvme_cache_bytes": 6 << 20},
    },
    "clipped by optax, some parameters and no other state on disk": {
        **{"width": 9216, "depth": 2, "tx": optax.chain(optax.clip_by_global_norm(0.05), ADAMW)},
        "tiers": {"master": "pinned_host", "opt_state": "pinned_host", "paths": (("^params/.*/up/", "nvme"),)},
    },
}


@pytest.mark.parametrize("name", ON_DISK)
def test_parameters_on_disk_give_the_bits_of_parameters_in_host_memory(name, tmp_path):
    args = dict(ON_DISK[name])
    tiers = args.pop("tiers")
    batches = [rows(i, poison="nonfinite" in args and i == 1) for i in range(3)]
    expected = end_of(HOST, batches, **args)
    assert not differing(expected, end_of(on_disks(tmp_path, **tiers), batches, **args))


def test_layers_alike_are_compiled_once_and_a_plan_counts_how_often_they_run(tmp_path):
    step, _, plan, like, store = make(on_disks(tmp_path, params="nvme"), depth=3, width=9216, accumulation_steps=2)
    assert store is not None
    store.close()
    traced = step.trace(plan, like)
    parts = {name: part.times for name, part in parts_of(traced).items()}
    first = {"embedding": 2, "head": 2, "embedding, backward": 2, "layer": 6, "layer, backward": 6, "norm": 1}
    assert parts == {**first, "global phase": 1, "update of a bucket": 1}
    compiled = traced.lower().compile()
    kinds = [len({kind_of(program) for program in group}) for group in (traced._first.values(), traced._updates)]
    assert kinds[0] == len(first) + 1, "one for all layers, forward and backward"
    assert len(compiled.programs) == sum(kinds)
    x = 4 * 8 * WIDTH * 2  # of a microbatch, in bfloat16
    gain = 4 * 4
    assert step.beginning.activation_bytes == 4 * x + gain
    assert jax.tree.leaves(traced.jaxpr.consts) == []


def test_a_loss_from_disks_is_that_from_host_memory(tmp_path):
    mesh = mesh_of(fsdp=2)
    model, abstract, _ = take_apart(lambda rngs: Tall(rngs, 2, 9216), ADAMW, seed=0, compute_dtype="bfloat16")
    found = []
    for placement in (HOST, on_disks(tmp_path, params="nvme")):
        plan = make_plan(abstract, mesh, annotations=model.annotations, placement=placement)
        like, leaves = structs(rows(0), mesh), on_disk(tree.flatten(plan))
        loss: Any = None
        with NvmeStore(placement.nvme_dir, leaves, run_id="run") if leaves else nullcontext() as store:
            args = {"layers": PARTS, "store": store, "gathered": frozenset()}
            evaluate = make_any_eval_step(model, loss, plan, like, **args)
            state = begun(abstract, plan)
            if store is not None:
                flat = tree.flatten(state)
                state = tree.unflatten(state, flat | store.write_arrays({path: flat[path] for path in leaves}))
            for seed in (0, 1):
                batch = jax.device_put(rows(seed), shardings(like))
                found.append(to_numpy(evaluate(state.params, state.model_state, batch)))
            if store is not None:
                evaluate.close()
    assert found[:2] == found[2:] and found[0] != found[1]


def test_what_cannot_be_on_disk_is_refused_by_name(tmp_path):
    def scaled(updates, state, params=None):
        scale = optax.tree.norm(params)
        return jax.tree.map(lambda u: u / scale, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), scaled)
    with pytest.raises(PlanError, match=r"params/body/blocks/0/down/kernel is read by the optimizer before any bucket"):
        make(on_disks(tmp_path, params="nvme"), tx=tx, compute_dtype=None)
    with pytest.raises(PlanError, match="list of layer functions"):
        make(on_disks(tmp_path), layers=None)
