"""The only place that talks to Orbax: one directory holds `state` (sharded arrays), `data` and `meta` (JSON).

On disk the state is nested dicts keyed by the parts of each leaf's path, so plain Orbax reads it without this package.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jaxckpt.state import tree

TMP_SUFFIX = ".orbax-checkpoint-tmp"


def save_async(
    directory: Path, *, state: dict[str, jax.Array], data: Any, meta: Any, timeout_s: float
) -> ocp.AsyncResponse[None]:
    """Starts writing `directory`, which must not exist; `.result(timeout)` of the response waits for the bytes.

    `state` is keyed by path. It may be donated as soon as this returns. Every process calls it with the same paths.
    """
    with _context(timeout_s):
        items = {"state": tree.nest({path: _storable(x) for path, x in state.items()}), "data": data, "meta": meta}
        return ocp.save_checkpointables_async(str(directory), items)


def load_state(directory: Path, target: dict[str, jax.ShapeDtypeStruct], *, timeout_s: float) -> dict[str, jax.Array]:
    """The arrays of `directory`, each made straight in the sharding and memory kind of `target`."""
    keys = {path: x for path, x in target.items() if _is_key(x)}
    plain = {path: _key_data_struct(x) if path in keys else x for path, x in target.items()}
    with _context(timeout_s):
        loaded = ocp.load_checkpointables(str(directory), {"state": tree.nest(plain)})["state"]
    arrays = tree.flatten(loaded)
    return {path: _as_key(arrays[path], keys[path]) if path in keys else arrays[path] for path in target}


def check_complete(directory: Path) -> None:
    """Raises OSError where the processes' arrays were not merged into one; Orbax only warns of that."""
    if not (directory / "state" / "manifest.ocdbt").is_file():
        raise OSError(f"Orbax left no manifest in {directory / 'state'}, without which the arrays cannot be read")


def read_json(directory: Path, item: str) -> Any:
    """The JSON item `data` or `meta`, without touching an array or a device."""
    return json.loads((directory / item / "data.json").read_text())


def _context(timeout_s: float) -> ocp.Context:
    context = ocp.Context()
    saving = context.array.saving
    # Compression costs 60 % of the CPU time and a second copy of the state for 7 % smaller files; one growing data
    # file serialises the writers.
    saving.use_ocdbt = True
    saving.use_zarr3 = True
    saving.use_compression = False
    saving.ocdbt_target_data_file_size = 256 << 20
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    registry = ocp.handlers.local_registry()
    for item in ("data", "meta"):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=item)
    context.checkpointables.registry = registry
    if jax.process_count() > 1:
        context.multiprocessing.active_processes = set(range(jax.process_count()))
        context.multiprocessing.barrier_sync_key_prefix = "jaxckpt"
    return context


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _storable(x: jax.Array) -> jax.Array:
    # Typed random keys cannot be placed on a multi-process sharding except under jit, so their words are stored.
    return jax.jit(jax.random.key_data)(x) if _is_key(x) else x


def _key_data_struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    words = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=x.sharding)


def _as_key(words: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), target)  # a struct itself does not tell its kind
    impl = impls[0]
    return jax.jit(lambda w: jax.random.wrap_key_data(w, impl=impl), out_shardings=target.sharding)(words)
