"""State in pinned host memory: copied aside before a step may overwrite it, and fingerprinted without a device.

`numpy.asarray` of an array in pinned host memory is a view. While it is held the array cannot be overwritten in place: on
CPU the step that was given it for donation copies it, on a GPU it is refused. So a save copies, and keeps no view.
"""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxckpt.distributed.sync import Group
from jaxckpt.snapshot.direct import DTYPES
from jaxckpt.snapshot.direct_file import Workers, allocate
from jaxckpt.state.np_fingerprint import elements_per_word, np_fingerprint

Sums = list[int]
"""the two halves of a fingerprint, or of a part of one"""
_MODULUS = 1 << 32


def stays_on_host(x: Any) -> bool:
    """Whether the fingerprint of a leaf, an array or a struct, is taken from host memory instead of on the devices."""
    if x.sharding.memory_kind != "pinned_host" or str(x.dtype) not in DTYPES or not x.ndim:
        return False
    # Shards that cut a word could not be added up; only hundreds of parts along one axis would.
    return x.sharding.shard_shape(x.shape)[-1] % elements_per_word(x.shape, np.dtype(x.dtype)) == 0


def copy_all(parts: Iterable[Any], workers: Workers) -> list[np.ndarray]:
    """Each array (a jax.Array of one device) in memory that no step can reach."""

    def copy(part: Any) -> np.ndarray:
        view = np.asarray(part)
        out = allocate(view.nbytes).view(view.dtype).reshape(view.shape)
        np.copyto(out, view)
        return out

    with workers.pool() as pool:
        return list(pool.map(copy, parts))


async def sums_of_parts(
    parts: list[tuple[tuple[slice, ...], np.ndarray]], shape: tuple[int, ...], workers: Workers
) -> list[tuple[str, Sums]]:
    """(which part, what it adds to the fingerprint of an array of `shape`) of each (index, part)."""
    run = asyncio.get_running_loop().run_in_executor
    with workers.pool() as pool:
        starts = [[s.start or 0 for s in index] for index, _ in parts]
        jobs = [run(pool, np_fingerprint, part, at, shape) for at, (_, part) in zip(starts, parts, strict=True)]
        sums = await asyncio.gather(*jobs)
    return [(part_name(index, shape), found.tolist()) for (index, _), found in zip(parts, sums, strict=True)]


def fingerprints(arrays: Mapping[str, jax.Array], group: Group) -> dict[str, str | None]:
    """The fingerprints of arrays in pinned host memory, from where they lie, in hexadecimal digits; None where replicas
    differ. Every process calls it with the same paths, and gets the same."""
    if not arrays:
        return {}
    jobs = {path: [(shard.index, shard.data) for shard in x.addressable_shards] for path, x in arrays.items()}
    take = lambda x, index, data: np_fingerprint(np.asarray(data), [s.start or 0 for s in index], x.shape)
    with ThreadPoolExecutor(8, thread_name_prefix="fingerprint") as pool:
        running = {
            path: [
                (part_name(index, arrays[path].shape), pool.submit(take, arrays[path], index, data))
                for index, data in some
            ]
            for path, some in jobs.items()
        }
        found = {path: [(name, job.result().tolist()) for name, job in some] for path, some in running.items()}
    return added_up(found, {path: x.shape for path, x in arrays.items()}, group)


def added_up(
    found: Mapping[str, list[tuple[str, Sums]]],
    shapes: Mapping[str, tuple[int, ...]],
    group: Group,
    what: str = "add up fingerprints",
) -> dict[str, str | None]:
    """The fingerprints that all processes' parts of the arrays of these shapes add up to, see `whole`; each process comes
    with the same paths. `what` tells its callers in different threads apart."""
    if not found:
        return {}
    everywhere = group.gather(what, found)
    entries = {path: [tuple(entry) for one in everywhere for entry in one[path]] for path in found}
    return {path: whole(entry, shapes[path]) for path, entry in entries.items()}


def whole(entries: Iterable[tuple[str, Sums]], shape: tuple[int, ...]) -> str | None:
    """The fingerprint that the sums of all parts add up to, each part once; None where two say other things of a part, or
    the parts are not the whole of an array of `shape`."""
    parts: dict[str, Sums] = {}
    for bounds, sums in entries:
        if parts.setdefault(bounds, sums) != sums:
            return None
    if sum(math.prod(stop - start for start, stop in json.loads(bounds)) for bounds in parts) != math.prod(shape):
        return None
    return "".join(f"{sum(sums[half] for sums in parts.values()) % _MODULUS:08x}" for half in (0, 1))


def part_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """JSON of the bounds along each axis of the part of an array of `shape` at `index`."""
    return json.dumps([s.indices(n)[:2] for s, n in zip(index, shape, strict=True)])
