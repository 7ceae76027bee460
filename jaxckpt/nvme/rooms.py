"""Host memory that the files are read into, updated in and written from: pinned arrays of JAX's own, used again and again.

A step that donates such an array gets its memory back as the array of the result, so the bytes of a leaf never move in
host memory between its two files; and no page is touched for the first time while training (that cost five times the
update itself on CPU).
"""

import ctypes
import threading
from collections import OrderedDict
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_ODD = 16  # bytes; XLA takes over memory whose address is a multiple of 64

Kind = tuple[tuple[int, ...], np.dtype, Any]
"""shape, dtype and device of a room"""


class Rooms:
    """Rooms that nobody uses now, at most `most_bytes` of them. Its methods may be called from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._free: OrderedDict[Kind, list[jax.Array]] = OrderedDict()
        self._bytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
        """An array in pinned host memory that only the caller knows, holding anything; a new one where none is free."""
        kind = (shape, dtype, device)
        with self._lock:
            found = self._free.get(kind)
            if found:
                room = found.pop()
                self._bytes -= room.nbytes
                self._free.move_to_end(kind)
                return room
        return _make_room(shape, dtype, device)

    def give(self, rooms: list[jax.Array]) -> None:
        """Takes back arrays that nobody else knows any more; those longest unused go where it would be too many."""
        with self._lock:
            for room in rooms:
                kind = (room.shape, np.dtype(room.dtype), next(iter(room.devices())))
                self._free.setdefault(kind, []).append(room)
                self._free.move_to_end(kind)
                self._bytes += room.nbytes
            while self._bytes > self.most_bytes:
                kind, oldest = next(iter(self._free.items()))
                if oldest:
                    self._bytes -= oldest.pop().nbytes
                else:
                    del self._free[kind]

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self._bytes = 0


def view(room: jax.Array) -> np.ndarray:
    """The memory of an array in host memory, which must be ready, to read and to write.

    Not np.asarray: JAX would not donate memory that numpy knows of, and would copy it instead. An array that others
    know must not be written to.
    """
    raw: Any = (ctypes.c_ubyte * room.nbytes).from_address(room.unsafe_buffer_pointer())
    raw.owner = room  # a thread that is still moving bytes after another has failed must not touch freed memory
    return np.frombuffer(raw, np.uint8).view(room.dtype).reshape(room.shape)


def shards(array: jax.Array) -> list[jax.Array]:
    """The single-device arrays that an array consists of in this process."""
    return [shard.data for shard in array.addressable_shards]


def _make_room(shape: tuple[int, ...], dtype: np.dtype, device: Any) -> jax.Array:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    # Memory at an odd address is copied, whatever `device_put` is told, and not taken over; then the array can be donated.
    nothing = np.zeros(nbytes + 64 + _ODD, np.uint8)
    start = -nothing.ctypes.data % 64 + _ODD
    room = nothing[start : start + nbytes].view(dtype).reshape(shape)
    return jax.device_put(room, SingleDeviceSharding(device, memory_kind="pinned_host")).block_until_ready()
