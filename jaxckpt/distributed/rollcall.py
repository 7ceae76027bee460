"""Finds out which processes have come, before JAX is joined: JAX itself aborts at its limit and names nobody.

Process 0 answers on the coordinator's own port, which JAX takes over afterwards, so no other port must be open. Each
other process sends one line of JSON, its number and how many it expects; the answer, one line too, says whether all are here.
"""

import errno
import json
import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

from jaxckpt.errors import DistributedError

_LINE_BYTES = 4096
_LINE_TIMEOUT_S = 5.0
_RETRY_S = 0.1
_PREDECESSOR_S = 15.0
"""for the run before, which may be just about to end, to give the port free"""


def call_roll(address: str, num_processes: int, process: int, *, timeout_s: float) -> None:
    """Returns when all processes are here. Raises DistributedError on each that came, naming those that did not in
    `timeout_s`, or at once where two say the same number or do not expect the same number of processes."""
    deadline = time.monotonic() + timeout_s
    if process == 0:
        problem = _answer(address, num_processes, deadline)
    else:
        problem = _report(address, num_processes, process, deadline, timeout_s)
    if problem:
        raise DistributedError(
            f"process {process} of {num_processes}, coordinator {address}: {problem} (limit {timeout_s:g} s). Every process "
            "must be started with the same distributed.coordinator_address and distributed.num_processes and its own "
            "distributed.process_id, and must reach process 0 at that address."
        )


def _answer(address: str, num_processes: int, deadline: float) -> str:
    """Process 0's part; what is wrong, or ''."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(address, deadline))
        except OSError as e:
            return f"process 0 cannot listen there: {e}"
        here: dict[int, socket.socket] = {}
        problem = ""
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        while not problem and len(here) < num_processes - 1:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                problem = _missing(set(range(1, num_processes)) - here.keys())
            for key, _ in selector.select(max(0.0, left_s)):
                if key.fileobj is server:
                    connection, caller = server.accept()
                    stack.enter_context(connection)
                    problem = problem or _admit(connection, caller[0], num_processes, here)
                    if connection in here.values():
                        selector.register(connection, selectors.EVENT_READ)
                else:  # nobody says a second thing: it has died, and may come again
                    selector.unregister(key.fileobj)
                    here = {process: c for process, c in here.items() if c is not key.fileobj}
        for connection in here.values():
            _send(connection, {"problem": problem})
    return problem


def _listen(address: str, deadline: float) -> socket.socket:
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)  # JAX's own way to say where to listen
    port, is_dual = int(bind.rpartition(":")[2]), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    deadline = min(deadline, time.monotonic() + _PREDECESSOR_S)
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual, backlog=1024)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _admit(connection: socket.socket, caller: str, num_processes: int, here: dict[int, socket.socket]) -> str:
    """Enters the caller in `here`, unless it is a stranger; what is wrong with it, or ''."""
    said = _receive(connection)
    if said is None or not isinstance(said.get("process"), int) or not isinstance(said.get("num_processes"), int):
        return ""
    process, expected = said["process"], said["num_processes"]
    if expected != num_processes:
        problem = f"process {process} ({caller}) expects {expected} processes, process 0 expects {num_processes}"
    elif not 0 < process < num_processes or process in here:
        problem = f"two processes say that they are process {process}; the second is on {caller}"
    else:
        here[process] = connection
        return ""
    _send(connection, {"problem": problem})
    return problem


def _report(address: str, num_processes: int, process: int, deadline: float, timeout_s: float) -> str:
    """The part of a process that is not 0; what is wrong, or ''."""
    host, _, port = address.rpartition(":")
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, left_s)) as connection:
                _send(connection, {"process": process, "num_processes": num_processes})
                # Process 0 waits for the others from the moment it comes itself.
                answer = _receive(connection, timeout_s=timeout_s + _LINE_TIMEOUT_S)
            if answer is not None and isinstance(answer.get("problem"), str):
                return answer["problem"]
        except OSError:  # not there yet
            pass
        time.sleep(_RETRY_S)
    return _missing({0})


def _missing(processes: set[int]) -> str:
    names = [str(i) for i in sorted(processes)]
    shown = names[:20] + ([f"{len(names) - 20} more"] if len(names) > 20 else [])
    return f"process{'es' if len(names) > 1 else ''} {', '.join(shown)} did not come"


def _send(connection: socket.socket, record: dict[str, Any]) -> None:
    with suppress(OSError):  # one that has gone is found by the next wait
        connection.sendall(json.dumps(record).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float = _LINE_TIMEOUT_S) -> dict[str, Any] | None:
    """One line of JSON from a caller, None from one that says anything else."""
    deadline, line = time.monotonic() + timeout_s, b""
    try:
        while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            received = connection.recv(_LINE_BYTES)
            if not received:
                return None
            line += received
        record = json.loads(line)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
