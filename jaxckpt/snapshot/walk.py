"""Reads an array in C order in runs of bounded size, each byte once and checked, whatever its shards and chunks.

A run of the array in C order is one piece in every chunk that it touches, and the pieces of a chunk come in their order.
So each chunk's checksum is known as soon as the walk has passed it, and two arrays of different layouts can be compared
in one pass over each.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import crc32c
import numpy as np

from jaxckpt.snapshot import shards
from jaxckpt.snapshot.shards import Chunk, StoredArray

_OPEN_FILES = 64


@dataclass
class _Passed:
    """How far the walk is through a chunk."""

    chunk: Chunk
    cell: tuple[int, ...]
    nbytes: int = 0
    crc: int = 0


class Walk:
    """One pass over `array`: `read` the runs that `shards.runs` gives for its shape, in that order, then `finish`.

    Raises DamagedSnapshot like `shards.iter_chunks`; what was read counts only after `finish`. Use as a context manager.
    """

    def __init__(self, array: StoredArray) -> None:
        self._array = array
        self._files: OrderedDict[tuple[int, ...], IO[bytes]] = OrderedDict()
        self._chunks: dict[tuple[int, ...], _Passed] = {}
        self._indexed: set[tuple[int, ...]] = set()

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def read(self, starts: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """The elements of the run of `shape` that begins at `starts`."""
        axis = next(
            (d for d, n in enumerate(shape) if n > 1), len(shape) - 1
        )  # behind it, the run takes all of each axis
        out = None
        for first in self._chunks_touched(starts, shape):
            size = self._array.chunk_shape
            low = tuple(map(max, starts, first))
            high = tuple(min(s + n, f + c) for s, n, f, c in zip(starts, shape, first, size, strict=True))
            length = math.prod(size[axis + 1 :])
            begin = sum((low[d] - first[d]) * math.prod(size[d + 1 :]) for d in range(axis + 1))
            count = (high[axis] - low[axis]) * length if shape else 1
            raw = self._take(first, begin, count)
            lead = tuple(h - a for h, a in zip(high[: axis + 1], low[: axis + 1], strict=True))
            block = np.frombuffer(raw, self._array.dtype).reshape((*lead, *size[axis + 1 :]))
            block = block[(*(slice(0, h - a) for h, a in zip(high, low, strict=True)), ...)]
            if block.shape == shape:
                return block
            out = np.empty(shape, self._array.dtype) if out is None else out
            out[tuple(slice(a - s, h - s) for a, h, s in zip(low, high, starts, strict=True))] = block
        assert out is not None
        return out

    def finish(self) -> None:
        """Checks what the runs did not reach: the elements of a chunk that lie outside the array."""
        for first, passed in self._chunks.items():
            if self._array.has_crc and passed.nbytes < self._payload(passed):
                self._skip(first, self._payload(passed))

    def _chunks_touched(self, starts: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The first elements of the chunks that the run touches."""
        size = self._array.chunk_shape
        return itertools.product(*(range(s // c * c, s + n, c) for s, n, c in zip(starts, shape, size, strict=True)))

    def _take(self, first: tuple[int, ...], begin: int, count: int) -> bytes:
        """`count` elements from the `begin`-th of the chunk at `first`; what lies before them and was not read is passed."""
        itemsize = self._array.dtype.itemsize
        self._skip(first, begin * itemsize)
        return self._read_on(first, count * itemsize)

    def _skip(self, first: tuple[int, ...], to: int) -> None:
        passed = self._passed(first)
        assert passed.nbytes <= to, "runs come in C order"
        while passed.nbytes < to:
            self._read_on(first, min(shards.BLOCK_BYTES, to - passed.nbytes))

    def _read_on(self, first: tuple[int, ...], nbytes: int) -> bytes:
        passed = self._passed(first)
        file, f = self._array.file(passed.cell), self._open(passed.cell)
        raw = shards.read_bytes(f, file, passed.chunk.offset + passed.nbytes, nbytes)
        passed.nbytes += nbytes
        if self._array.has_crc:
            passed.crc = crc32c.crc32c(raw, passed.crc)
            if passed.nbytes == self._payload(passed):
                shards.check_chunk_crc(f, file, passed.chunk, passed.crc)
        return raw

    def _payload(self, passed: _Passed) -> int:
        return passed.chunk.nbytes - (shards.CRC_BYTES if self._array.has_crc else 0)

    def _passed(self, first: tuple[int, ...]) -> _Passed:
        cell = tuple(f // s for f, s in zip(first, self._array.shard_shape, strict=True))
        if cell not in self._indexed:
            chunks, _ = shards.read_index(self._array, cell, self._array.file(cell), self._open(cell))
            self._chunks.update({chunk.starts: _Passed(chunk, cell) for chunk in chunks})
            self._indexed.add(cell)
        return self._chunks[first]

    def _open(self, cell: tuple[int, ...]) -> IO[bytes]:
        if cell in self._files:
            self._files.move_to_end(cell)
        else:
            if len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[cell] = shards.open_file(self._array.file(cell))
        return self._files[cell]
