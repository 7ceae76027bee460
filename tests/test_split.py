"""The update in parts is the update of the whole tree, to the last bit; what cannot be taken apart is refused."""

import itertools
import sys

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.update.buckets import Bucket, make_buckets
from jaxckpt.update.self_check import SelfCheck, self_check, step_in_parts
from jaxckpt.update.split import split_update

RNG = np.random.default_rng(0)
array = lambda *shape: jnp.asarray(RNG.normal(0, 0.2, shape), jnp.float32)
like = lambda weights: jax.tree.map(lambda x: array(*x.shape), weights)
# An odd number of leaves, because a sum over them ends with the last one by itself.
WEIGHTS = {"embed": array(6, 4), "layer": {"b": array(5), "w": array(4, 5)}}
BUCKETS = (("embed",), ("layer/b", "layer/w"))

matrices = lambda weights: jax.tree.map(lambda x: x.ndim > 1, weights)
clip = optax.clip_by_global_norm(0.1)
multi = lambda tx, **args: optax.MultiSteps(tx, 2, **args).gradient_transformation()
scheduled = optax.warmup_cosine_decay_schedule(0, 1e-2, 3, 10)
by_rank = lambda weights: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", weights)
SETUPS = {
    "sgd": optax.sgd(1e-2, 0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "adamw, mask": optax.adamw(1e-2, mask=matrices),
    "adamw, mask tree": optax.adamw(1e-2, mask=matrices(WEIGHTS)),
    "adamw, schedule": optax.adamw(scheduled),
    "adamw, bfloat16 mu": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 0, 10)),
    "clip": optax.chain(optax.clip(0.01), optax.adam(1e-2)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-2)),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-2)),
    "MultiSteps": multi(optax.adamw(1e-2)),
    "masked": optax.masked(optax.adamw(1e-2), matrices),
    "partition": optax.partition({"a": optax.adamw(1e-2), "b": optax.sgd(1e-2)}, by_rank),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "amsgrad": optax.amsgrad(1e-2),
    "adan": optax.adan(1e-2),
    "yogi": optax.yogi(1e-2),
    "novograd": optax.novograd(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "zero_nans": optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "centralize": optax.chain(optax.centralize(), optax.adam(1e-2)),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "sm3": optax.sm3(1e-2),
    "add_noise": optax.chain(optax.add_noise(1e-3, 0.5, key=jax.random.key(0, impl="rbg")), optax.sgd(1e-2)),
    "conditionally": optax.chain(optax.conditionally_transform(optax.clip(0.01), lambda n: n > 1), optax.adam(1e-2)),
    "muon": optax.contrib.muon(1e-2),
    "clip_by_global_norm": optax.chain(clip, optax.adamw(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(1e-2), 5),
    "apply_if_finite, clip": optax.apply_if_finite(optax.chain(clip, optax.adamw(1e-2)), 5),
    "normalize": optax.chain(optax.normalize_by_update_norm(), optax.adam(1e-2)),
    "skip_not_finite": multi(optax.adamw(1e-2), should_skip_update_fn=optax.skip_not_finite),
}
GLOBAL = ("clip_by_global_norm", "apply_if_finite", "apply_if_finite, clip", "normalize", "skip_not_finite")


def trained(step, weights, state, *, n=4):
    """Leaves of weights and optimizer state after n steps."""
    rng = np.random.default_rng(1)
    weights, state = jax.tree.map(jnp.copy, (weights, state))  # the steps donate them
    for _ in range(n):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), weights)
        weights, state = step(weights, state, grads)
    return tree.flatten({"weights": weights, "opt_state": state})


def optax_step(tx):
    def step(weights, state, grads):
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return jax.jit(step)


def differing(a, b):
    raw = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
    assert list(a) == list(b)
    return [path for path in a if raw(a[path]) != raw(b[path])]


@pytest.mark.parametrize("name", SETUPS)
def test_four_steps_in_buckets_are_bitwise_those_of_optax(name):
    tx = SETUPS[name]
    split = split_update(tx, WEIGHTS)
    assert split.kind == ("global+leaf" if name in GLOBAL else "leaf")
    # A jit for each bucket, one of them of a single leaf, is where XLA may divide by a scalar in another way.
    state = jax.jit(tx.init)(WEIGHTS)
    apart = trained(step_in_parts(split, BUCKETS, is_apart=True), WEIGHTS, state)
    assert differing(trained(optax_step(tx), WEIGHTS, state), apart) == []


@pytest.mark.parametrize("name", ["adamw", "apply_if_finite, clip", "muon"])
def test_so_are_they_in_one_jit_with_a_leaf_a_bucket_and_a_scalar_weight(name):
    weights = {**WEIGHTS, "temperature": array()}
    tx = SETUPS[name]
    split = split_update(tx, weights)
    state = jax.jit(tx.init)(weights)
    parts = trained(step_in_parts(split, [(path,) for path in split.weights], is_apart=False), weights, state)
    assert differing(trained(optax_step(tx), weights, state), parts) == []


def test_the_owner_of_state_is_read_from_the_update():
    split = split_update(optax.chain(clip, optax.adafactor(1e-2, min_dim_size_to_factor=4)), WEIGHTS)
    owners = {path.partition("/")[2]: weight for path, weight in split.owner.items()}
    assert split.weights == ("embed", "layer/b", "layer/w") == tuple(tree.flatten(WEIGHTS))
    assert owners["0/v_row/layer/w"] == "layer/w" and owners["0/count"] is None
    assert split.global_grads == set(split.weights) and not split.global_weights


def test_nothing_global_is_read_where_every_leaf_goes_by_itself():
    split = split_update(optax.lamb(1e-2), WEIGHTS)
    assert (split.kind, split.global_grads, split.global_weights) == ("leaf", frozenset(), frozenset())
    cuts, new = split.global_phase({}, {"0/count": jnp.int32(3)}, {})
    assert int(new["0/count"]) == 4 and all(x.ndim == 0 for x in cuts)


REFUSED = {
    "prodigy": (
        optax.contrib.prodigy(),
        r"needs:\n  opt_state/estim_lr needs gradients and optimizer state of 3 weights",
        "opt_state: device",
    ),
    "dadapt_adamw": (optax.contrib.dadapt_adamw(1.0), r"needs:\n  opt_state/estim_lr needs", "opt_state: device"),
    "clip after adam": (
        optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
        r"updates/layer/w needs gradients and optimizer state of 2 other weights \(embed, layer/b\)",
        "put it first in the chain, or clip the gradients by max_grad_norm",
    ),
    "MultiSteps with a clip": (
        multi(optax.chain(clip, optax.adamw(1e-2))),
        "opt_state/inner_opt_state/1/0/mu/embed needs",
        "accumulation_steps instead of MultiSteps",
    ),
    "sorted over all weights": (
        optax.stateless(lambda g, w: unravelled(jnp.sort(jax.flatten_util.ravel_pytree(g)[0]), g)),
        "updates/embed needs gradients of 2 other weights",
        "mixes the elements of several weights",
    ),
}


def unravelled(flat, like):
    return jax.flatten_util.ravel_pytree(like)[1](flat)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_state_of_all_weights_is_refused_with_the_way_out(name):
    tx, output, way_out = REFUSED[name]
    with pytest.raises(PlanError, match=output) as error:
        split_update(tx, WEIGHTS)
    assert way_out in str(error.value)


def test_state_that_changes_its_form_is_refused():
    tx = optax.GradientTransformation(
        lambda w: {"n": jnp.int32(0), "gone": jnp.int32(0)}, lambda g, s, w: (g, {"n": jnp.stack([s["n"], s["n"]])})
    )
    with pytest.raises(PlanError, match=r"opt_state/gone: given int32\[\], returned nothing") as error:
        split_update(tx, WEIGHTS)
    assert "opt_state/n: given int32[], returned int32[2]" in str(error.value)


def test_twice_the_leaves_are_twice_the_work():
    def work(layers):
        """Python functions called, in which anything quadratic shows."""
        weights = {str(i): {k: jax.ShapeDtypeStruct((8, 8), jnp.float32) for k in "abcd"} for i in range(layers)}
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            split = split_update(optax.chain(clip, optax.adamw(1e-2)), weights)
            for i in range(0, 4 * layers, 2):
                split.bucket(split.weights[i : i + 2])
        finally:
            sys.setprofile(None)
        return calls

    work(2)  # what is only done once
    assert work(50) < 2.5 * work(25)


def plan_of(shapes, kinds):
    device = jax.devices()[0]
    place = lambda x, kind: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=SingleDeviceSharding(device, memory_kind=kind)
    )
    weights = {f"w{i}": place(jax.ShapeDtypeStruct(s, jnp.float32), "device") for i, s in enumerate(shapes)}
    split = split_update(optax.trace(0.9), weights)
    kind = lambda path, x: "pinned_host" if kinds[int(path.rpartition("w")[2])] else "device"
    state = tree.map_with_path(lambda path, x: place(x, kind(path, x)), jax.eval_shape(optax.trace(0.9).init, weights))
    return split, weights, state


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=9), st.integers(1, 160))
def test_every_weight_is_in_one_bucket_of_at_most_the_bytes_asked_for(leaves, bucket_bytes):
    split, weights, state = plan_of([(n,) for n, _ in leaves], [moves for _, moves in leaves])
    buckets = make_buckets(split, weights, state, bucket_bytes=bucket_bytes)
    resident = [path for path, (_, moves) in zip(split.weights, leaves, strict=True) if not moves]
    moving = [path for path in split.weights if path not in resident]
    assert [path for b in buckets for path in b.weights] == resident + moving
    for bucket in buckets:
        assert bucket.opt_state == tuple(f"trace/{path}" for path in bucket.weights)
        assert bucket.nbytes == sum(4 * weights[path].size for path in bucket.weights if path in moving)
        assert bucket.nbytes <= bucket_bytes or len(bucket.weights) == 1
    # As few as tree order allows.
    full = [b.nbytes + 4 * weights[after.weights[0]].size for b, after in itertools.pairwise(buckets) if b.nbytes]
    assert all(n > bucket_bytes for n in full)


def test_what_moves_may_be_told():
    split, weights, state = plan_of([(8,), (9,), (7,)], [True, True, True])
    buckets = make_buckets(
        split, weights, state, bucket_bytes=64, moves=lambda path: path in ("weights/w1", "opt_state/trace/w2")
    )
    assert [(b.weights, b.nbytes) for b in buckets] == [(("w0",), 0), (("w1", "w2"), 64)]


def test_the_self_check_tries_one_bucket_of_each_form_and_says_what_differs():
    weights = {str(i): {"b": array(300), "w": array(300, 200)} for i in range(30)}
    tx = optax.chain(clip, optax.adamw(1e-2))
    split = split_update(tx, weights)
    bucket = lambda paths: Bucket(paths, tuple(s for s, w in split.owner.items() if w in paths), 1)
    buckets = [bucket(split.weights[i : i + 2]) for i in range(0, 60, 2)]
    good = self_check(tx, weights, buckets)
    assert good == SelfCheck(True, (), "global+leaf", 1, 30)
    assert good.text().endswith("is bitwise that of plain optax")
    # Every number of calls is another transformation: the update in parts is traced first and then the whole one.
    calls = iter(range(10))
    unsteady = optax.stateless(lambda g, w: jax.tree.map(lambda x: x * (1 + next(calls)), g))
    bad = self_check(unsteady, weights, buckets[:1])
    assert not bad.is_bitwise and bad.differing == ("weights/0/b", "weights/0/w")
    assert "weights/0/w" in bad.text()


def test_the_self_check_takes_larger_leaves_where_an_optimizer_wants_them_and_says_where_it_cannot():
    split, weights, state = plan_of([(10,), (12,)], [True, True])
    buckets = make_buckets(split, weights, state, bucket_bytes=1000)
    assert self_check(picky(10), weights, buckets, is_apart=True) == SelfCheck(True, (), "leaf", 1, 1)
    text = self_check(picky(11), weights, buckets).text()
    assert "does not take weights with dimensions of at most 64 (ValueError: leaves of 11 or more" in text


def picky(least):
    def update(grads, weights):
        if min(x.size for x in jax.tree.leaves(weights)) < least:
            raise ValueError(f"leaves of {least} or more, please")
        return grads

    return optax.stateless(update)
