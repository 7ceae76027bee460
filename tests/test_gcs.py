"""Steps, the lock and the metrics of a run directory on gs://, against a real server that is slow, fails and is cut off."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gcs import BUCKET
from jaxckpt.errors import DataError, SaveError, SnapshotError
from jaxckpt.observe.metrics import MetricsFile, read_metrics
from jaxckpt.snapshot import gcs as objects
from jaxckpt.snapshot import paths, steps
from jaxckpt.snapshot.lock import RunLock

MANIFEST = '{"files":{}}'


@pytest.fixture
def name(request):
    """A prefix of the bucket for one test."""
    return request.node.name.replace("[", "-").replace("]", "")


@pytest.fixture
def root(gcs, name):
    return paths.resolve(f"gs://{BUCKET}/{name}")


def make(root, step, *, mark=True, files=3, **metrics):
    directory = steps.step_path(root, step)
    for i in range(files):
        objects.write(os.fspath(directory / "state" / "w" / "c" / str(i)), b"x" * 100)
    if mark:
        steps.commit(root, step, manifest=MANIFEST, metrics=metrics)
    return directory


# -------------------------------------------------------------------------------------------------- steps


def test_steps_on_gs_count_by_their_mark_and_go_with_all_their_objects(root, gcs, name):
    assert steps.committed_steps(root) == []
    for step in (10, 2):
        make(root, step, loss=0.5)
    make(root, 11, mark=False)
    assert steps.committed_steps(root) == [2, 10]
    assert steps.read_mark(root, 10)["metrics"] == {"loss": 0.5}
    assert (steps.step_path(root, 10) / "manifest.json").read_text() == MANIFEST
    steps.delete(root, 2)
    assert steps.sweep(root) == ["step_0000000011"]
    steps.delete(root, 10)
    assert gcs.names(name) == []


def test_one_listing_tells_the_steps_however_many_objects_they_have(root, gcs):
    make(root, 1, files=40), make(root, 2, files=40)
    gcs.requests.clear()
    assert steps.committed_steps(root) == [1, 2]
    assert len(gcs.requests) == 1


def test_a_listing_of_many_pages_is_read_to_its_end(root, gcs, name):
    make(root, 1, files=7), make(root, 2)
    steps.pin(root, 1, "a")
    gcs.page_size = 2
    gcs.requests.clear()
    assert steps.committed_steps(root) == [1, 2] and steps.pins(root) == {"a": 1}
    assert len(objects.objects_under(f"{root}/step_0000000001")) == 8
    assert len([text for text in gcs.requests if "pageToken" in text]) >= 4
    steps.delete(root, 1)
    gcs.page_size = None
    assert objects.names(os.fspath(root)) == {"step_0000000002", "step_0000000002.ok", "pin_a"}


def test_the_mark_is_the_last_object_of_a_commit_and_the_first_to_go(root, gcs):
    make(root, 1)
    written = [text for text in gcs.requests if text.startswith("POST")]
    assert "step_0000000001.ok" in written[-1] and "manifest.json" in written[-2]
    gcs.requests.clear()
    steps.delete(root, 1)
    deleted = [text for text in gcs.requests if text.startswith("DELETE")]
    assert deleted[0].endswith("step_0000000001.ok ") and len(deleted) == 5


def test_sweep_on_gs_leaves_pins_and_what_was_set_aside(root, gcs, name):
    make(root, 1), make(root, 2), make(root, 3), make(root, 4)
    steps.pin(root, 1, "first")
    assert steps.quarantine(root, 2) == "damaged_step_0000000002"
    make(root, 2)
    assert steps.quarantine(root, 2) == "damaged_step_0000000002.1"
    assert steps.set_aside(root, 3) == "superseded_step_0000000003"
    make(root, 5, mark=False)
    objects.delete(f"{root}/step_0000000004.ok")
    objects.write(f"{root}/step_0000000009.ok", b"")
    objects.write(f"{root}/mine.txt", b"")
    assert steps.committed_steps(root) == [1] and steps.pins(root) == {"first": 1}
    before = gcs.names(f"{name}/damaged") + gcs.names(f"{name}/superseded")
    assert len(before) == 3 * 5 and all(name.endswith((".ok", "manifest.json", "0", "1", "2")) for name in before)
    assert steps.sweep(root) == ["step_0000000004", "step_0000000005", "step_0000000009.ok"]
    assert gcs.names(f"{name}/damaged") + gcs.names(f"{name}/superseded") == before
    assert objects.names(os.fspath(root)) >= {"mine.txt", "pin_first", "step_0000000001", "step_0000000001.ok"}
    steps.unpin(root, "first")
    assert steps.pins(root) == {}


def test_a_failed_save_on_gs_is_discarded_and_a_committed_step_is_not(root, gcs, name):
    make(root, 1), make(root, 2, mark=False), make(root, 20, mark=False)
    for step in (1, 2):
        steps.discard_unfinished(root, step)
    assert objects.names(os.fspath(root)) == {"step_0000000001", "step_0000000001.ok", "step_0000000020"}


def test_a_bucket_that_is_not_there_is_named(gcs):
    missing = paths.resolve("gs://no-such-bucket/run")
    for call in (steps.committed_steps, steps.sweep, steps.check_writable):
        with pytest.raises(OSError, match="gs://no-such-bucket"):
            call(missing)
    steps.discard_unfinished(missing, 1)
    assert steps.free_bytes(missing) is None


def test_a_place_without_rights_is_noticed_before_a_save(root, gcs):
    steps.check_writable(root)
    assert objects.names(os.fspath(root)) == set()
    gcs.inject(403, "^POST.*probe")
    with pytest.raises(OSError, match=r"probe: .*Forbidden"):
        steps.check_writable(root)


@pytest.mark.parametrize("action", [503, "refuse", "lose the answer", "cut the answer"], ids=str)
def test_a_request_that_fails_now_and_then_is_repeated(root, gcs, name, action):
    fault = gcs.inject(action, every=5)
    make(root, 1, files=2, loss=1.0), make(root, 2, files=2)
    steps.quarantine(root, 2)
    steps.delete(root, 1)
    assert fault.hits >= 3
    gcs.clear()
    left = gcs.names(name)
    assert [n.removeprefix(f"{name}/damaged_step_0000000002") for n in left] == [
        ".ok",
        "/manifest.json",
        "/state/w/c/0",
        "/state/w/c/1",
    ]


@pytest.mark.parametrize("stage", ["manifest.json", r"step_\d+\.ok"])
def test_a_commit_that_fails_leaves_no_step_that_counts(root, gcs, stage):
    gcs.inject(403, f"^POST.*{stage}")
    with pytest.raises(OSError, match=stage):
        make(root, 1)
    gcs.clear()
    assert steps.committed_steps(root) == []
    steps.discard_unfinished(root, 1)
    assert objects.names(os.fspath(root)) == set()


@pytest.mark.parametrize("call", [steps.delete, steps.quarantine], ids=lambda f: f.__name__)
def test_a_removal_that_fails_half_way_leaves_no_step_that_counts_and_the_sweep_ends_it(root, gcs, call):
    make(root, 1)
    gcs.inject(403, "^DELETE.*/c/1")
    with pytest.raises(OSError, match="c/1"):
        call(root, 1)
    assert steps.committed_steps(root) == []
    gcs.clear()
    assert steps.sweep(root) == ["step_0000000001"]
    assert steps.committed_steps(root) == []


def test_a_quarantine_whose_copy_fails_loses_nothing(root, gcs):
    make(root, 1)
    gcs.inject(403, "^POST.*rewriteTo.*c/1")
    with pytest.raises(OSError, match="c/1"):
        steps.quarantine(root, 1)
    gcs.clear()
    assert steps.committed_steps(root) == [1] and len(objects.objects_under(f"{root}/step_0000000001")) == 4
    assert steps.quarantine(root, 1) == "damaged_step_0000000001.1"


def test_objects_that_are_gone_already_are_no_error(root, gcs):
    make(root, 1)
    fault = gcs.inject("lose the answer", "^DELETE", times=4)
    steps.delete(root, 1)
    assert fault.hits == 4 and objects.names(os.fspath(root)) == set()


def test_a_server_that_says_nothing_is_given_up_in_time_with_a_message(gcs):
    fault = gcs.inject("silence", "prefix=silent/")
    code = (
        "from jaxckpt.snapshot import paths, steps\nroot = paths.resolve('gs://bucket/silent')\n"
        "try: steps.committed_steps(root)\nexcept OSError as e: print(e)"
    )
    started = time.monotonic()
    done = in_a_process(gcs, code, JAXCKPT_GCS_TIMEOUT_S="0.2")
    output, errors = done.communicate(timeout=120)
    assert (done.returncode, errors) == (0, "")
    assert "gs://bucket/silent: the server was asked again and again, and said nothing for 0.2 s each time" in output
    assert "JAXCKPT_GCS_TIMEOUT_S" in output and fault.hits == 6  # gcsfs pauses 33 s in all between six tries
    assert time.monotonic() - started < 70


def in_a_process(server, code, *arguments, **environment):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TENSORSTORE_", "EPATH_", "GCSFS_", "FSSPEC_"))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**plain, **server.env, **environment},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# -------------------------------------------------------------------------------------------------- the lock

HOLD = """
import sys
from jaxckpt.errors import JaxckptError
from jaxckpt.snapshot import gcs, paths
from jaxckpt.snapshot.lock import RunLock
root = paths.resolve(sys.argv[1])
gcs.filesystem()
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = RunLock(root, lease_s=float(sys.argv[2]), renew_s=0.3)
    lock.check()
    print("held", flush=True)
    sys.stdin.readline()
    lock.check()
    lock.release()
except JaxckptError as e:
    print(type(e).__name__, e, flush=True)
"""


def tell(run):
    run.stdin.write("go\n")
    run.stdin.flush()


def owner_of(root):
    return json.loads(objects.read(f"{root}/lock"))


def leave_lock(root, *, lease_s, pid=1, machine="elsewhere"):
    """The lock as a process of another machine leaves it, or as it renews it."""
    owner = {"owner": "other", "host": "node7", "machine": machine, "pid": pid, "started": 0.0, "lease_s": lease_s}
    objects.write(f"{root}/lock", json.dumps(owner).encode())


def test_the_lock_on_gs_is_renewed_and_given_free(root, gcs, name):
    lock = RunLock(root, lease_s=30, renew_s=0.2)
    first = objects.stat(f"{root}/lock").generation
    time.sleep(1)
    lock.check()
    assert objects.stat(f"{root}/lock").generation > first
    assert (owner_of(root)["pid"], owner_of(root)["lease_s"]) == (os.getpid(), 30)
    with pytest.raises(SnapshotError, match=r"in use by an earlier Run of this process.*run\.close"):
        RunLock(root)
    lock.release()
    assert gcs.names(name) == []
    RunLock(root).release()


def test_a_living_owner_is_named_and_a_killed_one_of_this_machine_is_replaced_at_once(root, gcs):
    owner = in_a_process(gcs, HOLD, os.fspath(root), "60")
    try:
        assert [owner.stdout.readline(), tell(owner), owner.stdout.readline()] == ["ready\n", None, "held\n"]
        with pytest.raises(SnapshotError, match=rf"in use by another run \(host .*, pid {owner.pid}, since 20"):
            RunLock(root)
    finally:
        owner.send_signal(signal.SIGKILL)  # and not waited for: a zombie is as dead
    deadline = time.monotonic() + 20
    while True:
        try:
            lock = RunLock(root)
            break
        except SnapshotError:
            assert time.monotonic() < deadline, "the kill takes a moment, not longer"
    assert time.monotonic() < deadline, "it waited for the lease"
    lock.release()
    owner.communicate()


def test_of_three_that_wait_for_a_lease_to_end_exactly_one_gets_the_lock(root, gcs):
    runs = [in_a_process(gcs, HOLD, os.fspath(root), "60") for _ in range(3)]
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * 3
    leave_lock(root, lease_s=4)
    started = time.monotonic()
    for run in runs:
        tell(run)
    said = [run.stdout.readline() for run in runs]
    waited = time.monotonic() - started
    winner = runs[said.index("held\n")]
    others = [line for line in said if line != "held\n"]
    assert len(others) == 2 and waited > 3.9
    assert all(f"pid {winner.pid}" in line and line.startswith("SnapshotError") for line in others)
    assert owner_of(root)["pid"] == winner.pid
    errors = [run.communicate("go\n", timeout=60)[1] for run in runs]
    assert "held by host node7, pid 1, since 1970-01-01 00:00:00 UTC; waiting at most" in errors[runs.index(winner)]
    assert [run.returncode for run in runs] == [0, 0, 0]


def test_an_owner_on_another_machine_that_shows_itself_keeps_others_out(root, gcs):
    leave_lock(root, lease_s=5)
    stop, said = threading.Event(), []

    def renew():
        while not stop.wait(0.5):
            leave_lock(root, lease_s=5)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(SnapshotError, match="in use by another run .host node7, pid 1"):
            RunLock(root, say=said.append)
    finally:
        stop.set()
        thread.join()
    assert len(said) == 1 and "waiting at most" in said[0]


def test_a_lock_that_another_run_took_is_lost_and_left_alone(root, gcs):
    lock = RunLock(root, lease_s=60, renew_s=30)
    leave_lock(root, lease_s=60, pid=77)
    with pytest.raises(SaveError, match=r"no longer holds the lock .* host node7, pid 77, .* has taken it"):
        lock.check()
    lock.release()
    assert owner_of(root)["pid"] == 77


def test_the_renewal_notices_the_loss_too_and_does_not_take_the_lock_back(root, gcs):
    lock = RunLock(root, lease_s=60, renew_s=0.2)
    leave_lock(root, lease_s=60, pid=77)
    time.sleep(0.8)
    assert owner_of(root)["pid"] == 77
    with pytest.raises(SaveError, match="pid 77"):
        lock.check()
    lock.release()


def test_a_lock_that_was_removed_is_lost(root, gcs):
    lock = RunLock(root, lease_s=60, renew_s=30)
    objects.delete(f"{root}/lock")
    with pytest.raises(SaveError, match="somebody has removed it"):
        lock.check()
    lock.release()


def test_a_lock_that_cannot_be_renewed_stops_counting_after_its_lease_and_counts_again_once_it_is(root, gcs):
    lock = RunLock(root, lease_s=2, renew_s=0.2)
    gcs.inject(403, "^POST.*/lock")
    time.sleep(1)
    lock.check()
    time.sleep(2)
    with pytest.raises(SaveError, match=r"could not be renewed for [23] s, longer than its lease of 2 s"):
        lock.check()
    gcs.clear()
    time.sleep(0.7)
    lock.check()
    lock.release()


def test_a_lost_answer_costs_the_owner_nothing(root, gcs):
    created = gcs.inject("lose the answer", "^POST.*/lock", times=1)
    lock = RunLock(root, lease_s=30, renew_s=0.3)
    renewed = gcs.inject("lose the answer", "^POST.*/lock", times=1)
    time.sleep(2.5)
    lock.check()
    assert created.hits == renewed.hits == 1
    lock.release()
    assert objects.names(os.fspath(root)) == set()


# -------------------------------------------------------------------------------------------------- metrics


def test_metrics_on_gs_are_there_after_a_sync_and_rewound_at_a_resume(root, gcs):
    path = root / "metrics.jsonl"
    file = MetricsFile(path, resume_step=0)
    for step in (1, 2, 3):
        file.write({"step": step})
    with pytest.raises(FileNotFoundError):
        read_metrics(path)
    file.sync()
    file.write({"step": 4})
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    file.close()
    file.close()
    assert [line["step"] for line in read_metrics(os.fspath(path))] == [1, 2, 3, 4]
    file = MetricsFile(path, resume_step=2)
    assert file.last_step == 2
    file.write({"step": 3, "again": True})
    file.sync()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3] and read_metrics(path)[2]["again"]
    file.close()


def test_metrics_that_cannot_be_uploaded_fail_the_sync_and_not_the_close(root, gcs):
    file = MetricsFile(root / "metrics.jsonl", resume_step=0)
    file.write({"step": 1})
    gcs.inject(403, "^POST")
    with pytest.raises(SaveError, match=r"metrics.jsonl: the lines of metrics could not be written: .*Forbidden"):
        file.sync()
    file.close()


def test_metrics_that_cannot_be_read_are_refused(root, gcs):
    objects.write(f"{root}/metrics.jsonl", b"nonsense\n")
    with pytest.raises(DataError, match=rf"{root}/metrics.jsonl, line 1: not a line of metrics"):
        MetricsFile(root / "metrics.jsonl", resume_step=1)
    gcs.inject(403, "^GET.*metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics.jsonl cannot be written: .*Forbidden"):
        MetricsFile(root / "metrics.jsonl", resume_step=1)
