"""Two real processes that save to one run directory on gs://."""

from gcs import BUCKET
from groups import run_two
from jaxckpt import read_metrics
from jaxckpt.snapshot import paths
from jaxckpt.snapshot.manifest import read_manifest
from jaxckpt.snapshot.steps import committed_steps
from runs import train

LARGE = "model.d_ff=2048"  # leaves that are not packed with others, so that each process has something to write


def test_what_two_processes_save_on_gs_one_continues(gcs):
    run_dir = f"gs://{BUCKET}/two"
    run_two(run_dir, "steps=6", LARGE)
    root = paths.resolve(run_dir) / "snapshots"
    assert committed_steps(root) == [3, 6]
    writers = {f"state/array_metadatas/process_{i}" for i in range(2)}
    assert writers <= set(read_manifest(root, 6)["files"]), "each wrote its part"
    assert gcs.names("two/lock") == []
    assert "continues after step 6 of 8" in train(run_dir, "steps=8", LARGE)
    assert [line["step"] for line in read_metrics(f"{run_dir}/metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert committed_steps(root) == [6, 8]
