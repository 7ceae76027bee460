"""A thread that reads ahead, and waiting for it so that a stop is obeyed."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("jaxckpt")

_POLL_S = 0.1
_ROOM_POLL_S = 0.02
_CLOSE_S = 1.0
_TELL_EVERY_S = 60
Arrival = tuple[Any, BaseException | None]
"""what a read gave, or the error that ended it"""


def wait_for(get: Callable[[float], Any], what: str, should_stop: Callable[[], bool]) -> Any:
    """What `get(timeout_s)` gives once it is not None; None once `should_stop` says yes while nothing has come.

    Says every minute that it still waits for `what`.
    """
    began, told = time.monotonic(), 0
    while (arrival := get(_POLL_S)) is None and not should_stop():
        if (waited := int(time.monotonic() - began) // _TELL_EVERY_S) > told:
            told = waited
            log.warning("waiting for %s since %d s", what, told * _TELL_EVERY_S)
    return arrival


class ReadAhead:
    """A thread that takes batches from an iterator and keeps `count` of them, or the error that ended them, at hand."""

    def __init__(self, batches: Any, count: int):
        self._batches = batches
        self._arrived: queue.Queue[Arrival] = queue.Queue(max(1, count))
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="jaxckpt-read-ahead", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Arrival | None:
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def leave(self) -> None:
        """Leaves the thread to itself: it may sit in a read that never ends, and does not keep the process from ending."""
        self._is_left = True

    def close(self) -> None:
        """Ends the thread and the iterator; a read that does not end within a second is left to itself."""
        self._is_left = True
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._is_left:
                try:
                    arrival = next(self._batches), None
                except BaseException as e:
                    arrival = None, e
                self._put(arrival)
                if arrival[1] is not None:
                    return
        finally:
            self._batches.close()  # Grain's iterators belong to the thread that reads from them

    def _put(self, arrival: Arrival) -> None:
        while not self._is_left:
            try:
                return self._arrived.put(arrival, timeout=_ROOM_POLL_S)
            except queue.Full:
                continue
