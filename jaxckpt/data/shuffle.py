"""Each epoch in an order of its own, which is computed and not stored: element i of an endless shuffle in O(1)."""

import hashlib
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import grain
import numpy as np

from jaxckpt.errors import DataError

BLOCK = 4096


def by_blocks(blocks: np.ndarray, places: np.ndarray, values_of: Callable[[int], np.ndarray]) -> np.ndarray:
    """values_of(blocks[i])[..., places[i]] for each i; int64 arrays of one length."""
    if (blocks == blocks[0]).all():
        return values_of(int(blocks[0]))[..., places]
    parts = {block: values_of(block) for block in np.unique(blocks).tolist()}
    first = next(iter(parts.values()))
    result = np.empty((*first.shape[:-1], len(places)), first.dtype)
    for block, values in parts.items():
        chosen = blocks == block
        result[..., chosen] = values[..., places[chosen]]
    return result


def reads_rows(source: Any) -> bool:
    """Whether `source` gives many examples at once: read_rows(int64[n]) -> {field: array[n, ...]}, in one pass."""
    return callable(getattr(source, "read_rows", None))


class Epochs(grain.MapDataset):
    """`source` for ever: each epoch in an order of its own, or in the source's order where `seed` is None.

    Element i is source[perm(seed, i // N)(i % N)]. Not Grain's shuffle().repeat(): there seed s in epoch 1 equals seed
    s + 1 in epoch 0, and for N = 4^k + 1 it is no permutation (one example never comes, another twice). Not numpy's:
    Generator.permutation may change between numpy versions. A sequence is read directly, because
    MapDataset.source(...)[i] costs 15 times what cutting a row of tokens does.
    """

    def __init__(self, source: Any, *, seed: int | str | None):
        super().__init__(source if isinstance(source, grain.MapDataset) else ())
        self._source: Any = source
        self._seed, self.epoch_length = seed, len(source)
        if not 0 < self.epoch_length < sys.maxsize:
            raise DataError(
                f"a shuffle needs a data set with an end and at least one example; this one has {self.epoch_length}."
            )
        self._permuted = lru_cache(maxsize=16)(self._permute)
        if reads_rows(source):
            self.read_rows = self._read

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, position = divmod(index, self.epoch_length)
        if self._seed is not None:
            position = shuffled(position, self.epoch_length, shuffle_keys(self._seed, epoch))
        return self._source[position]

    def __str__(self) -> str:
        return f"Epochs(seed={self._seed}, epoch_length={self.epoch_length})"

    def _read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        epochs, positions = np.divmod(numbers, self.epoch_length)
        if self._seed is None:
            return self._source.read_rows(positions)
        # Numbers come in runs, and a whole block of an order is computed in the time that a few of its places take.
        places = by_blocks(
            epochs * (self.epoch_length // BLOCK + 1) + positions // BLOCK, positions % BLOCK, self._permuted
        )
        return self._source.read_rows(places)

    def _permute(self, block: int) -> np.ndarray:
        epoch, block = divmod(block, self.epoch_length // BLOCK + 1)
        positions = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.epoch_length))
        assert self._seed is not None
        return shuffled_many(positions, self.epoch_length, shuffle_keys(self._seed, epoch))


class ShuffledEpochs(Epochs):
    """`source` (a MapDataset or a sequence) for ever, each epoch in an order of its own, which (seed, epoch) decides."""

    def __init__(self, source: Any, *, seed: int):
        super().__init__(source, seed=seed)


def shuffle_keys(seed: int | str, epoch: int) -> tuple[int, ...]:
    """Six round keys of 64 bits. Hashed, so that neighbouring seeds and epochs have nothing in common."""
    return struct.unpack("<6Q", hashlib.sha512(f"jaxckpt shuffle {seed} {epoch}".encode()).digest()[:48])


def shuffled(position: int, n: int, keys: tuple[int, ...]) -> int:
    """Image of `position` under a keyed permutation of range(n), in O(1) memory.

    A Feistel network over a power of two >= n (each round xors one half with a hash of the other, so it
    can be undone whatever the hash). A result outside range(n) walks on along its cycle, which must come back inside:
    still a permutation, for every n, and fewer than two passes on average (Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002).
    """
    # Below 6 bits the few values a round can take make some orders measurably more likely than others.
    bits = max(6, (n - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    high, low = position >> low_bits, position & low_mask
    while True:
        for r in range(0, len(keys), 2):
            high ^= _mix(low ^ keys[r]) & high_mask
            low ^= _mix(high ^ keys[r + 1]) & low_mask
        if (value := high << low_bits | low) < n:
            return value


def _mix(x: int) -> int:
    """The finalizer of splitmix64: all 64 bits of `x` reach the low bits."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def shuffled_many(positions: np.ndarray, n: int, keys: tuple[int, ...]) -> np.ndarray:
    """`shuffled` of each of int64 positions[...], in one pass over the array."""
    bits = max(6, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    result = np.empty(positions.shape, np.uint64)
    todo = np.arange(positions.size)
    value = positions.astype(np.uint64).ravel()
    flat = result.reshape(-1)
    while todo.size:
        high, low = value >> low_bits, value & low_mask
        for r in range(0, len(keys), 2):
            high ^= _mix_many(low ^ np.uint64(keys[r])) & high_mask
            low ^= _mix_many(high ^ np.uint64(keys[r + 1])) & low_mask
        value = high << low_bits | low
        is_inside = value < np.uint64(n)
        flat[todo[is_inside]] = value[is_inside]
        todo, value = todo[~is_inside], value[~is_inside]
    return result.astype(np.int64)


def _mix_many(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)  # wraps around, as `_mix` does with its mask
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
