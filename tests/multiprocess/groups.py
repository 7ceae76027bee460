"""Starting and ending runs of several real processes on this machine."""

import os
import signal
import socket
import subprocess
from pathlib import Path

from runs import TIMEOUT_S, command, finish, start


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def member(run_dir: Path, process: int, port: int, *overrides: str, config: Path | None = None) -> list[str]:
    """The command of one of two processes of four devices each."""
    group = (f"distributed.coordinator_address=127.0.0.1:{port}", "distributed.num_processes=2", "mesh.cpu_devices=4")
    return command(run_dir, *group, f"distributed.process_id={process}", *overrides, config=config)


def start_two(
    run_dir: Path, *overrides: str, config: Path | None = None, is_cold: bool = False
) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [start(member(run_dir, process, port, *overrides, config=config), is_cold=is_cold) for process in range(2)]


def kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=TIMEOUT_S)


def run_two(run_dir: Path, *overrides: str, expect: int = 0, config: Path | None = None) -> list[str]:
    processes = start_two(run_dir, *overrides, config=config)
    try:
        return [finish(process, expect=expect) for process in processes]
    finally:
        kill(processes)
