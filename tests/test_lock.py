"""One writer a run directory; the local lock dies with its owner."""

import json
import os
import signal
import subprocess
import sys

import pytest

from jaxckpt.errors import SaveError, SnapshotError
from jaxckpt.snapshot import paths
from jaxckpt.snapshot.lock import RunLock

HOLD = """
import sys, time
from jaxckpt.snapshot import paths
from jaxckpt.snapshot.lock import RunLock
lock = RunLock(paths.resolve(sys.argv[1]))
print("held", flush=True)
time.sleep(300)
"""


def test_a_second_lock_is_refused_naming_the_owner_until_the_first_is_released(tmp_path):
    run_dir = paths.resolve(tmp_path / "new" / "run")
    lock = RunLock(run_dir)
    lock.check()
    with pytest.raises(SnapshotError, match=r"run is in use by an earlier Run of this process.*run\.close"):
        RunLock(run_dir)
    lock.release()
    RunLock(run_dir).release()


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout and owner.stdout.readline() == "held\n"
        with pytest.raises(SnapshotError, match=f'another run .*"pid": {owner.pid},.*give another run_dir'):
            RunLock(paths.resolve(tmp_path))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    lock = RunLock(paths.resolve(tmp_path))
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_lock_file_that_was_removed_or_replaced_is_noticed(tmp_path, is_replaced):
    lock = RunLock(paths.resolve(tmp_path))
    (tmp_path / "lock").unlink()
    if is_replaced:
        second = RunLock(paths.resolve(tmp_path))
        second.check()
        second.release()
    with pytest.raises(SaveError, match="lock file of this run was removed or replaced"):
        lock.check()
    lock.release()


def test_a_directory_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        RunLock(paths.resolve(tmp_path / "file" / "run"))
