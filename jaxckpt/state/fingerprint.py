"""A 64-bit fingerprint of an array's bits, the same under every sharding and memory kind.

For each 32-bit word w of the array, with i_d its global index along axis d (all arithmetic mod 2^32):

    H(t, s): t += s; t ^= t>>16; t *= 85ebca6b; t ^= t>>13; t *= c2b2ae35; t ^= t>>16     (MurmurHash3's finaliser)
    k1 = sum_d H(i_d, 9e3779b9 * (2d+1));   k2 = sum_d (H(i_d, 7f4a7c15 * (2d+2)) & ~1), +1 on the last axis
    x = w ^ k1; x ^= x>>16; x *= k2; x ^= x>>15;   y = x * 9e3779b1; y ^= y>>16
    fingerprint = (sum of x, sum of y)

The sums commute, so shards may be added in any order. For a fixed index w -> x -> y are bijections, so a change
confined to one word always changes both halves. It finds accidents, not adversaries. Shape and dtype are not mixed in.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# 8- and 16-bit arrays are packed into words where the last dimension is a multiple of this, so that a shard
# boundary never falls inside a word.
PACK = 512


def fingerprint(x: jax.Array) -> jax.Array:
    """uint32[2] of any array, under jit; XLA adds up the shards."""
    words = _words(x)
    if words.size == 0:
        return jnp.zeros(2, jnp.uint32)
    k1 = k2 = jnp.uint32(0)
    last = words.ndim - 1
    for d in range(words.ndim):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, d)
        salt1, salt2 = _salts(d)
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


def combine(fingerprints: list[jax.Array]) -> jax.Array:
    """uint32[2] of several fingerprints, sensitive to their order."""
    total = jnp.zeros(2, jnp.uint32)
    for f in fingerprints:
        total = total * jnp.uint32(0x85EBCA6B) + f
    return total


def to_hex(fingerprint_value: Any) -> str:
    """16 hexadecimal digits of a uint32[2]."""
    a, b = (int(v) for v in np.asarray(fingerprint_value))
    return f"{a:08x}{b:08x}"


def np_fingerprint(a: np.ndarray) -> np.ndarray:
    """The same value without JAX."""
    words = _np_words(a)
    k1 = np.zeros((1,) * words.ndim, np.uint32)
    k2 = np.zeros_like(k1)
    with np.errstate(over="ignore"):
        for d in range(words.ndim):
            index = np.arange(words.shape[d], dtype=np.uint32).reshape([-1 if i == d else 1 for i in range(words.ndim)])
            salt1, salt2 = _salts(d)
            k1 = k1 + _np_mix(index, salt1)
            k2 = k2 + ((_np_mix(index, salt2) & np.uint32(0xFFFFFFFE)) | np.uint32(d == words.ndim - 1))
        x1 = words ^ k1
        x1 ^= x1 >> np.uint32(16)
        x1 *= k2
        x1 ^= x1 >> np.uint32(15)
        x2 = x1 * np.uint32(0x9E3779B1)
        x2 ^= x2 >> np.uint32(16)
        return np.array([x1.sum(dtype=np.uint32), x2.sum(dtype=np.uint32)], np.uint32)


def _salts(axis: int) -> tuple[int, int]:
    return (0x9E3779B9 * (2 * axis + 1)) & 0xFFFFFFFF, (0x7F4A7C15 * (2 * axis + 2)) & 0xFFFFFFFF


def _mix(x: jax.Array, salt: int) -> jax.Array:
    x = x + jnp.uint32(salt)
    x ^= x >> 16
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _np_mix(x: np.ndarray, salt: int) -> np.ndarray:
    x = x + np.uint32(salt)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _is_packed(shape: tuple[int, ...], dtype: np.dtype, bits: int) -> bool:
    return bits in (8, 16) and dtype != np.bool_ and bool(shape) and shape[-1] > 0 and shape[-1] % PACK == 0


def _bits(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 8
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits


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
    bits = _bits(dtype)
    if bits in (32, 64):
        return lax.bitcast_convert_type(x, jnp.uint32)
    if _is_packed(x.shape, dtype, bits):
        per_word = 32 // bits
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, per_word), jnp.uint32)
    if bits < 8:
        if jnp.issubdtype(dtype, jnp.floating):
            x = lax.bitcast_convert_type(x, jnp.uint4)
        return x.astype(jnp.int32).astype(jnp.uint32) & jnp.uint32((1 << bits) - 1)
    return lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)


def _np_words(a: np.ndarray) -> np.ndarray:
    a = np.ascontiguousarray(a if a.ndim else a[None])
    dtype = a.dtype
    if dtype == np.bool_:
        return a.astype(np.uint32)
    if dtype.kind == "c":
        return np.stack([_np_words(np.real(a)), _np_words(np.imag(a))], -1)
    bits = _bits(dtype)
    if bits == 32:
        return a.view(np.uint32)
    if bits == 64:
        return a.view(np.uint32).reshape(*a.shape, 2)
    if _is_packed(a.shape, dtype, bits):
        return a.view(np.uint32)
    if bits < 8:
        return (a.view(np.uint8) & ((1 << bits) - 1)).astype(np.uint32)
    return a.view({8: np.uint8, 16: np.uint16}[bits]).astype(np.uint32)
