"""Shard files moved past the page cache, beside tensorstore, which must read and write the same."""

import contextlib
import errno
import itertools
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import direct
from jaxckpt.snapshot.direct_file import BLOCK_BYTES, Counters, File, allocate, dio_alignment
from jaxckpt.state.fingerprint import np_fingerprint

ROOT = Path(__file__).parents[1]


def random_bits(shape, dtype, seed=0):
    dtype = jnp.dtype(dtype)
    words = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (words & 1 if dtype == np.bool_ else words).reshape(-1).view(dtype).reshape(shape)


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def make_array(root, a, shard, least_bytes):
    """An array on disk whose shards were written by `direct`; its layout."""
    chunk = direct.chunk_shape(shard, a.dtype.itemsize, least_bytes=least_bytes)
    layout = direct.Layout(a.shape, shard, chunk, a.dtype)
    metadata = {
        "shape": list(a.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "codecs": direct.codecs(chunk),
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root)}, "metadata": metadata}
    ts.open({**spec, "dtype": a.dtype.name}, create=True).result()
    for place in layout.shards_of(whole(a.shape)):
        box = tuple(slice(p * s, (p + 1) * s) for p, s in zip(place, shard, strict=True))
        direct.write_shard(layout.file(str(root), place), a[box], layout, Counters())
    return layout


def read_box(root, layout, box, counters=None):
    out = np.zeros(tuple(s.stop - s.start for s in box), layout.dtype)
    for place in layout.shards_of(box):
        direct.read_shard(layout.file(str(root), place), layout, place, [(box, out)], counters or Counters())
    return out


def chunk_files(root):
    return sorted(p for p in root.rglob("*") if p.is_file() and "/c" in str(p.relative_to(root.parent)))


def plainly(root):
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root)}}).result()


SHAPES = [  # array, shard
    ((), ()),
    ((1,), (1,)),
    ((1001, 3), (1001, 3)),
    ((64, 128), (16, 64)),
    ((7, 5, 3), (7, 5, 3)),
    ((600, 4096), (300, 4096)),
    ((BLOCK_BYTES + 1009,), (BLOCK_BYTES + 1009,)),  # a prime number: one chunk, larger than a block
]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "complex64"])
@pytest.mark.parametrize(("shape", "shard"), SHAPES, ids=str)
def test_a_file_is_byte_for_byte_what_tensorstore_writes(tmp_path, shape, shard, dtype):
    a = random_bits(shape, dtype)
    for least_bytes in (100, 1 << 18):
        root = tmp_path / str(least_bytes)
        layout = make_array(root, a, shard, least_bytes)
        assert direct.read_layout(str(root)) == layout
        assert plainly(root).read().result().tobytes() == a.tobytes()
        ours = {f: f.read_bytes() for f in chunk_files(root)}
        assert len(ours) == len(list(layout.shards_of(whole(shape)))) and all(map(len, ours.values()))
        plainly(root).write(a).result()
        assert {f: f.read_bytes() for f in chunk_files(root)} == ours
        assert read_box(root, layout, whole(shape)).tobytes() == a.tobytes()


@pytest.mark.parametrize(("shape", "shard"), SHAPES[2:], ids=str)
def test_any_box_can_be_read(tmp_path, shape, shard):
    a = random_bits(shape, "int16")
    layout = make_array(tmp_path, a, shard, 300)
    rng = np.random.default_rng(0)
    for _ in range(30):
        box = tuple(slice(*sorted(rng.choice(n + 1, 2, replace=False).tolist())) for n in shape)
        assert read_box(tmp_path, layout, box).tobytes() == a[box].tobytes(), box


def test_a_part_cut_along_any_axis_reads_little_more_than_itself(tmp_path):
    a = random_bits((2048, 2048), "int32")
    layout = make_array(tmp_path, a, (1024, 2048), 256 << 10)
    for axis, parts in itertools.product((0, 1), (1, 2, 4, 8)):
        box = list(whole(a.shape))
        box[axis] = slice(0, a.shape[axis] // parts)
        counters = Counters()
        assert np.array_equal(read_box(tmp_path, layout, tuple(box), counters), a[tuple(box)])
        assert counters.bytes_read < 1.03 * a.nbytes / parts, (axis, parts)


def test_a_chunk_is_a_box_that_divides_the_shard_and_is_worth_a_request():
    for shard, itemsize in [
        ((1024, 4096), 4),
        ((32, 512, 4096), 2),
        ((50257, 768), 4),
        ((32003, 4096), 2),
        ((3, 5), 8),
    ]:
        chunk = direct.chunk_shape(shard, itemsize, least_bytes=256 << 10)
        nbytes, total = (int(np.prod(x)) * itemsize for x in (chunk, shard))
        assert all(n % c == 0 for n, c in zip(shard, chunk, strict=True))
        assert min(total, 256 << 10) <= nbytes <= 16 << 20, (shard, chunk)
    assert direct.chunk_shape((1024, 4096), 4, least_bytes=256 << 10) == (128, 512)


@pytest.fixture(scope="module")
def damageable(tmp_path_factory):
    root = tmp_path_factory.mktemp("damage")
    a = random_bits((64, 2048), "int32")
    return root, a, make_array(root, a, (16, 1024), 4096)


@contextlib.contextmanager
def changed(path):
    """Gives the file back its bytes afterwards."""
    before = path.read_bytes()
    try:
        yield bytearray(before)
    finally:
        path.write_bytes(before)


def test_every_flipped_bit_is_found_and_its_place_is_named(damageable):
    root, a, layout = damageable
    files, rng = chunk_files(root), np.random.default_rng(0)
    assert len(files) == 8
    for _ in range(200):
        file = files[rng.integers(len(files))]
        with changed(file) as data:
            at = int(rng.integers(len(data)))
            data[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(data)
            with pytest.raises(DamagedSnapshot) as e:
                read_box(root, layout, whole(a.shape))
            assert str(file) in str(e.value)
            start, stop = (int(word) for word in str(e.value).split("bytes ")[1].split(" are")[0].split(" to "))
            assert start <= at < stop
    assert np.array_equal(read_box(root, layout, whole(a.shape)), a)


def test_a_cut_lengthened_or_missing_file_is_found_by_a_reader_of_any_part_of_it(damageable):
    root, a, layout = damageable
    file = root / "c" / "0" / "0"
    box = (slice(0, 1), slice(0, 1))
    size = len(file.read_bytes())
    for n in [0, 1, 4096, size // 2, size - 1]:
        with changed(file) as data:
            file.write_bytes(data[:n])
            with pytest.raises(DamagedSnapshot, match=f"c/0/0: bytes {n} to {size} .* it has {n} bytes"):
                read_box(root, layout, box)
    with changed(file) as data:
        file.write_bytes(data + b"\0")
        with pytest.raises(DamagedSnapshot, match="c/0/0"):
            read_box(root, layout, box)
    with changed(file):
        file.unlink()
        with pytest.raises(DamagedSnapshot, match="c/0/0.*missing"):
            read_box(root, layout, box)
    assert np.array_equal(read_box(root, layout, box), a[box])


def test_an_index_that_is_whole_but_leads_astray_is_refused(damageable):
    root, a, layout = damageable
    file = root / "c" / "0" / "0"
    with changed(file) as data:
        n = 16 * int(np.prod(layout.chunks_per_axis))
        index = bytearray(data[-n - 4 : -4])
        index[0:8] = index[16:24]  # two chunks in one place
        data[-n - 4 :] = index + struct.pack("<I", direct.crc32c(bytes(index)))
        file.write_bytes(data)
        with pytest.raises(DamagedSnapshot, match="index does not fit"):
            read_box(root, layout, whole(a.shape))


def test_two_files_exchanged_have_right_checksums_and_another_fingerprint(damageable, tmp_path):
    # What a checksum of a file cannot see; the leaf's fingerprint, which the snapshot holds, does.
    root, a, layout = damageable
    copy = shutil.copytree(root, tmp_path / "copy")
    one, other = copy / "c" / "0" / "0", copy / "c" / "1" / "1"
    one.rename(tmp_path / "spare"), other.rename(one), (tmp_path / "spare").rename(other)
    assert not np.array_equal(np_fingerprint(read_box(copy, layout, whole(a.shape))), np_fingerprint(a))


class SlowFile(File):
    """A disk that moves at most 5000 bytes a call, as one may that is interrupted or nearly full."""

    def _move(self, call, data, offset):
        return super()._move(call, data[: 5000 // self.alignment * self.alignment or self.alignment], offset)


def test_short_reads_and_writes_go_on_where_they_stopped(tmp_path):
    data = random_bits((40_000,), "uint8")
    buffer = allocate(40_960)
    with SlowFile(str(tmp_path / "f"), os.O_RDWR | os.O_CREAT) as file:
        buffer[:40_000] = data
        file.write(buffer.data, 0)
        file.cut(40_000)
        buffer[:] = 0
        assert file.read(buffer.data, 0) == 40_000
    assert np.array_equal(buffer[:40_000], data)


def test_a_file_that_cannot_be_moved_directly_is_moved_through_the_cache(tmp_path):
    data = random_bits((8193,), "uint8")
    with File(str(tmp_path / "f"), os.O_RDWR | os.O_CREAT) as file:
        file.write(data.data[1:], 1)  # neither address, size nor offset is aligned: EINVAL under O_DIRECT
        file.write(data.data[:1], 0)
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_alignment_is_a_power_of_two_that_direct_writes_accept(tmp_path):
    with open(tmp_path / "f", "wb") as f:
        alignment = dio_alignment(f.fileno())
    assert alignment in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert allocate(1).ctypes.data % 4096 == 0


LIMITED = """
import resource, sys
import numpy as np
from jaxckpt.snapshot import direct
from jaxckpt.snapshot.direct_file import Counters
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))  # as a full disk: a short write, then an error
layout = direct.Layout((5_000_000,), (5_000_000,), (5_000_000,), np.dtype("uint8"))
try:
    direct.write_shard(sys.argv[1], np.ones(5_000_000, np.uint8), layout, Counters())
except OSError as e:
    print(e.errno, e.filename)
"""


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_file(tmp_path):
    path = str(tmp_path / "c" / "0")
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == [str(errno.EFBIG), path], done.stderr
