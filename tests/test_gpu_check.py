"""scripts/gpu_check.sh, which is written for a machine that is hard to come by: all of its parts run, tiny, on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_part_of_the_gpu_check_runs_and_what_must_be_exact_is(tmp_path):
    out = tmp_path / "dry.json"
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [ROOT / "scripts" / "gpu_check.sh", "--dry", out]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    parts = found["parts"]
    assert found["is_dry"] and found["left_out"] == [] and not any("error" in part for part in parts.values())
    names = ("transfers", "ours", "device", "whole-tree", "resume", "nvme", "budget")
    assert list(parts) == [f"{name} dry" for name in names]
    assert parts["transfers dry"]["h2d_gb_per_s"] > 0 and parts["transfers dry"]["d2h_gb_per_s"] > 0
    # Where state lives changes no bit of training, and neither does a restart.
    assert parts["ours dry"]["loss_bits"] == parts["device dry"]["loss_bits"] == parts["whole-tree dry"]["loss_bits"]
    assert parts["resume dry"]["is_exact"] and parts["resume dry"]["resumed_at"] == 5
    assert parts["nvme dry"]["is_exact"] and len(parts["nvme dry"]["nvme"]["plans"]) >= 2, "gradients, and buckets"
    assert parts["budget dry"]["steps"] == 3
    assert "pinned_host" in [
        *parts["budget dry"]["tiers"].values(),
        *(tier for _, tier in parts["budget dry"]["paths"]),
    ]
