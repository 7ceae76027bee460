"""One infinite sequence of examples, cut into global batches, as global `jax.Array`s.

Global batch k is examples [k B, (k + 1) B), whatever the number of processes, the mesh or the threads. So a data
position is one number.
"""

import hashlib
import logging
import math
import pickle
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.errors import DataError

log = logging.getLogger("jaxckpt")

STATE_VERSION = 1
_POLL_S = 0.1
_TELL_EVERY_S = 60
PyTree = Any
_Arrival = tuple[PyTree, BaseException | None]


def batch_sharding(sharding: NamedSharding, global_batch: int) -> NamedSharding:
    """`sharding` of axis 0 alone, checked to cut `global_batch` rows evenly."""
    if any(axes is not None for axes in sharding.spec[1:]):
        raise DataError(
            f"a batch is sharded on its first axis only; found {sharding.spec}. Shard other axes inside the step."
        )
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    shards = math.prod(sharding.mesh.shape[name] for name in names)
    if global_batch < 1 or global_batch % shards:
        below = global_batch // shards * shards
        near = " or ".join(str(b) for b in (below, below + shards) if b > 0)
        mesh = ", ".join(f"{name}={sharding.mesh.shape[name]}" for name in names)
        raise DataError(
            f"a global batch of {global_batch} cannot be cut evenly into {shards} shards (mesh axes "
            f"{mesh or 'none'}). Use {near}."
        )
    return NamedSharding(sharding.mesh, PartitionSpec(axes), memory_kind=sharding.memory_kind)


def local_rows(sharding: NamedSharding, global_batch: int) -> np.ndarray:
    """Sorted global row numbers of a batch that this process must supply: those of its devices, not of its number."""
    shards = batch_sharding(sharding, global_batch).addressable_devices_indices_map((global_batch,))
    rows = sorted({row for index in shards.values() if index for row in range(*index[0].indices(global_batch))})
    if not rows:
        raise DataError(
            "this process has no device in the mesh, so it has no part of the batch. Put all devices in the mesh."
        )
    return np.array(rows, np.int64)


def as_dataset(source: Any) -> grain.MapDataset:
    """`source` as an infinite MapDataset, repeated if it ends. Only random access makes a position exact."""
    if not isinstance(source, grain.MapDataset):
        kind = type(source)
        by_number = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
        if not by_number or isinstance(source, Mapping | str | bytes | grain.IterDataset):
            raise DataError(
                f"data of type {kind.__module__}.{kind.__qualname__} cannot be resumed exactly: "
                "its position is not a number, so example i cannot be read again without what came before it. "
                "Give a grain.MapDataset, or a sequence with __len__ and __getitem__(i) that returns example i."
            )
        source = grain.MapDataset.source(source)
    if len(source) == 0:
        raise DataError("the data set is empty: its length is 0. Check the paths and filters that it is made from.")
    return source if len(source) >= sys.maxsize else source.repeat()


class GlobalBatches(grain.MapDataset):
    """Element k = rows `rows` of the global batch that begins at example `start + k * global_batch` of `parent`, as
    numpy.

    Examples are pytrees of arrays and numbers of the same structure, shapes and dtypes. 64-bit values become 32-bit
    ones, as JAX would do it, but an integer that does not fit is an error. Every error names the example.
    """

    def __init__(self, parent: grain.MapDataset, global_batch: int, rows: Sequence[int] | np.ndarray, start: int = 0):
        super().__init__(parent)
        self._global_batch, self._rows, self._start = int(global_batch), [int(r) for r in rows], int(start)

    def __len__(self) -> int:
        return max(0, len(self._parent) - self._start) // self._global_batch

    def __str__(self) -> str:
        return f"GlobalBatches(global_batch={self._global_batch}, rows={len(self._rows)}, start={self._start})"

    def __getitem__(self, index: Any) -> PyTree:
        if isinstance(index, slice):
            return self.slice(index)
        if not 0 <= index < len(self):  # MapDataset wraps around by convention; a stream must not
            raise IndexError(index)
        numbers = [self._start + index * self._global_batch + row for row in self._rows]
        first, structure = read_example(self._parent, numbers[0])
        columns = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in first]
        for row, number in enumerate(numbers):
            leaves, other = read_example(self._parent, number) if row else (first, structure)
            if other != structure:
                raise DataError(
                    f"example {number} has the structure {other}, but example {numbers[0]} of its batch {structure}."
                )
            for j, (column, leaf) in enumerate(zip(columns, leaves, strict=True)):
                if leaf.shape != column.shape[1:] or leaf.dtype != column.dtype:
                    raise DataError(
                        f"example {number}: field '{_paths(structure)[j]}' is {leaf.dtype}{list(leaf.shape)}, "
                        f"but in example {numbers[0]} of its batch {column.dtype}{list(column.shape[1:])}. "
                        "Pad, cut or cast the examples to one shape and dtype."
                    )
                column[row] = leaf  # copied at once: the user may reuse one buffer for all examples
        return jax.tree.unflatten(structure, [_narrowed(c, numbers, structure, j) for j, c in enumerate(columns)])


def read_example(dataset: grain.MapDataset, number: int) -> tuple[list[np.ndarray], Any]:
    """(leaves, tree structure) of one example, or a DataError that names the number, the field and the user's error."""
    try:
        example = dataset[number]
    except Exception as error:
        raise DataError(f"example {number}: reading it raised {type(error).__name__}: {error}") from error
    if example is None:
        raise DataError(
            f"example {number} is None, which is how a filter of a MapDataset drops it; "
            "then the position is no longer a number of examples. Filter the source before it becomes a MapDataset."
        )
    # None and lists are leaves here, so that they are refused: JAX drops the first and takes the second for a tree of
    # numbers.
    leaves, structure = jax.tree.flatten(example, is_leaf=lambda x: x is None or isinstance(x, list))
    arrays = []
    for j, leaf in enumerate(leaves):
        array = (
            np.asarray(leaf)
            if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex | jax.Array)
            else None
        )
        if array is None or not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)):
            found = type(leaf).__name__ if array is None else f"an array of dtype {array.dtype}"
            raise DataError(
                f"example {number}: field '{_paths(structure)[j]}' is {found}, "
                "but a batch holds numpy arrays and numbers. Convert it (np.asarray, "
                ".numpy()) or leave the field out."
            )
        # JAX takes no big-endian array, and files of other systems hold them.
        arrays.append(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    if not arrays:
        raise DataError(f"example {number} has no array: {example!r}. Return a dict of numpy arrays.")
    return arrays, structure


def _paths(structure: Any) -> list[str]:
    indexed = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(indexed)]


def _narrowed(column: np.ndarray, numbers: Sequence[int], structure: Any, leaf: int) -> np.ndarray:
    """`column` in the dtype that JAX will use, checked; JAX alone would wrap a large integer around in silence."""
    dtype = jax.dtypes.canonicalize_dtype(column.dtype)
    if dtype == column.dtype:
        return column
    with np.errstate(over="ignore"):
        narrow = column.astype(dtype)
    lost = narrow != column if column.dtype.kind in "iu" else np.isfinite(column) & ~np.isfinite(narrow)
    if lost.any():
        row, *place = np.argwhere(lost)[0]
        raise DataError(
            f"example {numbers[row]}: field '{_paths(structure)[leaf]}' holds {column[(row, *place)]} "
            f"({column.dtype}), which does not fit {dtype}. Bring it into range, or set jax_enable_x64."
        )
    return narrow


class BatchStream:
    """Iterator over the global batches: pytrees of `jax.Array`[global_batch, ...], for ever, read ahead in threads.

    Its whole state is the number of the next example. Threads and buffers are rebuilt from it, so what was read ahead
    never counts.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int,
        sharding: NamedSharding,
        fingerprint: str,
        num_threads: int = 2,
        prefetch: int = 2,
    ):
        """`source`: a grain.MapDataset or a sequence; `fingerprint`: what it is made of.

        `prefetch` batches wait on the device (0: `next` reads in the caller's thread).
        """
        self.global_batch, self.fingerprint = global_batch, fingerprint
        self.sharding = batch_sharding(sharding, global_batch)
        self._dataset = as_dataset(source)
        self._epoch_length = len(source)
        self._rows = local_rows(self.sharding, global_batch)
        # Grain's own defaults are 16 threads and 500 elements, and an element is a whole batch here.
        self._options = grain.ReadOptions(num_threads=min(num_threads, prefetch), prefetch_buffer_size=prefetch)
        self._next_example = 0
        self._batches: Any = None

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return self.next_unless(lambda: False)

    def next_unless(self, should_stop: Callable[[], bool]) -> PyTree | None:
        """The next batch; or None once `should_stop` says yes while none has come, and the position stays.

        Data that never comes cannot be interrupted: its thread is left behind, and does not keep the process from ending.
        """
        self.start()
        arrived: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        threading.Thread(target=_fetch, args=(self._batches, arrived), name="jaxckpt-next-batch", daemon=True).start()
        arrival = None
        try:
            arrival = self._wait(arrived, should_stop)
        finally:  # also where Ctrl-C ends the wait, in a notebook
            if arrival is None:
                self._batches = None  # not closed: that would wait for the thread that is reading
        if arrival is None:
            return None
        batch, error = arrival
        if error is not None:
            self.close()  # Grain's iterator has moved on by one; a second call must meet the same batch again
            raise error
        self._next_example += self.global_batch
        return batch

    def _wait(self, arrived: "queue.SimpleQueue[_Arrival]", should_stop: Callable[[], bool]) -> "_Arrival | None":
        began, told = time.monotonic(), 0
        while True:
            try:
                return arrived.get(timeout=_POLL_S)
            except queue.Empty:
                if should_stop():
                    return None
                if (waited := int(time.monotonic() - began) // _TELL_EVERY_S) > told:
                    told = waited
                    log.warning("waiting for example %d since %d s", self._next_example, told * _TELL_EVERY_S)

    def start(self) -> None:
        """Begins to read ahead, so that the first batch is ready when compilation or a restore is."""
        if self._batches is None:
            ahead = GlobalBatches(self._dataset, self.global_batch, self._rows, self._next_example).map(self._to_device)
            self._batches = iter(ahead.to_iter_dataset(self._options))
            self._batches.start_prefetch()

    def close(self) -> None:
        """Stops the threads and drops what was read ahead. The position stays; `next` starts again from there."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def state(self) -> dict[str, Any]:
        """The position as JSON, the same on every process. It counts only the batches that were handed out."""
        return {
            "version": STATE_VERSION,
            "next_example": self._next_example,
            "global_batch": self.global_batch,
            "fingerprint": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`, in O(1). Its batch size may differ: the sequence of examples goes on without a gap."""
        position = state.get("next_example")
        expected = {"version": STATE_VERSION, "fingerprint": self.fingerprint}
        problems = [
            f"{key} was {state.get(key)!r} and is {value!r}"
            for key, value in expected.items()
            if state.get(key) != value
        ]
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            problems.append(f"next_example is {position!r}, not a number of examples")
        if problems:
            raise DataError(
                f"the data changed: {'; '.join(problems)}. The next example would not be the one that was due. "
                "Give the data (files, tokenizer, seq_len, holdout, seed) that the run began with, "
                "allow the change by name (data), or start a new run."
            )
        self.close()
        self._next_example = int(state["next_example"])

    def batch_at(self, next_example: int) -> PyTree:
        """This process's rows, as numpy, of the batch that begins at `next_example`, built now from no buffer."""
        return GlobalBatches(self._dataset, self.global_batch, self._rows, next_example)[0]

    def batch_struct(self) -> PyTree:
        """The batch as `jax.ShapeDtypeStruct`s with shardings, from example 0, to compile a step early."""
        leaves, structure = read_example(self._dataset, 0)
        structs = [
            jax.ShapeDtypeStruct(
                (self.global_batch, *leaf.shape),
                jax.dtypes.canonicalize_dtype(leaf.dtype),
                sharding=self.sharding,
            )
            for leaf in leaves
        ]
        return jax.tree.unflatten(structure, structs)

    def probe(self) -> str:
        """A fingerprint from outside, for data that brings none: the length and the bytes of eight examples."""
        digest = hashlib.sha256(str(self._epoch_length).encode())
        last = min(self._epoch_length, 2**31) - 1
        for number in sorted({i * last // 7 for i in range(8)}):
            leaves, structure = read_example(self._dataset, number)
            digest.update(str(structure).encode())
            for leaf in leaves:
                digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        return digest.hexdigest()

    def _to_device(self, batch: PyTree) -> PyTree:
        # No collective, and no order among processes: safe in threads.
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(self.sharding, x, (self.global_batch, *x.shape[1:])), batch
        )


def _fetch(batches: Any, arrived: queue.SimpleQueue[_Arrival]) -> None:
    try:
        arrived.put((next(batches), None))
    except BaseException as e:
        arrived.put((None, e))


def check_reproducible(stream: BatchStream, next_example: int) -> str | None:
    """Builds the batch at `next_example` twice and compares the bits; DataError if they differ.

    Returns a warning if they are equal although a global random generator was drawn from, else None.
    """
    before = _global_generators()
    first = stream.batch_at(next_example)
    moved = [name for name, value in _global_generators().items() if value != before[name]]
    second = stream.batch_at(next_example)
    way_out = (
        "Derive a generator from the number of the example, np.random.default_rng((seed, i)), "
        "or use random_map of grain.MapDataset, which hands one in."
    )
    if differing := _differing(first, second):
        cause = " and ".join(f"it uses {name}" for name in moved) or "an unknown source of randomness or state"
        raise DataError(
            f"the batch at example {next_example} is not a function of its number: built twice, "
            f"it differs in {', '.join(differing)}. Likely cause: {cause}. A resumed run would see other data. "
            f"{way_out}"
        )
    if moved:
        return (
            f"the data uses {' and '.join(moved)}. The batch at example {next_example} came out the same twice, "
            f"but another order of reading can change what it gives. {way_out}"
        )
    return None


def _global_generators() -> dict[str, Any]:
    return {
        "numpy's global random generator (np.random.*)": pickle.dumps(np.random.get_state(legacy=False)),
        "Python's random module": random.getstate(),
    }


def _differing(first: PyTree, second: PyTree) -> list[str]:
    """Paths of the fields whose bits differ (NaN equals itself)."""
    structure = jax.tree.structure(first)
    if structure != jax.tree.structure(second):
        return [f"its structure ({structure} and {jax.tree.structure(second)})"]
    pairs = zip(_paths(structure), jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return [f"'{path}'" for path, a, b in pairs if (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes())]
