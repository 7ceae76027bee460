"""Schedules at their borders, weight decay by path, and Muon one layer's matrix at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxckpt.state import tree
from jaxckpt.update.optimizers import make_optimizer, make_schedule, muon_dimensions

RNG = np.random.default_rng(0)
ARGS = {
    "adamw": {"weight_decay": 0.1},
    "adafactor": {"weight_decay": 0.1},
    "lion": {"weight_decay": 0.1},
    "muon": {"weight_decay": 0.1, "adam_lr_scale": 0.5},
    "sgd": {"momentum": 0.9},
}


def schedule(name, **args):
    return make_schedule(name, **{"lr": 1.0, "warmup_steps": 10, "decay_steps": 100, **args})


def at(s, *counts):
    return [round(float(s(c)), 5) for c in counts]


def test_every_schedule_warms_up_linearly_from_zero():
    for name in ("constant", "linear", "cosine", "wsd"):
        assert at(schedule(name), 0, 5, 9, 10) == [0.0, 0.5, 0.9, 1.0], name


def test_without_warmup_the_first_update_is_at_the_peak():
    for name in ("constant", "linear", "cosine", "wsd"):
        assert at(schedule(name, warmup_steps=0), 0) == [1.0], name


def test_decay_ends_at_its_step_and_stays_there():
    for name in ("linear", "cosine", "wsd"):
        before, end, beyond = at(schedule(name, final_ratio=0.2), 99, 100, 10_000)
        assert before > 0.2 and end == beyond == 0.2, name
    assert at(schedule("constant"), 100, 10_000) == [1.0, 1.0]


def test_linear_and_cosine_are_half_way_down_in_the_middle():
    assert at(schedule("linear", final_ratio=0.0), 55) == at(schedule("cosine", final_ratio=0.0), 55) == [0.5]
    assert at(schedule("cosine", final_ratio=0.0), 32)[0] > at(schedule("linear", final_ratio=0.0), 32)[0]


def test_wsd_stays_at_the_peak_and_decays_over_the_last_fraction():
    s = schedule("wsd", decay_fraction=0.2, final_ratio=0.0)
    assert at(s, 10, 50, 80) == [1.0, 1.0, 1.0]
    assert at(s, 85, 90, 95, 100) == [0.75, 0.5, 0.25, 0.0]
    assert at(schedule("wsd", decay_fraction=1.0, final_ratio=0.0), 10, 55, 100) == [1.0, 0.5, 0.0]


def test_a_schedule_may_end_during_its_warmup():
    for name in ("linear", "cosine", "wsd"):
        assert at(schedule(name, warmup_steps=10, decay_steps=5), 5, 10) == [0.5, 1.0], name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="constant, linear, cosine or wsd"):
        schedule("exponential")
    with pytest.raises(ValueError, match="adamw, adafactor, lion, muon or sgd"):
        make_optimizer("adam", optax.constant_schedule(1.0), weight_decay_exclude=None)


def updates_of(name, params, *, exclude, grads=None, **args):
    tx = make_optimizer(name, optax.constant_schedule(0.1), weight_decay_exclude=exclude, **{**ARGS[name], **args})
    grads = grads if grads is not None else jax.tree.map(jnp.zeros_like, params)
    # jit alone, because it takes a second where single operations take ten.
    return tree.flatten(jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params))


PARAMS = {"inner": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}, "embed": {"kernel": jnp.ones((5, 4))}}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
def test_weight_decay_reaches_exactly_the_paths_that_are_not_excluded(name):
    # With a gradient of zero, what moves is what decays.
    moved = lambda exclude: {p for p, u in updates_of(name, PARAMS, exclude=exclude).items() if jnp.any(u != 0)}
    assert moved(None) == {"inner/kernel", "inner/bias", "embed/kernel"}
    assert moved("bias") == {"inner/kernel", "embed/kernel"}
    assert moved("(bias|embed)") == {"inner/kernel"}
    assert moved("^inner/") == {"embed/kernel"}


def test_under_muon_what_adam_updates_does_not_decay():
    moved = {p for p, u in updates_of("muon", PARAMS, exclude="bias").items() if jnp.any(u != 0)}
    assert moved == {"inner/kernel"}


def test_adafactor_without_weight_decay_leaves_a_leaf_without_gradient_alone():
    assert not any(jnp.any(u != 0) for u in updates_of("adafactor", PARAMS, exclude=None, weight_decay=0).values())


LAYERED = {
    "embed": {"embedding": jnp.asarray(RNG.normal(size=(10, 8)), jnp.float32)},
    "layers": {
        "wq": jnp.asarray(RNG.normal(size=(3, 8, 6)), jnp.float32),
        "norm": jnp.asarray(RNG.normal(size=(3, 8)), jnp.float32),
    },
    "head": {"kernel": jnp.asarray(RNG.normal(size=(8, 6)), jnp.float32)},
    "lm_head": {"kernel": jnp.asarray(RNG.normal(size=(8, 10)), jnp.float32)},
}
GRADS = jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.float32), LAYERED)


def test_muon_takes_the_matrices_of_layers_and_leaves_the_rest_to_adam():
    taken = {p for p, d in tree.flatten(muon_dimensions(LAYERED)).items() if d is not None}
    assert {p.split("/reduction")[0].split("/output")[0] for p in taken} == {"layers/wq", "head/kernel"}


def test_muon_takes_the_matrices_of_layers_that_stand_in_a_list():
    # nnx.List: the layer is a key of the path, and the parameter is the layer's own matrix.
    params = {"layers": {0: {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}, 1: {"kernel": jnp.ones((4, 6))}}}
    found = muon_dimensions(params)
    assert found["layers"][0]["kernel"] == contrib.MuonDimensionNumbers(0, 1) == found["layers"][1]["kernel"]
    assert found["layers"][0]["bias"] is None
    assert muon_dimensions({"sublayers": {"w": jnp.ones((4, 6))}})["sublayers"]["w"] is not None


def test_stacked_layers_are_orthogonalised_one_by_one():
    stacked = updates_of("muon", LAYERED, exclude=None, grads=GRADS)["layers/wq"]
    for i in range(3):
        one = {"w": LAYERED["layers"]["wq"][i]}
        alone = updates_of("muon", one, exclude=None, grads={"w": GRADS["layers"]["wq"][i]})["w"]
        # The same matrices in a batched and in a plain product: float32 rounding over five Newton-Schulz steps.
        np.testing.assert_allclose(stacked[i], alone, rtol=2e-4, atol=1e-5)


def test_the_update_of_a_matrix_is_nearly_orthogonal():
    update = -updates_of("muon", LAYERED, exclude=None, grads=GRADS, weight_decay=0.0)["layers/wq"][0] / 0.1
    singular = np.linalg.svd(np.asarray(update), compute_uv=False)
    # Five Newton-Schulz steps with the authors' coefficients end between 0.65 and 1.25, from any singular values.
    assert (singular > 0.65).all() and (singular < 1.25).all(), singular


def test_adam_under_muon_has_its_own_learning_rate():
    half, whole = (updates_of("muon", LAYERED, exclude=None, grads=GRADS, adam_lr_scale=s) for s in (0.5, 1.0))
    np.testing.assert_allclose(2 * half["embed/embedding"], whole["embed/embedding"], rtol=1e-6)
    assert np.array_equal(half["layers/wq"], whole["layers/wq"])


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_it_is_optax_own_optimizer(name):
    own = {"adamw": optax.adamw, "lion": optax.lion, "sgd": optax.sgd}[name](0.1, **ARGS[name])
    mine = updates_of(name, LAYERED, exclude=None, grads=GRADS)
    theirs = tree.flatten(jax.jit(lambda g, p: own.update(g, own.init(p), p)[0])(GRADS, LAYERED))
    assert mine.keys() == theirs.keys() and all(np.array_equal(mine[p], theirs[p]) for p in mine)
