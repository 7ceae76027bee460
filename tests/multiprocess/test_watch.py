"""Who is named, by whom, and who is left alone: several watches over one store, in one process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import pytest

from jaxckpt.distributed.peers import CLOSED, OPEN, Peers
from jaxckpt.distributed.watch import Watch

LIMIT_S = 0.5


class Shared:
    """A key-value store; `cut` processes are not served any more, like those of a machine that is gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.cut: set[int] = set()
        self.is_hanging = threading.Event()
        self.lock = threading.Lock()

    def of(self, process: int) -> "Client":
        return Client(self, process)


class Client:
    def __init__(self, shared: Shared, process: int) -> None:
        self.shared, self.process = shared, process

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._serve()
        with self.shared.lock:
            self.shared.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._serve()
        with self.shared.lock:
            return [(k, v) for k, v in self.shared.values.items() if k.startswith(key + "/")]

    def _serve(self) -> None:
        while self.shared.is_hanging.is_set():
            time.sleep(0.01)
        if self.process in self.shared.cut:
            raise RuntimeError("UNAVAILABLE")


class Ended(list[int]):
    """The processes that were ended, in order."""

    def leaver(self, process: int) -> Callable[[int], None]:
        def leave(exit_code: int) -> None:
            assert exit_code == 1
            self.append(process)

        return leave


@contextmanager
def watching(shared: Shared, ended: Ended, count: int = 3) -> Iterator[list[Watch]]:
    watches = [Watch(shared.of(i), i, count, limit_s=LIMIT_S, leave=ended.leaver(i)) for i in range(count)]
    for watch in watches:
        watch.newest_saved = lambda: 40
        watch.open()
        watch.start()
    time.sleep(LIMIT_S)
    try:
        yield watches
    finally:
        shared.is_hanging.clear()
        for watch in watches:
            watch.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_process_is_named_on_all_others(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        watches[2].step = 41
        time.sleep(LIMIT_S)
        shared.cut.add(2)
        wait_for(lambda: set(ended) >= {0, 1})
    said = capfd.readouterr().err
    assert said.count("process 2 (host ") >= 2 and "has been silent for" in said
    assert "Its last finished step was 41." in said and "The newest snapshot is step 40." in said
    assert "process 0 has failed" not in said and "process 1 (" not in said


def test_a_reason_reaches_all_others_at_once_and_each_ends(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        watches[1].fail_with(ValueError("the disk is full"))
        wait_for(lambda: sorted(ended) == [0, 2])
    assert capfd.readouterr().err.count("failed: ValueError: the disk is full. Its last finished step was 0.") == 2


def test_process_0_stays_until_the_others_have_read_why_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        watches[0].fail("failed: no room")
        shared.cut |= {0, 1, 2}  # the store ends with it
        wait_for(lambda: sorted(ended) == [1, 2])
    assert capfd.readouterr().err.count("failed: no room") == 2


def test_process_0_waits_for_one_that_has_not_spoken_yet(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    first, late = (Watch(shared.of(i), i, 2, limit_s=LIMIT_S, leave=ended.leaver(i)) for i in range(2))
    first.open()
    first.start()
    failing = threading.Thread(target=first.fail, args=("failed: no such file",))
    failing.start()
    time.sleep(1)
    late.open()
    late.start()
    failing.join()
    shared.cut |= {0, 1}
    wait_for(lambda: ended == [1])
    first.stop()
    late.stop()
    assert "failed: no such file" in capfd.readouterr().err


def test_who_fails_too_is_not_ended_by_another(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        failing = [threading.Thread(target=watch.fail, args=("failed: the loss is not finite",)) for watch in watches]
        for thread in failing:
            thread.start()
            time.sleep(LIMIT_S)
        for thread in failing:
            thread.join()
        time.sleep(3)  # longer than anybody is given for an error of his own
    assert ended == []


def test_the_echo_of_a_death_does_not_hide_the_dead(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        shared.cut.add(2)
        error = jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed: Connection closed by peer")
        for watch in watches[:2]:
            threading.Thread(target=watch.fail_with, args=(error,), daemon=True).start()
        wait_for(lambda: set(ended) >= {0, 1})
    said = capfd.readouterr().err
    assert said.count("process 2 (host ") >= 2 and "process 1 (host" not in said


def test_an_echo_that_nobody_explains_is_a_failure_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        watches[1].fail_with(jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed: Connection closed by peer"))
        wait_for(lambda: sorted(ended) == [0, 2])
    assert "process 1 (host" in capfd.readouterr().err


def test_a_lost_coordinator_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        shared.is_hanging.set()
        wait_for(lambda: set(ended) == {1, 2})
    said = capfd.readouterr().err
    assert said.count("which coordinates the run, has not answered for") == 2
    assert watches[0] and "process 1" not in said and "process 2" not in said


def test_a_store_that_hangs_for_less_than_the_limit_costs_nothing() -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended):
        for _ in range(3):
            shared.is_hanging.set()
            time.sleep(LIMIT_S * 0.7)
            shared.is_hanging.clear()
            time.sleep(LIMIT_S / 2)
    assert ended == []


def test_one_that_is_done_may_be_silent_and_is_not_ended() -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        watches[1].close()
        time.sleep(LIMIT_S)
        shared.cut.add(1)
        time.sleep(4 * LIMIT_S)
        assert ended == []
        watches[2].fail("failed: later")
        wait_for(lambda: ended == [0])


def test_all_leave_together() -> None:
    shared, ended = Shared(), Ended()
    with watching(shared, ended) as watches:
        leaving = [threading.Thread(target=watch.leave, args=(20,)) for watch in watches]
        for thread in leaving[:2]:
            thread.start()
        time.sleep(2 * LIMIT_S)
        assert leaving[0].is_alive() and leaving[1].is_alive(), "left before process 2 was done"
        leaving[2].start()
        for thread in leaving:
            thread.join(10)
            assert not thread.is_alive()
    assert ended == []


def beat(count: int, state: str = OPEN) -> dict[int, dict[str, object]]:
    return {1: {"count": count, "state": state}}


def test_time_in_which_this_process_itself_stood_still_is_nobody_elses_silence() -> None:
    peers = Peers(longest_s=2.0)
    peers.hear(beat(1), {}, 0.0)
    peers.hear(beat(1), {}, 1000.0)
    assert peers.silent_s[1] == 2.0 and not peers.silent(10.0)
    for _ in range(10):
        peers.hear(beat(1), {}, 1.0)
    assert set(peers.silent(10.0)) == {1}
    peers.hear(beat(2), {}, 1.0)
    assert not peers.silent(10.0)


def test_silence_of_the_store_is_not_silence_of_a_process() -> None:
    peers = Peers(longest_s=2.0)
    peers.hear(beat(1), {}, 0.0)
    for _ in range(30):
        peers.hear_nothing(1.0)
    assert peers.store_silent_s == 30.0
    peers.hear(beat(1), {}, 1.0)
    assert peers.store_silent_s == 0.0 and not peers.silent(10.0)


def test_a_process_that_has_never_spoken_or_is_done_is_not_silent() -> None:
    peers = Peers(longest_s=2.0)
    assert not peers.silent(0.0)
    for _ in range(10):
        peers.hear(beat(1, CLOSED), {}, 1.0)
    assert not peers.silent(5.0)
