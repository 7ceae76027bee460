"""Two real processes whose optimizer state lies on disk, each with its own shards."""

from pathlib import Path

import pytest
from etils import epath

from groups import kill, run_two, start_two
from jaxckpt.observe.metrics import read_metrics
from jaxckpt.snapshot.steps import committed_steps
from runs import numbers, steps_done, train, wait_for

TINY = ("model.num_layers=1", "model.d_ff=2048", "data.seq_len=32", "mesh.data=1", "mesh.fsdp=8", "eval.every=null")


def test_killed_with_state_on_the_disks_of_two_processes_both_go_on_in_the_same_bits_and_so_does_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling is nearly all of the time, and how well XLA does it is not what is tested here.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    disks, run = tmp_path / "nvme", tmp_path / "run"
    disks.mkdir()
    settings = (*TINY, "snapshots.every=4", "placement.opt_state=nvme", f"placement.nvme_dir={disks}")
    saved = lambda: committed_steps(epath.Path(run / "snapshots"))
    processes = start_two(run, "steps=100", *settings)
    try:
        # What was restored of the optimizer's state shows in the loss of the second step from there.
        wait_for(lambda: saved() and steps_done(run) >= saved()[-1] + 3, processes[0], "steps after a snapshot")
    finally:
        kill(processes)
    before, newest = numbers(run), saved()[-1]
    steps = len(before)
    assert newest + 2 <= steps, "some steps are made for the second time"
    output = run_two(run, f"steps={steps}", *settings)[0]
    assert f"continues after step {newest}" in output and "│ nvme " in output, "some leaves are large enough for a file"
    assert numbers(run) == before
    # What a killed process has left is removed, though nothing is on disks any more.
    [left] = disks.glob("*.p1")
    (left / "work").mkdir()
    (left / "work" / "file").write_text("of two gigabytes")
    moved = ("placement.opt_state=pinned_host", *TINY)
    assert f"continues after step {steps}" in train(run, f"steps={steps + 1}", *moved)
    for line in read_metrics(run / "metrics.jsonl")[:-1]:
        busy_s = line["offload"]["nvme_hidden_s"] + line["offload"]["nvme_exposed_s"]
        assert line["tokens"] / line["tokens_per_s"] >= busy_s, "a step lasts as long as its disks work, saved or not"
    assert not [file for file in disks.rglob("*") if file.is_file() and file.name != "lock"], "nothing outlives a run"
