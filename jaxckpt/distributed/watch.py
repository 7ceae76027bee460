"""Names a process that failed, on every other process, and ends those at once.

A step waits on the devices for every process, and for ever for one that has died; JAX itself notices after 100 s and
aborts without a name. Here each process tells the coordinator's key-value store about once a second that it lives, and
why it ends if it fails. Process 0 listens to all; the others listen to process 0 and to the failures, so the traffic
grows with the number of processes and not with its square. Two threads do it: one talks to the store, which may hang, and
one judges what was heard, which must not.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxckpt.distributed.aborts import hold_aborts, is_aborting
from jaxckpt.distributed.peers import ALL_CLOSED, CLOSED, OPEN, Peers
from jaxckpt.distributed.sync import PREFIX, client, process_number
from jaxckpt.errors import JaxckptError

HEARTBEAT_TIMEOUT_S = 30.0

_DIRECTORY = f"{PREFIX}/watch"
_GRACE_S = 2.0
"""for this process's own error, often the same one, to come first: it says more than another's"""
_LEAVING_S = 15.0
"""in which a process that failed must end"""
_READING_S = 8.0
"""in which the others must have read process 0's failure, before the store ends with it"""
_ECHOES = ("gloo", "nccl", "connection", "peer", "socket", "coordination", "rendezvous")
"""words of the device runtime's errors that may come from another process's death"""


LEAVING_TOGETHER_S = 300.0
_REASON_LENGTH = 4000


class Store(Protocol):
    """What is used of the coordinator's client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = ..., /) -> None: ...
    def key_value_dir_get(self, key: str, /) -> list[tuple[str, str]]: ...


class Watch:
    """This process's part in the watching, for as long as the process lives.

    limit_s: seconds of silence after which a process counts as dead. leave: ends this process; the other arguments are
    the process's own number and how many there are.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        num_processes: int,
        *,
        limit_s: float = HEARTBEAT_TIMEOUT_S,
        leave: Callable[[int], object] = os._exit,
        is_aborting: Callable[[], bool] = lambda: False,
    ) -> None:
        self.step = 0
        """last step that this process has done"""
        self.newest_saved: Callable[[], int | None] | None = None
        """the newest step that is saved, None: there is none; asked at the end, in a thread that may hang"""
        self._store, self._process, self._num_processes = store, process, num_processes
        self._limit_s, self._leave, self._is_aborting = limit_s, leave, is_aborting
        self._interval_s = min(1.0, limit_s / 5)
        self._state = CLOSED
        self._failure: dict[str, Any] | None = None
        self._failed_at = self._noticed_at = self._closed_at = 0.0
        self._peers = Peers(longest_s=2 * self._interval_s)
        self._outbox: dict[str, str] = {}
        self._heard: tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]] | None = None
        self._beats = self._exchanges = 0
        self._has_read = self._is_ending = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("jaxckpt-heartbeat", self._talk), ("jaxckpt-watch", self._judge_all))
        ]

    # ------------------------------------------------------------------------------------------ for the run

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def fail_with(self, error: BaseException) -> None:
        """`fail` with the text of `error`, unless that is how a program ends well."""
        if isinstance(error, SystemExit) and not error.code:
            return
        name = "" if isinstance(error, JaxckptError) else f"{type(error).__name__}: "
        text = f"failed: {name}{error}"[:_REASON_LENGTH]
        is_runtime = isinstance(error, jax.errors.JaxRuntimeError)
        self.fail(text, is_echo=is_runtime and any(word in text.lower() for word in _ECHOES))

    def open(self) -> None:
        """From here on this process must not fail or fall silent, and ends if another does."""
        self._state = OPEN
        self._kick()

    @property
    def is_open(self) -> bool:
        return self._state == OPEN

    def close(self) -> None:
        """This process's part is done: its silence is no failure any more, and another's failure does not end it."""
        self._state = CLOSED
        self._kick()

    def fail(self, reason: str, *, is_echo: bool = False) -> None:
        """Tells the others why this process ends, which it must do within seconds. Returns once they can know.

        `is_echo`: the error may come from another's death. Then this waits for the limit of silence, and does not return
        if that names one.
        """
        with self._changed:
            if self._failure is not None or self._is_ending:
                return
            self._failure = {**self._identity(), "reason": reason, "is_echo": is_echo}
        self._publish_failure()
        if is_echo:
            _say(
                f"process {self._process}: {reason}\nwaiting up to {self._limit_s:g} s to learn which process has left"
            )
            time.sleep(self._limit_s + 3 * self._interval_s)
            self._failure["is_echo"] = False
            self._publish_failure()
        self._failed_at = time.monotonic()
        if self._process == 0:
            self._wait(self._have_all_read, _READING_S)

    def leave(self, timeout_s: float) -> None:
        """Ends the watching once nobody has a run open any more; another's failure until then still ends this process."""
        self._closed_at = time.monotonic()
        self.close()
        if not self._wait(self._are_all_closed, timeout_s, is_urgent=False) and self._failure is None:
            self.fail(f"has waited {timeout_s:g} s for the others, which are not done, and leaves")
        # Twice: the exchange under way may have begun before the others were seen to be done.
        told = self._exchanges + 2
        self._wait(lambda: self._exchanges >= told, _READING_S if self._process == 0 else 0)
        self.stop()

    def stop(self) -> None:
        """Ends the threads, which must not run into the end of the interpreter."""
        self._is_ending = True
        self._kick()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2.0)

    # ------------------------------------------------------------------------------------------ talking

    def _talk(self) -> None:
        while not self._is_ending:
            try:
                self._exchange()
            except Exception:
                # The store is gone or overloaded: the judge sees that nothing new is heard, and for how long.
                time.sleep(self._interval_s / 4)
            with self._changed:
                if not self._outbox:
                    self._changed.wait(self._interval_s)

    def _exchange(self) -> None:
        # A directory for each, because only directories can be read without waiting.
        self._store.key_value_set(f"{_DIRECTORY}/beat/{self._process}/{self._process}", json.dumps(self._beat()), True)
        outbox, exchanges = dict(self._outbox), self._exchanges + 1
        for key, value in outbox.items():
            self._store.key_value_set(f"{_DIRECTORY}/{key}", value, True)
        beats = self._read("beat" if self._process == 0 else "beat/0")
        failures = self._read("failed")
        with self._changed:
            self._heard, self._exchanges = (beats, failures), exchanges
            self._outbox = {k: v for k, v in self._outbox.items() if outbox.get(k) != v}
            self._changed.notify_all()

    def _read(self, key: str) -> dict[int, dict[str, Any]]:
        """{process: its record} of the others."""
        found = self._store.key_value_dir_get(f"{_DIRECTORY}/{key}")
        records = {int(name.rpartition("/")[2]): json.loads(value) for name, value in found}
        return {process: record for process, record in records.items() if process != self._process}

    def _beat(self) -> dict[str, Any]:
        self._beats += 1
        state = ALL_CLOSED if self._process == 0 and self._are_all_closed() else self._state
        return {**self._identity(), "count": self._beats, "state": state, "has_read": self._has_read}

    def _identity(self) -> dict[str, Any]:
        return {"host": socket.gethostname(), "pid": os.getpid(), "step": self.step}

    def _publish_failure(self) -> None:
        key, value = f"failed/{self._process}", json.dumps(self._failure)
        with self._changed:
            self._outbox[key] = value
            self._changed.notify_all()
        self._wait(lambda: self._outbox.get(key) != value, _READING_S)

    def _kick(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, *, is_urgent: bool = True) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            with self._changed:
                if is_urgent:
                    self._changed.notify_all()  # the talking thread need not sleep out its interval
                self._changed.wait(0.05)
        return condition()

    def _have_all_read(self) -> bool:
        beats = self._peers.beats
        read = {
            i for i, beat in beats.items() if beat["has_read"] or beat["state"] != OPEN
        } | self._peers.failures.keys()
        return len(read) >= self._num_processes - 1  # one that has not spoken yet has not read either

    def _are_all_closed(self) -> bool:
        if self._state == OPEN:
            return False
        if self._process == 0:
            return self._peers.are_all_closed(self._num_processes - 1)
        beat = self._peers.beats.get(0)
        return beat is not None and beat["state"] == ALL_CLOSED

    # ------------------------------------------------------------------------------------------ judging

    def _judge_all(self) -> None:
        judged = time.monotonic()
        while not self._is_ending:
            time.sleep(min(0.2, self._interval_s / 2))
            now = time.monotonic()
            self.judge(now - judged)
            judged = now

    def judge(self, elapsed_s: float) -> None:
        """Looks at what was heard in the last `elapsed_s` and ends this process where another has failed."""
        with self._changed:
            heard, self._heard = self._heard, None
        if heard is None:
            self._peers.hear_nothing(elapsed_s)
        else:
            self._peers.hear(*heard, elapsed_s)
        now = time.monotonic()
        if self._failed_at and now - self._failed_at > _LEAVING_S:
            self._end(f"process {self._process} has failed and does not end: {(self._failure or {}).get('reason')}")
        is_bound = self._state == OPEN or self._closed_at > 0
        if not is_bound or (self._failure is not None and not self._failure["is_echo"]):
            return
        if failures := self._peers.confirmed():
            # First, because process 0 may have failed too, and the store with it is gone as soon as we have read why.
            self._noticed_at = self._noticed_at or now
            if now - self._noticed_at >= (_GRACE_S if self._failure is None else 0):
                self._end("\n".join(_told(i, record) for i, record in sorted(failures.items())))
        elif self._process == 0:
            self._report_silent()
        elif lost := self._lost_coordinator():
            self._end(lost)

    def _lost_coordinator(self) -> str | None:
        beat = self._peers.beats.get(0)
        name = f"process 0 ({_where(beat)}), which coordinates the run," if beat else "process 0"
        last = f" Its last finished step was {beat['step']}." if beat else ""
        if silent := self._peers.silent(self._limit_s):
            return f"{name} has been silent for {silent[0]:.0f} s.{last}"
        # Nothing is judged by a store that answers late, only by one whose client JAX has given up.
        if self._peers.store_silent_s > 1.5 * self._interval_s and self._is_aborting():
            return f"{name} is gone: the connection to it broke.{last}"
        if self._peers.store_silent_s > self._limit_s:
            return f"{name} has not answered for {self._peers.store_silent_s:.0f} s.{last}"
        return None

    def _report_silent(self) -> None:
        for process, seconds in self._peers.silent(self._limit_s).items():
            beat = self._peers.beats[process]
            reason = f"has been silent for {seconds:.0f} s (distributed.heartbeat_timeout_s allows {self._limit_s:g} s)"
            record = {key: beat[key] for key in ("host", "pid", "step")} | {"reason": reason, "is_echo": False}
            with self._changed:
                self._outbox.setdefault(f"failed/{process}", json.dumps(record))
                self._changed.notify_all()

    def _end(self, what: str) -> None:
        _say(what)  # at once: what is saved may be hard to find out
        _say(f"{self._saved()} Start the same command again on all processes to continue from there.")
        self._has_read = True
        if self._process == 0:
            self._wait(self._have_all_read_from_here, _READING_S)
        elif self._peers.failures:
            # Process 0 waits to hear this, so that the store does not end, and JAX with it, before this process does.
            told = self._exchanges + 2
            self._wait(lambda: self._exchanges >= told, 1.0)
        self._is_ending = True
        self._leave(1)

    def _have_all_read_from_here(self) -> bool:
        # The judge itself is here, so it takes in what is heard meanwhile.
        if self._heard is not None:
            (beats, failures), self._heard = self._heard, None
            self._peers.hear(beats, failures, 0.0)
        return self._have_all_read()

    def _saved(self) -> str:
        answer: list[str] = []

        def ask(newest_saved: Callable[[], int | None]) -> None:
            step = newest_saved()
            answer.append("There is no snapshot yet." if step is None else f"The newest snapshot is step {step}.")

        if self.newest_saved is not None:
            try:
                asking = threading.Thread(target=ask, args=(self.newest_saved,), daemon=True)
                asking.start()
                asking.join(3.0)
            except RuntimeError:  # no new thread while the interpreter ends
                pass
        return answer[0] if answer else "What is saved is untouched."


_watches: list[Watch] = []
"""the one of this process, which lives as long as the store that JAX keeps for the process"""


def start(
    *, limit_s: float = HEARTBEAT_TIMEOUT_S, newest_saved: Callable[[], int | None] | None = None
) -> Watch | None:
    """The watch of this process, open; None in a run of one process. Later calls give the same one, its limit unchanged."""
    process, num_processes = process_number()
    if num_processes == 1:
        return None
    if not _watches:
        is_held = process > 0 and hold_aborts()  # process 0 hosts what JAX aborts for
        watch = Watch(
            client(),
            process,
            num_processes,
            limit_s=limit_s,
            is_aborting=is_aborting if is_held else lambda: False,
        )
        _watches.append(watch)
        watch.open()  # before its first word, or it would count as done
        watch.start()
        atexit.register(_at_exit, watch)  # after JAX's own, so before it: that one waits for the others
    _watches[0].newest_saved = newest_saved or _watches[0].newest_saved
    _watches[0].open()
    return _watches[0]


def current() -> Watch | None:
    """The watch that `start` has made in this process, if it has."""
    return _watches[0] if _watches else None


def _at_exit(watch: Watch) -> None:
    error = getattr(sys, "last_value", None)
    if not watch.is_open or error is None:
        watch.leave(LEAVING_TOGETHER_S)
        return
    watch.fail_with(error)
    # JAX's own way out would wait minutes for the others, which end now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _told(process: int, record: dict[str, Any]) -> str:
    return f"process {process} ({_where(record)}) {record['reason'].rstrip('.')}. Its last finished step was {record['step']}."


def _where(record: dict[str, Any]) -> str:
    return f"host {record['host']}, pid {record['pid']}"


def _say(text: str) -> None:
    # Not through sys.stderr, which another thread may hold while it hangs.
    os.write(2, f"\n{text}\n".encode())
