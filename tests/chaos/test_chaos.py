"""A run that is killed again and again, at any moment of its life, ends where the run that was never stopped ends.

python -m pytest tests/chaos --kills 100
"""

import random
import signal
import time
from pathlib import Path

import pytest
from etils import epath

from jaxckpt.snapshot.steps import committed_steps
from jaxckpt.snapshot.verify import verify
from runs import assert_same_run, command, finish, start, steps_done, train

# Line s is written before the save of s begins, and that waits for the save of s - 1: at worst both are lost.
MOST_LOST = 2
SAVING = ("snapshots.every=1", "snapshots.keep=2", "eval.every=null")


def saving(tmp_path: Path, tier: str) -> tuple[str, ...]:
    """Saves every step; with the optimizer's state on disk, where the large weights of a wider model have it."""
    if tier == "device":
        return SAVING
    disk = tmp_path / "nvme"
    disk.mkdir()
    return (*SAVING, "placement.opt_state=nvme", f"placement.nvme_dir={disk}", "model.d_ff=1024")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills")


def kill_at_random(process, run_dir: Path, rng: random.Random) -> str:
    """Kills the run at a random moment: of its start, or of a step and the save behind it; what the moment was."""
    if rng.random() < 0.4:
        moment = rng.uniform(0, 6)
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.002)
    else:
        moment = rng.uniform(0, 0.3)
        first = steps_done(run_dir) + rng.randint(1, 4)
        while steps_done(run_dir) < first and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    return finish(process, expect=None)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_kills_at_random_moments_never_leave_a_corrupt_step_and_end_in_the_same_bits(
    tmp_path: Path, kills: int, tier: str
) -> None:
    saves = saving(tmp_path, tier)
    if tier == "nvme":  # the points of a save where it may be hit are gone through in test_offloaded_snapshots.py
        kills = -(-kills // 3)
    steps = f"steps={(30 if tier == 'device' else 12) + 3 * kills}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, steps, *saves, "snapshots.every=1000")
    rng = random.Random(kills)
    root = epath.Path(killed / "snapshots")
    died_at, reached = 0, 0
    for number in range(kills):
        output = kill_at_random(start(command(killed, steps, *saves)), killed, rng)
        done, saved = steps_done(killed), committed_steps(root)
        died_at += done > reached
        reached = max(reached, done)
        for step in saved:
            assert verify(root, step) == [], f"kill {number}, step {step}:\n{output}"
        assert (saved[-1] if saved else 0) >= done - MOST_LOST, f"kill {number}: {done} done, {saved} saved:\n{output}"
        assert len(saved) <= 3, "the newest two, and one that retention had not come to"
    assert died_at > kills // 4, "most kills must hit a run that trains"
    train(killed, steps, *saves)
    assert_same_run(whole, killed)
    assert not [p.name for p in root.iterdir() if p.name.startswith(("damaged_", "superseded_"))]
