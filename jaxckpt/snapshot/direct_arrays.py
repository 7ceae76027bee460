"""Writes and reads arrays whose shards lie on several devices, several files at a time, for whoever runs an event loop."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxckpt.snapshot.direct import Box, Layout, read_shard, write_shard
from jaxckpt.snapshot.direct_file import Counters, Workers, allocate, sync

Reserve = Callable[[int], AbstractAsyncContextManager[None]]  # waits until so many bytes may be in use
T = TypeVar("T")


async def write_array(
    root: str,
    layout: Layout,
    parts: list[tuple[Box, np.ndarray]],
    workers: Workers,
    reserve: Reserve,
    counters: Counters,
) -> list[str]:
    """Writes whole shards of the array in the directory `root`, several at a time; the files, for `sync_files`.

    Its zarr.json is not written.
    """

    async def write(box: Box, shard: np.ndarray) -> str:
        file = layout.file(root, tuple(b.start // n for b, n in zip(box, layout.shard, strict=True)))
        async with reserve(shard.nbytes):
            await _on(pool, write_shard, file, shard, layout, counters)
        return file

    with workers.pool() as pool:
        return await _all(write(box, shard) for box, shard in parts)


async def sync_files(files: list[str], workers: Workers) -> None:
    """Returns when the files are on the disk."""
    with workers.pool() as pool:
        await _all(_on(pool, sync, file) for file in files)


async def read_array(
    root: str,
    layout: Layout,
    sharding: jax.sharding.Sharding,
    workers: Workers,
    reserve: Reserve,
    counters: Counters,
    most_bytes: float = math.inf,
) -> tuple[jax.Array, int]:
    """The array in the directory `root`, made straight in this sharding and memory kind, and its bytes in this process.

    Reads only the chunks of which this process's devices hold something, and each once, unless that would take more than
    `most_bytes` of memory at a time.
    """
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(layout.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), layout.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    parts = [(tuple(slice(*b) for b in bounds), devices) for bounds, devices in holders.items()]

    async def read(together: list[tuple[Box, list[Any]]]) -> list[jax.Array]:
        async with reserve(sum(_nbytes(box, layout) for box, _ in together)):
            outs = [(box, _empty(box, layout)) for box, _ in together]
            places = sorted({place for box, _ in together for place in layout.shards_of(box)})
            await _all(
                _on(pool, read_shard, layout.file(root, place), layout, place, outs, counters) for place in places
            )
            placed = [
                await _on(pool, _put, out, devices, sharding.memory_kind)
                for (_, devices), (_, out) in zip(together, outs, strict=True)
            ]
            return [x for several in placed for x in several]

    places = [place for box, _ in parts for place in layout.shards_of(box)]
    share_files = len(set(places)) < len(places)
    is_bearable = sum(_nbytes(box, layout) for box, _ in parts) < most_bytes
    with workers.pool() as pool:
        held = await _all(map(read, [parts] if share_files and is_bearable else [[part] for part in parts]))
    arrays = [x for several in held for x in several]
    return jax.make_array_from_single_device_arrays(layout.shape, sharding, arrays), sum(x.nbytes for x in arrays)


def _nbytes(box: Box, layout: Layout) -> int:
    return math.prod(s.stop - s.start for s in box) * layout.dtype.itemsize


def _empty(box: Box, layout: Layout) -> np.ndarray:
    return allocate(_nbytes(box, layout)).view(layout.dtype).reshape([s.stop - s.start for s in box])


def _put(shard: np.ndarray, devices: list[Any], memory_kind: str | None) -> list[jax.Array]:
    # A CPU device takes the memory over as it is; others copy it, and it is in use until they have.
    placed = [jax.device_put(shard, SingleDeviceSharding(d, memory_kind=memory_kind)) for d in devices]
    return jax.block_until_ready(placed)


async def _on(pool: ThreadPoolExecutor, f: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, f, *args)


async def _all(waiting: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return; after the first error the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    except GeneratorExit:  # nobody waits for this any more, and the event loop is gone
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
