"""Two real processes of four devices each, joined by jax.distributed on this machine, on a packed mixture of stores."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from groups import kill, run_two, start_two
from jaxckpt import read_metrics
from jaxckpt.data.prepare import Settings, prepare
from jaxckpt.snapshot.steps import committed_steps
from runs import (
    ROOT,
    assert_same_run,
    finish,
    steps_done,
    train,
    wait_for,
)

CONFIG = """
run_dir: unused
steps: 30
model: {{name: llama, num_layers: 2, d_model: 64, num_heads: 4, num_kv_heads: 2, d_ff: 128, compute_dtype: float32}}
data:
  name: stores
  stores: {{plain: {stores}/plain/train, spoken: {stores}/spoken}}
  weights: {{plain: 1, spoken: 2}}
  weights_schedule: [[9, {{plain: 2, spoken: 1}}], [20, {{spoken: 1}}]]
  held_out: {stores}/plain/held_out
  rows: packed
  seq_len: 128
  batch_size: 16
  skip: [[6, 7]]
optimizer: {{lr: 3e-3, schedule: {{warmup_steps: 5}}}}
mesh: {{data: 2, fsdp: 4, cpu_devices: 8}}
snapshots: {{every: 3, keep: 2}}
eval: {{every: 10, batches: 1}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on two stores of short documents; the smaller one is read more than twice."""
    stores = tmp_path_factory.mktemp("stores")
    for name, count, holdout in (("plain", 120, 0.2), ("spoken", 60, 0.0)):
        text = (ROOT / f"configs/data/sotu/195{count // 60}_harry_s_truman.txt").read_text()
        lines = [json.dumps({"text": text[200 * i : 200 * i + 40 + 97 * i % 150]}) for i in range(count)]
        (stores / f"{name}.jsonl").write_text("\n".join(lines))
        prepare([stores / f"{name}.jsonl"], stores / name, Settings(holdout=holdout))
    file = stores / "config.yaml"
    file.write_text(CONFIG.format(stores=stores))
    return file


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("two_processes")
    run_two(run_dir, config=config)
    examples = [line["example"] for line in read_metrics(run_dir / "metrics.jsonl")]
    assert examples == [16 * step for step in range(32) if step not in (5, 6)]
    return run_dir


def test_killed_on_two_processes_and_resumed_on_one_gets_the_same_batches_and_close_losses(
    tmp_path: Path, uninterrupted: Path, config: Path
) -> None:
    processes = start_two(tmp_path, config=config)
    wait_for(lambda: steps_done(tmp_path) >= 11, processes[0], "step 11")
    kill(processes)
    train(tmp_path, config=config)
    whole, moved = (read_metrics(d / "metrics.jsonl") for d in (uninterrupted, tmp_path))
    assert [line["batch_digest"] for line in whole] == [line["batch_digest"] for line in moved]
    # Sums across processes run in another order than inside one: some hundreds of float32 sums, 18 updates.
    np.testing.assert_allclose([line["loss"] for line in whole], [line["loss"] for line in moved], rtol=1e-4)


def test_sigterm_to_one_process_stops_both_after_the_same_saved_step(
    tmp_path: Path, uninterrupted: Path, config: Path
) -> None:
    processes = start_two(tmp_path, "snapshots.every=1000", config=config)
    try:
        wait_for(lambda: steps_done(tmp_path) >= 7, processes[0], "step 7")
        processes[1].send_signal(signal.SIGTERM)
        outputs = [finish(process, expect=75) for process in processes]
    finally:
        kill(processes)
    stopped_at = steps_done(tmp_path)
    assert committed_steps(tmp_path / "snapshots") == [stopped_at], outputs
    assert 7 <= stopped_at < 30
    run_two(tmp_path, config=config)
    assert_same_run(uninterrupted, tmp_path)
