"""Stop signals: the first asks the run to stop after a step, the second stops at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPED = 75
"""exit code of a run that stopped early and can be resumed (EX_TEMPFAIL of sysexits.h)"""


@dataclass
class StopRequest:
    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While open, SIGTERM and SIGINT set the request; a second one exits with code 75 at once, saving nothing."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if request:
            _say(f"{name} again: stopping at once; what was not saved is lost")
            os._exit(STOPPED)
        request.signal_name = name
        _say(f"{name}: saving after this step, then stopping (once more: stop at once)")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    # Not through sys.stderr, which the interrupted code may be in the middle of using.
    os.write(2, f"\n{text}\n".encode())
