"""Rows of token stores: every target once, no document sees another, and any order of reading gives the same."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.data.packing import pack
from jaxckpt.data.rows import CutRows, PieceRows, cut_documents
from jaxckpt.data.shuffle import BLOCK, Epochs, ShuffledEpochs, shuffle_keys, shuffled, shuffled_many

documents = st.lists(st.integers(1, 40), max_size=60)


def flat(lengths):
    """(tokens, offsets): every token is another number, so that where it comes from can be told."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.arange(1, offsets[-1] + 1, dtype=np.uint32), offsets


def targets_of(row):
    """(input token, target token) of each target that the loss would count, and what both may see."""
    tokens = row["tokens"]
    counts = row.get("loss_mask", np.ones_like(tokens))[1:] != 0
    if "segment_ids" in row:
        counts &= row["segment_ids"][1:] == row["segment_ids"][:-1]
    return list(zip(tokens[:-1][counts].tolist(), tokens[1:][counts].tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), max_size=40), seq_len=st.integers(1, 12))
def test_cut_rows_hold_every_target_of_whole_rows_once(lengths, seq_len):
    tokens, _ = flat(lengths)
    rows = CutRows(tokens, seq_len=seq_len)
    pairs = [pair for i in range(len(rows)) for pair in targets_of(rows[i])]
    whole = max(0, tokens.size - 1) // seq_len * seq_len
    assert pairs == [(i, i + 1) for i in range(1, whole + 1)]


@settings(max_examples=120, deadline=None)
@given(lengths=documents, seq_len=st.integers(1, 16), is_packed=st.booleans())
def test_pieces_hold_every_target_of_every_document_once_and_nothing_across_documents(lengths, seq_len, is_packed):
    tokens, offsets = flat(lengths)
    rows = PieceRows(tokens, offsets, seq_len=seq_len, is_packed=is_packed)
    pairs = Counter(pair for i in range(len(rows)) for pair in targets_of(rows[i]))
    expected = Counter((t, t + 1) for a, b in itertools.pairwise(offsets) for t in range(a + 1, b))
    assert pairs == expected
    assert (cut_documents(offsets, seq_len)[1] >= 2).all(), "no row for a piece without a target"


@settings(max_examples=60, deadline=None)
@given(lengths=documents, seq_len=st.integers(1, 16))
def test_packed_segments_are_contiguous_pieces_with_positions_from_zero_and_padding_outside(lengths, seq_len):
    tokens, offsets = flat(lengths)
    rows = PieceRows(tokens, offsets, seq_len=seq_len, is_packed=True)
    for i in range(len(rows)):
        row = rows[i]
        ids = row["segment_ids"]
        used = int((ids > 0).sum())
        assert (ids[:used] > 0).all() and np.array_equal(np.unique(ids[:used]), np.arange(1, ids.max() + 1))
        assert not any(row[name][used:].any() for name in ("tokens", "loss_mask", "segment_ids", "positions"))
        for segment in range(1, ids.max() + 1):
            at = np.flatnonzero(ids == segment)
            assert np.array_equal(row["positions"][at], np.arange(at.size))
            piece = row["tokens"][at]
            assert np.array_equal(piece, piece[0] + np.arange(at.size))


@pytest.mark.parametrize(("choice", "kept"), [("truncate", [5, 4]), ("leave_out", [4]), ("split", [5, 5, 3, 4])])
def test_long_documents_are_split_truncated_or_left_out(choice, kept):
    starts, lengths = cut_documents(np.array([0, 11, 12, 16]), 4, choice)
    assert lengths.tolist() == kept
    assert starts.tolist() == {"truncate": [0, 12], "leave_out": [12], "split": [0, 4, 8, 12]}[choice]


def test_a_loss_mask_of_the_store_reaches_the_rows():
    tokens, offsets = flat([5, 3])
    mask = np.array([0, 1, 0, 1, 1, 0, 0, 1], np.uint8)
    packed = PieceRows(tokens, offsets, seq_len=8, is_packed=True, loss_mask=mask)[0]
    assert packed["loss_mask"].tolist() == [*mask, 0]
    assert CutRows(tokens, seq_len=3, loss_mask=mask)[1]["loss_mask"].tolist() == mask[3:7].tolist()
    assert CutRows(tokens, seq_len=3, has_mask=True)[1]["loss_mask"].tolist() == [1, 1, 1, 1]
    assert "loss_mask" not in CutRows(tokens, seq_len=3)[0]


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=80), spare=st.integers(0, 20))
def test_packing_places_every_piece_once_in_no_row_longer_than_its_width(lengths, spare):
    width = max(lengths, default=1) + spare
    starts, pieces = pack(np.array(lengths, np.int32), width)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    rows = [pieces[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert all(row and sum(lengths[p] for p in row) <= width for row in rows)


def best_fit_decreasing(lengths, width):
    """The same, piece by piece: the textbook's loop."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(width - length)
    return sorted(rooms)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=80), spare=st.integers(0, 20))
def test_packing_is_best_fit_decreasing(lengths, spare):
    width = max(lengths, default=1) + spare
    starts, pieces = pack(np.array(lengths, np.int32), width)
    filled = [sum(lengths[p] for p in pieces[a:b]) for a, b in itertools.pairwise(starts)]
    assert sorted(width - f for f in filled) == best_fit_decreasing(lengths, width)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 3 * BLOCK), seed=st.integers(0, 99), numbers=st.lists(st.integers(0, 10**7), min_size=1))
def test_reading_many_rows_of_an_order_is_reading_each(n, seed, numbers):
    source = CutRows(np.arange(n + 1, dtype=np.uint16), seq_len=1)
    epochs = Epochs(source, seed=seed)
    together = epochs.read_rows(np.array(numbers))["tokens"]
    assert np.array_equal(together, [epochs[i]["tokens"] for i in numbers])
    assert np.array_equal(together[:, 0], [ShuffledEpochs(range(n), seed=seed)[i] for i in numbers])


@pytest.mark.parametrize("n", [1, 2, 65, 4**8 + 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_an_order_computed_at_once_is_the_order_computed_one_by_one_and_a_permutation(n):
    keys = shuffle_keys(3, 5)
    order = shuffled_many(np.arange(n), n, keys)
    assert np.array_equal(np.sort(order), np.arange(n))
    some = range(0, n, max(1, n // 50))
    assert [int(order[i]) for i in some] == [shuffled(i, n, keys) for i in some]


def test_rows_without_a_seed_come_in_their_order_again_and_again():
    epochs = Epochs(CutRows(np.arange(6), seq_len=1), seed=None)
    assert epochs.read_rows(np.arange(12))["tokens"][:, 0].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
