"""Stop signals: the first asks the run to stop when it next can, the second stops at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPED = 75
"""exit code of a run that stopped early and can be resumed (EX_TEMPFAIL of sysexits.h)"""

SAME_S = 0.3
"""in which a signal that comes again is still the first one: GNU timeout, uv run and others send a process what its group has
got already, and nobody decides anew so soon"""

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class StopRequest:
    """True once a signal has asked to stop. Whoever works keeps `consequence` and `before_leaving` right."""

    signal_name: str | None = None
    consequence: str = "stopping before anything is trained"
    """what a first signal leads to now, for the one who sent it"""
    loss: str = "nothing had been trained yet"
    """what a second signal costs now"""
    before_leaving: Callable[[str], object] = lambda reason: None
    """called with the reason when a second signal ends the process; it must return within seconds"""
    received_at: float = 0.0
    """by `time.monotonic`"""

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While open, SIGTERM and SIGINT set the request; a second one exits with code 75 at once, saving nothing.

    A thread does this, not the signal handler: Python runs handlers in the main thread alone, and that may sit in a
    compiler, in a wait for another process or in an import for minutes.
    """
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_listen, args=(reader, request), name="jaxckpt-signals", daemon=True)
    listener.start()
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The numbers go through the pipe; a Python handler must exist for them to do so.
    previous = {number: signal.signal(number, _ignore) for number in _NUMBERS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        os.close(writer)
        listener.join()
        os.close(reader)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _listen(reader: int, request: StopRequest) -> None:
    while numbers := os.read(reader, 1):
        if numbers[0] in _NUMBERS:
            _receive(signal.Signals(numbers[0]).name, request)


def _receive(name: str, request: StopRequest) -> None:
    if request.signal_name == name and time.monotonic() - request.received_at < SAME_S:
        return
    if request:
        _say(f"{name} again: stopping at once; {request.loss}")
        request.before_leaving(f"was stopped at once by a second {name}")
        os._exit(STOPPED)
    request.signal_name, request.received_at = name, time.monotonic()
    _say(f"{name}: {request.consequence} (once more: stop at once)")


def _say(text: str) -> None:
    # Not through sys.stderr, which the interrupted code may be in the middle of using.
    os.write(2, f"\n{text}\n".encode())
