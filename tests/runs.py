"""Starting, killing and comparing real runs of `python -m jaxckpt.train`."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxckpt import read_metrics
from jaxckpt.snapshot import orbax_io
from jaxckpt.snapshot.steps import committed_steps, step_path
from jaxckpt.state import tree

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300

# 60 to 90 ms a step on two cores: long enough to be hit by a kill, short enough to repeat.
SMALL = (
    "steps=30",
    "model.num_layers=2",
    "model.d_model=64",
    "model.d_ff=128",
    "model.compute_dtype=float32",
    "data.files=[configs/data/sotu/1950_harry_s_truman.txt,configs/data/sotu/1951_harry_s_truman.txt]",
    "data.holdout=0.5",
    "data.seq_len=128",
    "data.batch_size=16",
    "snapshots.every=3",
    "snapshots.keep=2",
    "eval.every=10",
    "eval.batches=1",
    "optimizer.schedule.warmup_steps=5",
)


def command(run_dir: Path, *overrides: str, options: tuple[str, ...] = (), config: Path | None = None) -> list[str]:
    """Trains by `config`, or by a small version of configs/tiny.yaml."""
    train = [sys.executable, "-m", "jaxckpt.train", "--config", str(config or "configs/tiny.yaml"), *options]
    return [*train, f"run_dir={run_dir}", *(SMALL if config is None else ()), *overrides]


# Most runs of the tests compile the same few programs: those of a run that ended well are given to the ones after it.
_COMPILED = Path(tempfile.mkdtemp(prefix="runs-compiled-"))
atexit.register(shutil.rmtree, _COMPILED, ignore_errors=True)


def start(arguments: list[str], *, is_cold: bool = False, **environment: str) -> subprocess.Popen[str]:
    """A process; a run in a new local directory finds there what earlier ones compiled, unless `is_cold`."""
    if (own := _compilations(arguments)) and not is_cold and not own.exists():
        shutil.copytree(_COMPILED, own, copy_function=os.link)
    # Its own process group, so that a test that fails can take everything down.
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _compilations(arguments: Any) -> Path | None:
    """Where a run keeps its compiled programs, if it is one and its directory is local."""
    names = [a.removeprefix("run_dir=") for a in arguments if a.startswith("run_dir=")]
    return Path(names[0], "compilation_cache") if names and "://" not in names[0] else None


def finish(process: subprocess.Popen[str], *, expect: int | None = 0) -> str:
    """The output of a run that ends by itself, whose exit code must be `expect` (None: any)."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {TIMEOUT_S} s:\n{output}") from None
    assert expect is None or process.returncode == expect, f"exit code {process.returncode}:\n{output}"
    if process.returncode == 0 and (own := _compilations(process.args)) and own.is_dir():
        for file in own.iterdir():
            if not (_COMPILED / file.name).exists():
                shutil.copy(file, _COMPILED)
    return output


def train(run_dir: Path, *overrides: str, expect: int = 0, **options: Any) -> str:
    # One that is refused must leave nothing, and so finds nothing.
    return finish(start(command(run_dir, *overrides, **options), is_cold=expect == 2), expect=expect)


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition: Any, process: subprocess.Popen[str], what: str) -> None:
    """Polls without a pause to speak of, so that a signal lands close to the moment; fails if the run ends first."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"the run ended before {what}:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what} within {TIMEOUT_S} s"
        time.sleep(0.0005)


def signal_after(step: int, process: subprocess.Popen[str], run_dir: Path, number: int = signal.SIGKILL) -> str:
    """Sends the signal once the metrics file holds `step` lines; the run's output."""
    wait_for(lambda: steps_done(run_dir) >= step, process, f"step {step}")
    process.send_signal(number)
    output = finish(process, expect=None)
    assert number != signal.SIGKILL or process.returncode == -signal.SIGKILL, output
    return output


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    """What each step did, to the bit; speed is left out."""
    keys = ("step", "loss", "loss_bits", "grad_norm", "lr", "tokens", "batch_digest", "eval_loss")
    return [tuple(line.get(key) for key in keys) for line in read_metrics(run_dir / "metrics.jsonl")]


def final_leaves(run_dir: Path) -> dict[str, np.ndarray]:
    """Every leaf of the newest snapshot, read by plain Orbax onto one device; the packed ones are cut out here."""
    newest = step_path(run_dir / "snapshots", committed_steps(run_dir / "snapshots")[-1])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    table = orbax_io.read_json(newest, "meta")["leaves"]
    packed = json.loads((newest / "manifest.json").read_text())["packed"]
    target = {p: (x["shape"], np.dtype(x["dtype"])) for p, x in table.items() if p not in packed}
    if packed:
        target["packed"] = (
            json.loads((newest / "state" / "packed" / "zarr.json").read_text())["shape"],
            np.dtype("uint8"),
        )
    structs = {p: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for p, (shape, dtype) in target.items()}
    state = ocp.load_checkpointables(str(newest), {"state": tree.nest(structs)})["state"]
    leaves = {path: np.asarray(x) for path, x in tree.flatten(state).items()}
    words = leaves.pop("packed").tobytes() if packed else b""
    for path, (offset, nbytes) in packed.items():
        leaf = np.frombuffer(words[offset : offset + nbytes], np.dtype(table[path]["dtype"]))
        leaves[path] = leaf.reshape(table[path]["shape"])
    return leaves


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    a, b = final_leaves(one), final_leaves(other)
    assert a.keys() == b.keys() and len(a) > 5
    different = [path for path in a if not np.array_equal(a[path], b[path])]
    assert not different
