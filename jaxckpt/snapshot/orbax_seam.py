"""Stands in for private functions of Orbax's, so that the bytes of our arrays are moved by `direct`.

Nothing here changes what lies on disk but the size of the chunks and their checksums, which `store_checked_chunks` sees
to whoever moves the bytes. A process in which Orbax has other functions than we know, and a file system on which the
self-test fails, gets one warning and Orbax's own way.
"""

import asyncio
import functools
import inspect
import logging
import math
import os
import sys
import tempfile
import types
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import (
    jax_array_handlers,
    limits,
    replica_slices,
    serialization,
    tensorstore_utils,
)

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import direct, direct_arrays, host_arrays
from jaxckpt.snapshot.direct_file import Counters, Workers
from jaxckpt.snapshot.orbax_arrays import array_info, store_checked_chunks

TMP_SUFFIX = ".orbax-checkpoint-tmp"
# What the functions that we stand in for take, and which function calls them by these names.
SIGNATURES = {
    "transfer_arrays_to_host": "arrays replica_id use_replica_parallel min_slice_bytes_for_replica_parallel "
    "max_replicas_for_replica_parallel enable_pinned_host_transfer",
    "async_serialize_from_host": "rslices_on_host tensorstore_spec context primary_host transaction byte_limiter",
    "async_deserialize": "user_sharding tensorstore_spec global_shape dtype byte_limiter context assume_metadata strict",
}
CALLERS = {
    "transfer_arrays_to_host": "_serialize_arrays_batches_without_dispatcher",
    "async_serialize_from_host": "_async_serialize_replica_slices",
    "build_array_write_spec": "_async_serialize_replica_slices",
    "async_deserialize": "_deserialize_arrays",
}
SLOW = "snapshots are moved by Orbax alone, which is slower: %s"
log = logging.getLogger("jaxckpt")

Directory = str | os.PathLike[str]


@functools.cache
def mover() -> "Mover":
    """The one of this process, as Orbax's functions are; the first call puts it in their place."""
    return Mover()


@dataclass
class _Reading:
    target: Mapping[str, jax.ShapeDtypeStruct]
    errors: list[Exception] = field(default_factory=list)


@dataclass
class _Batch:
    unfinished: int = 0
    files: list[str] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Mover:
    """Moves the bytes of arrays in our own directories, and leaves all others to Orbax."""

    def __init__(self) -> None:
        self.counters, self.workers = Counters(), Workers()
        self._writing: dict[str, str] = {}  # {parent of a directory that is being written: its path}
        self._reading: dict[str, _Reading] = {}
        self._batches: dict[asyncio.AbstractEventLoop, _Batch] = {}
        self._trusted: dict[int, bool] = {}  # {number of a file system: whether the self-test passed there}
        self._sums: dict[str, dict[str, list[tuple[str, host_arrays.Sums]]]] = {}  # by parent, and by name of the array
        store_checked_chunks(self._is_ours)
        self._problem = _unknown_seam()
        if self._problem is None:
            self._write, self._read = serialization.async_serialize_from_host, serialization.async_deserialize
            serialization.async_serialize_from_host, serialization.async_deserialize = self.serialize, self.deserialize
            self._transfer = replica_slices.transfer_arrays_to_host
            replica_slices.transfer_arrays_to_host = self.transfer
        else:
            log.warning(SLOW, self._problem)

    def writing(self, directory: Directory) -> None:
        """Looks after the arrays that are written to `directory` from now on, and to no other one beside it."""
        parent = os.path.dirname(os.fspath(directory))
        self._writing[parent], self._sums[parent] = os.fspath(directory), {}
        self.is_trusted(parent)  # now, and not in the middle of the save

    @property
    def copies_host_memory(self) -> bool:
        """Whether arrays in pinned host memory are copied from where they lie; Orbax alone would write views of them."""
        return self._problem is None

    def sums_of_host_arrays(self, directory: Directory) -> dict[str, list[tuple[str, host_arrays.Sums]]]:
        """{name of an array: (which part, what it adds to the fingerprint) of what this process has written of it}, of
        arrays in pinned host memory."""
        return self._sums.pop(os.path.dirname(os.fspath(directory)), {})

    @contextmanager
    def reading(self, directory: Directory, target: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[Exception]]:
        """Looks after the arrays that are read from `directory` meanwhile; `target` by the name of an array's directory.

        An array that cannot be read is an error in the list, and zeros take its place: if one process left Orbax with an
        error, the others would wait in it for that one.
        """
        root = os.fspath(directory)
        self._reading[root] = reading = _Reading(target)
        self.is_trusted(os.path.dirname(root))
        try:
            yield reading.errors
        finally:
            del self._reading[root]

    def is_trusted(self, directory: str) -> bool:
        """Whether the self-test passed on the file system of `directory`; makes it once."""
        if self._problem is not None or "://" in directory:
            return False
        try:
            device = os.stat(directory).st_dev
        except OSError:  # not there yet
            return False
        if device not in self._trusted:
            self._trusted[device] = True  # the test itself goes this way
            try:
                # The name of an unfinished step, which is swept away if this process is killed here.
                where = directory if os.access(directory, os.W_OK) else None
                with tempfile.TemporaryDirectory(prefix=f"step_9999999999{TMP_SUFFIX}-", dir=where) as scratch:
                    self._test(scratch)
            except Exception as e:
                self._trusted[device] = False
                log.warning(SLOW, f"the self-test in {directory} failed ({type(e).__name__}: {e})")
        return self._trusted[device]

    def transfer(
        self,
        arrays: Sequence[jax.Array],
        replica_id: int | None,
        use_replica_parallel: bool,
        min_slice_bytes_for_replica_parallel: int | None = None,
        max_replicas_for_replica_parallel: int | None = None,
        *,
        enable_pinned_host_transfer: bool = False,
    ) -> list[Any]:
        """In place of Orbax's transfer_arrays_to_host, which takes views of arrays that are in host memory already."""
        found = dict.fromkeys(range(len(arrays)))
        elsewhere = [i for i, x in enumerate(arrays) if x.sharding.memory_kind != "pinned_host"]
        if elsewhere:
            moved = self._transfer(
                [arrays[i] for i in elsewhere], replica_id, use_replica_parallel, min_slice_bytes_for_replica_parallel,
                max_replicas_for_replica_parallel, enable_pinned_host_transfer=enable_pinned_host_transfer,
            )  # fmt: skip
            found.update(zip(elsewhere, moved, strict=True))
        # Whole shards of one replica: to cut them into a part a replica is a computation on the device.
        here = {i: replica_slices.get_replica_slices(arrays[i], replica_id, False) for i in found if i not in elsewhere}
        parts = [part.unsliced_data for slices in here.values() for part in slices.replica_slices]
        copies = iter(host_arrays.copy_all(parts, self.workers))
        for i, slices in here.items():
            held = [replace(part, unsliced_data=next(copies)) for part in slices.replica_slices]
            found[i] = replace(slices, is_on_host=True, replica_slices=held)
        return list(found.values())

    async def serialize(
        self,
        rslices_on_host: Any,
        tensorstore_spec: dict[str, Any],
        *,
        context: Any = None,
        primary_host: int | None = 0,
        transaction: Any = None,
        byte_limiter: Any = None,
    ) -> None:
        """In place of Orbax's async_serialize_from_host: writes what this process holds of one array."""
        array, root = _path(tensorstore_spec), _file_path(tensorstore_spec)
        ours = next((parent for parent, directory in self._writing.items() if _lies_in(array, directory)), None)
        layout = None
        if root and ours is not None and transaction is None and rslices_on_host.is_on_host and self.is_trusted(ours):
            layout = direct.layout_of({**tensorstore_spec["metadata"], "data_type": tensorstore_spec["dtype"]})
        parts = [(part.index, part.value) for part in rslices_on_host.to_fragments().fragments]
        async with self._batch() as batch:
            whole = jax.ShapeDtypeStruct(
                rslices_on_host.global_shape, rslices_on_host.dtype, sharding=rslices_on_host.sharding
            )
            if ours is not None and host_arrays.stays_on_host(whole):
                sums = await host_arrays.sums_of_parts(parts, whole.shape, self.workers)
                self._sums[ours][os.path.basename(array)] = sums
            if layout is None or tuple(rslices_on_host.local_shape) != layout.shard:
                return await self._write(
                    rslices_on_host, tensorstore_spec, context=context, primary_host=primary_host,
                    transaction=transaction, byte_limiter=byte_limiter,
                )  # fmt: skip
            if primary_host is None or jax.process_index() == primary_host:
                await ts.open(ts.Spec(tensorstore_spec), create=True, open=True, context=context)
            batch.files += await direct_arrays.write_array(
                root, layout, parts, self.workers, _reserve(byte_limiter), self.counters
            )

    async def deserialize(
        self,
        user_sharding: Any,
        tensorstore_spec: Any,
        global_shape: Any = None,
        dtype: Any = None,
        *,
        byte_limiter: Any = None,
        context: Any = None,
        assume_metadata: bool = False,
        strict: bool = True,
    ) -> tuple[jax.Array, int]:
        """In place of Orbax's async_deserialize: the array, and the bytes of it in this process."""
        root = _file_path(tensorstore_spec)
        reading = next((reading for ours, reading in self._reading.items() if _lies_in(root, ours)), None)
        layout = None
        try:
            async with self._batch():
                if reading is not None and isinstance(user_sharding, jax.sharding.Sharding) and self.is_trusted(root):
                    layout = direct.read_layout(root)
                if (
                    layout is None
                    or not user_sharding.addressable_devices
                    or (global_shape is not None and tuple(global_shape) != layout.shape)
                    or (dtype is not None and jnp.dtype(dtype) != layout.dtype)
                ):
                    return await self._read(
                        user_sharding, tensorstore_spec, global_shape, dtype, byte_limiter=byte_limiter,
                        context=context, assume_metadata=assume_metadata, strict=strict,
                    )  # fmt: skip
                most_bytes = getattr(byte_limiter, "max_bytes", math.inf)
                return await direct_arrays.read_array(
                    root, layout, user_sharding, self.workers, _reserve(byte_limiter), self.counters, most_bytes
                )
        except Exception as e:
            target = reading.target.get(os.path.basename(root)) if reading is not None else None
            if reading is None or target is None:
                raise
            reading.errors.append(e)
            return _zeros(target), 0

    @asynccontextmanager
    async def _batch(self) -> AsyncIterator["_Batch"]:
        """What is moved at the same time. The last one to leave waits until the files of all are on the disk.

        An error leaves it only when all are done: Orbax closes the event loop at the first error, and would leave the
        others hanging in it.
        """
        loop = asyncio.get_running_loop()
        batch = self._batches.setdefault(loop, _Batch())
        batch.unfinished += 1
        await asyncio.sleep(0)  # the others come in
        try:
            yield batch
            if batch.unfinished == 1:
                await direct_arrays.sync_files(batch.files, self.workers)
        finally:
            batch.unfinished -= 1
            if not batch.unfinished:
                self._batches.pop(loop, None)
                batch.is_over.set()
            if isinstance(sys.exception(), Exception):
                await batch.is_over.wait()

    def _is_ours(self, directory: str) -> bool:
        return any(_lies_in(directory, ours) for ours in self._writing.values())

    def _test(self, scratch: str) -> None:
        """Writes and reads a small sharded array as a snapshot's are, and looks at it with other eyes."""
        devices = jax.local_devices()[:2]
        a = np.arange(len(devices) * 300, dtype=np.float32).reshape(len(devices), 300)
        sharding = NamedSharding(Mesh(np.array(devices), ("d",)), PartitionSpec("d"))
        x = jax.device_put(a, sharding)
        path = os.path.join(scratch, "step" + TMP_SUFFIX)
        info = array_info("x", path)
        before = (self.counters.files_written, self.counters.files_read)
        self._writing[scratch] = os.path.join(scratch, "step")
        self._reading[path] = _Reading({})
        try:
            (on_host,) = replica_slices.transfer_arrays_to_host([x], 0, False)
            spec = tensorstore_utils.build_array_write_spec(
                info, global_shape=x.shape, local_shape=on_host.local_shape, dtype=x.dtype, use_ocdbt=False
            ).json
            read_spec = tensorstore_utils.build_array_read_spec(info, use_ocdbt=False).json
            _run(lambda: serialization.async_serialize_from_host(on_host, spec, primary_host=None))
            plain = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.join(path, "x")}}
            found = ts.open(plain, open=True).result().read().result()
            loaded, _ = _run(lambda: serialization.async_deserialize(sharding, read_spec))
            with open(os.path.join(path, "x", "c", "0", "0"), "r+b") as f:
                first = f.read(1)
                f.seek(0)
                f.write(bytes([first[0] ^ 1]))
            try:
                _run(lambda: serialization.async_deserialize(sharding, read_spec))
            except DamagedSnapshot:
                pass
            else:
                raise AssertionError("a flipped bit was not seen")
        finally:
            del self._writing[scratch], self._reading[path]
        moved = (self.counters.files_written - before[0], self.counters.files_read - before[1])
        assert moved[0] == len(devices) and moved[1] >= len(devices), f"Orbax did not use it: {moved} files"
        assert np.array_equal(found, a), "tensorstore reads other values than were written"
        assert np.array_equal(loaded, a), "other values are read than were written"


def _zeros(target: jax.ShapeDtypeStruct) -> jax.Array:
    assert target.sharding is not None, "a restore says where each array goes"
    part = lambda index: np.zeros(
        [len(range(*s.indices(n))) for s, n in zip(index, target.shape, strict=True)], target.dtype
    )
    return jax.make_array_from_callback(target.shape, target.sharding, part)


def _unknown_seam() -> str | None:
    """What differs around the two functions of Orbax's that we stand in for; None where nothing does."""
    for name, expected in SIGNATURES.items():
        module = replica_slices if name == "transfer_arrays_to_host" else serialization
        try:
            found = " ".join(inspect.signature(getattr(module, name)).parameters)
        except (AttributeError, TypeError, ValueError) as e:
            found = repr(e)
        if found != expected:
            return f"Orbax's private function {name} takes ({found}), not ({expected})"
    for name, caller in CALLERS.items():
        code = getattr(getattr(jax_array_handlers, caller, None), "__code__", None)
        if code is None or name not in _names(code):
            return f"Orbax's private function {caller} does not call {name}"
    for module in (serialization, replica_slices):
        if getattr(jax_array_handlers, name := module.__name__.rpartition(".")[2], None) is not module:
            return f"Orbax's module jax_array_handlers does not use the module {name}"
    return None


def _names(code: types.CodeType) -> set[str]:
    """Names that a function, or one inside it, looks up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _file_path(spec: Any) -> str:
    """The directory of the array that a tensorstore spec describes, "" where it is not zarr3 on local files."""
    path = _path(spec)
    return "" if "://" in path else path


def _path(spec: Any) -> str:
    """The same, also on gs://."""
    array = spec.get("base", spec) if isinstance(spec, dict) else {}
    store = array.get("kvstore", {})
    if array.get("driver") != "zarr3" or store.get("driver") not in ("file", "gcs"):
        return ""
    path = os.path.normpath(store["path"])
    return path if store["driver"] == "file" else f"gs://{store['bucket']}/{path}"


def _lies_in(path: str, directory: str) -> bool:
    return path.startswith(directory) and path[len(directory) :].startswith(("/", TMP_SUFFIX))


def _reserve(byte_limiter: Any) -> direct_arrays.Reserve:
    limiter = byte_limiter or limits.get_byte_limiter()
    return lambda nbytes: limits.reserved_bytes(limiter, nbytes)


def _run(start: Callable[[], Any]) -> Any:
    """Runs a coroutine to its end, also where an event loop is running already, as in a notebook."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(start())).result()
