"""JAX aborts a process as soon as the coordinator's process is gone, and its own callback for that cannot be used from
Python (jaxlib 0.10 to 0.12: std::bad_cast). These hold such an abort for seconds, so that a message can say why.
"""

import ctypes
import signal
from pathlib import Path

_THREADS = Path("/proc/self/task")


def hold_aborts() -> bool:
    """Lets a thread that aborts sleep for six seconds first; whether that could be set up.

    The handler is the C library's own `sleep`, which a signal handler may call: it gets the signal's number, 6, and
    needs no Python, whose lock may be taken. An abort that nobody explains meanwhile goes on as before.
    """
    if not _THREADS.is_dir():
        return False
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    previous = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if previous:  # somebody else's, such as faulthandler's
        libc.signal(signal.SIGABRT, previous)
        return False
    return True


def is_aborting() -> bool:
    """Whether a thread of this process sleeps in that handler: a signal is blocked while it is handled."""
    return any(_blocks_abort(thread / "status") for thread in _THREADS.iterdir())


def _blocks_abort(status: Path) -> bool:
    try:
        blocked = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk:"))
    except (OSError, StopIteration):  # the thread has just ended
        return False
    return bool(int(blocked.split()[1], 16) >> (signal.SIGABRT - 1) & 1)
