"""Bounded waits between processes, through the coordinator's key-value store and not through the devices.

A collective on the devices waits for ever for a process that has died; these name it and give up.
"""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax._src import distributed as _jax_distributed  # the client has no public name; held by tests/multiprocess

from jaxckpt.errors import DistributedError

PREFIX = "jaxckpt"
_ANSWER_MARGIN_S = 5.0
"""between process 0's giving up and the others' hearing of it"""


def client() -> Any:
    """The coordinator's key-value store; None in a run of one process."""
    return _jax_distributed.global_state.client


def process_number() -> tuple[int, int]:
    """(number of this process, how many there are), without starting a backend, which itself waits for the others."""
    return _jax_distributed.global_state.process_id, _jax_distributed.global_state.num_processes


class Group:
    """All processes of the run; every process must make the same calls in the same order.

    Calls of different names (`what`) do not depend on each other, so two threads may make them in any order.
    """

    # Shared by all groups of a process, because they share the store, where a key can be set only once.
    _calls: ClassVar[Counter[str]] = Counter()
    _calls_lock = threading.Lock()

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_primary = jax.process_index() == 0
        self._is_alone = jax.process_count() == 1

    def barrier(self, what: str) -> None:
        """Waits until every process is here; raises DistributedError, which names `what` and who is missing."""
        missing = self.errors(what, None)
        if missing:
            raise DistributedError(
                f"process {jax.process_index()} waited for the other processes to {what}: "
                + "; ".join(f"process {i} {error}" for i, error in missing.items())
            )

    def errors(self, what: str, error: str | None) -> dict[int, str]:
        """{process number: its error} of the processes that have one, the same on every process; {}: all is well.

        Every process calls it, with its own error or None. Process 0 collects them for `timeout_s`; a process that has
        not come by then is an entry too, and reads so itself if it comes later. Raises DistributedError where process 0
        does not come. `what` is the same at each call of one place, without step numbers: a later call of the same name
        frees the memory of the earlier ones.
        """
        found, absent = self._exchange(what, error)
        late = {i: f"did not come within {self.timeout_s:g} s" for i in absent}
        return dict(sorted({**{i: e for i, e in found.items() if e is not None}, **late}.items()))

    def gather(self, what: str, value: Any) -> list[Any]:
        """The JSON values of all processes, in their order, the same on every process. Raises as `barrier` does."""
        found, absent = self._exchange(what, value)
        if absent:
            missing = ", ".join(f"process {i}" for i in absent)
            raise DistributedError(
                f"process {process_number()[0]} waited for the other processes to {what}: {missing} did not come within "
                f"{self.timeout_s:g} s"
            )
        return [found[i] for i in sorted(found)]

    def _exchange(self, what: str, value: Any) -> tuple[dict[int, Any], list[int]]:
        """({process: its JSON value}, the processes that did not come), the same on every process."""
        if self._is_alone:
            return {0: value}, []
        base, number = self._next_key(what)
        key = f"{base}/{number}"
        client().key_value_set(f"{key}/from/{jax.process_index()}", json.dumps(value))
        if not self.is_primary:
            # Process 0 waits for the others from the moment it comes itself.
            self._blocking_get(what, f"{key}/from/0", self.timeout_s)
            answer = json.loads(self._blocking_get(what, f"{key}/all", self.timeout_s + _ANSWER_MARGIN_S))
            return {int(i): v for i, v in answer["found"].items()}, answer["absent"]
        found, absent = self._collect(what, key)
        client().key_value_set(f"{key}/all", json.dumps({"found": found, "absent": absent}))
        if not absent and number > 0:
            client().key_value_delete(f"{base}/{number - 1}")  # everybody is past it
        return found, absent

    def from_primary(self, what: str, decide: Callable[[], Any]) -> Any:
        """The JSON value that `decide()` gives on process 0. If it raises there, every process raises."""
        if self._is_alone:
            return decide()
        key = "/".join(map(str, self._next_key(what)))
        if not self.is_primary:
            answer = json.loads(self._blocking_get(what, key, self.timeout_s))
            if "error" in answer:
                raise DistributedError(f"process 0 could not {what}: {answer['error']}")
            return answer["value"]
        try:
            value = decide()
        except Exception as e:
            client().key_value_set(key, json.dumps({"error": str(e)}))
            raise
        client().key_value_set(key, json.dumps({"value": value}))
        return value

    def _collect(self, what: str, key: str) -> tuple[dict[int, Any], list[int]]:
        """({process: its value}, the absent ones), on process 0."""
        deadline = time.monotonic() + self.timeout_s
        found, absent = {}, []
        for i in range(jax.process_count()):
            try:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                found[i] = json.loads(client().blocking_key_value_get(f"{key}/from/{i}", left_ms))
            except Exception as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise self._gave_up(what, self.timeout_s, e) from e
                absent.append(i)
        return found, absent

    def _next_key(self, what: str) -> tuple[str, int]:
        with self._calls_lock:
            number = self._calls[what]
            self._calls[what] += 1
        return f"{PREFIX}/group/{what}", number

    def _blocking_get(self, what: str, key: str, limit_s: float) -> str:
        try:
            return client().blocking_key_value_get(key, int(limit_s * 1000))
        except Exception as e:  # the client raises RuntimeError subclasses that differ between jax versions
            raise self._gave_up(what, limit_s, e) from e

    def _gave_up(self, what: str, limit_s: float, error: Exception) -> DistributedError:
        reason = "it did not come" if "DEADLINE_EXCEEDED" in str(error) else str(error).splitlines()[0]
        return DistributedError(
            f"process {jax.process_index()} waited for process 0 to {what} and gave up (limit {limit_s:g} s): {reason}"
        )


class Agreement:
    """Turns a wish of any process into one step that all processes share: to stop after, or to save after.

    A process dispatches step s, asks here, and then waits for the numbers of s-1, which every process must have
    dispatched. So while one that has dispatched s publishes its wish, before it dispatches s+1, another may at most have
    asked at s+2, and must see the wish when it asks at s+3: all agree on s+3. One object agrees once; take a new one
    after the agreed step, which every process reaches before it can ask a new one.
    """

    _numbers = itertools.count()  # shared by all: every process makes them in the same order

    def __init__(self) -> None:
        self._is_alone = jax.process_count() == 1
        self._agreed: int | None = None
        self._directory = f"{PREFIX}/agreement/{next(self._numbers)}"

    def agreed_step(self, dispatched: int, is_wanted: bool) -> int | None:
        """The step that all share, once there is one. Call it after dispatching step `dispatched` and before the next."""
        if self._agreed is None and self._is_alone:
            self._agreed = dispatched if is_wanted else None
        elif self._agreed is None:
            if is_wanted:
                try:
                    client().key_value_set(f"{self._directory}/step", str(dispatched + 3), allow_overwrite=False)
                except Exception as e:  # another process was first
                    if "ALREADY_EXISTS" not in str(e):
                        raise
            values = dict(client().key_value_dir_get(self._directory))
            if values:
                self._agreed = int(next(iter(values.values())))
        return self._agreed
