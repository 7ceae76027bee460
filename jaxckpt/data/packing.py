"""Which pieces share a row: best fit from the longest to the shortest, planned from the lengths alone."""

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class _Filling:
    """What a kind of row holds: `times` pieces of one length, on top of another filling."""

    below: "_Filling | None"
    length: int
    times: int


def pack(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(row starts int64 [rows + 1], pieces int64 [pieces]): row r holds pieces[row_starts[r]:row_starts[r + 1]].

    Every piece, whose length is in 1..width, is in one row, and no row is longer than `width`. Pieces of one length are
    taken in their order. Best-fit decreasing on the histogram of lengths (Krell et al. 2021, arXiv:2107.02027,
    "longest-pack-first"): all rows that are filled alike are handled at once, so the time of the search depends on the
    number of different lengths and not on the number of pieces.
    """
    count_of = np.bincount(lengths, minlength=width + 1)
    kinds = _plan(count_of.tolist(), width)
    order = np.argsort(
        lengths.astype(np.uint16 if width < 1 << 16 else np.int64), kind="stable"
    )  # radix where 16 bits do
    cursor = (np.cumsum(count_of) - count_of).tolist()  # of each length, the next piece in `order`
    pieces, counts = [], []
    for filling, rows in kinds:
        columns = []
        node: _Filling | None = filling
        while node is not None:
            start, taken = cursor[node.length], rows * node.times
            columns.append(order[start : start + taken].reshape(rows, node.times))
            cursor[node.length] += taken
            node = node.below
        pieces.append(np.concatenate(columns[::-1], axis=1))  # the longest first
        counts.append(np.full(rows, pieces[-1].shape[1], np.int64))
    starts = (
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))]) if counts else np.zeros(1, np.int64)
    )
    return starts, np.concatenate([p.reshape(-1) for p in pieces]) if pieces else np.zeros(0, np.int64)


def _plan(count_of: list[int], width: int) -> list[tuple[_Filling, int]]:
    """(filling, number of rows filled so) for `count_of[length]` pieces of each length."""
    open_rows: dict[int, list[tuple[_Filling | None, int]]] = {}  # room left -> fillings with that room
    rooms: list[int] = []  # the keys of open_rows, sorted

    def put(filling: _Filling | None, rows: int, room: int) -> None:
        if rows:
            if room not in open_rows:
                bisect.insort(rooms, room)
                open_rows[room] = []
            open_rows[room].append((filling, rows))

    for length in range(width, 0, -1):
        left = count_of[length]
        while left:
            place = bisect.bisect_left(rooms, length)
            if place == len(rooms):  # nothing has room: new rows, each filled with this length alone
                times = width // length
                put(None, -(-left // times), width)
                continue
            room = rooms[place]
            filling, rows = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[place]
            # Best fit fills a row with one length before it opens the next, which has more room.
            times = min(room // length, left)
            filled = min(rows, left // times)
            put(_Filling(filling, length, times), filled, room - times * length)
            put(filling, rows - filled, room)
            left -= filled * times
    return [(filling, rows) for room in rooms for filling, rows in open_rows[room] if filling is not None]
