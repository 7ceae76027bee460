"""One training step: exact under padding and accumulation, the same in every memory kind and on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import ConfigError
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import combine, np_fingerprint, to_hex
from jaxckpt.state.plan import Placement
from jaxckpt.update.optimizers import make_optimizer
from jaxckpt.update.step import make_finite_check
from tiny import IN, OUT, Mlp, batch_of, differing, make_step, mesh_of, on_mesh, squared_error

SGD = optax.sgd(0.1)
BATCH = batch_of(0, 16)
SPLIT = [("kernel", P("fsdp")), ("bias", P())]
# Sums of float32 in another order: 16 x 3 positions, so a few units in the last place of the largest term.
REORDERED = {"rtol": 2e-5, "atol": 2e-6}


def reference(build, batch, seed=0):
    """(mean loss, gradient, count) by jax.grad over the whole batch, in plain NNX."""
    graphdef, params, rest = nnx.split(build(nnx.Rngs(seed)), nnx.Param, ...)

    def total(params):
        return squared_error(nnx.merge(graphdef, params, rest), batch)

    (value, count), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return float(value / count), jax.tree.map(lambda g: np.asarray(g / count), nnx.to_pure_dict(grads)), int(count)


def run(n, step, state, batch=BATCH, mesh=None):
    mesh = mesh if mesh is not None else mesh_of()
    for _ in range(n):
        state, metrics = step(state, on_mesh(batch, mesh))
    return state, metrics


@pytest.mark.parametrize("accumulation_steps, axes", [(1, {}), (4, {}), (2, {"data": 2, "fsdp": 2})], ids=str)
def test_the_gradient_is_that_of_the_sum_over_the_count_for_ragged_batches(accumulation_steps, axes):
    counts = BATCH["mask"].reshape(4, 4, -1).sum((0, 2))
    assert len(set(counts)) > 1, "the microbatches differ in their number of targets, or a mean of means would pass"
    loss, grads, count = reference(Mlp, BATCH)
    mesh = mesh_of(**axes)
    step, state, _, _ = make_step(Mlp, SGD, rows=16, mesh=mesh, rules=SPLIT, accumulation_steps=accumulation_steps)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = run(1, step, state, mesh=mesh)
    assert int(metrics["tokens"]) == count and metrics["tokens"].dtype == jnp.int32
    np.testing.assert_allclose(metrics["loss"], loss, **REORDERED)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), **REORDERED)
    applied = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 0.1, before, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), applied, grads)


def test_a_batch_without_any_target_changes_nothing_and_is_no_nan():
    step, state, _, _ = make_step(Mlp, SGD, rows=16)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = run(1, step, state, {**BATCH, "mask": np.zeros_like(BATCH["mask"])})
    assert (float(metrics["loss"]), int(metrics["tokens"]), bool(metrics["finite"])) == (0.0, 0, True)
    assert not differing(before, state.params)


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_is_optax_own(limit):
    own = optax.chain(optax.clip_by_global_norm(limit), SGD)
    step, state, _, _ = make_step(Mlp, SGD, rows=16, max_grad_norm=limit)
    theirs, their_state, _, _ = make_step(Mlp, own, rows=16)
    state, metrics = run(2, step, state)
    their_state, _ = run(2, theirs, their_state)
    assert float(metrics["grad_norm"]) > 0.01
    assert not differing(state.params, their_state.params)


OPTIMIZERS = {
    "adafactor": {"weight_decay": 0.1, "min_dim_size_to_factor": 4},
    "muon": {"weight_decay": 0.1, "adam_lr_scale": 0.5},
}


def one_layer(rngs):
    return nnx.Linear(IN, OUT, rngs=rngs)


# The optimizers one by one are the matter of test_split; many buckets, of test_offload.
@pytest.mark.parametrize(("name", "compute_dtype"), [("adafactor", "bfloat16"), ("muon", None)])
def test_state_in_pinned_host_memory_trains_to_the_same_bits(name, compute_dtype):
    mesh = mesh_of(fsdp=2)
    tx = make_optimizer(name, optax.constant_schedule(0.01), weight_decay_exclude="bias", **OPTIMIZERS[name])
    ends = []
    for tier in ("device", "pinned_host"):
        placement = Placement(master=tier, opt_state=tier)
        step, state, plan, _ = make_step(
            one_layer,
            tx,
            rows=16,
            mesh=mesh,
            rules=SPLIT,
            placement=placement,
            compute_dtype=compute_dtype,
            max_grad_norm=1.0,
        )
        state, metrics = run(3, step, state, mesh=mesh)
        moved = [x for x in jax.tree.leaves((state.opt_state, state.master)) if x.ndim]
        assert moved and {x.sharding.memory_kind for x in moved} == {tier}
        assert all(x.sharding == p.sharding for x, p in zip(jax.tree.leaves(state), jax.tree.leaves(plan), strict=True))
        if compute_dtype:
            cast = jax.tree.map(lambda m: np.asarray(m).astype(jnp.bfloat16), state.master)
            assert not differing(cast, state.params), "bfloat16 params are the master weights, rounded"
        ends.append(jax.tree.map(np.asarray, (state, metrics)))
    assert not differing(*ends)


def test_an_update_too_small_for_bfloat16_is_kept_in_the_master_weights():
    step, state, _, _ = make_step(Mlp, optax.sgd(1e-6), rows=16, compute_dtype="bfloat16")
    before = jax.tree.map(np.asarray, state)
    state, _ = run(3, step, state)
    kernels = lambda group: group["inner"]["kernel"]
    assert differing(kernels(before.master), kernels(state.master))
    assert not differing(kernels(before.params), kernels(state.params))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_skipped_update_leaves_everything_but_the_step(accumulation_steps):
    # The noise has a typed random key in the optimizer state, which must not advance either.
    tx = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(0.1))
    step, state, _, _ = make_step(
        lambda r: Mlp(r, has_norm=True), tx, rows=16, nonfinite="skip", accumulation_steps=accumulation_steps
    )
    bad = {**BATCH, "x": BATCH["x"].copy()}
    bad["x"][5, 0, 0] = np.inf
    state, _ = run(1, step, state)
    before = jax.tree.map(
        np.asarray, jax.tree.map(lambda x: jax.random.key_data(x) if "key" in str(x.dtype) else x, state)
    )
    state, metrics = run(1, step, state, bad)
    assert not bool(metrics["finite"]) and int(state.step) == 2
    assert differing(before, state) == [".step"]
    state, metrics = run(1, step, state)
    assert bool(metrics["finite"]) and differing(before.params, state.params)


def test_an_infinite_gradient_under_a_finite_loss_is_seen():
    def loss(model, batch):
        total, count = squared_error(model, batch)
        return total + jnp.sqrt(jnp.sum(model.outer.bias[...] * 0)), count

    step, state, _, _ = make_step(Mlp, SGD, rows=16, loss=loss, nonfinite="skip")
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = run(1, step, state)
    assert np.isfinite(metrics["loss"]) and not bool(metrics["finite"]) and not differing(before, state.params)


def test_the_batch_digest_is_numpys_and_the_same_on_every_mesh_and_for_every_accumulation():
    expected = to_hex(combine([jnp.asarray(np_fingerprint(x)) for x in tree.flatten(BATCH).values()]))
    for axes, accumulation_steps in [({}, 1), ({"data": 2, "fsdp": 4}, 1), ({"fsdp": 2, "tensor": 2}, 4)]:
        mesh = mesh_of(**axes)
        step, state, _, _ = make_step(Mlp, SGD, rows=16, mesh=mesh, accumulation_steps=accumulation_steps)
        assert to_hex(run(1, step, state, mesh=mesh)[1]["batch_digest"]) == expected
    other = {**BATCH, "mask": 1 - BATCH["mask"]}
    assert to_hex(run(1, step, make_step(Mlp, SGD, mesh=mesh)[1], other, mesh)[1]["batch_digest"]) != expected


@pytest.mark.parametrize(
    "result", [lambda t, c: t, lambda t, c: (t, c, t), lambda t, c: (t[None], c), lambda t, c: [t, c]], ids=range(4)
)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_loss_of_another_shape_is_told_what_is_expected(result, accumulation_steps):
    loss = lambda model, batch: result(*squared_error(model, batch))
    step, state, _, _ = make_step(Mlp, SGD, rows=16, loss=loss, accumulation_steps=accumulation_steps)
    with pytest.raises(ConfigError, match=r"must return two scalars, \(sum over targets, number of targets\); found"):
        run(1, step, state)


def test_a_count_may_be_a_sum_of_weights_or_a_plain_number():
    for count, dtype in [(lambda c: c * 0.5, jnp.float32), (lambda c: 8, jnp.int32)]:
        loss = lambda model, batch, count=count: (lambda t, c: (t, count(c)))(*squared_error(model, batch))
        step, state, _, _ = make_step(Mlp, SGD, rows=16, loss=loss, accumulation_steps=2)
        tokens = run(1, step, state)[1]["tokens"]
        expected = BATCH["mask"].sum() * 0.5 if dtype == jnp.float32 else 16
        assert tokens.dtype == dtype and float(tokens) == expected


def test_the_learning_rate_is_reported_for_the_update_that_it_made():
    lr = lambda count: 0.1 * (count + 1)
    step, state, _, _ = make_step(Mlp, optax.sgd(lr), rows=16, lr=lr)
    found = []
    for _ in range(2):
        state, metrics = run(1, step, state)
        found.append(float(metrics["lr"]))
    np.testing.assert_allclose(found, [0.1, 0.2])


class Wide(nnx.Module):
    """A user's model that knows nothing of sharding, with weights that the default rule splits."""

    def __init__(self, rngs):
        self.up = nnx.Linear(IN, 1024, rngs=rngs)
        self.mid = nnx.Linear(1024, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.mid(nnx.relu(self.up(x)))))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_default_fsdp_computes_the_same_and_repeats_no_computation(accumulation_steps):
    losses, flops = [], []
    for axes in ({}, {"fsdp": 8}):
        mesh = mesh_of(**axes)
        step, state, plan, _ = make_step(Wide, SGD, rows=16, mesh=mesh, accumulation_steps=accumulation_steps)
        batch = on_mesh(BATCH, mesh)
        compiled = step.lower(state, batch).compile()
        cost = compiled.cost_analysis()
        flops.append((cost[0] if isinstance(cost, list) else cost)["flops"])
        state, first = compiled(state, batch)
        _, second = compiled(state, batch)
        losses.append([float(first["loss"]), float(second["loss"]), float(second["grad_norm"])])
    assert plan.params["mid"]["kernel"].sharding.shard_shape((1024, 1024)) == (128, 1024)
    np.testing.assert_allclose(*losses, rtol=1e-4)  # float32 sums over 1024 in another order
    # An eighth, and what cannot be divided: the element-wise work on whole weights.
    assert flops[1] < flops[0] / 6, flops


def test_the_finite_check_names_the_leaf_in_every_memory_kind():
    step, state, plan, _ = make_step(Mlp, optax.adam(0.1), placement=Placement(opt_state="pinned_host"))
    check = make_finite_check(plan)
    assert all(jax.tree.leaves(check(state)))
    kernel = state.opt_state[0].nu["inner"]["kernel"]
    state.opt_state[0].nu["inner"]["kernel"] = jax.device_put(np.asarray(kernel) * np.nan, kernel.sharding)
    bad = [path for path, ok in check(state).items() if not ok]
    assert bad == ["opt_state/0/nu/inner/kernel"]


def test_a_sum_of_weights_below_one_divides_like_any_other():
    light = lambda model, batch: tuple(x * 0.01 for x in squared_error(model, batch))
    full, scaled = (run(1, *make_step(Mlp, SGD, rows=16, loss=loss)[:2])[1] for loss in (squared_error, light))
    np.testing.assert_allclose(scaled["loss"], full["loss"], rtol=1e-5)  # two float32 roundings of the factor


def test_the_reported_learning_rate_is_the_one_used_after_a_skipped_update():
    schedule = lambda count: 0.1 / (1 + count)
    step, state, _, _ = make_step(Mlp, optax.sgd(schedule), rows=16, nonfinite="skip", lr=schedule)
    rates = []
    for y in (BATCH["y"], BATCH["y"] * np.float32("nan"), BATCH["y"]):
        state, metrics = run(1, step, state, {**BATCH, "y": y})
        rates.append(float(metrics["lr"]))
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.05], rtol=1e-6)
