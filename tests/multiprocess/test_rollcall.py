"""Who has come, before JAX is joined: over real sockets, in threads."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from groups import free_port
from jaxckpt.distributed.rollcall import call_roll
from jaxckpt.errors import DistributedError

pytestmark = pytest.mark.filterwarnings("error")


def call(executor: ThreadPoolExecutor, port: int, num_processes: int, process: int, timeout_s: float) -> Future[None]:
    return executor.submit(call_roll, f"127.0.0.1:{port}", num_processes, process, timeout_s=timeout_s)


def test_all_that_come_go_on_whatever_their_order() -> None:
    port = free_port()
    with ThreadPoolExecutor(4) as executor:
        calls = []
        for process in (2, 0, 3, 1):
            calls.append(call(executor, port, 4, process, 20))
            time.sleep(0.2)
        for future in calls:
            future.result()


def test_those_that_do_not_come_are_named_on_every_process_within_the_limit() -> None:
    port, started = free_port(), time.monotonic()
    with ThreadPoolExecutor(2) as executor:
        for future in [call(executor, port, 5, process, 1.0) for process in (0, 2)]:
            with pytest.raises(DistributedError, match=r"processes 1, 3, 4 did not come \(limit 1 s\)"):
                future.result()
    assert time.monotonic() - started < 3


def test_a_missing_process_0_is_named() -> None:
    with pytest.raises(DistributedError, match="process 0 did not come"):
        call_roll(f"127.0.0.1:{free_port()}", 2, 1, timeout_s=0.5)


def test_two_processes_of_one_number_are_refused_on_all_at_once() -> None:
    port, started = free_port(), time.monotonic()
    with ThreadPoolExecutor(3) as executor:
        for future in [call(executor, port, 3, process, 30) for process in (0, 1, 1)]:
            with pytest.raises(DistributedError, match="two processes say that they are process 1"):
                future.result()
    assert time.monotonic() - started < 10


def test_another_number_of_processes_is_refused_on_all_at_once() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as executor:
        for future in [call(executor, port, 2, 0, 30), call(executor, port, 3, 1, 30)]:
            with pytest.raises(DistributedError, match="process 1 .* expects 3 processes, process 0 expects 2"):
                future.result()


def test_a_process_that_dies_while_it_waits_may_come_again_and_strangers_do_not_count() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as executor:
        first = call(executor, port, 3, 0, 20)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                time.sleep(0.05)
        connection.sendall(b'{"process": 1, "num_processes": 3}\n')
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            connection.close()
        others = [call(executor, port, 3, process, 20) for process in (1, 2)]
        for future in [first, *others]:
            future.result()


def test_process_0_waits_for_the_port_of_the_run_before() -> None:
    port = free_port()
    with socket.create_server(("", port)) as before, ThreadPoolExecutor(2) as executor:
        calls = [call(executor, port, 2, process, 20) for process in (0, 1)]
        threading.Timer(1.0, before.close).start()
        for future in calls:
            future.result()
