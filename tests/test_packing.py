"""Small leaves come back from one array bit for bit, whatever they are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.snapshot import packing
from jaxckpt.snapshot.leaves import num_bytes
from tiny import mesh_of

DTYPES = [np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]


def random_array(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (int(np.prod(shape)) * np.dtype(dtype).itemsize,), np.uint8)
    return (raw % 2 if dtype == np.bool_ else raw % 8 if dtype == ml_dtypes.int4 else raw).view(dtype).reshape(shape)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), max_size=12))
def test_packed_arrays_come_back_bitwise_and_aligned(kinds):
    arrays = {f"leaf/{i}": random_array(tuple(shape), dtype, i) for i, (dtype, shape) in enumerate(kinds)}
    packed, table = packing.pack(arrays)
    assert packed.dtype == np.uint8 and packed.nbytes == packing.packed_bytes(arrays)
    assert all(offset % 64 == 0 for offset, _ in table.values())
    found = packing.unpack(packed, table, arrays)
    for path, x in arrays.items():
        assert found[path].dtype == x.dtype and found[path].shape == x.shape and found[path].tobytes() == x.tobytes()


def test_only_small_leaves_are_packed_and_the_empty_one_too():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    leaves = {
        "edge": of(packing.SMALL_BYTES // 4),
        "large": of(packing.SMALL_BYTES // 4 + 1),
        "empty": of(0, 9),
        "x": of(),
    }
    large, small = packing.split(leaves)
    assert set(large) == {"large"} and set(small) == {"edge", "empty", "x"}


@pytest.mark.parametrize("spec, kind", [(P("fsdp"), "device"), (P(), "device"), (P(None, "fsdp"), "pinned_host")])
def test_leaves_travel_to_the_host_and_back_into_their_shardings(spec, kind):
    sharding = NamedSharding(mesh_of(data=2, fsdp=4), spec, memory_kind=kind)
    x = random_array((8, 12), np.float32)
    leaves = {"a": jax.device_put(x, sharding), "b": jax.device_put(np.int32(7), NamedSharding(sharding.mesh, P()))}
    host = packing.to_host(leaves)
    target = {path: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for path, v in leaves.items()}
    back = packing.to_devices(packing.unpack(*packing.pack(host), target), target)
    assert np.array_equal(np.asarray(back["a"]).view(np.uint32), x.view(np.uint32)) and int(back["b"]) == 7
    assert back["a"].sharding == sharding


def test_copies_on_the_host_do_not_follow_a_donated_array():
    x = jnp.arange(64.0)
    host = packing.to_host({"x": x})
    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(x))
    assert np.array_equal(host["x"], np.arange(64.0, dtype=np.float32))


def test_a_table_that_does_not_fit_is_an_error():
    packed, table = packing.pack({"a": np.arange(3.0)})
    like = {"a": jax.ShapeDtypeStruct((4,), np.float64)}
    with pytest.raises(ValueError, match=r"leaf 'a' has 24 bytes at 0 of 64, expected 32"):
        packing.unpack(packed, table, like)
    with pytest.raises(ValueError, match="of 64"):
        packing.unpack(packed, {"a": [48, 32]}, like)
    with pytest.raises(KeyError):
        packing.unpack(packed, {}, like)
    assert num_bytes(like["a"]) == 32
