"""The only place that talks to Orbax: one directory holds `state` (sharded arrays), `data` and `meta` (JSON).

On disk the state is nested dicts keyed by the parts of each leaf's path, so plain Orbax reads it without this package:
zarr3, one file a shard, uncompressed, with a crc32c behind every chunk, which plain Orbax verifies when it reads.
"""

import functools
import json
import logging
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils
from orbax.checkpoint._src.serialization import types as serialization_types

from jaxckpt.errors import SnapshotError
from jaxckpt.state import tree

TMP_SUFFIX = ".orbax-checkpoint-tmp"
CRC32C = {"name": "crc32c"}
# Orbax warns of both at every save; both are what we ask for.
NEEDLESS_WARNINGS = ("Skipping merge of OCDBT checkpoints", "No prioritized params found")


def save_async(
    directory: str | os.PathLike[str],
    *,
    state: dict[str, jax.Array | np.ndarray],
    data: Any,
    meta: Any,
    timeout_s: float,
    staging_bytes: int | None = None,
) -> ocp.AsyncResponse[None]:
    """Starts writing `directory`, which must not exist; `.result(timeout)` of the response waits for the bytes.

    `state` is keyed by path; a numpy array must be the same on every process and is written once. It may be donated as
    soon as this returns. Every process calls it with the same paths.

    `staging_bytes` bounds the copies of the state in host memory; where the state is larger, this returns when the last
    part has been copied, thus when most of it is on disk.
    """
    _store_crc32c()
    logging.getLogger("absl").addFilter(_is_worth_a_line)
    staged = _Staged(path for path, x in state.items() if isinstance(x, jax.Array))
    context = _context(timeout_s)
    if staging_bytes is not None:
        # Orbax still holds one batch while it copies the next.
        context.memory.transfer_concurrent_bytes = max(1, staging_bytes // 2)
        context.memory.serialization_status_callback = staged
    with context:
        items = {"state": tree.nest({path: _storable(x) for path, x in state.items()}), "data": data, "meta": meta}
        response = ocp.save_checkpointables_async(epath.Path(directory), items)
    if staging_bytes is not None:
        staged.wait(response)
    return response


def load_state(
    directory: str | os.PathLike[str],
    target: dict[str, jax.ShapeDtypeStruct],
    *,
    timeout_s: float,
    restore_bytes: int | None = None,
) -> dict[str, jax.Array]:
    """The arrays of `directory` that `target` names, each made straight in its sharding and memory kind there.

    Leaves that `target` leaves out are not read; one that is not stored raises SnapshotError. `restore_bytes` bounds what is read and not yet handed to JAX.
    """
    keys = {path: x for path, x in target.items() if _is_key(x)}
    plain = {path: _key_data_struct(x) if path in keys else x for path, x in target.items()}
    context = _context(timeout_s)
    context.pytree.loading.partial_load = True
    if restore_bytes is not None:
        context.memory.read_concurrent_bytes = max(restore_bytes, _largest_read(directory, plain) + 1)
    with context:
        loaded = ocp.load_checkpointables(epath.Path(directory), {"state": tree.nest(plain)})["state"]
    arrays = tree.flatten(loaded)
    if missing := [path for path in target if not isinstance(arrays.get(path), jax.Array)]:
        raise SnapshotError(
            f"{directory}: the snapshot does not hold these leaves: {', '.join(missing)}. Ask only for those that its "
            "meta/data.json lists."
        )
    return {path: _as_key(arrays[path], keys[path]) if path in keys else arrays[path] for path in target}


def read_json(directory: str | os.PathLike[str], item: str) -> Any:
    """The JSON item `data` or `meta`, without touching an array or a device."""
    return json.loads((epath.Path(directory) / item / "data.json").read_text())


def array_name(path: str) -> str:
    """The name of a leaf's directory below `state`: Orbax joins the parts of a path with dots."""
    return path.replace("/", ".")


class _Staged:
    """Knows which leaves Orbax has copied to the host; after the last one the state may be donated."""

    def __init__(self, paths: Any) -> None:
        self._missing = set(paths)
        self._changed = threading.Condition()

    def key_priority(self, keypath: Any) -> Any:
        return serialization_types.TransferPriority.ASYNCHRONOUS_PRIORITIZED

    def on_transfer_start(self, keypath: Any) -> None: ...

    def on_transfer_end(self, keypath: Any) -> None:
        with self._changed:
            self._missing.discard(tree.path_str(keypath))
            self._changed.notify_all()

    def on_write_start(self, keypath: Any) -> None: ...

    def on_write_end(self, keypath: Any) -> None: ...

    def wait(self, response: ocp.AsyncResponse[None]) -> None:
        """Returns when every leaf is copied; raises what the save raised before that."""
        with self._changed:
            while self._missing:
                self._changed.wait(0.05)
                try:
                    response.result(timeout=0.001)
                    return
                except TimeoutError:
                    continue


def _context(timeout_s: float) -> ocp.Context:
    context = ocp.Context()
    saving = context.array.saving
    # Compression costs 60 % of the CPU time and a second copy of the state for 7 % smaller files.
    saving.use_ocdbt = False
    saving.use_zarr3 = True
    saving.use_compression = False
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    registry = ocp.handlers.local_registry()
    for item in ("data", "meta"):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=item)
    context.checkpointables.registry = registry
    if jax.process_count() > 1:
        context.multiprocessing.active_processes = set(range(jax.process_count()))
        context.multiprocessing.barrier_sync_key_prefix = "jaxckpt"
    return context


@functools.cache
def _store_crc32c() -> None:
    """Makes Orbax put a crc32c behind every chunk, for which it has no option. Raises SnapshotError where it would not."""
    found = "no function _build_zarr3_metadata(global_shape, chunk_shape, use_compression)"
    try:
        build = tensorstore_utils._build_zarr3_metadata

        def with_crc32c(*args: Any, **kwargs: Any) -> dict[str, Any]:
            metadata = build(*args, **kwargs)
            metadata["codecs"][0]["configuration"]["codecs"].append(CRC32C)
            return metadata

        tensorstore_utils._build_zarr3_metadata = with_crc32c
        spec = tensorstore_utils.ArrayWriteSpec(
            "/nowhere", "x", global_shape=(4, 4), write_shape=(2, 4), dtype=jnp.dtype("float32"),
            use_compression=False, use_zarr3=True, use_ocdbt=False,
        ).json  # fmt: skip
        found = json.dumps(spec["metadata"]["codecs"])
        sharded = spec["metadata"]["codecs"][0]
        assert sharded["name"] == "sharding_indexed"
        assert [codec["name"] for codec in sharded["configuration"]["codecs"]] == ["bytes", "crc32c"]
    except (AttributeError, TypeError, LookupError, AssertionError) as e:
        raise SnapshotError(
            f"this orbax-checkpoint cannot be made to write checksums: expected the codecs sharding_indexed[bytes, crc32c], "
            f"found {found}. Install the version that jaxckpt's pyproject.toml asks for."
        ) from e


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in NEEDLESS_WARNINGS)


def _largest_read(directory: str | os.PathLike[str], target: dict[str, jax.ShapeDtypeStruct]) -> int:
    """The most bytes that Orbax reserves at once: for one shard, every chunk that it touches."""
    largest = 0
    for path, x in target.items():
        metadata = json.loads((epath.Path(directory) / "state" / array_name(path) / "zarr.json").read_text())
        chunk = metadata["codecs"][0]["configuration"]["chunk_shape"]
        shard = x.sharding.shard_shape(x.shape)
        nbytes = np.dtype(x.dtype).itemsize
        for size, c in zip(shard, chunk, strict=True):
            nbytes *= (-(-size // c) + 1) * c
        largest = max(largest, nbytes)
    return largest


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _storable(x: Any) -> Any:
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
