"""Only a step with its mark counts; whatever a kill or a failure leaves behind is swept."""

import hashlib
import json
import math
import os
import shutil

import pytest
from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import orbax_io, steps
from jaxckpt.snapshot.steps import TMP_SUFFIX

MANIFEST = '{"files":{}}'


@pytest.fixture
def tmp_path(tmp_path):
    return epath.Path(tmp_path)


def make(root, step, *, mark=True, **metrics):
    directory = steps.step_path(root, step)
    (directory / "state").mkdir(parents=True)
    (directory / "state" / "bytes").write_bytes(b"x" * 100)
    if mark:
        steps.commit(root, step, manifest=MANIFEST, metrics=metrics)
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
    names = [steps.step_path(epath.Path("x"), n).name for n in (1, 9, 10, 99, 10**9)]
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
    (tmp_path / ".writing-step_0000000006.ok").touch()
    (tmp_path / "mine.txt").touch()
    swept = steps.sweep(tmp_path)
    assert swept == [
        ".deleted-step_0000000003",
        ".writing-step_0000000006.ok",
        "step_0000000002",
        "step_0000000003.ok",
        f"step_0000000004{TMP_SUFFIX}",
        f"step_0000000005{TMP_SUFFIX}-17",
    ]
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "step_0000000001", "step_0000000001.ok"]
    assert steps.sweep(tmp_path) == []


@pytest.mark.parametrize("numbers", [(4,), (2, 4)], ids=str)
def test_sweep_never_deletes_the_last_whole_steps_for_want_of_a_mark(tmp_path, caplog, numbers):
    for number in numbers:
        make(tmp_path, number, mark=False)
        (steps.step_path(tmp_path, number) / steps.MANIFEST).touch()
    make(tmp_path, 7, mark=False)  # killed before its manifest
    assert steps.sweep(tmp_path) == ["step_0000000007"]
    # One may be the first save, killed; two are never left by a kill.
    prefix = "unmarked_" if len(numbers) == 1 else "damaged_"
    assert sorted(os.listdir(tmp_path)) == [f"{prefix}step_000000000{n}" for n in numbers]
    assert len(caplog.records) == len(numbers) and "has no mark" in caplog.text
    assert steps.quarantined(tmp_path) == ([] if len(numbers) == 1 else sorted(os.listdir(tmp_path)))


def test_a_pin_that_would_read_as_a_step_is_refused(tmp_path):
    make(tmp_path, 9)
    with pytest.raises(SnapshotError, match="@12 means step 12"):
        steps.pin(tmp_path, 9, "12")
    steps.pin(tmp_path, 9, "v12")
    assert steps.pins(tmp_path) == {"v12": 9}


def test_sweep_makes_the_directory(tmp_path):
    assert steps.sweep(tmp_path / "a" / "b") == [] and (tmp_path / "a" / "b").is_dir()


def test_a_kill_at_any_point_of_a_deletion_leaves_no_step_that_looks_whole(tmp_path, subtests_of_kills=3):
    # What a kill leaves after each of the three actions of `delete`: the mark gone, the directory renamed, half emptied.
    for done in range(1, subtests_of_kills + 1):
        root = tmp_path / str(done)
        root.mkdir()
        directory = make(root, 1)
        make(root, 2)  # what is deleted is never the last, or its lost mark would be a riddle
        directory.with_name(directory.name + ".ok").unlink()
        if done > 1:
            directory = directory.rename(root / f".deleted-{directory.name}")
        if done > 2:
            shutil.rmtree(directory / "state")
        assert steps.committed_steps(root) == [2]
        steps.sweep(root)
        assert sorted(os.listdir(root)) == ["step_0000000002", "step_0000000002.ok"]


@pytest.mark.parametrize("stage", ["writing", "renamed", "half marked"])
def test_a_failed_save_is_discarded_at_whatever_stage_it_failed(tmp_path, stage):
    make(tmp_path, 1), make(tmp_path, 2), make(tmp_path, 20)
    steps.step_path(tmp_path, 2).with_suffix(".ok").unlink()
    if stage == "writing":
        steps.step_path(tmp_path, 2).rename(tmp_path / f"step_0000000002{TMP_SUFFIX}")
    if stage == "half marked":
        (tmp_path / ".writing-step_0000000002.ok").touch()
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
    os.symlink(tmp_path / "nowhere", directory / "unreadable")  # the fsync of the tree fails here
    with pytest.raises(OSError):
        steps.commit(tmp_path, 1, manifest=MANIFEST, metrics={})
    assert os.listdir(tmp_path) == [directory.name]


def record_calls(monkeypatch):
    """(name, path) of every fsync, rename, unlink and rmdir that Python asks the system for, in order."""
    calls = []

    def spy(name):
        real = getattr(os, name)

        def call(*args, dir_fd=None, **kwargs):
            target = args[-1] if name in ("rename", "replace") else args[0]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            here = os.readlink(f"/proc/self/fd/{dir_fd}") + "/" if dir_fd is not None else ""
            calls.append((name, here + path))
            return real(*args, **({} if dir_fd is None else {"dir_fd": dir_fd}), **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir"):
        spy(name)
    return calls


def test_every_byte_is_on_the_disk_before_the_mark_and_the_mark_is_gone_before_any_byte_is(tmp_path, monkeypatch):
    make(tmp_path, 1, mark=False)
    calls = record_calls(monkeypatch)
    steps.commit(tmp_path, 1, manifest=MANIFEST, metrics={})
    committed = len(calls)
    steps.delete(tmp_path, 1)
    root, step = os.fspath(tmp_path), os.fspath(tmp_path / "step_0000000001")
    mark = f"{step}.ok"
    marked = calls.index(("rename", mark))
    synced = [path for name, path in calls[:marked] if name == "fsync"]
    for path in (f"{step}/state/bytes", f"{step}/manifest.json", f"{root}/.writing-step_0000000001.ok"):
        assert path in synced, f"{path} was not on the disk when the mark came"
    last = {path: i for i, path in enumerate(synced)}
    assert last[root] > last[step] > last[f"{step}/state"] > last[f"{step}/state/bytes"], "a name without its file"
    assert ("fsync", root) in calls[marked:committed], "the mark may not last"
    gone = next(i for i, call in enumerate(calls) if call in (("unlink", mark), ("remove", mark)))
    renamed = calls.index(("rename", f"{root}/.deleted-step_0000000001"))
    emptied = next(i for i, (name, path) in enumerate(calls) if name == "unlink" and path.endswith("/bytes"))
    assert ("fsync", root) in calls[gone:renamed], "the mark may come back"
    assert ("fsync", root) in calls[renamed:emptied], "the name may come back"


# -------------------------------------------------------------------------------------------------- the mark


def test_the_mark_holds_the_metrics_and_vouches_for_the_manifest_and_itself(tmp_path):
    directory = make(tmp_path, 7, loss=0.1, eval_loss=None, worst=math.inf, odd=math.nan)
    mark = steps.read_mark(tmp_path, 7)
    assert mark["metrics"] == {"loss": 0.1, "eval_loss": None, "worst": None, "odd": None} and mark["step"] == 7
    assert (directory / "manifest.json").read_text() == MANIFEST
    assert mark["manifest_sha256"] == hashlib.sha256(MANIFEST.encode()).hexdigest()
    rest = {k: v for k, v in mark.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert mark["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert "\n" not in (tmp_path / f"{directory.name}.ok").read_text()


def test_every_changed_byte_of_a_mark_is_found(tmp_path):
    path = make(tmp_path, 3, loss=1.5).parent / "step_0000000003.ok"
    text = path.read_bytes()
    for position in range(len(text)):
        for changed in (text[:position] + bytes([text[position] ^ 1]) + text[position + 1 :], text[:position]):
            path.write_bytes(changed)
            with pytest.raises(DamagedSnapshot, match="step_0000000003.ok: the mark is"):
                steps.read_mark(tmp_path, 3)
    path.write_bytes(text)
    assert steps.read_mark(tmp_path, 3)["step"] == 3


OTHER_MARKS = ["", "null", "[]", "3", '{"step":3}', '{"step":3,"sha256":null}', "\xff", '{"metrics":NaN}', "[" * 100]


@pytest.mark.parametrize("text", OTHER_MARKS, ids=str)
def test_a_mark_of_another_kind_is_damage(tmp_path, text):
    make(tmp_path, 3)
    (tmp_path / "step_0000000003.ok").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedSnapshot):
        steps.read_mark(tmp_path, 3)


def test_the_mark_of_another_step_is_damage(tmp_path):
    make(tmp_path, 3), make(tmp_path, 4)
    os.replace(tmp_path / "step_0000000004.ok", tmp_path / "step_0000000003.ok")
    with pytest.raises(DamagedSnapshot, match="not what was written for step 3"):
        steps.read_mark(tmp_path, 3)


def test_a_mark_of_the_first_format_is_no_damage_but_cannot_be_read(tmp_path):
    make(tmp_path, 3)
    (tmp_path / "step_0000000003.ok").write_text(json.dumps({"step": 3, "committed_at": 1.5}))
    with pytest.raises(SnapshotError, match="format 1") as refusal:
        steps.read_mark(tmp_path, 3)
    assert not isinstance(refusal.value, DamagedSnapshot)


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path):
    make(tmp_path, 3), make(tmp_path, 12)
    with pytest.raises(SnapshotError, match="no snapshot of step 4; the steps there are: 3, 12"):
        steps.read_mark(tmp_path, 4)


# -------------------------------------------------------------------------------------------------- set aside


def test_a_quarantined_step_no_longer_counts_and_never_replaces_an_older_one(tmp_path):
    for i, expected in enumerate(["damaged_step_0000000002", "damaged_step_0000000002.1", "damaged_step_0000000002.2"]):
        make(tmp_path, 2, loss=i)
        assert steps.quarantine(tmp_path, 2) == expected
        assert steps.committed_steps(tmp_path) == []
        assert json.loads((tmp_path / f"{expected}.ok").read_text())["metrics"] == {"loss": i}
        assert (tmp_path / expected / "state" / "bytes").exists()
    assert steps.quarantined(tmp_path) == [
        "damaged_step_0000000002",
        "damaged_step_0000000002.1",
        "damaged_step_0000000002.2",
    ]
    make(tmp_path, 2)
    assert steps.set_aside(tmp_path, 2) == "superseded_step_0000000002"
    before = sorted(os.listdir(tmp_path))
    assert steps.sweep(tmp_path) == [] and sorted(os.listdir(tmp_path)) == before


def test_a_kill_inside_a_quarantine_leaves_what_sweep_ends(tmp_path):
    make(tmp_path, 2).rename(tmp_path / "damaged_step_0000000002")
    assert steps.committed_steps(tmp_path) == []
    assert steps.sweep(tmp_path) == ["step_0000000002.ok"]
    assert os.listdir(tmp_path) == ["damaged_step_0000000002"]


# -------------------------------------------------------------------------------------------------- pins


def test_a_pin_keeps_its_step_by_name_until_it_is_removed(tmp_path):
    make(tmp_path, 1), make(tmp_path, 2)
    steps.pin(tmp_path, 1, "before.the-change_2")
    steps.pin(tmp_path, 1, "before.the-change_2")
    steps.pin(tmp_path, 2, "step_0000000009.ok")
    steps.pin(tmp_path, 2, f"x{TMP_SUFFIX}")
    assert steps.sweep(tmp_path) == []
    assert steps.pins(tmp_path) == {"before.the-change_2": 1, "step_0000000009.ok": 2, f"x{TMP_SUFFIX}": 2}
    steps.delete(tmp_path, 1)
    assert steps.pins(tmp_path)["before.the-change_2"] == 1, "retention decides, not the pin"
    steps.unpin(tmp_path, "before.the-change_2")
    assert "before.the-change_2" not in steps.pins(tmp_path)


def test_pins_that_cannot_be_are_refused(tmp_path):
    make(tmp_path, 1), make(tmp_path, 2)
    steps.pin(tmp_path, 1, "a")
    with pytest.raises(SnapshotError, match="'a' holds step 1 already"):
        steps.pin(tmp_path, 2, "a")
    with pytest.raises(SnapshotError, match=r"no snapshot of step 3 to pin; the steps there are: \[1, 2\]"):
        steps.pin(tmp_path, 3, "b")
    with pytest.raises(SnapshotError, match="there is no pin 'b'; the pins are: a"):
        steps.unpin(tmp_path, "b")
    for name in ("", "a/b", "../x", "a b", "ä", "a" * 201, "a\n"):
        for call in (lambda name=name: steps.pin(tmp_path, 1, name), lambda name=name: steps.unpin(tmp_path, name)):
            with pytest.raises(SnapshotError, match="expected a name of letters"):
                call()
    (tmp_path / "pin_a").write_text("?")
    with pytest.raises(SnapshotError, match="pin_a: not a pin"):
        steps.pins(tmp_path)


# -------------------------------------------------------------------------------------------------- the place


def test_the_free_bytes_are_those_of_a_user(tmp_path):
    stat = os.statvfs(tmp_path)
    assert steps.free_bytes(tmp_path) == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)


def test_a_place_that_cannot_be_written_is_noticed_and_one_that_can_is_left_as_it_was(tmp_path):
    steps.check_writable(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError):
        steps.check_writable(tmp_path / "none")


def test_orbax_and_the_sweep_mean_the_same_leftovers():
    assert steps.TMP_SUFFIX == orbax_io.TMP_SUFFIX
