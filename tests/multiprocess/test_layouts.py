"""Saved by four processes, restored by one, two or four on another mesh, cut otherwise or held elsewhere: exact, and each
process reads only what it holds."""

import json
import sys
from pathlib import Path

import pytest

from groups import free_port, kill
from runs import ROOT, finish, start

WORKER = str(Path(__file__).parent / "layouts.py")
MIB = 1 << 20
MATRIX = 64 * MIB

# What a restore may hold beside the arrays: the blocks of its 8 threads, 8 MiB each, and what Orbax, the compiled check and
# Python itself take up at their first use.
SPARE = 8 * 8 * MIB + 64 * MIB


def run(action, run_dir, *, processes, devices, axes, spec, kind="device"):
    """What each process says."""
    port = str(free_port())
    layout = (str(devices), json.dumps(axes), json.dumps(spec), kind)
    command = [sys.executable, WORKER, action, str(run_dir), str(processes)]
    group = [start([*command, str(i), port, *layout], PYTHONPATH=str(ROOT)) for i in range(processes)]
    try:
        return [json.loads(finish(process).strip().splitlines()[-1]) for process in group]
    finally:
        kill(group)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By 4 processes of 2 devices, the matrix cut by rows."""
    run_dir = tmp_path_factory.mktemp("four")
    run("save", run_dir, processes=4, devices=2, axes={"fsdp": 8}, spec=["fsdp", None])
    return run_dir


@pytest.mark.parametrize(
    "layout",
    [
        {"processes": 1, "devices": 8, "axes": {"data": 2, "fsdp": 4}, "spec": ["fsdp", None]},
        {"processes": 1, "devices": 1, "axes": {}, "spec": []},
        {"processes": 2, "devices": 4, "axes": {"fsdp": 8}, "spec": ["fsdp", None], "kind": "pinned_host"},
        {"processes": 2, "devices": 1, "axes": {"fsdp": 2}, "spec": [None, "fsdp"]},
        {"processes": 4, "devices": 2, "axes": {"fsdp": 4, "tensor": 2}, "spec": ["tensor", "fsdp"]},
        {"processes": 2, "devices": 2, "axes": {"data": 2, "fsdp": 2}, "spec": ["fsdp", None], "kind": "nvme"},
    ],
    ids=[
        "one process, 4 x 2",
        "one device",
        "two processes, pinned host",
        "two processes, by columns",
        "four, by both",
        "two processes, each with all of it on disk",
    ],
)
def test_a_restore_on_another_mesh_is_exact_and_reads_only_what_it_holds(saved, layout):
    answers = run("restore", saved, **layout)
    assert all(answer["is_right"] for answer in answers), answers
    for answer in answers:
        # The metadata, and where an array is cut across its chunks the ends of chunks that lie in both halves.
        assert answer["read"] <= 1.1 * answer["distinct"] + 2 * MIB, answers
        assert answer["peak"] <= answer["held"] + SPARE, answers


def test_what_two_processes_have_on_disk_is_restored_by_one_and_by_two(tmp_path):
    layout = {"processes": 2, "devices": 1, "axes": {"fsdp": 2}, "spec": ["fsdp", None], "kind": "nvme"}
    run("save", tmp_path, **layout)
    directory = tmp_path / "snapshots" / "step_0000000005"
    files = {path: path.stat().st_nlink for path in (directory / "state" / "params.kernel").rglob("?/?/?")}
    assert len(files) == 2 and set(files.values()) == {1}, (
        "the working files are gone, and those of the snapshot are left"
    )
    alone = {"processes": 1, "devices": 2, "axes": {"fsdp": 2}, "spec": [None, "fsdp"]}
    for answer in [*run("restore", tmp_path, **layout), *run("restore", tmp_path, **alone)]:
        assert answer["is_right"]


def test_damage_that_one_process_meets_is_told_alike_on_all(tmp_path):
    layout = {"processes": 2, "devices": 1, "axes": {"fsdp": 2}, "spec": ["fsdp", None]}
    run("save", tmp_path, **layout)
    file = tmp_path / "snapshots/step_0000000005/state/params.kernel/c/1/0"  # the second process's half
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    said = [answer["damage"] for answer in run("restore", tmp_path, **layout)]
    assert said[0] == said[1]
    assert "process 1" in said[0] and "params.kernel/c/1/0" in said[0] and "process 0" not in said[0]
