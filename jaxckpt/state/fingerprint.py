"""A 64-bit fingerprint of an array's bits, the same under every sharding and memory kind.

For each 32-bit word w of the array, with i_d its global index along axis d (all arithmetic mod 2^32):

    H(t, s): t += s; t ^= t>>16; t *= 85ebca6b; t ^= t>>13; t *= c2b2ae35; t ^= t>>16     (MurmurHash3's finaliser)
    k1 = sum_d H(i_d, 9e3779b9 * (2d+1));   k2 = sum_d (H(i_d, 7f4a7c15 * (2d+2)) & ~1), +1 on the last axis
    x = w ^ k1; x ^= x>>16; x *= k2; x ^= x>>15;   y = x * 9e3779b1; y ^= y>>16
    fingerprint = (sum of x, sum of y)

The sums commute, so shards may be added in any order. For a fixed index w -> x -> y are bijections, so a change
confined to one word always changes both halves. It finds accidents, not adversaries. Shape and dtype are not mixed in.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.state.np_fingerprint import PACK as PACK
from jaxckpt.state.np_fingerprint import PartialFingerprint as PartialFingerprint
from jaxckpt.state.np_fingerprint import bits_of, is_packed, salts
from jaxckpt.state.np_fingerprint import np_fingerprint as np_fingerprint
from jaxckpt.state.np_fingerprint import np_fingerprints as np_fingerprints
from jaxckpt.state.np_fingerprint import to_hex as to_hex


def fingerprint(x: jax.Array) -> jax.Array:
    """uint32[2] of any array, under jit; XLA adds up the shards."""
    words = _words(x)
    if words.size == 0:
        return jnp.zeros(2, jnp.uint32)
    k1 = k2 = jnp.uint32(0)
    last = words.ndim - 1
    for d in range(words.ndim):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, d)
        salt1, salt2 = salts(d)
        k1 = k1 + _mix(index, salt1)
        k2 = k2 + ((_mix(index, salt2) & jnp.uint32(0xFFFFFFFE)) | jnp.uint32(d == last))
    x1 = words ^ k1
    x1 ^= x1 >> 16
    x1 *= k2
    x1 ^= x1 >> 15
    x2 = x1 * jnp.uint32(0x9E3779B1)
    x2 ^= x2 >> 16
    zero = jnp.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    # One variadic reduce over the last axis is one pass over memory; two sums cost ten times as much on CPU.
    a, b = lax.reduce((x1, x2), (zero, zero), add, (last,))
    if a.ndim:
        a, b = lax.reduce(lax.optimization_barrier((a, b)), (zero, zero), add, tuple(range(a.ndim)))
    return jnp.stack([a, b])


def of_array(x: jax.Array) -> jax.Array:
    """uint32[2] of a concrete array, computed where it lies and not waited for; the same on every process."""
    return _compiled(x.shape, x.dtype, x.sharding)(x)


def prepare(structs: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Compiles `of_array` for arrays like these, which takes a fraction of a second for each kind."""
    for x in structs:
        _compiled(x.shape, x.dtype, x.sharding)


@functools.cache
def _compiled(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    on_device = sharding.with_memory_kind("device")  # XLA computes nowhere else
    compute = jax.jit(lambda x: fingerprint(jax.device_put(x, on_device)), out_shardings=everywhere)
    return compute.lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).compile()


def combine(fingerprints: list[jax.Array]) -> jax.Array:
    """uint32[2] of several fingerprints, sensitive to their order."""
    total = jnp.zeros(2, jnp.uint32)
    for f in fingerprints:
        total = total * jnp.uint32(0x85EBCA6B) + f
    return total


def _mix(x: jax.Array, salt: int) -> jax.Array:
    x = x + jnp.uint32(salt)
    x ^= x >> 16
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """uint32 words whose shape depends on shape and dtype only."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.ndim == 0:
        x = x[None]
    dtype = x.dtype
    if dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([_words(lax.real(x)), _words(lax.imag(x))], -1)
    bits = bits_of(dtype)
    if bits in (32, 64):
        return lax.bitcast_convert_type(x, jnp.uint32)
    if is_packed(x.shape, dtype, bits):
        per_word = 32 // bits
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, per_word), jnp.uint32)
    if bits < 8:
        if jnp.issubdtype(dtype, jnp.floating):
            x = lax.bitcast_convert_type(x, jnp.uint4)
        return x.astype(jnp.int32).astype(jnp.uint32) & jnp.uint32((1 << bits) - 1)
    return lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)
