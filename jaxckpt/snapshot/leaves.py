"""The leaves of a training state as a snapshot stores them: by path, in full precision, as plain arrays."""

import functools
import math
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxckpt.errors import SnapshotError, listed
from jaxckpt.nvme.array import NvmeArray, holders
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot.shards import array_directory as array_directory
from jaxckpt.state import tree
from jaxckpt.state.nvme import NvmeStruct, tier_of
from jaxckpt.state.train_state import TrainState, narrow


def stored_leaves(state: TrainState) -> dict[str, Any]:
    """{path: leaf} of what a snapshot holds: params at full precision (the master weights, where there are any, stand
    under `params`; the narrow copy is derived from them), opt_state, model_state and step."""
    return tree.flatten(_full(state))


def leaf_table(state: TrainState) -> dict[str, dict[str, Any]]:
    """JSON of every stored leaf: shape, dtype, partition spec and where it lives, `memory_kind`."""
    return {
        path: {
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "spec": [list(a) if isinstance(a, tuple) else a for a in x.sharding.spec],
            "memory_kind": tier_of(x),
        }
        for path, x in stored_leaves(state).items()
    }


def check_leaves(directory: PurePath, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises SnapshotError listing every leaf that only one side has, or that differs in shape or dtype."""
    problems = [f"leaf {p!r} is in the snapshot and not in this model" for p in stored if p not in wanted]
    problems += [f"leaf {p!r} is in this model and not in the snapshot" for p in wanted if p not in stored]
    for path in (p for p in stored if p in wanted):
        for key in ("shape", "dtype"):
            if stored[path][key] != wanted[path][key]:
                problems.append(
                    f"leaf {path!r} has {key} {stored[path][key]} in the snapshot and {wanted[path][key]} in this model"
                )
    if problems:
        raise SnapshotError(
            f"{directory} is a snapshot of another model or optimizer:\n"
            + listed(problems)
            + "\nUse the model and optimizer that it was made with (`python -m jaxckpt inspect` shows them), or start a new "
            "run_dir."
        )


def words(leaves: dict[str, Any]) -> dict[str, Any]:
    """Typed random keys as their uint32 words, which every format and every placement can hold; other leaves as they are."""
    return {path: _words(x) if _is_key(x) else x for path, x in leaves.items()}


def from_words(arrays: dict[str, jax.Array], target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The inverse of `words`, for the leaves that are keys in `target`."""
    return {path: _as_key(x, target[path]) if _is_key(target[path]) else x for path, x in arrays.items()}


def num_bytes(x: Any) -> int:
    """Bytes of an array, or of the array that a struct describes; sub-byte dtypes count as one byte an element."""
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def to_state(
    arrays: dict[str, jax.Array], plan: TrainState, compute_dtype: Any, *, store: NvmeStore | None
) -> TrainState:
    """The training state of stored leaves laid out as `plan`; the narrow params are derived where there is a master, and
    written to `store` where they live on disk."""
    full = tree.unflatten(_full(plan), arrays)
    if plan.master is None:
        return full
    weights = tree.flatten(full.params)

    def derive(path: str, p: Any) -> Any:
        # Leaf by leaf: the whole of the master weights need not fit on the devices.
        x = weights[path]
        found = jax.block_until_ready(_narrowing(x.sharding, p.sharding, compute_dtype)(_as_array(x)))
        if not isinstance(p, NvmeStruct):
            return found
        assert store is not None, "a plan with leaves on disk has a store"
        return store.write_array(f"params/{path}", found)

    params = tree.map_with_path(derive, plan.params)
    return TrainState(full.step, params, full.params, full.opt_state, full.model_state)


@functools.cache
def _narrowing(master: NamedSharding, params: NamedSharding, compute_dtype: Any) -> Any:
    """Jitted cast of a master weight, as every step casts it."""
    on_device = master.with_memory_kind("device")
    return jax.jit(lambda x: narrow(jax.device_put(x, on_device), compute_dtype)[0], out_shardings=params)


def _as_array(x: Any) -> jax.Array:
    """The leaf as what a jitted function can be given; one on disk is read."""
    if not isinstance(x, NvmeArray):
        return x
    parts = [
        jax.device_put(x.read(place), SingleDeviceSharding(device))
        for place, devices in holders(x).items()
        for device in devices
        if place in x.files and device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _full(state: TrainState) -> TrainState:
    params = state.params if state.master is None else state.master
    return TrainState(state.step, params, None, state.opt_state, state.model_state)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _words(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        found = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=x.sharding)
    return jax.jit(jax.random.key_data)(x)


def _as_key(x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), target)  # a struct itself does not tell its kind
    impl = impls[0]
    # Under jit, because a typed key cannot be put on the devices of several processes otherwise.
    return jax.jit(lambda w: jax.random.wrap_key_data(w, impl=impl), out_shardings=target.sharding)(x)
