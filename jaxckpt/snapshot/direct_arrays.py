"""Writes and reads arrays whose shards lie on several devices, several files at a time, for whoever runs an event loop."""

import asyncio
import ctypes
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
_ODD = 16  # bytes; XLA takes over memory whose address is a multiple of 64


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
            rooms = await _all(
                _on(pool, _make_room, box, layout, devices[0], sharding.memory_kind) for box, devices in together
            )
            outs = [(box, room) for (box, _), (room, _) in zip(together, rooms, strict=True)]
            places = sorted({place for box, _ in together for place in layout.shards_of(box)})
            await _all(
                _on(pool, read_shard, layout.file(root, place), layout, place, outs, counters) for place in places
            )
            placed = await _all(
                _on(pool, _put, room, there, devices, box, layout, sharding.memory_kind)
                for (box, devices), (room, there) in zip(together, rooms, strict=True)
            )
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


def _make_room(box: Box, layout: Layout, device: Any, memory_kind: str | None) -> tuple[np.ndarray, jax.Array | None]:
    """Memory for a part of an array, and the device's array that it is where the device's memory is the host's.

    Such an array could take over any memory as it is, but the first step could not reuse what JAX has not allocated
    itself, and would need room for the whole state once more.
    """
    shape, nbytes = tuple(s.stop - s.start for s in box), _nbytes(box, layout)
    if device.platform != "cpu":
        return allocate(nbytes).view(layout.dtype).reshape(shape), None
    sharding = SingleDeviceSharding(device, memory_kind=memory_kind)
    # Memory at an odd address is copied, whatever `device_put` is told; small pages that are only read take no room.
    nothing = allocate(nbytes + _ODD, is_large=False)[_ODD:].view(layout.dtype).reshape(shape)
    there = jax.device_put(nothing, sharding).block_until_ready()
    assert there.unsafe_buffer_pointer() != nothing.ctypes.data, "JAX has taken over memory that is not its own"
    # Nobody else knows the array yet, so that it is still right to write to it.
    raw = (ctypes.c_ubyte * there.nbytes).from_address(there.unsafe_buffer_pointer())
    raw.owner = there  # a thread that is still reading after another has failed must not write to freed memory
    return np.frombuffer(raw, np.uint8).view(layout.dtype).reshape(shape), there


def _put(
    room: np.ndarray, there: jax.Array | None, devices: list[Any], box: Box, layout: Layout, memory_kind: str | None
) -> list[jax.Array]:
    """The part in `room` on all its devices, on each in memory of its own."""
    if there is None:
        placed = [jax.device_put(room, SingleDeviceSharding(device, memory_kind=memory_kind)) for device in devices]
        return jax.block_until_ready(placed)  # `room` is in use until they are copied
    placed = [there]
    for device in devices[1:]:
        other, copy = _make_room(box, layout, device, memory_kind)
        assert copy is not None, "all devices of a sharding are of one platform"
        np.copyto(other, room)
        placed.append(copy)
    return placed


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
