"""Paths name leaves, and no two leaves share one."""

import jax
import numpy as np
import pytest

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.state.train_state import TrainState

NESTED = {"a": {0: 2, 1: 1}, "c": [3, (4,)]}


def test_a_path_is_the_keys_joined_with_slashes_through_dicts_lists_and_dataclasses():
    assert tree.flatten(NESTED) == {"a/0": 2, "a/1": 1, "c/0": 3, "c/1/0": 4}
    state = TrainState(0, {"w": 1}, None, ({"mu": {"w": 2}},), {})
    assert tree.flatten(state) == {"step": 0, "params/w": 1, "opt_state/0/mu/w": 2}


def test_unflatten_undoes_flatten_whatever_the_order_of_the_leaves():
    flat = tree.flatten(NESTED)
    assert tree.unflatten(NESTED, dict(reversed(flat.items()))) == NESTED


def test_unflatten_asks_for_every_path():
    with pytest.raises(KeyError):
        tree.unflatten(NESTED, {"a/0": 1})


def test_nest_has_the_same_paths_in_plain_dicts_with_string_keys():
    nested = tree.nest(tree.flatten(NESTED))
    assert nested == {"a": {"0": 2, "1": 1}, "c": {"0": 3, "1": {"0": 4}}}
    assert tree.flatten(nested) == tree.flatten(NESTED)


def test_map_with_path_hands_the_path_and_the_leaves_of_all_trees():
    assert tree.map_with_path(lambda path, x, y: (path, x + y), {"a": {"b": 1}}, {"a": {"b": 2}}) == {
        "a": {"b": ("a/b", 3)}
    }


@pytest.mark.parametrize("key", ["a.b", "a/b", ""])
def test_a_key_that_orbax_could_not_tell_apart_is_refused_by_name(key):
    with pytest.raises(PlanError, match="neither") as error:
        tree.flatten({"fine": {key: np.zeros(2), "x": 1}, "other": 1})
    assert repr(key) in str(error.value) and "fine" not in str(error.value)


def test_all_bad_keys_are_named_at_once():
    with pytest.raises(PlanError) as error:
        tree.flatten({"a.b": 1, "c": {"d/e": 2}})
    assert "'a.b'" in str(error.value) and "'d/e'" in str(error.value)


def test_an_integer_key_and_its_string_are_refused_as_one_path():
    # JAX itself refuses a dict with both, because it cannot sort them; a container of the user's own may hold both.
    @jax.tree_util.register_pytree_with_keys_class
    class Both:
        def tree_flatten_with_keys(self):
            return [(jax.tree_util.DictKey(1), 10), (jax.tree_util.DictKey("1"), 20)], None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    with pytest.raises(ValueError, match="sorting"):
        tree.flatten({1: 10, "1": 20})
    with pytest.raises(PlanError, match="same path.*x/1"):
        tree.flatten({"x": Both()})
