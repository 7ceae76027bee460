"""Which examples each step is trained on, over all changes of the batch size and all ranges that were left out.

Steps are counted from 1 as in metrics.jsonl; batch n (from 0) is that of step n + 1.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt.errors import DataError

Skip = tuple[int, int]
"""(first step, last step) whose batches are left out"""


@dataclass(frozen=True)
class Piece:
    """From batch `batch` on, batches of `global_batch` examples follow one another from example `example`."""

    batch: int
    example: int
    global_batch: int


@dataclass(frozen=True)
class Course:
    """A piecewise linear map from batches to examples."""

    pieces: tuple[Piece, ...]
    skipped: tuple[Skip, ...] = ()

    @classmethod
    def of(cls, global_batch: int) -> "Course":
        return cls((Piece(0, 0, global_batch),))

    def example(self, batch: int) -> int:
        """The first example of batch `batch`."""
        piece = self._piece(batch)
        return piece.example + (batch - piece.batch) * piece.global_batch

    def end(self, batches: int) -> int:
        """The example after those of the first `batches` batches."""
        if batches == 0:
            return 0
        return self.example(batches - 1) + self._piece(batches - 1).global_batch

    def with_batch_size(self, batch: int, global_batch: int) -> "Course":
        """From batch `batch` on, batches of `global_batch` examples; without a gap after those before."""
        return Course(
            (*(p for p in self.pieces if p.batch < batch), Piece(batch, self.end(batch), global_batch)), self.skipped
        )

    def without(self, skip: Skip) -> "Course":
        """Leaves out the batches of steps skip[0] to skip[1], as they are counted so far; later ones move up.

        skip[0] is at or after the first step of the last piece.
        """
        first, after = skip[0] - 1, skip[1]
        kept = [p for p in self.pieces if p.batch < first]
        here = Piece(first, self.example(after), self._piece(after).global_batch)
        return Course((*kept, here), (*self.skipped, skip))

    def until(self, batches: int) -> "Course":
        """What the first `batches` batches came from."""
        pieces = tuple(p for p in self.pieces if p.batch < batches)
        pieces = pieces or (Piece(0, 0, self.pieces[0].global_batch),)
        return Course(pieces, tuple(s for s in self.skipped if s[0] <= batches))

    def as_json(self) -> dict[str, Any]:
        return {
            "pieces": [[p.batch, p.example, p.global_batch] for p in self.pieces],
            "skipped": [list(s) for s in self.skipped],
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Course":
        return cls(tuple(Piece(*p) for p in tree["pieces"]), tuple((a, b) for a, b in tree["skipped"]))

    def _piece(self, batch: int) -> Piece:
        return [p for p in self.pieces if p.batch <= batch][-1]


def planned(past: Course, batches: int, skip: Sequence[Skip]) -> Course:
    """The course of a run that has `batches` batches behind it, which came from `past`, and is to leave out `skip`.

    Raises DataError where the two contradict each other.
    """
    check_skip(skip)
    done = list(past.skipped)
    if list(skip[: len(done)]) != done:
        raise DataError(
            f"skip is {_show(skip)}, but the steps before step {batches + 1} were trained with skip {_show(done)}. Keep these at "
            "the head of the list, or go back to a snapshot before them (resume: STEP)."
        )
    course = past
    for entry in skip[len(done) :]:
        if entry[0] <= batches:
            raise DataError(
                f"skip {list(entry)}: the run goes on after step {batches}, and has been trained on the batch of step {entry[0]}. "
                f"Go back to a snapshot of step {entry[0] - 1} or earlier (resume: STEP) to leave it out."
            )
        course = course.without(entry)
    return course


def check_skip(skip: Sequence[Skip]) -> None:
    """Raises DataError where `skip` is no list of ranges of steps, in their order."""
    problems = [f"{list(s)} is no range of steps from 1: expected [first, last]" for s in skip if not 1 <= s[0] <= s[1]]
    if not problems and any(b[0] < a[0] for a, b in itertools.pairwise(skip)):
        problems.append(
            f"found {_show(skip)}: each range must begin at the step where the one before it begins, or later"
        )
    if problems:
        raise DataError("\n  ".join(["skip cannot be used:", *problems]))


def _show(skip: Sequence[Skip]) -> str:
    return str([list(s) for s in skip])
