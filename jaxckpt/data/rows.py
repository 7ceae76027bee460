"""Rows of seq_len + 1 tokens from the documents of a store: cut, packed, or one document each.

A row is a function of its number, and `read_rows` takes many at once. Neighbouring rows that come from one document share a
token, because the last target of one is the first input of the next; so no target is lost and none comes twice.
"""

import math
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxckpt.data.packing import pack

LongDocuments = Literal["split", "truncate", "leave_out"]


class CutRows:
    """Row i is tokens [i L, i L + L + 1) of all documents joined; the last piece that is shorter is dropped.

    {"tokens": int32[n, L + 1]}, and with `has_mask` {"loss_mask": uint8[n, L + 1]}, all 1 where the store has none.
    """

    def __init__(
        self, tokens: np.ndarray, *, seq_len: int, loss_mask: np.ndarray | None = None, has_mask: bool | None = None
    ):
        self._tokens, self._seq_len, self._mask = tokens, seq_len, loss_mask
        self._has_mask = loss_mask is not None if has_mask is None else has_mask

    def __len__(self) -> int:
        return max(0, self._tokens.size - 1) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return _only(self.read_rows(np.array([index], np.int64)))

    def read_rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        starts, width = numbers * self._seq_len, self._seq_len + 1
        rows = {"tokens": _gather(self._tokens, starts, width, np.int32)}
        if self._has_mask:
            mask = self._mask
            rows["loss_mask"] = (
                np.ones((len(starts), width), np.uint8) if mask is None else _gather(mask, starts, width, np.uint8)
            )
        return rows


class PieceRows:
    """Rows that hold whole pieces of documents, none of which sees another.

    A document longer than a row is split, truncated or left out, as `long_documents` says. With `is_packed` a row holds
    as many pieces as best fit finds room for, else one. Fields, each [n, L + 1]: int32 "tokens" (padded with 0), uint8
    "loss_mask" (0 on padding), and packed also int32 "segment_ids" (1, 2, ... in a row; 0 on padding) and int32
    "positions" (from 0 in each segment).
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        *,
        seq_len: int,
        is_packed: bool,
        loss_mask: np.ndarray | None = None,
        long_documents: LongDocuments = "split",
    ):
        self._tokens, self._mask, self._width, self._is_packed = tokens, loss_mask, seq_len + 1, is_packed
        self._starts, self._lengths = cut_documents(offsets, seq_len, long_documents)
        if is_packed:
            self._row_starts, self._pieces = pack(self._lengths, self._width)
        else:
            count = self._lengths.size
            self._row_starts, self._pieces = np.arange(count + 1), np.arange(count)

    def __len__(self) -> int:
        return self._row_starts.size - 1

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold tokens."""
        return float(self._lengths.sum()) / max(1, len(self) * self._width)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return _only(self.read_rows(np.array([index], np.int64)))

    def read_rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        first = self._row_starts[numbers]
        counts = self._row_starts[numbers + 1] - first
        inside = _counts_from_zero(counts)  # which piece of its row, for every piece
        pieces = self._pieces[np.repeat(first, counts) + inside]
        lengths = self._lengths[pieces].astype(np.int64)
        # Where each piece begins in the batch seen as one flat array: after the pieces before it in its row.
        before = np.cumsum(lengths) - lengths
        start_of_row = np.repeat(before[np.cumsum(counts) - counts], counts)
        at = np.repeat(np.arange(numbers.size) * self._width, counts) + before - start_of_row
        return self._fill(numbers.size, at.tolist(), self._starts[pieces].tolist(), lengths.tolist(), inside.tolist())

    def _fill(
        self, rows: int, at: list[int], starts: list[int], lengths: list[int], inside: list[int]
    ) -> dict[str, np.ndarray]:
        names = ("tokens", "segment_ids", "positions") if self._is_packed else ("tokens",)
        fields = {name: _aligned((rows, self._width), np.int32) for name in names}
        fields["loss_mask"] = _aligned((rows, self._width), np.uint8)
        for values in fields.values():
            values[...] = 0
        flat = {name: values.reshape(-1) for name, values in fields.items()}
        tokens, mask, numbers = flat["tokens"], flat["loss_mask"], np.arange(self._width, dtype=np.int32)
        for a, start, length, number in zip(at, starts, lengths, inside, strict=True):
            end = a + length
            tokens[a:end] = self._tokens[start : start + length]
            mask[a:end] = 1 if self._mask is None else self._mask[start : start + length]
            if self._is_packed:
                flat["segment_ids"][a:end] = number + 1
                flat["positions"][a:end] = numbers[:length]
        return fields


def cut_documents(
    offsets: np.ndarray, seq_len: int, long_documents: LongDocuments = "split"
) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of tokens) of the pieces of all documents, int64 and int32, in order.

    A document of n tokens has n - 1 targets. Split, its pieces overlap by one token and have all of them; a document of
    one token has none, and no piece.
    """
    lengths = np.diff(offsets)
    starts = np.asarray(offsets[:-1])
    is_usable = lengths >= 2
    if long_documents == "leave_out":
        is_usable &= lengths <= seq_len + 1
    starts, lengths = starts[is_usable], lengths[is_usable]
    if long_documents != "split":
        return starts, np.minimum(lengths, seq_len + 1).astype(np.int32)
    counts = (lengths - 2) // seq_len + 1
    number = _counts_from_zero(counts)
    first = np.repeat(starts, counts) + number * seq_len
    left = np.repeat(lengths, counts) - number * seq_len
    return first, np.minimum(left, seq_len + 1).astype(np.int32)


def _gather(values: np.ndarray, starts: np.ndarray, width: int, dtype: type) -> np.ndarray:
    """values[start:start + width] of each start, as dtype[len(starts), width]."""
    rows = _aligned((len(starts), width), dtype)
    rows[...] = sliding_window_view(values, width)[starts]
    return rows


def _aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array without values, at an address that lets a CPU device take it over as it is, without one more copy."""
    size, alignment = math.prod(shape) * np.dtype(dtype).itemsize, 64
    room = np.empty(size + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + size].view(dtype).reshape(shape)


def _counts_from_zero(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _only(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[0] for name, values in rows.items()}
