"""Stop signals at moments in which the main thread cannot answer, or has only just begun; each in a real process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxckpt.distributed.signals import stop_on_signals
from runs import ROOT, command, finish, start

BUSY = """
import hashlib, os, time
from jaxckpt.distributed.signals import stop_on_signals
with stop_on_signals() as stop:
    stop.consequence, stop.loss = "it will stop", "the work is lost"
    stop.before_leaving = lambda reason: os.write(2, reason.encode())
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # minutes in C, without the interpreter
"""


def caught(pid: int) -> int:
    """The mask of signals for which the process has handlers; 0 before it runs."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_signals_are_heard_while_the_main_thread_is_in_c_code() -> None:
    busy = start([sys.executable, "-c", BUSY])
    assert busy.stdout is not None and busy.stdout.readline() == "busy\n"
    started = time.monotonic()
    busy.send_signal(signal.SIGTERM)
    assert busy.stdout.readline() == "\n"
    assert busy.stdout.readline() == "SIGTERM: it will stop (once more: stop at once)\n"
    busy.send_signal(signal.SIGINT)
    output = finish(busy, expect=75)
    assert "SIGINT again: stopping at once; the work is lost\nwas stopped at once by a second SIGINT" in output
    assert time.monotonic() - started < 20


TWICE = """
import os, signal, time
from jaxckpt.distributed.signals import SAME_S, stop_on_signals
with stop_on_signals() as stop:
    for again in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop:
            time.sleep(0.001)
    time.sleep(2 * SAME_S)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_signal_that_a_wrapper_sends_a_second_time_is_the_first_one() -> None:
    output = finish(start([sys.executable, "-c", TWICE]), expect=75)
    assert output.index("once more: stop at once") < output.index("still here") < output.index("SIGTERM again")


def test_a_signal_during_the_imports_stops_the_command_with_its_exit_code(tmp_path: Path) -> None:
    process = start(command(tmp_path / "run"), is_cold=True)
    wait_for(lambda: bool(caught(process.pid) >> (signal.SIGTERM - 1) & 1))
    process.send_signal(signal.SIGTERM)
    output = finish(process, expect=75)
    assert "SIGTERM: stopping before anything is trained" in output
    assert "stopped before the run was opened; what was saved before is untouched" in output
    assert not (tmp_path / "run").exists()


def test_handlers_and_the_wakeup_descriptor_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    descriptors = len(os.listdir("/proc/self/fd"))
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: bool(stop))
        assert stop.signal_name == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_bad_configuration_is_still_refused_without_jax() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxckpt.train", "--config", "nowhere.yaml"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 2 and "nowhere.yaml" in done.stderr
    assert "| jax\n" not in done.stderr and "jaxckpt.train" not in done.stdout
