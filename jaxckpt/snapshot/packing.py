"""Small leaves in one array: a file a leaf would cost milliseconds each, whatever its size.

A leaf's bytes lie in C order at an offset that is a multiple of 64; the table {path: [offset, bytes]} says where.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt.snapshot import shards
from jaxckpt.snapshot.leaves import num_bytes

NAME = shards.PACKED
SMALL_BYTES = 256 << 10
_ALIGNMENT = 64

Table = dict[str, list[int]]


def split(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(large, small) leaves; at most SMALL_BYTES is small, an empty leaf too."""
    small = {path: x for path, x in leaves.items() if num_bytes(x) <= SMALL_BYTES}
    return {path: x for path, x in leaves.items() if path not in small}, small


def to_host(small: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies of the leaves in this process's memory, which no later donation can reach.

    Every process calls it with the same leaves: those that no process holds whole are gathered over the devices.
    """
    here = dict(small)
    scattered = {p: x for p, x in small.items() if not (x.is_fully_addressable or x.is_fully_replicated)}
    if scattered:
        sharding = next(iter(scattered.values())).sharding
        assert isinstance(sharding, NamedSharding), "the plan gives every leaf one"
        here.update(_gather(sharding.mesh)(scattered))
    return {path: np.array(x) for path, x in jax.device_get(here).items()}


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Table]:
    """(uint8[n], table) of the arrays one after the other."""
    table: Table = {}
    end = 0
    for path, x in arrays.items():
        table[path] = [end, x.nbytes]
        end += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(max(end, 1), np.uint8)  # zarr has no empty arrays
    for path, x in arrays.items():
        offset, size = table[path]
        packed[offset : offset + size] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return packed, table


def unpack(packed: np.ndarray, table: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """{path: array} of the shapes and dtypes of `like`, as views of `packed`.

    Raises KeyError or ValueError where the table does not hold a path, or not in its size.
    """
    arrays = {}
    for path, x in like.items():
        offset, size = table[path]
        if size != num_bytes(x) or not 0 <= offset <= offset + size <= packed.nbytes:
            raise ValueError(f"leaf {path!r} has {size} bytes at {offset} of {packed.nbytes}, expected {num_bytes(x)}")
        arrays[path] = packed[offset : offset + size].view(x.dtype).reshape(x.shape)
    return arrays


def to_devices(arrays: Mapping[str, np.ndarray], target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays in the shardings of `target`; no process waits for another."""
    if jax.process_count() == 1:
        copies = [arrays[path].copy() for path in target]  # a view would keep the whole of `packed` alive
        return dict(zip(target, jax.device_put(copies, [x.sharding for x in target.values()]), strict=True))
    return {
        path: jax.make_array_from_callback(x.shape, x.sharding, lambda index, a=arrays[path]: a[index].copy())
        for path, x in target.items()
    }


@functools.cache
def _gather(mesh: Mesh) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec(), memory_kind="device")
    return jax.jit(lambda x: jax.device_put(x, everywhere), out_shardings=everywhere)


def packed_bytes(small: Mapping[str, Any]) -> int:
    """Length of the packed array of these leaves."""
    return sum(math.ceil(num_bytes(x) / _ALIGNMENT) * _ALIGNMENT for x in small.values()) or 1
