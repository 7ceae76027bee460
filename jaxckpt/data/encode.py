"""Documents to one flat array of tokens, with what of it is to be learned."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt.data.sources import Document
from jaxckpt.data.tokens import load_tokenizer
from jaxckpt.errors import DataError

_WINDOW, _OVERLAP = 1 << 18, 1 << 13
"""characters; a tokenizer takes 120 bytes of memory a character, so a longer text goes through it in windows"""


Piece = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens, and the characters where each starts and ends"""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Encoded:
    """Tokens of some documents, one after another, each with its end-of-document token."""

    tokens: np.ndarray
    """uint16 or uint32 [tokens]"""
    lengths: np.ndarray
    """int64 [documents]"""
    mask: np.ndarray | None
    """uint8 [tokens], 1: a loss target; None: all are"""


class Encoder:
    """A tokenizer for many documents at once; `encode` may be called from several threads."""

    def __init__(
        self, name: str | Path, *, eos: str | int | None = None, window: int = _WINDOW, overlap: int = _OVERLAP
    ) -> None:
        """`name`: "bytes" or the path of a tokenizer.json. Raises DataError."""
        self.tokenizer = load_tokenizer(name, eos=eos)
        self.dtype = np.dtype(np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._window, self._overlap = window, overlap
        self._model: Any = None
        if str(name) != "bytes":
            import tokenizers

            path = Path(name)
            content = (path / "tokenizer.json" if path.is_dir() else path).read_text("utf-8")
            self._model = tokenizers.Tokenizer.from_str(content)
            # Settings for batches of a model's input, which would cut documents and fill them up.
            self._model.no_truncation()
            self._model.no_padding()

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """All documents, in their order."""
        for document in documents:
            _check_targets(document)
        if not documents:
            return Encoded(np.empty(0, self.dtype), np.empty(0, np.int64), None)
        return self._encode_bytes(documents) if self._model is None else self._encode_texts(documents)

    def _encode_bytes(self, documents: Sequence[Document]) -> Encoded:
        parts = [d.text.encode() for d in documents]
        lengths = np.array([len(p) + 1 for p in parts], np.int64)
        tokens = np.frombuffer(b"\0".join([*parts, b""]), np.uint8).astype(self.dtype)
        ends = np.cumsum(lengths) - 1
        tokens[ends] = self.tokenizer.eos
        if all(d.targets is None for d in documents):
            return Encoded(tokens, lengths, None)
        mask = np.zeros(tokens.size, np.uint8)
        for document, end, length in zip(documents, ends, lengths, strict=True):
            at, done = end + 1 - length, 0
            for a, b in _ranges(document):
                first = at + len(document.text[done:a].encode())
                at, done = first + len(document.text[a:b].encode()), b
                mask[first:at] = 1
            mask[end] = _learns_end(document)
        return Encoded(tokens, lengths, mask)

    def _encode_texts(self, documents: Sequence[Document]) -> Encoded:
        is_plain = all(d.targets is None for d in documents)
        short = [d.text for d in documents if len(d.text) <= 4 * self._window]
        # The fast one leaves out the offsets.
        encode = self._model.encode_batch_fast if is_plain else self._model.encode_batch
        found = iter(encode(short, add_special_tokens=False))
        ids, masks = [], []
        for document in documents:
            if len(document.text) > 4 * self._window:
                piece = self._long(document.text, is_plain)
            elif is_plain:
                piece = (next(found).ids,)
            else:
                piece = _piece(next(found))
            ids.append(np.array(piece[0], self.dtype))
            if not is_plain:
                masks.append(_mask(document, *piece[1:]))
        end = np.array([self.tokenizer.eos], self.dtype)
        flat = [part for numbers in ids for part in (numbers, end)]
        lengths = np.array([len(numbers) + 1 for numbers in ids], np.int64)
        return Encoded(np.concatenate(flat), lengths, None if is_plain else np.concatenate(masks))

    # -------------------------------------------------------------------------------------------- long texts

    def _long(self, text: str, is_plain: bool) -> Piece:
        """The whole text, by windows; without offsets if `is_plain`."""
        starts = range(0, len(text) - self._overlap, self._window - self._overlap)
        at_once = 2 * (os.cpu_count() or 1)
        kept: list[Piece] = []
        last: Piece | None = None
        for i in range(0, len(starts), at_once):
            some = starts[i : i + at_once]
            for start, piece in zip(some, self._windows(text, some, self._window), strict=True):
                if last is not None:
                    joined = _joined(last, piece, start, self._overlap)
                    if joined is None:  # windows of such a text need never agree: pay the memory
                        return self._windows(text, [0], len(text))[0]
                    before, piece = joined
                    kept.append((before[0], _NONE, _NONE) if is_plain else before)
                last = piece
        pieces = [*kept, *([last] if last else [])]
        ids, first, end = (np.concatenate([piece[k] for piece in pieces]) for k in range(3))
        return ids, first, end

    def _windows(self, text: str, starts: Sequence[int], width: int) -> list[Piece]:
        found = self._model.encode_batch([text[s : s + width] for s in starts], add_special_tokens=False)
        return [_piece(encoding, start) for start, encoding in zip(starts, found, strict=True)]


def _piece(encoding: Any, start: int = 0) -> Piece:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
    return np.array(encoding.ids, np.uint32), offsets[:, 0], offsets[:, 1]


def _joined(left: Piece, right: Piece, start: int, overlap: int) -> tuple[Piece, Piece] | None:
    """Both windows cut at the middle of their overlap, which begins at character `start`; None where they disagree.

    What surrounds a text changes its tokens near the ends alone: a prefix that is put before it, a word that is cut.
    So the windows must agree in the middle half of their overlap, thousands of characters from either end.
    """
    a, b = start + overlap // 4, start + 3 * overlap // 4
    middles = []
    for _, first, last in (left, right):
        inside = np.flatnonzero((first >= a) & (last <= b))
        middles.append(slice(inside[0], inside[-1] + 1) if inside.size else slice(0, 0))
    one, other = ([part[middle] for part in side] for side, middle in zip((left, right), middles, strict=True))
    if not one[0].size or not all(np.array_equal(x, y) for x, y in zip(one, other, strict=True)):
        return None
    cut = one[0].size // 2
    (a, b, c), (d, e, f) = left, right
    i, j = middles[0].start + cut, middles[1].start + cut
    return (a[:i], b[:i], c[:i]), (d[j:], e[j:], f[j:])


# ------------------------------------------------------------------------------------------------ targets


def _mask(document: Document, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint8 [tokens + 1]: 1 where the characters of a token overlap a target, and for the end of the document."""
    mask = np.zeros(starts.size + 1, np.uint8)
    for a, b in _ranges(document):
        mask[:-1] |= (starts < b) & (ends > a)
    mask[-1] = _learns_end(document)
    return mask


def _check_targets(document: Document) -> None:
    borders = [0, *itertools.chain.from_iterable(_ranges(document)), len(document.text)]
    if any(a > b for a, b in itertools.pairwise(borders)):
        raise DataError(
            f"{document.name}: target ranges {list(_ranges(document))[:5]} are not ordered within the text's "
            f"{len(document.text)} characters."
        )


def _ranges(document: Document) -> tuple[tuple[int, int], ...]:
    return ((0, len(document.text)),) if document.targets is None else document.targets


def _learns_end(document: Document) -> bool:
    ranges = _ranges(document)
    return bool(ranges) and ranges[-1][1] == len(document.text)
