"""A run that is killed and started again gives the same bits as one that was never stopped."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxckpt import read_metrics
from jaxckpt.snapshot.orbax_io import TMP_SUFFIX
from jaxckpt.snapshot.steps import committed_steps
from runs import (
    assert_same_run,
    command,
    final_leaves,
    finish,
    numbers,
    signal_after,
    start,
    steps_done,
    train,
    wait_for,
)

# The documents of the small run give 14 batches an epoch, so 30 steps cross two epoch borders.
SCENARIOS = {
    "all on the device": (),
    "bfloat16, master weights and moments on local disks": (
        "model.compute_dtype=bfloat16",
        "model.d_ff=1024",  # leaves that are worth a file
        "data.seq_len=32",
        "placement.opt_state=nvme",
        "placement.master=nvme",
        "placement.nvme_dir=[{tmp_path}/a,{tmp_path}/b]",
        "placement.bucket_bytes=100KiB",
    ),
    "bfloat16, parameters and moments on a local disk, master weights in pinned host memory": (
        "model.compute_dtype=bfloat16",
        "model.scan_layers=false",
        "model.d_ff=2048",  # an array a layer is worth a file only if it is this wide
        "data.seq_len=32",
        "placement.opt_state=nvme",
        "placement.master=pinned_host",
        "placement.params=nvme",
        "placement.nvme_dir={tmp_path}/a",
    ),
    "accumulation and dropout": ("optimizer.accumulation_steps=2", "model.dropout=0.2"),
}


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    train(run_dir)
    return run_dir


@pytest.mark.parametrize("name", SCENARIOS)
def test_resume_after_kill_is_bitwise_equal(name: str, tmp_path: Path, uninterrupted: Path) -> None:
    overrides = [text.format(tmp_path=tmp_path) for text in SCENARIOS[name]]
    whole = uninterrupted if not overrides else tmp_path / "whole"
    if overrides:
        train(whole, *overrides)
    killed = tmp_path / "killed"
    # Once is enough for each kind of state: tests/chaos kills one run again and again.
    for step in sorted(random.Random(name).sample(range(2, 28), 1 if overrides else 2)):
        signal_after(step, start(command(killed, *overrides)), killed)
    train(killed, *overrides)
    assert_same_run(whole, killed)


def test_placement_does_not_change_a_bit(tmp_path: Path, uninterrupted: Path) -> None:
    """The moments move to the host in the middle of a run, and the run is the one that never moved them."""
    signal_after(12, start(command(tmp_path)), tmp_path)
    train(tmp_path, "placement.opt_state=pinned_host")
    assert_same_run(uninterrupted, tmp_path)


def test_kill_during_a_save_loses_at_most_that_snapshot(tmp_path: Path, uninterrupted: Path) -> None:
    root = tmp_path / "snapshots"
    hits = 0
    for _ in range(8):
        process = start(command(tmp_path))
        before = committed_steps(root)
        saving = lambda: root.is_dir() and any(TMP_SUFFIX in p.name for p in root.iterdir())
        wait_for(lambda: committed_steps(root) != before or steps_done(tmp_path) >= 6, process, "the first save")
        wait_for(saving, process, "a save under way")
        process.kill()
        finish(process, expect=-signal.SIGKILL)
        hits += saving()
        if hits == 2:
            break
    assert hits == 2, "no kill fell into a save"
    train(tmp_path)
    assert not saving()
    assert_same_run(uninterrupted, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_saves_the_step_and_exits_with_75(number: int, tmp_path: Path, uninterrupted: Path) -> None:
    process = start(command(tmp_path, "snapshots.every=1000"))
    output = signal_after(7, process, tmp_path, number)
    assert process.returncode == 75, output
    stopped_at = steps_done(tmp_path)
    assert 7 <= stopped_at < 30
    assert committed_steps(tmp_path / "snapshots") == [stopped_at]
    train(tmp_path)
    assert_same_run(uninterrupted, tmp_path)


def test_another_mesh_gets_the_same_batches_and_close_losses(tmp_path: Path, uninterrupted: Path) -> None:
    signal_after(12, start(command(tmp_path)), tmp_path)
    train(tmp_path, "mesh.data=1", "mesh.fsdp=2", "mesh.tensor=1", "mesh.cpu_devices=2")
    whole, moved = (read_metrics(d / "metrics.jsonl") for d in (uninterrupted, tmp_path))
    assert [line["batch_digest"] for line in whole] == [line["batch_digest"] for line in moved]
    # Another mesh adds up the same float32 numbers in another order: 2**-23 a sum, some hundreds of sums, 18 updates.
    np.testing.assert_allclose([line["loss"] for line in whole], [line["loss"] for line in moved], rtol=1e-4)


def test_evaluation_does_not_change_training(tmp_path: Path, uninterrupted: Path) -> None:
    train(tmp_path, "eval.every=null")
    assert [line[:-1] for line in numbers(uninterrupted)] == [line[:-1] for line in numbers(tmp_path)]
    a, b = final_leaves(uninterrupted), final_leaves(tmp_path)
    assert all(np.array_equal(a[path], b[path]) for path in a)


def test_more_steps_continue_the_run_that_would_have_had_them(tmp_path: Path) -> None:
    """The schedule keeps the end that the first start gave it."""
    train(tmp_path / "long", "steps=12", "optimizer.schedule.decay_steps=9")
    train(tmp_path / "grown", "steps=9")
    train(tmp_path / "grown", "steps=12")
    assert_same_run(tmp_path / "long", tmp_path / "grown")


def test_losses_fall(uninterrupted: Path) -> None:
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(held_out) == 3 and held_out[-1] < held_out[0]
