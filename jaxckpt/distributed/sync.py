"""Bounded waits between processes, through the coordinator's key-value store and not through the devices.

A collective on the devices waits for ever for a process that has died; these name it and give up.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _jax_distributed  # the client has no public name; held by tests/multiprocess

from jaxckpt.errors import DistributedError

_PREFIX = "jaxckpt"


def _client() -> Any:
    return _jax_distributed.global_state.client


class Group:
    """All processes of the run; every process must make the same calls in the same order."""

    # Shared by all groups of a process, because they share the store, where a key can be set only once.
    _numbers = itertools.count()

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_primary = jax.process_index() == 0
        self._is_alone = jax.process_count() == 1

    def barrier(self, what: str) -> None:
        """Waits until every process is here; raises DistributedError, which names `what` and who is missing."""
        if self._is_alone:
            return
        self._bounded(
            what, lambda: _client().wait_at_barrier(f"{_PREFIX}/{next(self._numbers)}/{what}", self._timeout_ms())
        )

    def from_primary(self, what: str, decide: Callable[[], Any]) -> Any:
        """The JSON value that `decide()` gives on process 0. If it raises there, every process raises."""
        if self._is_alone:
            return decide()
        key = f"{_PREFIX}/{next(self._numbers)}/{what}"
        if not self.is_primary:
            answer = json.loads(self._bounded(what, lambda: _client().blocking_key_value_get(key, self._timeout_ms())))
            if "error" in answer:
                raise DistributedError(f"process 0 could not {what}: {answer['error']}")
            return answer["value"]
        try:
            value = decide()
        except Exception as e:
            _client().key_value_set(key, json.dumps({"error": str(e)}))
            raise
        _client().key_value_set(key, json.dumps({"value": value}))
        return value

    def _timeout_ms(self) -> int:
        return int(self.timeout_s * 1000)

    def _bounded(self, what: str, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except Exception as e:  # the client raises RuntimeError subclasses that differ between jax versions
            raise DistributedError(
                f"process {jax.process_index()} waited for the other processes to {what} and gave up "
                f"(limit {self.timeout_s:g} s): {e}"
            ) from e


class StopAgreement:
    """Turns a stop request of any process into one last step that all processes share.

    A process dispatches step s, asks here, and then waits for the numbers of s-1, which every process must have dispatched.
    So while one that has dispatched s publishes its wish, before it dispatches s+1, another may at most have asked at
    s+2, and must see the wish when it asks at s+3: all stop after s+3.
    """

    _numbers = itertools.count()  # shared like Group's: each call of `train` agrees anew

    def __init__(self) -> None:
        self._is_alone = jax.process_count() == 1
        self._last_step: int | None = None
        self._directory = f"{_PREFIX}/stop/{next(self._numbers)}"

    def last_step(self, dispatched: int, is_requested: bool) -> int | None:
        """Call after dispatching step `dispatched` and before the next; the step to stop after, once there is one."""
        if self._last_step is None and self._is_alone:
            self._last_step = dispatched if is_requested else None
        elif self._last_step is None:
            if is_requested:
                try:
                    _client().key_value_set(f"{self._directory}/after_step", str(dispatched + 3), allow_overwrite=False)
                except Exception as e:  # another process was first
                    if "ALREADY_EXISTS" not in str(e):
                        raise
            values = dict(_client().key_value_dir_get(self._directory))
            if values:
                self._last_step = int(next(iter(values.values())))
        return self._last_step
