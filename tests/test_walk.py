"""Two layouts of one array are walked alike, and a walk checks what it passes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot.shards import runs
from jaxckpt.snapshot.walk import Walk
from test_fingerprint import dtype_of, random_bits
from test_shards import rewrite_with_gaps, write


def walked(array, block_bytes=1 << 20):
    """The whole array, put together from its runs."""
    flat = []
    with Walk(array) as walk:
        for starts, shape in runs(array.shape, array.dtype.itemsize, block_bytes):
            found = walk.read(starts, shape)
            assert found.shape == shape
            flat.append(found.reshape(-1).copy())
        walk.finish()
    return np.concatenate(flat).reshape(array.shape)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_layout_is_walked_in_c_order(tmp_path, data):
    rank = data.draw(st.integers(0, 3))
    axis = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
    layout = [data.draw(axis) for _ in range(rank)]
    chunk, shard = [c for c, _, _ in layout], [c * k for c, k, _ in layout]
    a = random_bits(tuple(n for *_, n in layout), dtype_of(data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))))
    array = write(tmp_path / "a", a, shard, chunk)
    assert walked(array, data.draw(st.sampled_from([1, 8, 40, 300, 1 << 20]))).tobytes() == a.tobytes()


@pytest.mark.parametrize(
    ("shard", "chunk"), [((12, 10), (12, 10)), ((12, 2), (12, 1)), ((1, 16), (1, 8)), ((7, 7), (7, 7))], ids=str
)
def test_every_flipped_bit_of_a_chunk_is_found(tmp_path, shard, chunk):
    """Also in the elements of a chunk that lie outside the array."""
    array = write(tmp_path / "a", random_bits((12, 10), dtype_of("float32")), shard, chunk)
    rng = np.random.default_rng(2)
    for cell in array.cells():
        file = array.file(cell)
        good = file.read_bytes()
        for bit in rng.choice(8 * len(good), 20, replace=False):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bytes(bad))
            with pytest.raises(DamagedSnapshot, match=str(file)):
                walked(array, 40)
        file.write_bytes(good)
    walked(array)


def test_more_files_than_stay_open_are_read(tmp_path):
    a = random_bits((3, 200), dtype_of("int8"))
    array = write(tmp_path / "a", a, (3, 1), (3, 1))
    rewrite_with_gaps(array)
    assert walked(array, 10).tobytes() == a.tobytes()
