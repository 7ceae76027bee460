"""Several endless sequences of rows as one, in proportions that may change on the way.

Which component example i comes from, and which of its examples it is, are functions of i and of the weights so far. So
the position of a mixture stays one number; when weights change, every component goes on where it was.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grain
import numpy as np

from jaxckpt.data.shuffle import BLOCK, Epochs, by_blocks
from jaxckpt.errors import DataError

Weights = Mapping[str, float]
_RESOLUTION = 1 << 20
"""weights are rounded to this part of their sum; large enough to be exact to 1e-6, and products stay in 64 bits"""


@dataclass(frozen=True)
class Segment:
    """From example `start` on, components are drawn in these proportions."""

    start: int
    weights: Weights

    def as_json(self) -> list[Any]:
        return [self.start, dict(self.weights)]


class Mixture(grain.MapDataset):
    """Endless mixture of endless components: {name: Epochs over rows of the same fields}.

    `schedule`: [(number of the first batch that they hold for, weights)], the first of them 0; weights are relative, and
    a component that is not named has weight 0. Until `resolve` has said which example each batch begins with, only the
    first weights count.
    """

    def __init__(self, components: Mapping[str, Epochs], schedule: Sequence[tuple[int, Weights]]):
        super().__init__(())
        self.components = dict(components)
        self.schedule = [(int(batch), dict(w)) for batch, w in schedule]
        check_schedule(self.schedule, list(self.components))
        self.segments: list[Segment] = []
        self._names: list[str] = []
        """those of all segments, sorted, in whatever order they were given; some may be components no more"""
        self._shares: list[np.ndarray] = []
        self._bases: list[np.ndarray] = []
        self._chosen = lru_cache(maxsize=16)(self._choose_block)
        self._set([Segment(0, self.schedule[0][1])])

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return {name: values[0] for name, values in self.read_rows(np.array([index], np.int64)).items()}

    @property
    def mixture(self) -> "Mixture":
        """This one: what wraps a mixture, and keeps the numbers of its examples, has it under the same name."""
        return self

    def __str__(self) -> str:
        return f"Mixture({', '.join(self.components)})"

    def resolve(self, past: Sequence[Segment], next_example: int, example_of: Callable[[int], int]) -> None:
        """Keeps `past` for the examples before `next_example`; from there on the schedule holds.

        `example_of` gives the first example of a batch.
        """
        kept = [s for s in past if s.start < next_example]
        # What is skipped before the first batch still counts as drawn with the first weights.
        planned = [(example_of(batch) if batch else 0, weights) for batch, weights in self.schedule]
        now = [weights for start, weights in planned if start <= next_example][-1]
        if not kept or not _alike(kept[-1].weights, now):
            kept = [*kept, Segment(next_example, now)]
        self._set(kept + [Segment(start, weights) for start, weights in planned if start > next_example])

    def past(self, next_example: int) -> list[Segment]:
        """The segments that examples before `next_example` came from."""
        return [s for s in self.segments if s.start < next_example]

    def draws(self, next_example: int) -> dict[str, int]:
        """How many examples of each component lie before `next_example`; of those that are none any more, too."""
        counts = np.zeros(len(self._names), np.int64)
        for segment, share, end in zip(self.segments, self._shares, self._ends(), strict=True):
            if segment.start < next_example:
                counts += _counts(np.array([min(next_example, end) - segment.start]), share)[:, 0]
        return dict(zip(self._names, counts.tolist(), strict=True))

    def read_rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        which, index = by_blocks(numbers // BLOCK, numbers % BLOCK, self._chosen)
        fields: dict[str, np.ndarray] = {}
        for number, name in enumerate(self._names):
            at = np.flatnonzero(which == number)
            if at.size == 0:
                continue
            if name not in self.components:
                raise DataError(
                    f"example {numbers[at[0]]} came from '{name}', which is no part of the mixture any more."
                )
            rows = self.components[name].read_rows(index[at])
            if at.size == numbers.size:
                return rows
            for field, values in rows.items():
                fields.setdefault(field, np.empty((numbers.size, *values.shape[1:]), values.dtype))[at] = values
        return fields

    def choose(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the component by name, number of its example) of each example int64[n]."""
        which, index = np.empty(numbers.shape, np.int64), np.empty(numbers.shape, np.int64)
        of_segment = np.searchsorted([s.start for s in self.segments], numbers, "right") - 1
        for i in np.unique(of_segment).tolist():
            chosen = of_segment == i
            place = numbers[chosen] - self.segments[i].start
            before = _counts(place, self._shares[i])
            drawn = np.argmax(_counts(place + 1, self._shares[i]) - before, axis=0)
            which[chosen] = drawn
            index[chosen] = self._bases[i][drawn] + np.take_along_axis(before, drawn[None], axis=0)[0]
        return which, index

    def _choose_block(self, block: int) -> np.ndarray:
        return np.stack(self.choose(np.arange(block * BLOCK, (block + 1) * BLOCK)))

    def _set(self, segments: list[Segment]) -> None:
        self.segments = segments
        self._chosen.cache_clear()
        # A segment is counted with all that were drawn from then, whether they are still there or not: else the others
        # would move. One that was not there yet has no share, and so changes nothing.
        self._names = sorted({*self.components, *(name for s in segments for name in s.weights)})
        self._shares = [_shares([s.weights.get(name, 0.0) for name in self._names]) for s in segments]
        base = np.zeros(len(self._names), np.int64)
        self._bases = []
        for segment, share, end in zip(segments, self._shares, self._ends(), strict=True):
            self._bases.append(base)
            if end < sys.maxsize:
                base = base + _counts(np.array([end - segment.start]), share)[:, 0]

    def _ends(self) -> list[int]:
        return [s.start for s in self.segments[1:]] + [sys.maxsize]


def check_schedule(schedule: Sequence[tuple[int, Weights]], names: Sequence[str]) -> None:
    """Raises DataError with everything that is wrong with a schedule of weights for components `names`."""
    problems = []
    steps = [batch + 1 for batch, _ in schedule]
    if not schedule or steps[0] != 1:
        problems.append(f"the first weights must hold from step 1; found {steps[:1] or 'none'}")
    if any(b <= a for a, b in itertools.pairwise(steps)):
        problems.append(f"the steps must rise: found {steps}")
    for step, (_, weights) in zip(steps, schedule, strict=True):
        if unknown := sorted(set(weights) - set(names)):
            problems.append(f"step {step}: {', '.join(unknown)} is no store; there are {', '.join(names)}")
        if bad := {k: w for k, w in weights.items() if not (np.isfinite(w) and w >= 0)}:
            problems.append(f"step {step}: weights must be finite and at least 0; found {bad}")
        elif not any(weights.values()):
            problems.append(f"step {step}: the weights sum to zero, so nothing would be drawn; found {dict(weights)}")
    if problems:
        raise DataError("\n  ".join(["the weights of the mixture cannot be used:", *problems]))


def _alike(a: Weights, b: Weights) -> bool:
    names = sorted({*a, *b})
    return np.array_equal(_shares([a.get(n, 0.0) for n in names]), _shares([b.get(n, 0.0) for n in names]))


def _shares(weights: Sequence[float]) -> np.ndarray:
    """Weights as whole numbers int64 in their proportions, each positive one at least 1."""
    w = np.asarray(weights, np.float64)
    shares = np.rint(w / w.sum() * _RESOLUTION).astype(np.int64)
    return np.where(w > 0, np.maximum(shares, 1), 0)


def _counts(drawn: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """int64 [components, n]: how many of the first `drawn` examples of a segment come from each component.

    Component by component, each takes its share of what the ones before it left, rounded up. A count rises by 0 or 1
    when `drawn` rises by 1, and the counts add up to `drawn`: so each example has one component, never off by more than
    one from its share of what was left.
    """
    counts = np.zeros((len(shares), drawn.size), np.int64)
    left, rest = drawn.astype(np.int64), int(shares.sum())
    for i, share in enumerate(shares.tolist()):
        if share == 0:
            continue
        # left * (rest - share) fits: examples stay below 2^42, shares below 2^21.
        passed_on = left * (rest - share) // rest
        counts[i] = left - passed_on
        left, rest = passed_on, rest - share
    return counts
