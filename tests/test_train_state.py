"""A model taken apart and put together again inside a step: what is state, what is drawn afresh, what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxckpt.errors import PlanError
from jaxckpt.state.train_state import narrow, step_key, take_apart
from tiny import IN, Mlp, batch_of, differing, make_step, mesh_of, on_mesh, squared_error

TX = optax.sgd(0.1)


def draws(build, key):
    """What the model's dropout layers let through, and its state afterwards."""
    model, _, init = take_apart(build, TX, seed=0)
    state = init()
    module = model.bind(state.params, state.model_state, key)
    with nnx.use_eager_sharding(False):  # as the step does it
        return np.asarray(module(jnp.arange(1.0, 4 * IN + 1).reshape(4, IN) % 7)), model.unbind(module)


class TwoDropouts(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.first(x), self.second(x)])


class Stacked(nnx.Module):
    """Two layers whose parameters and random streams are stacked, and run by a scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.scale = nnx.Param(jnp.ones(()))
        self.layers = make(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


def test_draws_depend_on_the_key_and_the_path_alone():
    a, b, c = (draws(TwoDropouts, jax.random.key(k))[0] for k in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert not np.array_equal(a[0], a[1]), "each path has its own stream"


def test_draws_do_not_depend_on_what_was_drawn_before():
    model, _, init = take_apart(TwoDropouts, TX, seed=0)
    state, x = init(), jnp.ones((4, IN))
    module = model.bind(state.params, state.model_state, jax.random.key(1))
    first, second = module(x), module(x)
    assert not np.array_equal(first, second)
    model.unbind(module)
    assert np.array_equal(model.bind(state.params, state.model_state, jax.random.key(1))(x), first)


def test_draws_do_not_depend_on_the_seed_of_the_weights():
    x, key = jnp.ones((4, IN)), jax.random.key(1)
    outs = []
    for seed in (0, 1):
        model, _, init = take_apart(TwoDropouts, TX, seed=seed)
        outs.append(model.bind(init().params, {}, key)(x))
    assert np.array_equal(*outs)


def test_stacked_layers_draw_differently_from_each_other_and_the_same_for_the_same_key():
    a, b = (draws(Stacked, jax.random.key(1))[0] for _ in range(2))
    assert np.array_equal(a, b)
    assert a.shape == (2, 4, IN) and not np.array_equal(a[0], a[1])


def test_the_key_of_a_step_is_a_function_of_seed_and_step():
    words = [jax.random.key_data(step_key(*at)).tolist() for at in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len({tuple(w) for w in words}) == 4
    assert jax.random.key_data(jax.jit(step_key, static_argnums=0)(1, 1)).tolist() == words[3]


def test_a_step_draws_by_its_number_and_each_microbatch_differently():
    # The gradient of a linear model at equal rows shows the masks; microbatch 0 is rows 0 and 2, microbatch 1 rows 1 and 3.
    seen = lambda model, batch: ((model(batch["x"][:, 0, :]) * batch["y"].mean()).sum(), batch["mask"].sum())
    batch = batch_of(0, 4)
    batch["x"], batch["y"] = np.ones_like(batch["x"]), np.ones_like(batch["y"])

    class Gate(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.zeros(IN))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.w[...][None] * x)

    mesh = mesh_of()
    grads = {}
    for accumulation in (1, 2):
        step, state, _, _ = make_step(Gate, TX, rows=4, loss=seen, accumulation_steps=accumulation)
        for number in range(2):
            before = np.asarray(state.params["w"])
            state, _ = step(state, on_mesh(batch, mesh))
            grads[accumulation, number] = before - np.asarray(state.params["w"])
    one = 0.1 * 2 / batch["mask"].sum()  # learning rate x what dropout scales a kept value by
    kept = {k: np.round(g / one) for k, g in grads.items()}
    assert not np.array_equal(kept[1, 0], kept[1, 1]), "two steps draw differently"
    again, state, _, _ = make_step(Gate, TX, rows=4, loss=seen)
    state, _ = again(state, on_mesh(batch, mesh))
    assert np.array_equal(-np.asarray(state.params["w"]), grads[1, 0]), "the same step draws the same"
    # With equal draws in both microbatches each sum would be even.
    assert (kept[2, 0] % 2).any()


def test_batch_statistics_are_state_and_pass_through_the_microbatches():
    mesh, batch = mesh_of(), batch_of(0, 8)
    step, state, _, _ = make_step(lambda r: Mlp(r, has_norm=True), TX, accumulation_steps=2, compute_dtype="bfloat16")
    assert set(state.model_state["norm"]) == {"mean", "var"}
    kernel = np.asarray(state.params["inner"]["kernel"], np.float32)
    bias = np.asarray(state.params["inner"]["bias"], np.float32)
    state, _ = step(state, on_mesh(batch, mesh))
    mean = np.zeros(16)
    for i in range(2):  # each microbatch takes every second row
        mean = 0.99 * mean + 0.01 * np.maximum(batch["x"][i::2] @ kernel + bias, 0).mean((0, 1))
    found = state.model_state["norm"]["mean"]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, mean, atol=1e-4)  # the layer itself runs in bfloat16


class Counter(nnx.Module):
    """Changes itself in the forward pass, in the way that `kind` names."""

    def __init__(self, rngs, kind):
        self.w = nnx.Param(jnp.ones(IN))
        self.kind = kind
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32)) if kind == "variable" else 0

    def __call__(self, x):
        if self.kind == "attribute":
            self.calls += 1
        elif self.kind == "variable":
            self.calls[...] += 1
        elif self.kind == "sow":
            self.sow(nnx.Intermediate, "seen", x)
        elif self.kind == "new":
            self.fresh = nnx.Variable(x)
        return x * self.w[...].reshape(1, -1)


def forward(kind):
    model, abstract, init = take_apart(lambda r: Counter(r, kind), TX, seed=0)
    state = init()
    module = model.bind(state.params, state.model_state, jax.random.key(0))
    module(jnp.ones((2, IN)))
    return model.unbind(module), abstract


def test_a_variable_that_the_forward_pass_changes_is_state():
    model_state, abstract = forward("variable")
    assert model_state == {"calls": 1} and set(abstract.model_state) == {"calls"}


@pytest.mark.parametrize("kind", ["attribute", "new"])
def test_a_plain_attribute_or_new_variable_of_the_forward_pass_is_refused_by_name(kind):
    with pytest.raises(PlanError, match="changed its own structure") as error:
        forward(kind)
    assert {"attribute": "calls", "new": "fresh"}[kind] in str(error.value)
    assert "nnx.Variable" in str(error.value)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")  # flax would rather see nnx.capture
def test_what_sow_collects_is_dropped():
    model_state, abstract = forward("sow")
    assert model_state == {} == abstract.model_state


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        x = nn.BatchNorm(use_running_average=not is_training)(nn.Dense(16)(x))
        x = nn.Dropout(0.5, deterministic=not is_training)(nn.relu(x))
        return nn.Dense(4)(x)


class WrappedLinen(nnx.Module):
    """How a Linen model joins in: Linen wants to be told what it may change, and NNX tells it when it is evaluated."""

    def __init__(self, rngs):
        self.deterministic = False  # the attribute that train() and eval() of NNX set
        self.linen = nnx.bridge.ToNNX(LinenMlp(), rngs=rngs).lazy_init(jnp.zeros((1, 3, IN)), is_training=True)

    def __call__(self, x):
        if self.deterministic:
            return self.linen(x, is_training=False)
        return self.linen(x, is_training=True, mutable=["batch_stats"])


def test_a_linen_module_trains_with_dropout_and_batch_statistics():
    mesh = mesh_of()
    step, state, _, _ = make_step(WrappedLinen, TX, accumulation_steps=2)
    assert set(state.params["linen"]) == {"Dense_0", "Dense_1", "BatchNorm_0"}
    before = jax.tree.map(np.asarray, state)
    losses = []
    for _ in range(2):
        state, metrics = step(state, on_mesh(batch_of(0, 8), mesh))
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert set(differing(before.params, state.params)) >= {
        "['linen']['Dense_0']['kernel']",
        "['linen']['Dense_1']['bias']",
    }
    assert len(differing(before.model_state, state.model_state)) == 2, "the running mean and variance move"


def test_a_linen_module_draws_by_the_key_that_it_is_bound_with():
    a, b, c = (draws(WrappedLinen, jax.random.key(k))[0] for k in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_a_model_without_parameters_or_that_is_no_nnx_module_is_refused():
    with pytest.raises(PlanError, match="no parameters.*lazy_init"):
        take_apart(lambda rngs: nnx.Dropout(0.5, rngs=rngs), TX, seed=0)
    with pytest.raises(PlanError, match=r"nnx.bridge.ToNNX.*LinenMlp"):
        take_apart(lambda rngs: LinenMlp(), TX, seed=0)  # type: ignore[arg-type,return-value]


def test_take_apart_allocates_nothing_and_init_depends_on_the_seed():
    before = set(map(id, jax.live_arrays()))
    _, abstract, init = take_apart(Mlp, TX, seed=0)
    assert set(map(id, jax.live_arrays())) <= before
    a, b, c = init(), init(), take_apart(Mlp, TX, seed=1)[2]()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), a) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert not differing(a, b) and differing(a.params, c.params)


def test_the_weights_are_those_that_the_model_builds_by_itself():
    _, _, init = take_apart(lambda r: Mlp(r, has_norm=True), TX, seed=3)
    own = nnx.to_pure_dict(nnx.state(Mlp(nnx.Rngs(3), has_norm=True), nnx.Param))
    assert not differing(own, init().params)


def test_narrow_casts_floats_alone_and_keeps_the_original():
    weights = {"w": jnp.array([1.0, 1 / 3]), "n": jnp.array([3])}
    params, master = narrow(weights, "bfloat16")
    assert master is weights
    assert params["w"].dtype == jnp.bfloat16 and params["n"].dtype == jnp.int32
    assert np.array_equal(params["w"], weights["w"].astype(jnp.bfloat16))


def test_narrow_makes_no_master_where_nothing_is_narrower():
    weights = {"w": jnp.ones(2)}
    assert narrow(weights, None) == (weights, None)
    assert narrow(weights, "float32") == (weights, None)
    half = {"w": jnp.ones(2, jnp.bfloat16)}
    assert narrow(half, "bfloat16") == (half, None)


def test_the_optimizer_sees_the_weights_at_full_precision():
    _, abstract, _ = take_apart(Mlp, optax.adam(1.0), seed=0, compute_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(abstract.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves((abstract.master, abstract.opt_state[0].mu))} == {jnp.dtype("float32")}


def test_the_loss_sees_the_model_in_training_mode_and_evaluation_does_not():
    modes = []

    def loss(model, batch):
        modes.append(model.dropout.deterministic)
        return squared_error(model, batch)

    from jaxckpt.update.step import make_eval_step

    step, state, plan, model = make_step(lambda r: Mlp(r, dropout=0.5), TX, loss=loss)
    batch = on_mesh(batch_of(0, 8), mesh_of())
    evaluate = make_eval_step(
        model, loss, plan, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch)
    )
    evaluate(state.params, state.model_state, batch)
    step(state, batch)
    assert modes[0] is True and modes[1:] and not any(modes[1:])
