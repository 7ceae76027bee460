"""What `python -m jaxckpt.train` accepts and refuses, and with which exit code; each run is a real process."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from jaxckpt import read_metrics
from jaxckpt.snapshot.steps import commit, committed_steps, step_path
from runs import ROOT, assert_same_run, command, finish, signal_after, start, steps_done, train, wait_for

OWN = ["--config", "tests/own_model.yaml"]
# The package may be installed or lie here.
PATHS = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])


def own(run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxckpt.train", *OWN, f"run_dir={run_dir}", *arguments]


def run_own(run_dir: Path, *arguments: str, expect: int = 0) -> str:
    return finish(start(own(run_dir, *arguments), is_cold=expect == 2, PYTHONPATH=PATHS), expect=expect)


def refused(output: str, *parts: str) -> None:
    assert "Traceback" not in output, output
    for part in parts:
        assert part in output, f"{part!r} is not in:\n{output}"


def contents(run_dir: Path) -> dict[str, str]:
    files = [p for p in (run_dir / "snapshots").rglob("*") if p.is_file()] + [run_dir / "metrics.jsonl"]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished")
    run_own(run_dir)
    assert committed_steps(run_dir / "snapshots") == [8, 12]
    return run_dir


@pytest.fixture
def untouched(finished: Path):
    """The finished run, checked afterwards to be the same to the byte."""
    before = contents(finished)
    yield finished
    assert contents(finished) == before


def test_own_model_data_and_optimizer_resume_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    signal_after(13, start(own(tmp_path, "steps=2000"), PYTHONPATH=PATHS), tmp_path)
    killed_at = committed_steps(tmp_path / "snapshots")
    assert killed_at and killed_at[-1] < 2000
    last = killed_at[-1] + 8
    run_own(tmp_path, f"steps={last}")
    run_own(tmp_path / "whole", f"steps={last}")
    assert_same_run(tmp_path / "whole", tmp_path)


def test_a_finished_run_has_nothing_left_to_do(untouched: Path) -> None:
    assert "all 12 steps are done" in run_own(untouched)


def test_every_problem_of_a_configuration_is_named_at_once(tmp_path: Path) -> None:
    output = train(
        tmp_path, "optimizer.lrr=1", "steps=many", "data.batch_size=0", "mesh.fsdp=-1", "mesh.data=-1", expect=2
    )
    refused(output, "optimizer.lrr", "did you mean optimizer.lr", "steps", "many", "data.batch_size", "mesh")
    assert not list(tmp_path.iterdir())


def test_missing_configuration_file_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxckpt.train", "--config", "nowhere.yaml"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 2
    refused(done.stderr, "nowhere.yaml")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("data.files=[nowhere.txt]",), ("nowhere.txt",)),
        (("data.batch_size=12",), ("12", "8", "16")),
        (("optimizer.accumulation_steps=4",), ("16", "4 microbatches", "32")),
        (("mesh.data=3",), ("mesh data=3", "8")),
        (("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=8"), ("num_heads", "tensor axis of 8")),
        (("model.vocab_size=100",), ("model.vocab_size", "100", "257")),
    ],
    ids=[
        "missing text",
        "batch and mesh",
        "microbatches and mesh",
        "mesh and devices",
        "heads and tensor axis",
        "vocabulary",
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path) -> None:
    refused(train(tmp_path, *overrides, expect=2), *parts)
    assert not committed_steps(tmp_path / "snapshots")


def test_empty_text_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    refused(train(tmp_path / "run", f"data.files=[{empty}]", expect=2), "empty.txt", "empty")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("optimizer.lr=0.2", ("optimizer.lr", "0.1", "0.2", "--allow-changed optimizer.lr")),
        ("seed=5", ("seed", "5")),
        ("data.batch_size=32", ("data.batch_size", "16", "32")),
        ("model.args.width=32", ("width", "16", "32")),
    ],
)
def test_a_change_that_alters_training_is_refused(change: str, parts: tuple[str, ...], untouched: Path) -> None:
    refused(run_own(untouched, "steps=16", change, expect=2), *parts)


def test_another_model_under_an_allowed_key_is_refused_leaf_by_leaf(untouched: Path) -> None:
    output = run_own(untouched, "steps=16", "model.args.width=32", "--allow-changed", "model", expect=2)
    refused(output, "params/hidden/kernel", "[8, 16]", "[8, 32]", "opt_state")


def test_changes_that_do_not_alter_training_and_allowed_ones_are_accepted(tmp_path: Path) -> None:
    run_own(tmp_path, "steps=4")
    run_own(tmp_path, "steps=6", "snapshots.every=3", "mesh.data=2", "mesh.fsdp=1", "placement.opt_state=pinned_host")
    run_own(tmp_path, "steps=8", "optimizer.lr=0.2", "--allow-changed", "optimizer.lr")
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [round(line["lr"], 6) for line in lines] == [0.1] * 6 + [0.2] * 2


def write_as_format(number: int, root: epath.Path, step: int) -> None:
    """Makes a step what a jaxckpt of another format would have saved: its meta says so, and all vouch for it."""
    directory = step_path(root, step)
    (directory / "meta/data.json").write_text(
        json.dumps({**json.loads((directory / "meta/data.json").read_text()), "format": number})
    )
    manifest = json.loads((directory / "manifest.json").read_text())
    said = (directory / "meta/data.json").read_bytes()
    manifest["files"]["meta/data.json"] = {"bytes": len(said), "sha256": hashlib.sha256(said).hexdigest()}
    commit(root, step, manifest=json.dumps({**manifest, "format": number}), metrics={})


def test_a_snapshot_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    run_own(tmp_path, "steps=4")
    write_as_format(99, epath.Path(tmp_path / "snapshots"), 4)
    before = contents(tmp_path)
    refused(run_own(tmp_path, "steps=8", expect=2), "format 99", "Update jaxckpt")
    assert contents(tmp_path) == before


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(run_own(tmp_path / "file" / "run", expect=2), "cannot be written", str(tmp_path / "file"))


def test_a_second_run_in_the_same_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = start(own(tmp_path, "steps=100000"), PYTHONPATH=PATHS)
    try:
        wait_for(lambda: steps_done(tmp_path) >= 1, first, "step 1")
        refused(run_own(tmp_path, expect=2), "in use by another run", str(first.pid))
        done = steps_done(tmp_path)
        wait_for(lambda: steps_done(tmp_path) > done + 5, first, "more steps")
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    done = committed_steps(tmp_path / "snapshots")[-1]
    run_own(tmp_path, f"steps={done + 1}")  # the lock died with its owner


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("model.target=own_model:Missing",), ("model.target", "own_model:Missing")),
        (("data.target=own_model:generator",), ("generator", "cannot be resumed exactly", "MapDataset")),
        (("data.target=own_model:unrepeatable",), ("numpy's global random generator", "'x'")),
    ],
    ids=["no such model", "an iterator without state", "a global random generator"],
)
def test_what_could_not_be_resumed_exactly_is_refused_by_name(
    overrides: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    refused(run_own(tmp_path, *overrides, expect=2), *parts)
    assert not committed_steps(tmp_path / "snapshots")


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tmp_path: Path) -> None:
    output = run_own(tmp_path, "model.loss=own_model:explodes_at_step_5", "snapshots.every=1", expect=1)
    refused(output, "step 5", "inf", "newest snapshot is step 4")
    assert committed_steps(tmp_path / "snapshots") == [3, 4]


def test_a_loss_that_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    output = run_own(tmp_path, "model.loss=own_model:explodes_at_step_5", "optimizer.nonfinite=skip")
    assert "step 5" in output
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [5, 11]
    assert lines[4]["loss"] is None and lines[4]["loss_bits"] == "7f800000"


def test_a_stop_before_the_first_step_is_resumable(tmp_path: Path) -> None:
    process = start(command(tmp_path), is_cold=True)
    wait_for(lambda: (tmp_path / "lock").exists(), process, "the lock")
    process.send_signal(signal.SIGTERM)
    output = finish(process, expect=75)
    assert committed_steps(tmp_path / "snapshots") == ([1] if steps_done(tmp_path) else []), output


def test_the_key_table_names_every_key_without_starting_jax() -> None:
    code = "import sys; from jaxckpt.cli import app; app(['config'], standalone_mode=False); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for key in ("run_dir", "steps", "snapshots.every", "snapshots.keep", "eval.every", "placement", "optimizer"):
        assert key in done.stdout
