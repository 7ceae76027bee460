"""Which of the other processes has failed or fallen silent: judged from what was heard, by the local clock alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSED, ALL_CLOSED = "open", "closed", "all closed"
"""states that a process tells of itself: trains or is about to; has no run open; and, of process 0, nobody has one open"""


@dataclass
class Peers:
    """What this process has heard of the others, and for how long it has heard nothing new.

    Only time in which this process itself was awake counts: `elapsed_s` is cut to `longest_s`, so one that was stopped
    by a debugger, starved or suspended does not take the others for dead when it wakes. A process that has never
    spoken is not silent: the waits at the start name it.
    """

    longest_s: float
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)
    silent_s: dict[int, float] = field(default_factory=dict)
    store_silent_s: float = 0.0
    """for how long the key-value store has not answered"""

    def hear(
        self, beats: Mapping[int, dict[str, Any]], failures: Mapping[int, dict[str, Any]], elapsed_s: float
    ) -> None:
        """Takes in an answer of the store."""
        # What the others could not say while the store hung is not their silence.
        silence_s = min(self.store_silent_s + elapsed_s, self.longest_s)
        self.store_silent_s = 0.0
        known, silent_s = self.beats, dict(self.silent_s)
        for process, beat in beats.items():
            is_new = process not in known or known[process]["count"] != beat["count"]
            silent_s[process] = 0.0 if is_new else silent_s[process] + silence_s
        # New objects: another thread may be looking at the old ones.
        self.beats, self.failures, self.silent_s = {**known, **beats}, dict(failures), silent_s

    def hear_nothing(self, elapsed_s: float) -> None:
        """The store has not answered since the last call, which says nothing of the processes but process 0, its host."""
        self.store_silent_s += min(elapsed_s, self.longest_s)

    def silent(self, limit_s: float) -> dict[int, float]:
        """{process: seconds} of those that should speak and have not for longer than `limit_s`."""
        return {
            process: seconds
            for process, seconds in self.silent_s.items()
            if seconds > limit_s and self.beats[process]["state"] == OPEN and process not in self.failures
        }

    def are_all_closed(self, num_others: int) -> bool:
        """Whether each of the `num_others` others has no run open, or has failed."""
        gone = {process for process, beat in self.beats.items() if beat["state"] != OPEN} | self.failures.keys()
        return len(gone) >= num_others

    def confirmed(self) -> dict[int, dict[str, Any]]:
        """The failures that name a cause, without those that may only be the echo of another's death."""
        return {process: record for process, record in self.failures.items() if not record["is_echo"]}
