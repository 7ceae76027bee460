"""Two real processes whose optimizer state lies on disk, each with its own shards."""

from pathlib import Path

from groups import kill, run_two, start_two
from runs import assert_same_run, steps_done, train, wait_for

FAST = ("snapshots.every=2", "eval.every=null", "model.d_ff=1024", "mesh.data=1", "mesh.fsdp=8")


def test_killed_with_state_on_the_disks_of_two_processes_and_resumed_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    disks = tmp_path / "nvme"
    disks.mkdir()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (*FAST, "placement.opt_state=nvme", f"placement.nvme_dir={disks}")
    run_two(whole, "steps=10", *settings)
    processes = start_two(killed, "steps=10", *settings)
    wait_for(lambda: steps_done(killed) >= 5, processes[0], "step 5")
    kill(processes)
    run_two(killed, "steps=10", *settings)
    assert_same_run(whole, killed)
    # The number of processes may change, and the tier.
    assert "continues after step 10" in train(killed, "steps=12", *settings)
    run_two(killed, "steps=14", *FAST)
    assert steps_done(killed) == 14
