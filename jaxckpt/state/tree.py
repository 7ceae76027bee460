"""Path-keyed views of pytrees. A path is a '/'-joined string, for example 'params/layers/attn/wq'."""

from collections.abc import Callable
from typing import Any

import jax

from jaxckpt.errors import PlanError

PyTree = Any


def path_str(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: PyTree) -> dict[str, Any]:
    """{path: leaf} in tree order. Raises PlanError where two leaves would share a path, or a key cannot be part of one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {path_str(path): leaf for path, leaf in leaves}
    # Orbax joins keys with dots: {"a.b": x} and {"a": {"b": y}} would be one array on disk, silently.
    bad = [
        k for path, _ in leaves for k in map(lambda entry: path_str((entry,)), path) if not k or "." in k or "/" in k
    ]
    if bad:
        raise PlanError(
            f"keys of the training state must be non-empty and hold neither '.' nor '/'; found {sorted(set(bad))}. "
            "Rename these modules or dictionary keys."
        )
    if len(flat) != len(leaves):
        paths = [path_str(path) for path, _ in leaves]
        twice = sorted({p for p in paths if paths.count(p) > 1})
        raise PlanError(f"several leaves of the training state have the same path: {twice}. Rename one key of each.")
    return flat


def map_with_path(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Like jax.tree.map, with the leaf's path as the first argument of `f`."""
    return jax.tree_util.tree_map_with_path(lambda path, *xs: f(path_str(path), *xs), tree, *rest)


def unflatten(like: PyTree, leaves: dict[str, Any]) -> PyTree:
    """The structure of `like` with the values of `leaves`; every path of `like` must be there."""
    return map_with_path(lambda path, _: leaves[path], like)


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts keyed by the parts of each path: the form on disk, free of any Python class."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return out
