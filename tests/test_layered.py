"""Parameters off the device, a layer at a time: the bits of the step that has everything on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxckpt.errors import PlanError
from jaxckpt.exactness import captured_arrays, moved_params_warning
from jaxckpt.models import llama
from jaxckpt.models.layers import Layers
from jaxckpt.state.mesh import batch_sharding
from jaxckpt.state.plan import Placement, make_plan, shardings, unannotated
from jaxckpt.state.train_state import take_apart
from jaxckpt.update.gradients import square_sums
from jaxckpt.update.layer_buckets import make_layer_buckets
from jaxckpt.update.layered import make_layered_step
from jaxckpt.update.split import split_update
from jaxckpt.update.step import make_train_step
from jaxckpt.update.two_programs import TwoPrograms
from tiny import differing, mesh_of, to_numpy

HOST = Placement(params="pinned_host", master="pinned_host", opt_state="pinned_host", bucket_bytes=1 << 10)
ADAMW = optax.adamw(0.01, weight_decay=0.1)
WIDTH = 16


class Block(nnx.Module):
    def __init__(self, width, rngs, *, has_norm=False):
        self.up = nnx.Linear(WIDTH, width, rngs=rngs)
        self.down = nnx.Linear(width, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if has_norm else None

    def __call__(self, x, gain):
        y = self.down(jnp.tanh(self.up(x))) * gain
        return x + y if self.norm is None else self.norm(x + y)


class Stack(nnx.Module):
    """A user's own model: layers of different shapes under a path of their own, a table that embed and head share.

    All sizes are multiples of a vector's: what remains of a row beyond its last whole vector XLA computes in another way, and
    where that is depends on the program.
    """

    def __init__(self, rngs, *, has_norm=False):
        self.table = nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), (32, WIDTH), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(32))
        self.body = nnx.Dict(blocks=nnx.List([Block(16 * (i + 1), rngs, has_norm=has_norm) for i in range(2)]))


def head(model, x, batch):
    logits = (x @ model.table[...].T + jnp.broadcast_to(model.bias[...], (*x.shape[:-1], 32))).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


PARTS = Layers(
    embed=lambda model, batch: (model.table[...][batch["tokens"]], batch["gain"][:, None, None]),
    layer=lambda block, x, gain: block(x, gain.astype(x.dtype)),
    head=head,
    path="body/blocks",
)


def rows(seed, poison=False):
    rng = np.random.default_rng(seed)
    gain = np.ones(8, np.float32)
    return {
        "tokens": rng.integers(0, 32, (8, 8)).astype(np.int32),
        "mask": rng.integers(0, 2, (8, 8)).astype(np.int32),
        "gain": gain * np.nan if poison else gain,
    }


def structs(batch, mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), batch)


def make(
    build,
    parts,
    batch,
    *,
    is_layered,
    loss=None,
    tx=ADAMW,
    fsdp=1,
    compute_dtype=None,
    rules=(),
    placement=HOST,
    **args,
):
    """(step, state, plan, batch structs), the same weights in both kinds of step; `loss`: of the whole model, or `parts`."""
    mesh = mesh_of(fsdp=fsdp)
    placement = placement if is_layered else Placement()
    model, abstract, _ = take_apart(build, tx, seed=0, compute_dtype=compute_dtype)
    plan = make_plan(abstract, mesh, rules=rules, annotations=model.annotations, placement=placement)
    args = {"seed": 0, "gathered": unannotated(plan, rules, model.annotations), **args}
    if is_layered:
        step = make_layered_step(model, parts, tx, plan, structs(batch, mesh), placement=placement, **args)
    else:
        step = make_train_step(
            model, loss or parts, tx, plan, structs(batch, mesh), compute_dtype=compute_dtype, **args
        )
    return step, begun(abstract, plan), plan, structs(batch, mesh)


def begun(abstract, plan):
    """A state that needs no compiler: weights from numpy, optimizer state 0."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    weights = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), abstract.params)
    params = jax.tree.map(lambda w, x: w.astype(x.dtype), weights, abstract.params)
    state = dataclasses.replace(zeros, params=params, master=None if abstract.master is None else weights)
    # Copied, so that the buffers are JAX's own and may be donated.
    return jax.tree.map(lambda x, s: jnp.copy(jax.device_put(x, s)), state, shardings(plan))


def pointers(state):
    away = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"]
    return [s.data.unsafe_buffer_pointer() for x in away for s in x.addressable_shards]


def ends_of(build, parts, batches, **args):
    """(state, metrics of all steps) on the device, and layer by layer from the host; checks what holds of the latter."""
    ends = []
    for is_layered in (False, True):
        step, state, plan, like = make(build, parts, batches[0], is_layered=is_layered, **args)
        before, metrics = pointers(state), []
        for batch in batches:
            state, found = step(state, jax.device_put(batch, shardings(like)))
            metrics.append(to_numpy(found))
        assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(plan)]
        if is_layered:
            assert len(before) >= len([x for x in jax.tree.leaves(state) if x.ndim])
            assert pointers(state) == before, "host buffers are written in place"
        ends.append((to_numpy(state), metrics))
    return ends, step


BFLOAT16 = {"compute_dtype": "bfloat16"}
KINDS = {
    "fused": {},
    "fused, bfloat16, 8 devices": {**BFLOAT16, "fsdp": 8, "lr": optax.constant_schedule(0.01)},
    "skipping and clipped, bfloat16, 8 devices": {**BFLOAT16, "fsdp": 8, "nonfinite": "skip", "max_grad_norm": 0.05},
    "accumulated": {"accumulation_steps": 2, "tx": optax.sgd(1.0)},
    "clipped by optax": {"tx": optax.chain(optax.clip_by_global_norm(0.05), ADAMW)},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_at_a_time_gives_the_bits_of_everything_on_the_device(name):
    is_skipping = KINDS[name].get("nonfinite") == "skip"
    batches = [rows(i, poison=is_skipping and i == 1) for i in range(3)]
    (plain, layered), step = ends_of(Stack, PARTS, batches, **KINDS[name])
    assert isinstance(step, TwoPrograms) == (not name.startswith("fused"))
    assert [bool(m["finite"]) for m in plain[1]] == [True, not is_skipping, True]
    assert not differing(plain, layered)
    assert np.any(
        layered[0].params["table"] != to_numpy(make(Stack, PARTS, rows(0), is_layered=False)[1]).params["table"]
    )


def test_a_llama_with_dropout_tied_embeddings_and_packed_documents_has_the_same_bits():
    config = llama.LlamaConfig(
        **dict(vocab_size=32, num_layers=2, d_model=32, num_heads=2, num_kv_heads=1, d_ff=32, scan_layers=False),
        **dict(dropout=0.2, tie_embeddings=True),
    )
    segment_ids = np.repeat([[1, 2]], 8, axis=0).repeat([8, 9], axis=1).astype(np.int32)
    batches = [{"tokens": np.tile(rows(i)["tokens"], 3)[:, :17], "segment_ids": segment_ids} for i in range(2)]
    build = lambda rngs: llama.Llama(config, rngs=rngs)
    args = {"compute_dtype": "bfloat16", "fsdp": 2, "rules": llama.SHARDING_RULES, "tx": optax.sgd(0.1, momentum=0.9)}
    (plain, layered), _ = ends_of(build, llama.LAYERS, batches, **args)
    assert not differing(plain, layered)


@pytest.mark.parametrize(("fsdp", "remat"), [(1, "none"), (1, "full"), (2, "none")])
def test_a_wide_llama_in_bfloat16_has_the_same_bits_whether_or_not_its_layers_are_computed_again(fsdp, remat):
    config = llama.LlamaConfig(
        vocab_size=257,
        num_layers=2,
        d_model=256,
        num_heads=4,
        num_kv_heads=2,
        d_ff=384,
        scan_layers=False,
        remat=remat,
    )
    tokens = np.random.default_rng(0).integers(0, 257, (2, 4, 129))
    batches = [{"tokens": x.astype(np.int32)} for x in tokens]
    args = {"compute_dtype": "bfloat16", "fsdp": fsdp, "rules": llama.SHARDING_RULES, "loss": llama.loss}
    (plain, layered), _ = ends_of(lambda rngs: llama.Llama(config, rngs=rngs), llama.LAYERS, batches, **args)
    assert not differing(plain, layered)


@pytest.mark.parametrize("shape", [(24, 16), (8, 16), (128, 128)])
def test_a_gradient_is_added_up_alike_whatever_else_the_program_computes(shape):
    """Left to XLA, it is not on processors with AVX-512."""
    rng = np.random.default_rng(0)
    make = lambda g, count: jnp.tanh(g / count.astype(jnp.float32))
    within = jax.jit(lambda g, count: square_sums([make(g, count)], count))
    alone = jax.jit(lambda g, count: square_sums([g], count))
    for _ in range(10):
        g, count = jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.int32(7)
        assert within(g, count) == alone(jax.jit(make)(g, count), count)


def test_a_run_is_warned_where_moving_its_parameters_changes_bits():
    on, off = ({"params": tier} for tier in ("device", "nvme"))
    settings = {"compute_dtype": "bfloat16", "accumulation_steps": 2}
    assert "are off it now" in moved_params_warning(on, off, settings)
    assert "are on it now" in moved_params_warning(off, on, settings)
    for same in ({**settings, "compute_dtype": None}, {**settings, "accumulation_steps": 1}):
        assert moved_params_warning(on, off, same) is None
    assert moved_params_warning(off, {"params": "pinned_host"}, settings) is None


def test_two_programs_are_traced_and_compiled_as_one():
    on_host = dataclasses.replace(HOST, grads="pinned_host")
    tx = optax.sgd(0.1)
    step, state, plan, like = make(Stack, PARTS, rows(0), is_layered=True, tx=tx, placement=on_host)
    traced = step.trace(plan, like)
    assert captured_arrays(traced.jaxpr) == []
    assert [x.aval.shape for x in traced.jaxpr.jaxpr.invars] == [x.shape for x in jax.tree.leaves((plan, like))]
    compiled = traced.lower().compile()
    expected = step(jax.tree.map(jnp.copy, state), jax.device_put(rows(0), shardings(like)))
    assert not differing(compiled(state, jax.device_put(rows(0), shardings(like))), expected)


def shares_a_layer(rngs):
    model = Stack(rngs)
    model.body.blocks[1] = model.body.blocks[0]
    return model


def parts_with(**changes):
    return dataclasses.replace(PARTS, **changes)


REFUSED = {
    "a stacked Llama": (
        lambda rngs: llama.Llama(STACKED, rngs=rngs),
        llama.LAYERS,
        "scan_layers",
    ),
    "no list": (Stack, parts_with(path="decoder"), "has no 'decoder'"),
    "batch statistics": (lambda rngs: Stack(rngs, has_norm=True), PARTS, r"body/blocks/0/norm/mean"),
    "a shared layer": (shares_a_layer, PARTS, r"body/blocks/1/down/kernel"),
    "a layer in embed": (
        Stack,
        parts_with(embed=lambda m, b: (m.body.blocks[0].up(m.table[...][b["tokens"]]), None)),
        "one of them reads 'body/blocks'",
    ),
    "a trained context": (
        Stack,
        parts_with(embed=lambda m, b: (m.table[...][b["tokens"]], m.bias[...][:8, None, None])),
        "context/ needs bias",
    ),
    "integers between layers": (Stack, parts_with(embed=lambda m, b: (b["tokens"], b["gain"])), "int32"),
}
STACKED = llama.LlamaConfig(vocab_size=32, num_layers=2, d_model=32, num_heads=2, num_kv_heads=1, d_ff=32)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_come_apart_is_refused_by_name(name):
    build, parts, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        make(build, parts, rows(0), is_layered=True)


def test_no_bucket_has_a_single_weight_and_none_is_updated_before_its_gradient_is_there():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(1, 5, rng.integers(1, 6))
        weights = {
            f"g{i}": {f"w{j}": np.zeros(rng.integers(1, 400), np.float32) for j in range(n)}
            for i, n in enumerate(sizes)
        }
        mesh = mesh_of()
        model, abstract, _ = take_apart(lambda rngs: nnx.Linear(2, 2, rngs=rngs), ADAMW, seed=0)
        abstract = dataclasses.replace(abstract, params=weights, opt_state=jax.eval_shape(ADAMW.init, weights))
        plan = make_plan(abstract, mesh, placement=HOST)
        groups = [[f"{g}/{w}" for w in ws] for g, ws in weights.items()]
        buckets = make_layer_buckets(split_update(ADAMW, plan.params), plan, groups, bucket_bytes=4096)
        place = {path: i for i, group in enumerate(groups) for path in group}
        for i, group in enumerate(buckets):
            assert all(len(b.weights) > 1 for b in group) or sum(sizes) == 1
            assert all(place[path] <= i for b in group for path in b.weights)
        assert sorted(path for group in buckets for b in group for path in b.weights) == sorted(place)
