"""Where a run stands in its data, over all its lives: what a snapshot keeps of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt.data.course import Course, Skip, planned
from jaxckpt.errors import DataError

STATE_VERSION = 2


class Position:
    """The number of batches handed out, and the few numbers that say which examples they came from."""

    def __init__(self, identity: Mapping[str, Any], *, global_batch: int, skip: Sequence[Skip]):
        """`identity`: what the data is made of, by name, as values that JSON holds. `skip`: [(first step, last step)]."""
        self.identity = dict(identity)
        self.global_batch = global_batch
        self._skip = tuple((int(a), int(b)) for a, b in skip)
        self.batches = 0
        """handed out"""
        self.course = planned(Course.of(global_batch), 0, self._skip)

    @property
    def next_example(self) -> int:
        """The example after the last one that was handed out; what is to be skipped next comes after it."""
        return self.course.end(self.batches)

    def key(self, batch: int, segments: Sequence[Any] = ()) -> str:
        """16 hexadecimal digits that stand for all that decides what batch `batch` holds: two of the same key are the same.

        `segments`: the weights of a mixture up to there.
        """
        what = [self.identity, self.course.example(batch), self.course.end(batch + 1), list(segments)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": STATE_VERSION,
            "batches": self.batches,
            "next_example": self.next_example,
            "global_batch": self.global_batch,
            **self.course.until(self.batches).as_json(),
            "identity": self.identity,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """To `state`; what is to be skipped, and another batch size, count from there.

        Raises DataError where the data is another, or what was skipped before.
        """
        if problems := self._differences(state):
            raise DataError(
                f"the data changed: {'; '.join(problems)}. The next example would not be the one that was due. "
                "Give the data (files, tokenizer, seq_len, holdout, seed) that the run began with, "
                "allow the change by name (data), or start a new run."
            )
        batches, past = int(state["batches"]), Course.from_json(state)
        if past.pieces[-1].global_batch != self.global_batch:
            past = past.with_batch_size(batches, self.global_batch)
        self.course, self.batches = planned(past, batches, self._skip), batches

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        if state.get("version") != STATE_VERSION:
            return [f"version was {state.get('version')!r} and is {STATE_VERSION!r}"]
        then, now = state.get("identity") or {}, json.loads(json.dumps(self.identity))
        names = dict.fromkeys([*then, *now])
        problems = [f"{k} was {then.get(k)!r} and is {now.get(k)!r}" for k in names if then.get(k) != now.get(k)]
        batches = state.get("batches")
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
            problems.append(f"batches is {batches!r}, not a number of batches")
        return problems
