"""Reads the arrays of a snapshot without JAX, in bounded memory, and tells which bytes of which file are damaged.

An array is a zarr3 directory: `zarr.json`, and a file a shard below `c/`. A shard file holds chunks at any offsets, each
with its crc32c behind it, and at its end an index of (offset, bytes) a chunk with its own crc32c. What lies between is
zero, so every byte of a file is checked by something.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import crc32c
import ml_dtypes
import numpy as np
from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError

BLOCK_BYTES = 4 << 20
"""of what is read and yielded at a time"""
PACKED = "packed"
"""the name of the array that holds all small leaves of a snapshot"""
_ABSENT = (1 << 64) - 1
CRC_BYTES = 4

Block = tuple[tuple[int, ...], np.ndarray]
"""(index of the first element along each axis of the whole array, elements)"""


@dataclass(frozen=True)
class StoredArray:
    """What `zarr.json` says."""

    path: epath.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    shard_shape: tuple[int, ...]
    """elements of one file"""
    chunk_shape: tuple[int, ...]
    """elements under one checksum; divides `shard_shape`"""
    has_crc: bool
    separator: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cells(self) -> Iterator[tuple[int, ...]]:
        """The grid coordinates of the shard files."""
        return itertools.product(*(range(-(-n // s)) for n, s in zip(self.shape, self.shard_shape, strict=True)))

    def file(self, cell: tuple[int, ...]) -> epath.Path:
        return self.path / self.separator.join(["c", *map(str, cell)])


@dataclass(frozen=True)
class Chunk:
    """A chunk as the index of its shard file gives it."""

    starts: tuple[int, ...]
    """first element along each axis of the whole array"""
    offset: int
    """first byte in the file"""
    nbytes: int
    """of the elements and the checksum"""


def array_directory(path: str) -> str:
    """Where Orbax puts the array of a leaf, below `state`: keys hold no dots, see `tree.flatten`."""
    return path.replace("/", ".")


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name that zarr or a snapshot's table of leaves gives it, for example 'bfloat16'."""
    return np.dtype(getattr(ml_dtypes, name, name))


def open_array(path: epath.Path) -> StoredArray:
    """Raises DamagedSnapshot without a readable `zarr.json`, SnapshotError where it describes another kind of array."""
    file = path / "zarr.json"
    try:
        meta = json.loads(file.read_bytes())
        return _stored_array(path, meta)
    except FileNotFoundError as e:
        raise DamagedSnapshot(f"{file}: missing") from e
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise DamagedSnapshot(f"{file}: cannot be read ({type(e).__name__}: {e})") from e


def iter_chunks(
    array: StoredArray, cell: tuple[int, ...] | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Every element of the array, or of the shard `cell`, in disjoint blocks of at most `block_bytes` (or one element).

    Checks every byte of every file that it reads; raises DamagedSnapshot with the file and the byte range. A chunk larger
    than a block is yielded in parts, before its checksum is known: trust the blocks only once the iteration is over.
    """
    for c in array.cells() if cell is None else [cell]:
        file = array.file(c)
        with open_file(file) as f:
            yield from _iter_shard(array, c, file, f, block_bytes)


def read_array(path: epath.Path) -> np.ndarray:
    """The whole array, checked as `iter_chunks` does."""
    array = open_array(path)
    out = np.empty(array.shape, array.dtype)
    for starts, block in iter_chunks(array):
        out[tuple(slice(s, s + n) for s, n in zip(starts, block.shape, strict=True))] = block
    return out


def open_file(file: epath.Path) -> IO[bytes]:
    """Raises DamagedSnapshot where there is no such file: a missing shard is never a shard of zeros."""
    try:
        return file.open("rb")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
        raise DamagedSnapshot(f"{file}: missing") from e


def read_index(array: StoredArray, cell: tuple[int, ...], file: epath.Path, f: IO[bytes]) -> tuple[list[Chunk], int]:
    """(chunks of a shard file that hold elements of the array, in the order of the file; offset of the index)."""
    size = f.seek(0, 2)
    grid = [n // c for n, c in zip(array.shard_shape, array.chunk_shape, strict=True)]
    start = size - 16 * math.prod(grid) - CRC_BYTES
    if start < 0:
        raise DamagedSnapshot(f"{file}: {size} bytes, too short for its index of {size - start}")
    raw = read_bytes(f, file, start, size - start)
    _check_crc(file, "the index", start, size, crc32c.crc32c(raw[:-CRC_BYTES]), raw[-CRC_BYTES:])
    entries = np.frombuffer(raw[:-CRC_BYTES], "<u8").reshape(-1, 2).tolist()
    chunk_bytes = math.prod(array.chunk_shape) * array.dtype.itemsize + (CRC_BYTES if array.has_crc else 0)
    found = []
    for position, (offset, nbytes) in zip(itertools.product(*map(range, grid)), entries, strict=True):
        starts = tuple(
            i * s + p * c for i, s, p, c in zip(cell, array.shard_shape, position, array.chunk_shape, strict=True)
        )
        if offset == nbytes == _ABSENT:
            if all(s < n for s, n in zip(starts, array.shape, strict=True)):
                raise DamagedSnapshot(f"{file}: bytes {start}-{size}: the index has no chunk {position}")
            continue  # wholly outside the array
        if nbytes != chunk_bytes or offset + nbytes > start:
            raise DamagedSnapshot(
                f"{file}: bytes {start}-{size}: the index has chunk {position} at bytes {offset}-{offset + nbytes}; "
                f"expected {chunk_bytes} bytes before {start}"
            )
        found.append(Chunk(starts, offset, nbytes))
    return sorted(found, key=lambda chunk: chunk.offset), start


def _iter_shard(
    array: StoredArray, cell: tuple[int, ...], file: epath.Path, f: IO[bytes], block_bytes: int
) -> Iterator[Block]:
    chunks, index_start = read_index(array, cell, file, f)
    end = 0
    for chunk in chunks:
        if chunk.offset < end:
            raise DamagedSnapshot(f"{file}: bytes {chunk.offset}-{end}: two chunks lie there")
        _check_zeros(f, file, end, chunk.offset)
        yield from _iter_chunk(array, chunk, file, f, block_bytes)
        end = chunk.offset + chunk.nbytes
    _check_zeros(f, file, end, index_start)


def _iter_chunk(array: StoredArray, chunk: Chunk, file: epath.Path, f: IO[bytes], block_bytes: int) -> Iterator[Block]:
    crc, offset = 0, chunk.offset
    for first, shape in runs(array.chunk_shape, array.dtype.itemsize, block_bytes):
        raw = read_bytes(f, file, offset, math.prod(shape) * array.dtype.itemsize)
        crc = crc32c.crc32c(raw, crc) if array.has_crc else 0
        offset += len(raw)
        starts = tuple(s + i for s, i in zip(chunk.starts, first, strict=True))
        block = np.frombuffer(raw, array.dtype).reshape(shape)
        block = block[(*(slice(0, max(0, n - s)) for n, s in zip(array.shape, starts, strict=True)), ...)]
        if block.size:  # a chunk at the edge of the array may lie partly outside
            yield starts, block
    if array.has_crc:
        check_chunk_crc(f, file, chunk, crc)


def runs(
    shape: tuple[int, ...], itemsize: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(first element, shape) of the runs of at most `block_bytes` that make up an array of `shape` in C order."""
    d, run = len(shape), itemsize
    while d and run * shape[d - 1] <= block_bytes:
        d -= 1
        run *= shape[d]
    if d == 0:
        yield (0,) * len(shape), shape
        return
    # Axes before d - 1 one by one, d - 1 in lengths, those behind it whole.
    length = max(1, block_bytes // run)
    for lead in itertools.product(*map(range, shape[: d - 1])):
        for i in range(0, shape[d - 1], length):
            n = min(length, shape[d - 1] - i)
            yield (*lead, i, *(0,) * (len(shape) - d)), (*(1,) * (d - 1), n, *shape[d:])


def _check_zeros(f: IO[bytes], file: epath.Path, start: int, end: int) -> None:
    for i in range(start, end, BLOCK_BYTES):
        raw = np.frombuffer(read_bytes(f, file, i, min(BLOCK_BYTES, end - i)), np.uint8)
        if raw.any():
            at = i + int(np.flatnonzero(raw)[0])
            raise DamagedSnapshot(f"{file}: byte {at}: {raw[at - i]} in the gap of bytes {start}-{end}, expected zeros")


def check_chunk_crc(f: IO[bytes], file: epath.Path, chunk: Chunk, crc: int) -> None:
    """Raises DamagedSnapshot where `crc`, of the chunk's elements as they were read, is not the stored one."""
    end = chunk.offset + chunk.nbytes
    _check_crc(file, "the chunk", chunk.offset, end, crc, read_bytes(f, file, end - CRC_BYTES, CRC_BYTES))


def _check_crc(file: epath.Path, what: str, start: int, end: int, found: int, stored: bytes) -> None:
    if found != (expected := int.from_bytes(stored, "little")):
        raise DamagedSnapshot(
            f"{file}: bytes {start}-{end}: the crc32c of {what} is {found:08x}, its checksum says {expected:08x}"
        )


def read_bytes(f: IO[bytes], file: epath.Path, offset: int, nbytes: int) -> bytes:
    """`nbytes` of the open `file` from `offset`; raises DamagedSnapshot where it is shorter."""
    f.seek(offset)
    raw = f.read(nbytes)
    if len(raw) != nbytes:
        raise DamagedSnapshot(f"{file}: ends at byte {offset + len(raw)}, expected at least {offset + nbytes}")
    return raw


def _stored_array(path: epath.Path, meta: dict[str, Any]) -> StoredArray:
    codec = meta["codecs"][0]
    sharding = codec.get("configuration", {})
    inner = [c["name"] for c in sharding.get("codecs", [])]
    keys = meta["chunk_key_encoding"]
    if not (
        (meta["zarr_format"], meta["node_type"], keys["name"]) == (3, "array", "default")
        and [c["name"] for c in meta["codecs"]] == ["sharding_indexed"]
        and inner in (["bytes"], ["bytes", "crc32c"])
        and sharding["codecs"][0].get("configuration", {}).get("endian", "little") == "little"
        and [c["name"] for c in sharding["index_codecs"]] == ["bytes", "crc32c"]
        and sharding.get("index_location", "end") == "end"
    ):
        raise SnapshotError(
            f"{path}/zarr.json: the array is not stored as jaxckpt stores arrays (zarr 3, sharding_indexed with bytes and "
            "crc32c, little endian, the index at the end). Read it with tensorstore."
        )
    shape, shard, chunk = (
        tuple(map(int, s))
        for s in (meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"], sharding["chunk_shape"])
    )
    if any(c < 1 or s % c for s, c in zip(shard, chunk, strict=True)) or len(shape) != len(shard):
        raise ValueError(f"chunks of {chunk} in shards of {shard} in an array of {shape}")
    return StoredArray(
        path=path,
        shape=shape,
        dtype=dtype_of(meta["data_type"]),
        shard_shape=shard,
        chunk_shape=chunk,
        has_crc=inner[1:] == ["crc32c"],
        separator=keys.get("configuration", {}).get("separator", "/"),
    )
