"""Only a step with its mark counts; whatever a kill or a failure leaves behind is swept."""

import os
import shutil

import pytest

from jaxckpt.snapshot import steps
from jaxckpt.snapshot.orbax_io import TMP_SUFFIX


def make(root, step, *, mark=True):
    directory = steps.step_path(root, step)
    (directory / "state").mkdir(parents=True)
    (directory / "state" / "bytes").write_bytes(b"x" * 100)
    if mark:
        steps.commit(root, step)
    return directory


def test_committed_steps_are_the_marked_ones_in_order(tmp_path):
    assert steps.committed_steps(tmp_path / "none") == [] == steps.committed_steps(tmp_path)
    for step in (10, 2, 1_000_000):
        make(tmp_path, step)
    make(tmp_path, 11, mark=False)
    (tmp_path / "step_0000000012.ok").touch()
    (tmp_path / "notes").mkdir()
    assert steps.committed_steps(tmp_path) == [2, 10, 1_000_000]


def test_names_sort_as_steps_do():
    names = [steps.step_path(steps.Path("x"), n).name for n in (1, 9, 10, 99, 10**9)]
    assert names == sorted(names)


def test_a_deleted_step_is_gone_with_its_mark_and_the_others_stay(tmp_path):
    make(tmp_path, 1), make(tmp_path, 2)
    steps.delete(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["step_0000000002", "step_0000000002.ok"]


def test_sweep_removes_every_kind_of_leftover_and_says_which(tmp_path):
    make(tmp_path, 1)
    make(tmp_path, 2, mark=False)
    make(tmp_path, 3).rename(tmp_path / ".deleted-step_0000000003")
    (tmp_path / f"step_0000000004{TMP_SUFFIX}" / "state").mkdir(parents=True)
    (tmp_path / f"step_0000000005{TMP_SUFFIX}-17").mkdir()
    (tmp_path / "step_0000000006.ok.w").touch()
    (tmp_path / "mine.txt").touch()
    swept = steps.sweep(tmp_path)
    assert swept == [
        ".deleted-step_0000000003",
        "step_0000000002",
        "step_0000000003.ok",
        f"step_0000000004{TMP_SUFFIX}",
        f"step_0000000005{TMP_SUFFIX}-17",
        "step_0000000006.ok.w",
    ]
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "step_0000000001", "step_0000000001.ok"]
    assert steps.sweep(tmp_path) == []


def test_sweep_makes_the_directory(tmp_path):
    assert steps.sweep(tmp_path / "a" / "b") == [] and (tmp_path / "a" / "b").is_dir()


def test_a_kill_at_any_point_of_a_deletion_leaves_no_step_that_looks_whole(tmp_path, subtests_of_kills=3):
    # What a kill leaves after each of the three actions of `delete`: the mark gone, the directory renamed, half emptied.
    for done in range(1, subtests_of_kills + 1):
        root = tmp_path / str(done)
        root.mkdir()
        directory = make(root, 1)
        directory.with_name(directory.name + ".ok").unlink()
        if done > 1:
            directory = directory.rename(root / f".deleted-{directory.name}")
        if done > 2:
            shutil.rmtree(directory / "state")
        assert steps.committed_steps(root) == []
        steps.sweep(root)
        assert os.listdir(root) == []


@pytest.mark.parametrize("stage", ["writing", "renamed", "half marked"])
def test_a_failed_save_is_discarded_at_whatever_stage_it_failed(tmp_path, stage):
    make(tmp_path, 1), make(tmp_path, 2), make(tmp_path, 20)
    steps.step_path(tmp_path, 2).with_suffix(".ok").unlink()
    if stage == "writing":
        steps.step_path(tmp_path, 2).rename(tmp_path / f"step_0000000002{TMP_SUFFIX}")
    if stage == "half marked":
        (tmp_path / "step_0000000002.ok.w").touch()
    steps.discard_unfinished(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == [
        "step_0000000001",
        "step_0000000001.ok",
        "step_0000000020",
        "step_0000000020.ok",
    ]


def test_discarding_never_touches_a_committed_step_and_survives_a_missing_directory(tmp_path):
    make(tmp_path, 1)
    steps.discard_unfinished(tmp_path, 1)
    assert steps.committed_steps(tmp_path) == [1] and (steps.step_path(tmp_path, 1) / "state" / "bytes").exists()
    steps.discard_unfinished(tmp_path / "gone", 1)
    (tmp_path / "file").touch()
    steps.discard_unfinished(tmp_path / "file", 1)


def test_the_mark_comes_last_and_in_one_piece(tmp_path):
    directory = make(tmp_path, 1, mark=False)
    (directory / "unreadable").symlink_to(tmp_path / "nowhere")  # the fsync of the tree fails here
    with pytest.raises(OSError):
        steps.commit(tmp_path, 1)
    assert os.listdir(tmp_path) == [directory.name]
