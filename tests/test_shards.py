"""Arrays on disk are read without JAX as tensorstore wrote them, and every damaged byte is found and named."""

import math
import os
import re
import shutil
import struct

import crc32c
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot.shards import iter_chunks, open_array, read_array
from jaxckpt.state.fingerprint import PACK, PartialFingerprint, np_fingerprint, to_hex
from test_fingerprint import dtype_of, random_bits

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
ABSENT = (1 << 64) - 1


def write(path, a, shard, chunk, *, codecs=(BYTES, CRC)):
    """Writes `a` with tensorstore, as plain Orbax does; the description of what was written."""
    shutil.rmtree(path, ignore_errors=True)
    sharding = {"chunk_shape": list(chunk), "codecs": list(codecs), "index_codecs": [BYTES, CRC]}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "shape": list(a.shape),
            "data_type": a.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True, open=True).result().write(a).result()
    return open_array(epath.Path(path))


def rewrite_with_gaps(array, seed=0):
    """Puts the chunks of every shard file at odd offsets in another order with zeros between them: the format allows it."""
    rng = np.random.default_rng(seed)
    for cell in array.cells():
        file = array.file(cell)
        raw = file.read_bytes()
        n = math.prod(s // c for s, c in zip(array.shard_shape, array.chunk_shape, strict=True))
        index = np.frombuffer(raw[-16 * n - 4 : -4], "<u8").reshape(n, 2).copy()
        out = bytearray(rng.integers(0, 700))
        for i in rng.permutation(n):
            offset, size = map(int, index[i])
            if offset != ABSENT:
                index[i, 0] = len(out)
                out += raw[offset : offset + size] + bytes(rng.integers(0, 700))
        out += index.tobytes() + struct.pack("<I", crc32c.crc32c(index.tobytes()))
        file.write_bytes(bytes(out))


def fingerprint_of(array):
    total = PartialFingerprint(array.shape, array.dtype)
    for starts, block in iter_chunks(array):
        total.add(block, starts)
    return to_hex(total.value())


@pytest.fixture
def stored(tmp_path):
    """An array of 4 files of 4 chunks, with gaps."""
    a = random_bits((12, 10), dtype_of("float32"))
    array = write(tmp_path / "a", a, (6, 8), (3, 4))
    rewrite_with_gaps(array)
    return array, a


NAMES = ["float32", "bfloat16", "uint8", "int64", "complex64", "bool", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gaps", [False, True], ids=["plain", "gaps"])
def test_what_tensorstore_wrote_is_read_back(tmp_path, name, gaps):
    for shape, shard, chunk in [
        ((), (), ()),
        ((5,), (5,), (5,)),
        ((12, 10), (6, 8), (3, 4)),
        ((4, 3, 5), (4, 1, 5), (1, 1, 5)),
    ]:
        a = random_bits(shape, dtype_of(name))
        array = write(tmp_path / "a", a, shard, chunk)
        if gaps:
            rewrite_with_gaps(array)
        assert (array.shape, array.dtype) == (a.shape, a.dtype)
        found = read_array(array.path)
        assert found.tobytes() == a.tobytes() and found.shape == a.shape
        assert fingerprint_of(array) == to_hex(np_fingerprint(a))


def test_tensorstore_reads_what_has_gaps(stored):
    array, a = stored
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array.path)}}
    assert ts.open(spec, open=True).result().read().result().tobytes() == a.tobytes()


def test_a_chunk_larger_than_a_block_is_read_in_parts(tmp_path):
    a = random_bits((3, 2 * PACK, 7), dtype_of("float32"))
    array = write(tmp_path / "a", a, a.shape, a.shape)
    blocks = list(iter_chunks(array, block_bytes=1000))
    assert len(blocks) > 80 and max(b.nbytes for _, b in blocks) <= 1000
    found = np.zeros_like(a)
    for starts, block in blocks:
        found[tuple(slice(s, s + n) for s, n in zip(starts, block.shape, strict=True))] = block
    assert found.tobytes() == a.tobytes()


def test_arrays_without_checksums_are_read_too(tmp_path):
    a = random_bits((12, 10), dtype_of("float32"))
    array = write(tmp_path / "a", a, (6, 8), (3, 4), codecs=(BYTES,))
    assert not array.has_crc and read_array(array.path).tobytes() == a.tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_layout_of_every_dtype_has_the_fingerprint_of_the_whole(tmp_path, data):
    lead = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)), max_size=2))
    last = data.draw(st.sampled_from([(1, PACK), (3, 7), (64, PACK), (129, 2 * PACK), (PACK, 2 * PACK), (4, 1)]))
    files = data.draw(st.integers(1, 3))  # along the last axis; a sync each makes many files slow
    chunk = [*(c for c, _, _ in lead), last[0]]
    shard = [*(c * k for c, k, _ in lead), last[0] * -(-last[1] // (last[0] * files))]
    shape = [*(data.draw(st.integers(1, c * k * n)) for c, k, n in lead), last[1]]
    a = random_bits(tuple(shape), dtype_of(data.draw(st.sampled_from(NAMES))), seed=data.draw(st.integers(0, 99)))
    array = write(tmp_path / "a", a, shard, chunk)
    assert fingerprint_of(array) == to_hex(np_fingerprint(a))


def test_every_flipped_bit_is_found_and_placed(stored):
    array, _ = stored
    rng = np.random.default_rng(1)
    for cell in array.cells():
        file = array.file(cell)
        good = file.read_bytes()
        for bit in rng.choice(8 * len(good), 60, replace=False):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bytes(bad))
            with pytest.raises(DamagedSnapshot) as e:
                read_array(array.path)
            assert str(file) in str(e.value)
            found = re.search(r"bytes? (\d+)(?:-(\d+))?:", str(e.value))
            assert found, e.value
            start = int(found[1])
            assert start <= bit // 8 < int(found[2] or start + 1)
        file.write_bytes(good)
    read_array(array.path)


def test_truncation_a_longer_file_and_a_missing_file_are_found(stored):
    array, _ = stored
    file = array.file((1, 0))
    good = file.read_bytes()
    for bad in [b"", good[:10], good[:-1], good[: len(good) // 2], good + b"\0", good + good]:
        file.write_bytes(bad)
        with pytest.raises(DamagedSnapshot, match=re.escape(str(file))):
            read_array(array.path)
    os.unlink(file)
    with pytest.raises(DamagedSnapshot, match=r"c/1/0: missing"):
        read_array(array.path)


def index_replaced(raw, chunks, change):
    """A shard file whose index is changed and has the right checksum."""
    index = np.frombuffer(raw[-16 * chunks - 4 : -4], "<u8").reshape(chunks, 2).copy()
    change(index)
    return raw[: -16 * chunks - 4] + index.tobytes() + struct.pack("<I", crc32c.crc32c(index.tobytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.__setitem__((0, 1), 7), "expected 52 bytes"),
        (lambda index: index.__setitem__((0, 0), 1 << 62), "expected 52 bytes before"),
        (lambda index: index.__setitem__(0, ABSENT), r"no chunk \(0, 0\)"),
        (lambda index: index.__setitem__(1, index[0]), "two chunks lie there"),
    ],
    ids=["size", "offset", "absent", "twice"],
)
def test_an_index_that_makes_no_sense_is_damage(stored, change, message):
    array, _ = stored
    file = array.file((0, 0))
    file.write_bytes(index_replaced(file.read_bytes(), 4, change))
    with pytest.raises(DamagedSnapshot, match=message):
        read_array(array.path)


def test_exchanged_files_change_the_fingerprint(stored):
    array, a = stored
    x, y = array.file((0, 0)), array.file((1, 0))
    first, second = x.read_bytes(), y.read_bytes()
    x.write_bytes(second)
    y.write_bytes(first)
    assert fingerprint_of(array) != to_hex(np_fingerprint(a))


def test_a_missing_or_broken_description_is_damage_and_another_kind_of_array_is_not(tmp_path, stored):
    array, _ = stored
    with pytest.raises(DamagedSnapshot, match=r"nothing/zarr.json: missing"):
        open_array(epath.Path(tmp_path / "nothing"))
    text = (array.path / "zarr.json").read_text()
    for bad in ["", "[]", "{}", text[:-3], text.replace("[3,4]", "[3,0]"), text.replace("[6,8]", "[6,8,1]")]:
        (array.path / "zarr.json").write_text(bad)
        with pytest.raises(DamagedSnapshot, match=r"a/zarr.json: cannot be read"):
            open_array(array.path)
    for other in [text.replace("little", "big"), text.replace("sharding_indexed", "transpose")]:
        (array.path / "zarr.json").write_text(other)
        with pytest.raises(SnapshotError, match="not stored as jaxckpt stores arrays") as e:
            open_array(array.path)
        assert not isinstance(e.value, DamagedSnapshot)
