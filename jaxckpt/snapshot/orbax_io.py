"""Saves and loads by Orbax: one directory holds `state` (sharded arrays), `data` and `meta` (JSON). Only this file,
orbax_seam and orbax_arrays talk to it.

On disk the state is zarr3, one file a shard, uncompressed, small chunks with a crc32c each, so plain Orbax reads and
verifies it without this package; leaf `a/b` lies in `state/a.b`. Orbax makes directories, metadata and the commit and
copies from and to the devices; `orbax_seam` lets `direct` move the bytes of arrays on local files.
"""

import json
import logging
import math
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import types as serialization_types

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import host_arrays
from jaxckpt.snapshot.orbax_seam import TMP_SUFFIX as TMP_SUFFIX
from jaxckpt.snapshot.orbax_seam import Directory, mover
from jaxckpt.state import tree

# Orbax warns of the first two at every save; both are what we ask for. The third tells of an error that is raised, too.
NEEDLESS_WARNINGS = (
    "Skipping merge of OCDBT checkpoints",
    "No prioritized params found",
    "_SignalingThread.run() raised an exception",
)
# What Orbax drops, and Python then warns of, when a load fails: the error is raised.
DROPPED_COROUTINE = r"coroutine 'Store\._get_array_metadatas' was never awaited"
SIGNS_OF_DAMAGE = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FileNotFoundError")


def save_async(
    directory: Directory,
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
    logging.getLogger("absl").addFilter(_is_worth_a_line)
    mover().writing(directory)
    if not mover().copies_host_memory:
        state = {path: _on_device(x) if isinstance(x, jax.Array) else x for path, x in state.items()}
    context = _context(timeout_s)
    staged = _Staged(path for path, x in state.items() if isinstance(x, jax.Array))
    if staging_bytes is not None:
        # Orbax still holds one part while it copies the next; a third one is for what tensorstore copies.
        part = max(1, staging_bytes // 3)
        context.memory.transfer_concurrent_bytes = part
        context.memory.write_concurrent_bytes = max([part, *(_shard_bytes(x) for x in state.values())]) + 1
        context.memory.serialization_status_callback = staged
    items = {"state": tree.nest({path: _storable(x) for path, x in state.items()}), "data": data, "meta": meta}
    with context:
        response = ocp.save_checkpointables_async(epath.Path(directory), items)
    if staging_bytes is not None:
        staged.wait(response)
    return response


def takes_from_host(x: Any) -> bool:
    """Whether a save copies the leaf from host memory and `host_sums` tells its fingerprint."""
    return mover().copies_host_memory and host_arrays.stays_on_host(x)


def host_sums(directory: Directory) -> dict[str, list[tuple[str, host_arrays.Sums]]]:
    """{name of an array: (which part, what it adds to the fingerprint)} of what this process has written of the leaves
    that `takes_from_host`, once the save of `directory` is done. They are told once."""
    return mover().sums_of_host_arrays(directory)


def load_state(
    directory: Directory,
    target: dict[str, jax.ShapeDtypeStruct],
    *,
    timeout_s: float,
    restore_bytes: int | None = None,
) -> dict[str, jax.Array]:
    """The arrays of `directory` that `target` names, each made straight in its sharding and memory kind there.

    Leaves that `target` leaves out are not read. `restore_bytes` bounds what is read and not yet handed to JAX.

    Raises DamagedSnapshot where the bytes are not what was saved, SnapshotError where a leaf is not stored.
    """
    keys = {path: x for path, x in target.items() if _is_key(x)}
    plain = {path: _key_data_struct(x) if path in keys else x for path, x in target.items()}
    context = _context(timeout_s)
    context.pytree.loading.partial_load = True
    if restore_bytes is not None:
        context.memory.read_concurrent_bytes = max(restore_bytes, _largest_read(directory, plain) + 1)
    try:
        with mover().reading(directory, {array_name(p): x for p, x in plain.items()}) as errors, context:
            loaded = ocp.load_checkpointables(epath.Path(directory), {"state": tree.nest(plain)})["state"]
        if errors:
            raise next((e for e in errors if isinstance(e, DamagedSnapshot)), errors[0])
    except Exception as e:
        warnings.filterwarnings("ignore", DROPPED_COROUTINE, RuntimeWarning)
        clearer = _clearer(e)
        if clearer is e:
            raise  # `raise e from e` would make it its own cause
        raise clearer from e
    arrays = tree.flatten(loaded)
    if missing := [path for path in target if not isinstance(arrays.get(path), jax.Array)]:
        raise SnapshotError(
            f"{directory}: the snapshot does not hold these leaves: {', '.join(missing)}. Ask only for those that its "
            "meta/data.json lists."
        )
    return {path: _as_key(arrays[path], keys[path]) if path in keys else arrays[path] for path in target}


def read_json(directory: Directory, item: str) -> Any:
    """The JSON item `data` or `meta`, without touching an array or a device."""
    return json.loads((epath.Path(directory) / item / "data.json").read_text())


def array_name(path: str) -> str:
    """The name of a leaf's directory below `state`: Orbax joins the parts of a path with dots."""
    return path.replace("/", ".")


class _Staged:
    """Knows which leaves Orbax has copied to the host; after the last one the state may be donated."""

    def __init__(self, paths: Iterable[str]) -> None:
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
        """Returns when every leaf is copied, or the save is over; its error is for whoever waits for the save."""
        with self._changed:
            while self._missing and not _is_over(response):
                self._changed.wait(0.05)


def _is_over(response: ocp.AsyncResponse[None]) -> bool:
    try:
        response.result(timeout=0.001)
    except TimeoutError:
        return False
    except Exception:
        return True
    return True


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


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in NEEDLESS_WARNINGS)


def _clearer(error: BaseException) -> BaseException:
    """DamagedSnapshot, if that is what lies at the bottom; Orbax hides it under errors of its own."""
    causes = [error]
    while (below := causes[-1].__cause__ or causes[-1].__context__) is not None and below not in causes:
        causes.append(below)
    for cause in causes:
        if isinstance(cause, DamagedSnapshot):
            return DamagedSnapshot(str(cause))
    for cause in reversed(causes):
        if any(sign in f"{type(cause).__name__}: {cause}" for sign in SIGNS_OF_DAMAGE):
            return DamagedSnapshot(f"the snapshot's bytes are not what was saved: {cause}")
    return error


def _shard_bytes(x: Any) -> int:
    shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
    return math.prod(shape) * (8 if _is_key(x) else x.dtype.itemsize)


def _largest_read(directory: Directory, target: dict[str, jax.ShapeDtypeStruct]) -> int:
    """The most bytes that Orbax reserves at once: for one shard of the target, every chunk that it touches."""
    largest = 0
    for path, x in target.items():
        try:
            metadata = json.loads((epath.Path(directory) / "state" / array_name(path) / "zarr.json").read_text())
            chunk = metadata["codecs"][0]["configuration"]["chunk_shape"]
        except (OSError, ValueError, LookupError):
            continue  # the load itself will say what is wrong
        shard = x.sharding.shard_shape(x.shape)
        nbytes = np.dtype(x.dtype).itemsize * math.prod((-(-n // c) + 1) * c for n, c in zip(shard, chunk, strict=True))
        largest = max(largest, nbytes)
    return largest


def _on_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding.with_memory_kind("device")) if x.sharding.memory_kind == "pinned_host" else x


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
