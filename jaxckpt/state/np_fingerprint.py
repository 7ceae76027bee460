"""The fingerprint of `fingerprint.py` without JAX: of arrays in memory, and of blocks as they come from a disk."""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# 8- and 16-bit arrays are packed into words where the last dimension is a multiple of this, so that a shard
# boundary never falls inside a word.
PACK = 512
# This many words at a time: half as many cost a third more time, twice as many gain little.
PIECE = 1 << 17


def np_fingerprint(
    a: np.ndarray, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> np.ndarray:
    """uint32[2], the same value without JAX, in a few MiB of temporaries.

    With `starts` and `shape`, the share of the block `a` that begins at element `starts` of an array of `shape`: the
    shares of all blocks of an array add up to its fingerprint (mod 2^32). Where 8- or 16-bit elements are packed, a
    block must begin and end at a word along the last axis (ValueError otherwise; `PartialFingerprint` takes any block).
    """
    if a.ndim == 0:
        a, starts, shape = a[None], None, None
    starts = tuple(starts) if starts is not None else (0,) * a.ndim
    per_word = elements_per_word(tuple(shape) if shape is not None else a.shape, a.dtype)
    if starts[-1] % per_word or a.shape[-1] % per_word:
        raise ValueError(f"the block at {starts} of shape {a.shape} cuts words of {per_word} elements of {a.dtype}")
    total = np.zeros(2, np.uint32)
    for piece, first in _pieces(a, starts, per_word):
        words = _np_words(piece, per_word > 1)
        first = (*first[:-1], first[-1] // per_word, *(0,) * (words.ndim - piece.ndim))
        total += _np_sums(words, first)
    return total


def np_fingerprints(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """uint32[2] of each array; many small ones of a few shapes take a fraction of the time of one by one."""
    alike: dict[tuple[tuple[int, ...], np.dtype], list[str]] = {}
    for name, a in arrays.items():
        alike.setdefault((a.shape or (1,), a.dtype), []).append(name)
    found: dict[str, np.ndarray] = {}
    for (shape, dtype), names in alike.items():
        at_once = PIECE // max(1, math.prod(shape))
        if at_once < 2 or not math.prod(shape):
            found.update({name: np_fingerprint(arrays[name]) for name in names})
            continue
        is_packed_here = elements_per_word(shape, dtype) > 1
        for i in range(0, len(names), at_once):
            some = names[i : i + at_once]
            words = np.stack([_np_words(arrays[name].reshape(shape), is_packed_here) for name in some])
            x, y = _key_table((0,) * (words.ndim - 1), words.shape[1:])
            sums = _mixed_sums(np.bitwise_xor(x.reshape(-1), words.reshape(len(some), -1)), y.reshape(-1), axis=1)
            found.update(zip(some, sums.T, strict=True))
    return {name: found[name] for name in arrays}


class PartialFingerprint:
    """The fingerprint of an array of `shape`, added up from disjoint blocks in any order, also such as cut words."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._sums = np.zeros(2, np.uint32)
        self._per_word = elements_per_word(self.shape, self.dtype)
        # {index of a word along the last axis: the words there, put together from the blocks on its two sides}
        self._cut: dict[int, np.ndarray] = {}

    def add(self, block: np.ndarray, starts: Sequence[int]) -> None:
        """Takes the block that begins at element `starts`."""
        n = self._per_word
        if n == 1:
            self._sums += np_fingerprint(block, starts, self.shape)
            return
        *lead, first = starts
        end = first + block.shape[-1]
        inner, outer = -(-first // n) * n, end // n * n
        if inner < outer:
            whole = block[..., inner - first : outer - first]
            self._sums += np_fingerprint(whole, (*lead, inner), self.shape)
        for i in (*range(first, min(inner, end)), *range(max(outer, inner), end)):
            self._add_column(block[..., i - first], lead, i)

    def merge(self, other: "PartialFingerprint") -> None:
        """Takes the blocks that `other` has taken."""
        self._sums += other._sums
        for word, bits in other._cut.items():
            self._cut[word] = self._cut[word] | bits if word in self._cut else bits

    def value(self) -> np.ndarray:
        """uint32[2]; the array's fingerprint once all of its blocks are in."""
        total = self._sums.copy()
        for word, bits in self._cut.items():
            total += _np_sums(bits[..., None], (*(0,) * bits.ndim, word))
        return total

    def _add_column(self, column: np.ndarray, lead: Sequence[int], i: int) -> None:
        n = self._per_word
        bits = _np_words(column[..., None], False)[..., 0] << np.uint32(i % n * (32 // n))
        words = self._cut.setdefault(i // n, np.zeros(self.shape[:-1], np.uint32))
        words[tuple(slice(s, s + k) for s, k in zip(lead, column.shape, strict=True))] |= bits


def to_hex(fingerprint_value: Any) -> str:
    """16 hexadecimal digits of a uint32[2]."""
    a, b = (int(v) for v in np.asarray(fingerprint_value))
    return f"{a:08x}{b:08x}"


def salts(axis: int) -> tuple[int, int]:
    """What tells the axes apart, for k1 and for k2."""
    return (0x9E3779B9 * (2 * axis + 1)) & 0xFFFFFFFF, (0x7F4A7C15 * (2 * axis + 2)) & 0xFFFFFFFF


def is_packed(shape: tuple[int, ...], dtype: np.dtype, bits: int) -> bool:
    """Whether several elements share a word."""
    return bits in (8, 16) and dtype != np.bool_ and bool(shape) and shape[-1] > 0 and shape[-1] % PACK == 0


@functools.cache
def bits_of(dtype: Any) -> int:
    """Bits of an element that count: 4 of an int4, which numpy keeps in a byte."""
    name = np.dtype(dtype).name
    return 8 if name == "bool" else int(re.findall(r"\d+", name)[0])


def _np_words(a: np.ndarray, packed: bool) -> np.ndarray:
    """The words of a block; `packed` says whether the array that it is cut from is packed."""
    a = np.ascontiguousarray(a)
    dtype = a.dtype
    if dtype == np.bool_:
        return a.astype(np.uint32)
    if dtype.kind == "c":
        words = a.view(np.uint32).reshape(*a.shape, 2, dtype.itemsize // 8)
        return words[..., 0] if words.shape[-1] == 1 else np.swapaxes(words, -1, -2)
    bits = bits_of(dtype)
    if bits == 32 or packed:
        return a.view(np.uint32)
    if bits == 64:
        return a.view(np.uint32).reshape(*a.shape, 2)
    if bits < 8:
        return (a.view(np.uint8) & ((1 << bits) - 1)).astype(np.uint32)
    return a.view({8: np.uint8, 16: np.uint16}[bits]).astype(np.uint32)


def elements_per_word(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """How many neighbours along the last axis share a word."""
    return 32 // bits_of(dtype) if is_packed(shape, dtype, bits_of(dtype)) else 1


def _pieces(a: np.ndarray, starts: tuple[int, ...], per_word: int) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """(block, starts) of whole words, at most about PIECE of them, that make up `a`."""
    limit = PIECE * per_word * 4 // max(4, a.itemsize)
    if a.size <= limit:
        yield a, starts
        return
    d = next(d for d, n in enumerate(a.shape) if n > 1)
    length = -(-a.shape[d] // min(-(-a.size // limit), a.shape[d]))
    if d == a.ndim - 1:
        length = -(-length // per_word) * per_word
    for i in range(0, a.shape[d], length):
        part = a[(slice(None),) * d + (slice(i, i + length),)]
        yield from _pieces(part, (*starts[:d], starts[d] + i, *starts[d + 1 :]), per_word)


def _np_sums(words: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    """uint32[2]: the sums over a block of words that begins at word `starts`."""
    if words.size == 0:
        return np.zeros(2, np.uint32)
    x, y = _key_table(starts, words.shape)
    x ^= words.reshape(x.shape)
    return _mixed_sums(x, y, axis=None)


def _key_table(starts: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """uint32[2, n, m]: k1 and k2 of every word of a block, in C order."""
    last = len(shape) - 1
    keys = [
        (_short_np_keys if n <= 8192 else _np_keys)(d, start, n, d == last)
        for d, (start, n) in enumerate(zip(starts, shape, strict=True))
    ]
    # The keys are sums over the axes: added up along the rows and along the columns of a table of two long sides.
    columns = keys.pop()
    while keys and columns.shape[1] < 64:
        columns = _outer(keys.pop(), columns).reshape(2, -1)
    rows = keys[0] if keys else np.zeros((2, 1), np.uint32)
    for key in keys[1:]:
        rows = _outer(rows, key).reshape(2, -1)
    return _outer(rows, columns)


def _mixed_sums(x: np.ndarray, y: np.ndarray, axis: int | None) -> np.ndarray:
    """uint32[2, ...]: both sums over `axis` of words that k1 is in (`x`, which is used up), with k2 (`y`)."""
    scratch = x >> 16
    x ^= scratch
    x *= y
    np.right_shift(x, 15, out=scratch)
    x ^= scratch
    first = np.add.reduce(x, axis=axis, dtype=np.uint32)
    x *= np.uint32(0x9E3779B1)
    np.right_shift(x, 16, out=scratch)
    x ^= scratch
    return np.array([first, np.add.reduce(x, axis=axis, dtype=np.uint32)], np.uint32)


def _outer(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """uint32[2, n, m], the sums of uint32[2, n] and uint32[2, m]."""
    if b.shape[1] >= 16 or a.shape[1] < 16:
        return a[:, :, None] + b[:, None, :]
    out = np.empty((2, a.shape[1], b.shape[1]), np.uint32)
    for i in range(b.shape[1]):  # numpy is slow along short rows
        np.add(a, b[:, i, None], out=out[:, :, i])
    return out


def _np_keys(axis: int, start: int, n: int, is_last: bool) -> np.ndarray:
    """uint32[2, n]: k1 and k2 of the indices start .. start + n along an axis."""
    index = np.arange(start, start + n, dtype=np.uint32)
    x = index + np.array(salts(axis), np.uint32)[:, None]
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> 16
    x[1] &= np.uint32(0xFFFFFFFE)
    x[1] |= np.uint32(is_last)
    return x


# A thousand small leaves have few shapes. The result is shared: read only.
_short_np_keys = functools.lru_cache(maxsize=64)(_np_keys)
