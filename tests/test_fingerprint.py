"""The fingerprint is a function of an array's bits, the same in jit and in numpy, under every sharding and memory kind."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.state.fingerprint import (
    PACK,
    PartialFingerprint,
    combine,
    fingerprint,
    np_fingerprint,
    np_fingerprints,
    to_hex,
)
from tiny import mesh_of

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64"),
    *("bfloat16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
]
SHAPES = [(), (0,), (3, 0), (7,), (3, 2 * PACK), (2, 3, 5)]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def random_bits(shape, dtype, seed=0):
    """Every bit pattern may come up, NaNs and negative zeros too."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(2, size=shape).astype(np.bool_)
    if dtype in (dtype_of("int4"), dtype_of("uint4")):
        return rng.integers(0, 16, size=shape).astype(np.uint8).astype(dtype)
    if dtype == dtype_of("float4_e2m1fn"):
        return rng.integers(0, 16, size=shape).astype(np.uint8).view(dtype)
    raw = rng.integers(0, 256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype)[..., 0].copy() if raw.size else np.zeros(shape, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jit_and_numpy_agree_for_every_dtype(shape):
    arrays = {name: random_bits(shape, dtype_of(name)) for name in DTYPES}
    found = jax.jit(lambda xs: {name: fingerprint(x) for name, x in xs.items()})(arrays)
    assert {n: to_hex(f) for n, f in found.items()} == {n: to_hex(np_fingerprint(a)) for n, a in arrays.items()}


def test_many_at_once_are_each_as_one_alone():
    arrays = {
        f"{name}{shape}{seed}": random_bits(shape, dtype_of(name), seed)
        for name in DTYPES
        for shape in SHAPES
        for seed in range(3)
    }
    arrays["large"] = random_bits((300, 1000), np.dtype(np.float32))
    arrays |= {f"in turns {i}": random_bits((64, 1024), np.dtype(np.float32), i) for i in range(5)}
    found = np_fingerprints(arrays)
    assert {n: to_hex(f) for n, f in found.items()} == {n: to_hex(np_fingerprint(a)) for n, a in arrays.items()}


def test_jit_and_numpy_agree_on_64_bit_values():
    with jax.enable_x64(True):
        for name in ("int64", "float64", "complex128"):
            a = random_bits((3, 5), np.dtype(name))
            assert to_hex(jax.jit(fingerprint)(a)) == to_hex(np_fingerprint(a)), name


def reference(words):
    """The formula over a whole array of words at once."""
    k1 = np.zeros((1,) * words.ndim, np.uint32)
    k2 = np.zeros_like(k1)
    for d, n in enumerate(words.shape):
        index = np.arange(n, dtype=np.uint32).reshape([-1 if i == d else 1 for i in range(words.ndim)])
        h = []
        for salt in (0x9E3779B9 * (2 * d + 1), 0x7F4A7C15 * (2 * d + 2)):
            t = index + np.uint32(salt & 0xFFFFFFFF)
            t = (t ^ t >> 16) * np.uint32(0x85EBCA6B)
            t = (t ^ t >> 13) * np.uint32(0xC2B2AE35)
            h.append(t ^ t >> 16)
        k1 = k1 + h[0]
        k2 = k2 + (h[1] & np.uint32(0xFFFFFFFE) | np.uint32(d == words.ndim - 1))
    x = words ^ k1
    x = (x ^ x >> 16) * k2
    x ^= x >> 15
    y = x * np.uint32(0x9E3779B1)
    y ^= y >> 16
    return np.array([x.sum(dtype=np.uint32), y.sum(dtype=np.uint32)])


@pytest.mark.parametrize(
    "shape",
    [(300_001,), (2, 150_000), (140_000, 3), (3, 20_000, 5), (17, 16_001), (2, 2, 70_000), (40, 40, 40, 4)],
    ids=str,
)
def test_large_arrays_are_added_up_from_pieces(shape):
    a = random_bits(shape, np.dtype(np.uint32))
    assert np_fingerprint(a).tolist() == reference(a).tolist()
    assert np_fingerprint(a.view(np.uint16)[..., ::2]).tolist() == reference((a & 0xFFFF).astype(np.uint32)).tolist()


def test_large_packed_arrays_are_added_up_from_whole_words():
    a = random_bits((2, 2050 * PACK), np.dtype(np.uint8))  # a row is three pieces
    assert np_fingerprint(a).tolist() == reference(a.view(np.uint32)).tolist()
    assert np_fingerprint(a[:, ::-1]).tolist() == reference(a[:, ::-1].copy().view(np.uint32)).tolist()


def cut(data, shape, align=1):
    """A random partition of an array into blocks, as (starts, slices)."""
    edges = []
    for d, n in enumerate(shape):
        unit = align if d == len(shape) - 1 else 1
        inner = data.draw(st.lists(st.integers(0, n // unit), max_size=3))
        edges.append(sorted({0, n, *(unit * i for i in inner)}))
    spans = [list(itertools.pairwise(e)) for e in edges]
    return [(tuple(a for a, _ in box), tuple(slice(*s) for s in box)) for box in itertools.product(*spans)]


BLOCK_SHAPES = [(9,), (4, 3), (2, 3, 5), (3, PACK), (2, 2, 2 * PACK)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*DTYPES, "float64", "int64"]), st.sampled_from(BLOCK_SHAPES), st.data())
def test_the_shares_of_the_blocks_add_up_to_the_whole(name, shape, data):
    a = random_bits(shape, dtype_of(name), seed=data.draw(st.integers(0, 99)))
    per_word = 4 // a.itemsize if a.itemsize < 4 and shape[-1] % PACK == 0 else 1
    shares = [np_fingerprint(a[box], starts, shape) for starts, box in cut(data, shape, per_word)]
    assert np.sum(shares, axis=0, dtype=np.uint32).tolist() == np_fingerprint(a).tolist()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*DTYPES, "float64", "int64"]), st.sampled_from(BLOCK_SHAPES), st.data())
def test_blocks_that_cut_words_in_any_order_and_by_several_readers_add_up_too(name, shape, data):
    a = random_bits(shape, dtype_of(name), seed=data.draw(st.integers(0, 99)))
    readers = [PartialFingerprint(shape, a.dtype) for _ in range(2)]
    for starts, box in data.draw(st.permutations(cut(data, shape))):
        data.draw(st.sampled_from(readers)).add(a[box], starts)
    readers[0].merge(readers[1])
    assert readers[0].value().tolist() == np_fingerprint(a).tolist()


def test_a_block_that_cuts_a_word_is_refused():
    a = np.zeros((2, PACK), np.int8)
    for box, starts in [(a[:, 2:], (0, 2)), (a[:, :6], (0, 0))]:
        with pytest.raises(ValueError, match="cuts words of 4 elements of int8"):
            np_fingerprint(box, starts, a.shape)


def test_shards_of_jit_arrays_add_up_to_the_jit_value():
    a = random_bits((8, 2 * PACK), dtype_of("bfloat16"))
    x = jax.device_put(a, NamedSharding(mesh_of(fsdp=4, tensor=2), P("fsdp", "tensor")))
    shares = [
        np_fingerprint(np.asarray(s.data), [i.start or 0 for i in s.index], x.shape) for s in x.addressable_shards
    ]
    assert to_hex(np.sum(shares, axis=0, dtype=np.uint32)) == to_hex(jax.jit(fingerprint)(x))


def test_numpy_does_not_mind_the_memory_order():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert to_hex(np_fingerprint(np.asfortranarray(a))) == to_hex(np_fingerprint(a))
    assert to_hex(np_fingerprint(np.repeat(a, 2, 1)[:, ::2])) == to_hex(np_fingerprint(a))


def test_it_is_the_formula_of_the_docstring_in_plain_integers():
    u32 = (1 << 32) - 1

    def h(t, s):
        t = (t + s) & u32
        t = ((t ^ t >> 16) * 0x85EBCA6B) & u32
        t = ((t ^ t >> 13) * 0xC2B2AE35) & u32
        return t ^ t >> 16

    a = random_bits((3, 4), np.dtype(np.uint32))
    total = [0, 0]
    for (i, j), w in np.ndenumerate(a):
        k1 = sum(h(v, (0x9E3779B9 * (2 * d + 1)) & u32) for d, v in enumerate((i, j))) & u32
        k2 = sum(h(v, (0x7F4A7C15 * (2 * d + 2)) & u32) & ~1 for d, v in enumerate((i, j))) + 1 & u32
        x = int(w) ^ k1
        x = (x ^ x >> 16) * k2 & u32
        x ^= x >> 15
        y = x * 0x9E3779B1 & u32
        y ^= y >> 16
        total = [(total[0] + x) & u32, (total[1] + y) & u32]
    assert np_fingerprint(a).tolist() == total


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_every_sharding_mesh_and_memory_kind_gives_the_same_value(name):
    a = random_bits((8, 2 * PACK), dtype_of(name))
    expected = to_hex(np_fingerprint(a))
    eight, four = mesh_of(data=2, fsdp=4), mesh_of(fsdp=2, tensor=2)
    for mesh, spec in [(eight, P()), (eight, P("fsdp")), (eight, P(("data", "fsdp"))), (four, P("fsdp", "tensor"))]:
        assert to_hex(jax.jit(fingerprint)(jax.device_put(a, NamedSharding(mesh, spec)))) == expected, spec
    pinned = NamedSharding(eight, P(None, ("data", "fsdp")), memory_kind="pinned_host")
    on_device = jax.jit(lambda x: fingerprint(jax.device_put(x, pinned.with_memory_kind("device"))))
    assert to_hex(on_device(jax.device_put(a, pinned))) == expected


def test_a_typed_key_has_the_fingerprint_of_its_words():
    key = jax.random.key(3)
    assert to_hex(jax.jit(fingerprint)(key)) == to_hex(np_fingerprint(np.asarray(jax.random.key_data(key))))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from([s for s in SHAPES if 0 not in s]), st.data())
def test_any_flipped_bit_changes_both_halves(name, shape, data):
    dtype = dtype_of(name)
    a = random_bits(shape, dtype, seed=data.draw(st.integers(0, 99)))
    raw = np.atleast_1d(a.copy()).view(np.uint8).reshape(-1)
    bits = 1 if name == "bool" else 4 if "4_" in name or name.endswith("int4") else 8
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, bits - 1))
    flipped = raw.view(dtype).reshape(shape)
    assert (np_fingerprint(a) != np_fingerprint(flipped)).all()


def test_a_flipped_bit_shows_in_jit_too():
    a = random_bits((4, PACK), dtype_of("bfloat16"))
    f = jax.jit(fingerprint)
    flipped = a.copy()
    flipped.view(np.uint16)[3, 7] ^= 1
    assert (np.asarray(f(a)) != np.asarray(f(flipped))).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.sampled_from(["int8", "float32", "bool"]), st.data())
def test_swapping_two_different_values_changes_it(values, name, data):
    a = np.array(values).astype(name)
    i, j = data.draw(st.tuples(*[st.integers(0, len(a) - 1)] * 2))
    b = a.copy()
    b[[i, j]] = b[[j, i]]
    assert (to_hex(np_fingerprint(a)) == to_hex(np_fingerprint(b))) == (a[i] == a[j])


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5), st.integers(0, 99))
def test_a_transpose_changes_it_unless_it_changes_nothing(n, seed):
    a = np.random.default_rng(seed).integers(0, 2, size=(n, n)).astype(np.int32)
    assert (to_hex(np_fingerprint(a)) == to_hex(np_fingerprint(a.T))) == np.array_equal(a, a.T)


def test_leading_zeros_rows_and_signs_of_zero_count():
    zeros = [np.zeros(n, np.float32) for n in (1, 2, 3)] + [-np.zeros(1, np.float32)]
    assert len({to_hex(np_fingerprint(z)) for z in zeros}) == 4


def test_combine_is_sensitive_to_order_and_to_each_member():
    a, b = (jnp.asarray(np_fingerprint(np.full(3, v, np.float32))) for v in (1, 2))
    assert len({to_hex(combine(fs)) for fs in ([a, b], [b, a], [a], [b], [a, a], [b, b])}) == 6


def test_to_hex_keeps_leading_zeros():
    assert to_hex(np.array([1, 0xFFFFFFFF], np.uint32)) == "00000001ffffffff"
