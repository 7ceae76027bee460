"""One infinite sequence of examples, cut into global batches, as global `jax.Array`s.

Global batch k is examples [k B, (k + 1) B), whatever the number of processes, the mesh or the threads. So a data
position is one number.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.data.course import Course
from jaxckpt.data.shuffle import Epochs, reads_rows
from jaxckpt.errors import DataError

PyTree = Any


def batch_sharding(sharding: NamedSharding, global_batch: int) -> NamedSharding:
    """`sharding` of axis 0 alone, checked to cut `global_batch` rows evenly."""
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
    if reads_rows(source) and 0 < len(source) < sys.maxsize:
        return Epochs(source, seed=None)
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
    """Element k = rows `rows` of the global batch that `course` gives to batch `first + k`, read from `parent`, as numpy.

    Examples are pytrees of arrays and numbers of the same structure, shapes and dtypes. 64-bit values become 32-bit
    ones, as JAX would do it, but an integer that does not fit is an error. Every error names the example.
    """

    def __init__(self, parent: grain.MapDataset, course: Course, rows: Sequence[int] | np.ndarray, *, first: int = 0):
        super().__init__(parent)
        self._course, self._rows, self._first = course, np.asarray(rows, np.int64), first

    def __len__(self) -> int:
        return sys.maxsize

    def __str__(self) -> str:
        return f"GlobalBatches(rows={len(self._rows)}, first={self._first})"

    def __getitem__(self, index: Any) -> PyTree:
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            raise IndexError(index)
        numbers = self._course.example(self._first + index) + self._rows
        source: Any = self._parent
        if reads_rows(source):
            return _narrowed(source.read_rows(numbers), numbers.tolist())
        return stack_examples((read_example(self._parent, number) for number in numbers.tolist()), numbers.tolist())


def stack_examples(examples: Iterable[tuple[list[np.ndarray], Any]], numbers: Sequence[int]) -> PyTree:
    """Examples as `as_example` gives them, as one pytree of arrays [len(numbers), ...] in JAX's dtypes.

    Each is copied before the next is asked for: a user may reuse one buffer for all.
    """
    columns, structure = [], None
    for row, (number, (leaves, other)) in enumerate(zip(numbers, examples, strict=True)):
        if row == 0:
            columns, structure = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in leaves], other
        if other != structure:
            raise DataError(
                f"example {number} has the structure {other}, but example {numbers[0]} of its batch {structure}."
            )
        for j, (column, leaf) in enumerate(zip(columns, leaves, strict=True)):
            if leaf.shape != column.shape[1:] or leaf.dtype != column.dtype:
                raise DataError(
                    f"example {number}: field '{paths_of(structure)[j]}' is {leaf.dtype}{list(leaf.shape)}, "
                    f"but in example {numbers[0]} of its batch {column.dtype}{list(column.shape[1:])}. "
                    "Pad, cut or cast the examples to one shape and dtype."
                )
            column[row] = leaf
    return _narrowed(jax.tree.unflatten(structure, columns), numbers)


def read_example(dataset: grain.MapDataset, number: int) -> tuple[list[np.ndarray], Any]:
    """(leaves, tree structure) of one example, or a DataError that names the number, the field and the user's error."""
    try:
        example = dataset[number]
    except Exception as error:
        raise DataError(f"example {number}: reading it raised {type(error).__name__}: {error}") from error
    return as_example(example, number)


def as_example(example: Any, number: int) -> tuple[list[np.ndarray], Any]:
    """`example` as (leaves, tree structure), checked to be what a batch can hold. Errors call it `number`."""
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
                f"example {number}: field '{paths_of(structure)[j]}' is {found}, "
                "but a batch holds numpy arrays and numbers. Convert it (np.asarray, "
                ".numpy()) or leave the field out."
            )
        # JAX takes no big-endian array, and files of other systems hold them.
        arrays.append(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    if not arrays:
        raise DataError(f"example {number} has no array: {example!r}. Return a dict of numpy arrays.")
    return arrays, structure


def paths_of(structure: Any) -> list[str]:
    indexed = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(indexed)]


def _narrowed(batch: PyTree, numbers: Sequence[int]) -> PyTree:
    """`batch` in the dtypes that JAX will use, checked; JAX alone would wrap a large integer around in silence."""
    leaves, structure = jax.tree.flatten(batch)
    return jax.tree.unflatten(structure, [_narrow(x, numbers, structure, j) for j, x in enumerate(leaves)])


def _narrow(column: np.ndarray, numbers: Sequence[int], structure: Any, leaf: int) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(column.dtype)
    if dtype == column.dtype:
        return column
    with np.errstate(over="ignore"):
        narrow = column.astype(dtype)
    lost = narrow != column if column.dtype.kind in "iu" else np.isfinite(column) & ~np.isfinite(narrow)
    if lost.any():
        row, *place = np.argwhere(lost)[0]
        raise DataError(
            f"example {numbers[row]}: field '{paths_of(structure)[leaf]}' holds {column[(row, *place)]} "
            f"({column.dtype}), which does not fit {dtype}. Bring it into range, or set jax_enable_x64."
        )
    return narrow


def struct_of(leaves: Sequence[Any], structure: Any, sharding: NamedSharding, global_batch: int) -> PyTree:
    """A batch of examples with such leaves as `jax.ShapeDtypeStruct`s, cut as `sharding` says."""
    structs = []
    for path, leaf in zip(paths_of(structure), leaves, strict=True):
        shape = (global_batch, *leaf.shape)
        cut = _for_rank(sharding, len(shape))
        try:
            cut.shard_shape(shape)
        except ValueError as e:
            raise DataError(f"field '{path}' of shape {shape} cannot be cut as {cut.spec}: {e}") from None
        structs.append(jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=cut))
    return jax.tree.unflatten(structure, structs)


def place_batch(batch: PyTree, sharding: NamedSharding, global_batch: int, rows: np.ndarray) -> PyTree:
    """This process's `rows` of a batch, as numpy, as global `jax.Array`s[global_batch, ...].

    No collective, and no order among processes: safe in threads.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(batch, jax.tree.map(lambda x: _for_rank(sharding, x.ndim), batch))
    return jax.tree.map(lambda x: _to_array(x, _for_rank(sharding, x.ndim), global_batch, rows), batch)


def _to_array(x: np.ndarray, sharding: NamedSharding, global_batch: int, rows: np.ndarray) -> jax.Array:
    shape = (global_batch, *x.shape[1:])
    if all(axes is None for axes in sharding.spec[1:]):
        return jax.make_array_from_process_local_data(sharding, x, shape)
    place = {row: i for i, row in enumerate(rows.tolist())}

    def piece(index: Any) -> np.ndarray:
        return x[[place[row] for row in range(*index[0].indices(global_batch))]][:, *index[1:]]

    return jax.make_array_from_callback(shape, sharding, piece)


def _for_rank(sharding: NamedSharding, rank: int) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:rank]), memory_kind=sharding.memory_kind)
