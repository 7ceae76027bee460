"""One of two real processes dies, raises, stays away or is slow: what the other says and does, and what is left on disk."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from groups import free_port, kill, member, run_two, start_two
from jaxckpt.snapshot.steps import committed_steps
from runs import assert_same_run, command, finish, start, steps_done, wait_for

LIMIT_S = 5
SHORT = f"distributed.heartbeat_timeout_s={LIMIT_S}"
# Two cores carry this run, its peer and the tests: what takes a second may take some here.
SLACK_S = 25


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("two_processes")
    run_two(run_dir)
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path, uninterrupted: Path) -> Path:
    """A new one, whose programs are compiled: the limits of these tests do not count a compiler's time."""
    return tmp_path


def ended(process: subprocess.Popen[str], *, within_s: float) -> str:
    """The output of a run that must have failed, by itself, within the limit."""
    started = time.monotonic()
    output = finish(process, expect=1)
    assert time.monotonic() - started < within_s, output
    return output


def is_saving(run_dir: Path) -> bool:
    snapshots = run_dir / "snapshots"
    return snapshots.is_dir() and any(name.startswith("step_") and "tmp" in name for name in os.listdir(snapshots))


@pytest.mark.parametrize("moment", ["between saves", "while saving"])
def test_a_killed_process_is_named_within_the_limit_and_the_run_goes_on_bit_for_bit(
    moment: str, run_dir: Path, uninterrupted: Path
) -> None:
    processes = start_two(run_dir, SHORT)
    try:
        wait_for(lambda: steps_done(run_dir) >= 7, processes[0], "step 7")
        if moment == "while saving":
            wait_for(lambda: is_saving(run_dir), processes[0], "a save")
        os.killpg(processes[1].pid, signal.SIGKILL)
        output = ended(processes[0], within_s=LIMIT_S + SLACK_S)
    finally:
        kill(processes)
    assert f"process 1 (host {socket.gethostname()}, pid {processes[1].pid}) has been silent for" in output
    saved = committed_steps(run_dir / "snapshots")
    assert f"The newest snapshot is step {saved[-1]}. Start the same command again on all processes" in output
    run_two(run_dir)
    assert_same_run(uninterrupted, run_dir)


def test_the_death_of_process_0_is_named_though_the_store_dies_with_it(run_dir: Path, uninterrupted: Path) -> None:
    processes = start_two(run_dir, SHORT)
    try:
        wait_for(lambda: steps_done(run_dir) >= 7, processes[0], "step 7")
        os.killpg(processes[0].pid, signal.SIGKILL)
        output = ended(processes[1], within_s=LIMIT_S + SLACK_S)
    finally:
        kill(processes)
    # JAX says that something died; the last word is ours.
    last = output[output.rindex("process 0 (host") :]
    assert f"pid {processes[0].pid}), which coordinates the run, " in last
    assert f"The newest snapshot is step {committed_steps(run_dir / 'snapshots')[-1]}." in last
    run_two(run_dir)
    assert_same_run(uninterrupted, run_dir)


def test_a_save_that_raises_on_one_process_is_named_on_the_other_and_commits_nothing(
    run_dir: Path, uninterrupted: Path
) -> None:
    # The default limit of silence: nobody may need it here.
    processes = start_two(run_dir)
    try:
        wait_for(lambda: steps_done(run_dir) >= 7, processes[0], "step 7")
        (run_dir / "snapshots").rename(run_dir / "gone")
        outputs = [ended(process, within_s=SLACK_S) for process in processes]
    finally:
        kill(processes)
    assert "could not be saved" in outputs[0] and "No such file" in outputs[0], outputs[0]
    assert "process 0" in outputs[1] and "No such file" in outputs[1], outputs[1]
    shutil.rmtree(run_dir / "snapshots", ignore_errors=True)
    (run_dir / "gone").rename(run_dir / "snapshots")
    run_two(run_dir)
    assert_same_run(uninterrupted, run_dir)


@pytest.mark.parametrize("raising", [0, 1])
def test_a_process_that_raises_at_the_start_is_named_with_its_reason(raising: int, run_dir: Path) -> None:
    port = free_port()
    processes = [
        start(member(run_dir, i, port, *(("data.files=[nowhere.txt]",) if i == raising else ()))) for i in range(2)
    ]
    try:
        output = ended(processes[1 - raising], within_s=60 + SLACK_S)
        finish(processes[raising], expect=2)
    finally:
        kill(processes)
    assert f"process {raising} (host" in output and "failed: " in output and "nowhere.txt" in output, output


def test_a_process_that_never_comes_is_named_by_each_that_came(tmp_path: Path) -> None:
    port = free_port()
    overrides = ("distributed.timeout_s=8", "distributed.num_processes=4", "mesh.cpu_devices=2")
    here = [
        start(
            command(
                tmp_path, f"distributed.coordinator_address=127.0.0.1:{port}", f"distributed.process_id={i}", *overrides
            )
        )
        for i in (0, 2)
    ]
    for process in here:
        output = finish(process, expect=1)
        assert "processes 1, 3 did not come (limit 8 s)" in output and f"127.0.0.1:{port}" in output, output


def test_a_process_that_stands_still_for_less_than_the_limit_is_waited_for(run_dir: Path, uninterrupted: Path) -> None:
    processes = start_two(run_dir, "distributed.heartbeat_timeout_s=10")
    try:
        for number, step in ((1, 4), (0, 10)):
            wait_for(lambda: steps_done(run_dir) >= step, processes[0], f"step {step}")
            os.killpg(processes[number].pid, signal.SIGSTOP)
            time.sleep(3)
            os.killpg(processes[number].pid, signal.SIGCONT)
        for process in processes:
            finish(process)
    finally:
        kill(processes)
    assert_same_run(uninterrupted, run_dir)


def test_a_second_signal_ends_one_process_at_once_and_the_other_learns_why(run_dir: Path) -> None:
    processes = start_two(run_dir, "steps=100000", "snapshots.every=100000")
    try:
        wait_for(lambda: steps_done(run_dir) >= 7, processes[0], "step 7")
        os.killpg(processes[0].pid, signal.SIGSTOP)  # so that the first signal cannot be obeyed
        processes[1].send_signal(signal.SIGTERM)
        time.sleep(0.5)
        processes[1].send_signal(signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(processes[0].pid, signal.SIGCONT)
        output = ended(processes[0], within_s=SLACK_S)
        mine = finish(processes[1], expect=75)
    finally:
        kill(processes)
    assert "SIGTERM again: stopping at once; the steps since the newest snapshot are lost" in mine, mine
    assert "process 1" in output and "was stopped at once by a second SIGTERM" in output, output


def test_a_signal_while_compiling_stops_both_with_nothing_trained(tmp_path: Path) -> None:
    processes = start_two(tmp_path, is_cold=True)
    try:
        wait_for(lambda: (tmp_path / "compilation_cache").is_dir(), processes[0], "the compiler")
        processes[1].send_signal(signal.SIGTERM)
        outputs = [finish(process, expect=75) for process in processes]
    finally:
        kill(processes)
    assert "SIGTERM: stopping where all processes can" in outputs[1], outputs[1]
    assert "stopped; nothing was trained and nothing is saved yet" in outputs[0], outputs[0]
    assert steps_done(tmp_path) == 0 and committed_steps(tmp_path / "snapshots") == []


def test_a_disk_that_is_full_for_one_process_is_named_on_both_and_commits_nothing(tmp_path: Path) -> None:
    # Leaves that are large enough for shards of their own, half of them on process 1.
    large = ("mesh.data=1", "mesh.fsdp=8", "model.d_ff=1024", "eval.every=null")
    processes = start_two(tmp_path, "steps=100000", *large)
    try:
        wait_for(lambda: committed_steps(tmp_path / "snapshots") != [], processes[0], "a snapshot")
        resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (4096, 4096))
        outputs = [ended(process, within_s=SLACK_S) for process in processes]
    finally:
        kill(processes)
    for output in outputs:
        assert "could not be saved" in output and "File too large" in output, outputs
    assert "process 1 (host" in outputs[0], outputs[0]
    saved = committed_steps(tmp_path / "snapshots")[-1]
    assert f"newest good snapshot is step {saved}" in outputs[0], outputs[0]
    run_two(tmp_path, f"steps={saved + 6}", *large)
    assert committed_steps(tmp_path / "snapshots")[-1] == saved + 6
