"""Moves arrays between memory and zarr3 shard files past the page cache, every chunk with its crc32c. Knows no Orbax.

A shard file is what zarr3's codec sharding_indexed[bytes, crc32c] defines, so tensorstore reads and verifies it too:

    chunk 0 | crc32c | chunk 1 | crc32c | ... | index: offset and size of every chunk | crc32c of the index

without a gap, so every bit of a file is under one of the checksums. The (inner) chunks are small boxes that cut the
shard along every axis: whoever needs only a part of a shard, cut whichever way, reads little more than that part.
"""

import itertools
import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from crc32c import crc32c

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot.direct_file import BLOCK_BYTES, Counters, File, Sink, Stream

CRC_BYTES = 4
ROW_BYTES = 512  # copying shorter runs costs more than reading too much
PARTS = 8
MOST_BYTES = 4 << 20
LOCAL_CHUNK_BYTES, MOST_LOCAL_CHUNK_BYTES = 256 << 10, 1 << 20  # the least of a chunk on a local disk
DTYPES = frozenset(
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3b11fnuz",
    ]
)
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """How an array lies on disk: one file a shard of `shard` elements, made of chunks of `chunk` elements."""

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @property
    def chunks_per_axis(self) -> tuple[int, ...]:
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        return math.prod(self.chunks_per_axis) * (self.chunk_bytes + CRC_BYTES + 16) + CRC_BYTES

    def file(self, root: str, shard: tuple[int, ...]) -> str:
        """The file of the shard at this place in the grid of shards."""
        return os.path.join(root, "c", *map(str, shard))

    def shards_of(self, box: Box) -> Iterator[tuple[int, ...]]:
        """The places of the shards that hold a part of `box`."""
        return itertools.product(*[range(b.start // s, -(-b.stop // s)) for b, s in zip(box, self.shard, strict=True)])


class DamagedFile(DamagedSnapshot):
    """A shard's file that holds anything but what was written; `found` says where and what, without a way out."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found} Restore from another step; this one cannot be mended.")
        self.found = found


def layout_of(metadata: dict[str, Any]) -> Layout | None:
    """The layout that an array's zarr.json describes, or None where only tensorstore can read it."""
    try:
        (sharding,) = metadata["codecs"]
        inner = sharding["configuration"]
        shape, shard = tuple(metadata["shape"]), tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        known = (
            sharding["name"] == "sharding_indexed"
            and [codec["name"] for codec in inner["codecs"]] == ["bytes", "crc32c"]
            and [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
            and inner.get("index_location", "end") == "end"
            and metadata["chunk_grid"]["name"] == "regular"
            and metadata.get("chunk_key_encoding", {"name": "default"}) in ({"name": "default"}, _SLASHES)
            and metadata["data_type"] in DTYPES
            and sys.byteorder == "little"
        )
        layout = Layout(shape, shard, tuple(inner["chunk_shape"]), jnp.dtype(metadata["data_type"])) if known else None
    except (LookupError, TypeError, ValueError):
        return None
    if layout is None or not math.prod(shape) or len(shape) != len(shard) or len(shard) != len(layout.chunk):
        return None
    even = all(n % s == 0 and s % c == 0 for n, s, c in zip(shape, shard, layout.chunk, strict=True))
    return layout if even and math.prod(layout.chunks_per_axis) * 16 < BLOCK_BYTES else None


_SLASHES = {"name": "default", "configuration": {"separator": "/"}}


def chunk_shape(shard: tuple[int, ...], itemsize: int, *, least_bytes: int) -> tuple[int, ...]:
    """The shape of a shard's chunks: up to 8 parts along every axis, none smaller than `least_bytes`.

    A chunk is what a reader must read whole. The later axes are cut first, because a mesh has mostly cut the first.
    """
    chunk, parts = list(shard), [1] * len(shard)

    def nbytes() -> int:
        return math.prod(chunk) * itemsize

    def smallest_cut(axis: int) -> int:
        n = chunk[axis]
        return next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)

    def may_cut(axis: int, most_parts: float) -> bool:
        cut = smallest_cut(axis)
        row = chunk[-1] * itemsize // (cut if axis == len(chunk) - 1 else 1)
        return cut > 1 and parts[axis] * cut <= most_parts and nbytes() // cut >= least_bytes and row >= ROW_BYTES

    def cut(axis: int) -> None:
        by = smallest_cut(axis)
        chunk[axis] //= by
        parts[axis] *= by

    while axes := [a for a in range(len(chunk)) if may_cut(a, 2 * PARTS if parts[a] == 1 else PARTS)]:
        cut(min(axes, key=lambda a: (parts[a], -a)))
    while nbytes() > max(MOST_BYTES, least_bytes) and (axes := [a for a in range(len(chunk)) if may_cut(a, math.inf)]):
        cut(axes[0])
    return tuple(chunk)


def local_chunk_shape(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of a shard's chunks on a local disk."""
    # Sixteen chunks are enough to choose from; more would only cost time, until they are so large that they hold much that
    # nobody wants.
    least = min(max(LOCAL_CHUNK_BYTES, math.prod(shard) * itemsize // 16), MOST_LOCAL_CHUNK_BYTES)
    return chunk_shape(shard, itemsize, least_bytes=least)


def codecs(chunk: tuple[int, ...]) -> list[dict[str, Any]]:
    """The codecs of zarr.json that stand for this file format."""
    little, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    configuration = {
        "chunk_shape": list(chunk),
        "codecs": [little, crc],
        "index_codecs": [little, crc],
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def write_shard(path: str, array: np.ndarray, layout: Layout, counters: Counters, *, is_in_place: bool = False) -> None:
    """Writes one shard's file, which `sync` makes last. Raises OSError, with the path, where it cannot be.

    `is_in_place`: the file is there, and its blocks are written over.
    """
    source = _as_bytes(array)
    if not is_in_place:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with File(path, os.O_WRONLY | (0 if is_in_place else os.O_CREAT | os.O_TRUNC)) as file:
        out, index = Sink(file), []
        for place in itertools.product(*map(range, layout.chunks_per_axis)):
            start, crc = out.offset, 0
            origin = tuple(p * c for p, c in zip(place, layout.chunk, strict=True))
            for box in _pieces(layout.chunk, layout.dtype.itemsize):
                part = source[_shift(box, origin)]
                view = out.room(part.size)
                np.copyto(view.reshape(part.shape), part)
                crc = crc32c(view.data, crc)
                out.push(part.size)
            out.append(struct.pack("<I", crc))
            index += [start, out.offset - start]
        raw = struct.pack(f"<{len(index)}Q", *index)
        out.append(raw + struct.pack("<I", crc32c(raw)))
        out.finish()
    counters.add(files_written=1, bytes_written=out.offset)


def read_shard(
    path: str, layout: Layout, shard: tuple[int, ...], targets: list[tuple[Box, np.ndarray]], counters: Counters
) -> None:
    """Copies what the shard holds of each of the boxes (of the whole array) into the array beside it, which is that box.

    Verifies the size of the file, the index, and every chunk that it reads: those that touch a box, once. Raises
    DamagedSnapshot with the file and the byte range.
    """
    if not os.path.isfile(path):
        raise _damaged(path, 0, layout.file_bytes, "the file is missing")
    wanted = layout.chunk_bytes
    outs = [(box, _as_bytes(out)) for box, out in targets]
    with File(path, os.O_RDONLY) as file:
        needed = []
        for offset, place in zip(_read_index(file, layout, counters), _places(layout), strict=True):
            grids = zip(shard, layout.shard, place, layout.chunk, strict=True)
            origin = tuple(s * n + p * c for s, n, p, c in grids)
            chunk = tuple(slice(o, o + c) for o, c in zip(origin, layout.chunk, strict=True))
            if any(_overlap(chunk, box) is not None for box, _ in outs):
                needed.append((offset, origin))
        for run in _runs(sorted(needed), wanted + CRC_BYTES):
            stream = Stream(file, run[0][0], run[-1][0] + wanted + CRC_BYTES, counters)
            for offset, origin in run:
                crc = 0
                for piece in _pieces(layout.chunk, layout.dtype.itemsize):
                    here = _shift(piece, origin)
                    shape = tuple(s.stop - s.start for s in here)
                    data = stream.take(math.prod(shape) * layout.dtype.itemsize)
                    crc = crc32c(data.data, crc)
                    for box, out in outs:
                        _copy_part(data.reshape(*shape, layout.dtype.itemsize), here, out, box)
                if stream.take(CRC_BYTES).tobytes() != struct.pack("<I", crc):
                    raise _damaged(path, offset, offset + wanted + CRC_BYTES, "its crc32c does not match")
    counters.add(files_read=1)


def _copy_part(source: np.ndarray, source_box: Box, target: np.ndarray, target_box: Box) -> None:
    """Copies what two boxes of an array, each with its bytes, have in common."""
    if (part := _overlap(source_box, target_box)) is not None:
        to, of = (_shift(part, tuple(-s.start for s in box)) for box in (target_box, source_box))
        np.copyto(target[to], source[of])


def read_layout(root: str) -> Layout | None:
    """The layout of the array in the directory `root`; None where this module cannot read it."""
    try:
        with open(os.path.join(root, "zarr.json"), "rb") as f:
            metadata = json.load(f)
    except (OSError, ValueError):
        return None
    return layout_of(metadata) if isinstance(metadata, dict) else None


def _read_index(file: File, layout: Layout, counters: Counters) -> list[int]:
    """The offset of every chunk, after checking that the chunks and the index fill the file."""
    count = math.prod(layout.chunks_per_axis)
    length, each = 16 * count + CRC_BYTES, layout.chunk_bytes + CRC_BYTES
    if (found := file.size) != (expected := layout.file_bytes):
        raise _damaged(file.path, min(found, expected), max(found, expected), f"it has {found} bytes, not {expected}")
    start = layout.file_bytes - length
    raw = Stream(file, start, file.size, counters).take(length).tobytes()
    if crc32c(raw[:-CRC_BYTES]) != struct.unpack("<I", raw[-CRC_BYTES:])[0]:
        raise _damaged(file.path, start, file.size, "the crc32c of its index does not match")
    entries = struct.unpack(f"<{2 * count}Q", raw[:-CRC_BYTES])
    offsets, sizes = list(entries[::2]), entries[1::2]
    if sorted(offsets) != list(range(0, count * each, each)) or set(sizes) != {each}:
        raise _damaged(file.path, start, file.size, "its index does not fit the array")
    return offsets


def _places(layout: Layout) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, layout.chunks_per_axis))


def _runs(chunks: list[tuple[int, Any]], each: int) -> Iterator[list[tuple[int, Any]]]:
    """Groups of chunks that follow each other without a gap in the file."""
    run: list[tuple[int, Any]] = []
    for chunk in chunks:
        if run and chunk[0] != run[-1][0] + each:
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Boxes of at most BLOCK_BYTES that follow each other in a C-contiguous array of this shape; mostly one."""
    axis = 0  # the first whose rows fit
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > BLOCK_BYTES:
        axis += 1
    if not shape:
        yield ()
        return
    row = math.prod(shape[axis + 1 :]) * itemsize
    count = max(1, BLOCK_BYTES // row)
    whole = tuple(slice(0, n) for n in shape[axis + 1 :])
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], count):
            along = slice(start, min(start + count, shape[axis]))
            yield (*(slice(i, i + 1) for i in outer), along, *whole)


def _shift(box: Box, by: tuple[int, ...]) -> Box:
    return tuple(slice(s.start + n, s.stop + n) for s, n in zip(box, by, strict=True))


def _overlap(a: Box, b: Box) -> Box | None:
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(s.start < s.stop for s in both) else None


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as uint8, with one more axis: the bytes of an element."""
    array = np.asarray(array, order="C")
    return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def _damaged(path: str, start: int, stop: int, what: str) -> DamagedFile:
    return DamagedFile(f"{path}: bytes {start} to {stop} are not what was saved: {what}.")
