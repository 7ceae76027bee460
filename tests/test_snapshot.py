"""A snapshot holds the whole state, bit for bit, and fits only the run it belongs to."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, SaveError, SnapshotError
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.leaves import check_leaves, leaf_table, stored_leaves
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot, root_cause
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.plan import Placement, make_plan, shardings
from jaxckpt.state.train_state import TrainState, narrow
from tiny import differing, mesh_of

RULES = [("kernel", P("fsdp"))]
TX = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.adamw(1e-3))  # add_noise keeps a typed random key
OFF = Placement(master="pinned_host", opt_state="pinned_host")


def make_state(mesh, placement=None, compute_dtype=None, *, width=6, tx=TX, step=7):
    """(state, plan) with random bits, an integer key, an empty leaf and a batch statistic."""

    def init():
        rng = np.random.default_rng(step)
        leaf = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        weights = {
            "layers": {0: {"kernel": leaf(8, width)}, 1: {"kernel": leaf(8, width)}},
            "empty": leaf(0, 3),
            "b": leaf(width),
        }
        params, master = narrow(weights, compute_dtype)
        opt_state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, tx.init(weights))
        return TrainState(jnp.int32(step), params, master, opt_state, {"norm": {"mean": leaf(width)}})

    plan = make_plan(jax.eval_shape(init), mesh, rules=RULES, placement=placement or Placement())
    return jax.jit(init, out_shardings=shardings(plan))(), plan


def snapshot_of(state, plan, step=None, **meta):
    step = int(state.step) if step is None else step
    return Snapshot(
        state, {"next_example": 3 * step}, {"format": FORMAT, "step": step, "leaves": leaf_table(plan), **meta}
    )


@pytest.fixture
def snapshots(tmp_path):
    with Snapshots(tmp_path / "run", timeout_s=60) as opened:
        opened.open(Group(timeout_s=10))
        yield opened


@pytest.fixture(scope="module")
def tiny():
    return make_state(mesh_of())


def save(snapshots, state, plan, step=None):
    snapshots.save(snapshot_of(state, plan, step))
    snapshots.wait()


def big(step, megabytes):
    """A state that takes time to write."""
    w = jnp.arange(megabytes << 18, dtype=jnp.float32).reshape(-1, 1024) + step
    state = TrainState(jnp.int32(step), {"w": w}, None, {}, {})
    plan = make_plan(jax.eval_shape(lambda: state), mesh_of())
    return jax.device_put(state, shardings(plan)), plan


# What comes back

LAYOUTS = [
    ({"fsdp": 2}, None, None),
    ({"fsdp": 2}, OFF, None),
    ({"data": 2, "fsdp": 4}, OFF, "bfloat16"),
    ({}, None, "bfloat16"),
]


@pytest.mark.parametrize("saved_as", LAYOUTS, ids=range(len(LAYOUTS)))
def test_the_whole_state_comes_back_bitwise_on_every_mesh_placement_and_with_or_without_master_weights(
    snapshots, saved_as
):
    axes, *layout = saved_as
    state, plan = make_state(mesh_of(**axes), *layout)
    save(snapshots, state, plan)
    for axes, placement, compute_dtype in LAYOUTS:
        expected, target = make_state(mesh_of(**axes), placement, compute_dtype)
        found = snapshots.restore(7, target, compute_dtype=compute_dtype)
        assert not differing(found.state, expected)
        assert jax.tree.all(jax.tree.map(lambda x, p: x.sharding == p.sharding, found.state, target))
        assert found.data == {"next_example": 21} and found.meta["step"] == 7


def test_the_random_key_of_an_optimizer_continues_its_stream(snapshots, tiny):
    state, plan = tiny
    save(snapshots, state, plan)
    found = snapshots.restore(7, plan).state
    a, b = (jax.random.normal(s.opt_state[0].rng_key, (4,)) for s in (state, found))
    assert np.array_equal(a, b)


def test_what_is_stored_never_holds_the_narrow_copy():
    state, _ = make_state(mesh_of(), None, "bfloat16")
    stored = stored_leaves(state)
    assert stored["params/b"].dtype == jnp.float32 and not any(p.startswith("master") for p in stored)


@pytest.mark.parametrize("placement", [None, OFF], ids=["device", "pinned_host"])
def test_a_state_donated_right_after_the_save_does_not_change_the_bytes(snapshots, placement):
    mesh = mesh_of(fsdp=2)
    w = np.arange(1 << 22, dtype=np.float32).reshape(2048, 2048)  # 16 MiB, three times
    state = TrainState(jnp.int32(0), {"kernel": w}, None, {"mu": {"kernel": w}, "nu": {"kernel": w}}, {})
    plan = make_plan(jax.eval_shape(lambda: state), mesh, rules=RULES, placement=placement or Placement())
    state = jax.device_put(state, shardings(plan))

    def overwrite(state):
        on_device = jax.device_put(state, shardings(plan, "device"))
        return jax.device_put(jax.tree.map(lambda x: x * 0 - 1, on_device), shardings(plan))

    step = jax.jit(overwrite, donate_argnums=0, out_shardings=shardings(plan)).lower(state).compile()
    for number in range(3):
        snapshots.save(snapshot_of(state, plan, number))
        state = jax.block_until_ready(step(state))
        snapshots.wait()
        found = snapshots.restore(number, plan).state
        assert all(np.array_equal(x, w) for x in jax.tree.leaves((found.params, found.opt_state)))
        state = jax.device_put(found, shardings(plan))


# What does not fit


def test_every_leaf_that_does_not_fit_is_listed_at_once(snapshots, tiny):
    state, plan = tiny
    save(snapshots, state, plan)
    other = make_state(mesh_of(), width=5, tx=optax.sgd(0.1, momentum=0.9))[1]
    other.params["more"] = other.params["b"]
    other.params["b"] = jax.ShapeDtypeStruct((6,), jnp.int32, sharding=other.params["b"].sharding)
    with pytest.raises(SnapshotError) as error:
        snapshots.restore(7, other)
    text = str(error.value)
    for line in (
        "leaf 'opt_state/1/0/mu/b' is in the snapshot and not in this model",
        "leaf 'params/more' is in this model and not in the snapshot",
        "leaf 'params/layers/0/kernel' has shape [8, 6] in the snapshot and [8, 5] in this model",
        "leaf 'params/b' has dtype float32 in the snapshot and int32 in this model",
        "start a new run_dir",
    ):
        assert line in text


def test_a_long_list_of_differences_is_cut_with_their_number():
    leaves = {f"params/{i}": {"shape": [1], "dtype": "float32"} for i in range(50)}
    with pytest.raises(SnapshotError, match=r"and 30 more"):
        check_leaves(Path("x"), leaves, {})


def test_a_newer_format_is_refused_with_both_versions(snapshots, tiny):
    state, plan = tiny
    snapshots.save(snapshot_of(state, plan, format=FORMAT + 1, versions={"jaxckpt": "9.9"}))
    snapshots.wait()
    with pytest.raises(
        SnapshotError, match=rf"format {FORMAT + 1}, written by jaxckpt 9\.9.*reads format {FORMAT}\. Update"
    ):
        snapshots.restore(7, plan)


@pytest.mark.parametrize("content", [None, "", "[]", '{"step": 7}', '{"format": "x"}'], ids=str)
def test_an_unreadable_meta_is_damage(snapshots, tiny, content):
    state, plan = tiny
    save(snapshots, state, plan)
    path = snapshots.root / "step_0000000007" / "meta" / "data.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DamagedSnapshot, match=r"step_0000000007: the snapshot's meta"):
        snapshots.restore(7, plan)


# Which steps there are


def test_the_newest_keep_steps_stay(tmp_path, tiny):
    state, plan = tiny
    with Snapshots(tmp_path, keep=2, timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        for step in (1, 2, 3, 10):
            save(snapshots, state, plan, step)
        assert snapshots.steps() == [3, 10]
        assert sorted(os.listdir(snapshots.root)) == [f"step_{n:010d}{m}" for n in (3, 10) for m in ("", ".ok")]


def test_a_step_being_written_is_never_listed(snapshots):
    state, plan = big(1, 64)
    snapshots.save(snapshot_of(state, plan))
    job, seen = snapshots._job, []
    assert job is not None
    while job.is_alive():
        mark = (snapshots.root / "step_0000000001.ok").exists()
        seen.append((mark, snapshots.steps()))
    assert seen[0] == (False, []), "there was time to look"
    assert all(listed == [] or (snapshots.root / "step_0000000001.ok").exists() for _, listed in seen)
    snapshots.wait()
    assert snapshots.steps() == [1]
    assert np.array_equal(snapshots.restore(1, plan).state.params["w"], state.params["w"])


def test_opening_sweeps_what_a_killed_process_left_and_keeps_what_counts(tmp_path, tiny):
    state, plan = tiny
    with Snapshots(tmp_path, timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        save(snapshots, state, plan, 1)
        save(snapshots, state, plan, 2)
        (snapshots.root / "step_0000000002.ok").unlink()
    again = Snapshots(tmp_path, timeout_s=60)
    assert again.steps() == [1]
    again.open(Group(timeout_s=10))
    assert sorted(os.listdir(again.root)) == ["step_0000000001", "step_0000000001.ok"]
    save(again, state, plan, 2)  # the swept step can be saved again
    assert again.steps() == [1, 2]
    again.close()


# Failures


def test_a_save_that_fails_raises_at_the_next_check_and_training_may_be_told_once(snapshots, tiny):
    state, plan = tiny
    save(snapshots, state, plan, 1)
    kept = snapshots.root.rename(snapshots.root.with_name("kept"))
    snapshots.root.write_text("a file where the directory was")
    threads = set(threading.enumerate())
    with pytest.raises(SaveError, match=r"snapshot of step 2 could not be saved: .*no good snapshot"):
        save(snapshots, state, plan, 2)
    assert set(threading.enumerate()) <= threads, "a thread that waits for ever would keep the process from ending"
    snapshots.check()
    snapshots.root.unlink()
    kept.rename(snapshots.root)
    save(snapshots, state, plan, 3)
    assert snapshots.steps() == [1, 3]


def test_an_error_in_the_background_reaches_check_without_waiting(snapshots, tiny):
    state, plan = tiny
    (snapshots.root / ".writing-step_0000000002.ok").mkdir()  # where the mark would be written
    snapshots.save(snapshot_of(state, plan, 2))
    assert snapshots._job is not None
    snapshots._job.join()
    with pytest.raises(SaveError, match="step 2 could not be saved: IsADirectoryError"):
        snapshots.check()
    assert os.listdir(snapshots.root) == [], "what failed takes no room"
    snapshots.wait()


def test_a_pin_that_cannot_be_read_stops_retention_and_says_so(snapshots, tiny):
    state, plan = tiny
    (snapshots.root / "pin_x").write_text("garbage")
    with pytest.raises(SaveError, match=r"step 2 is saved, but older ones could not be deleted: .*pin_x: not a pin"):
        save(snapshots, state, plan, 2)
    assert snapshots.steps() == [2]


@pytest.mark.parametrize(
    "args",
    [{"every": True}, {"every_minutes": "1"}, {"staging_bytes": "2GiB"}, {"restore_bytes": 1.5}, {"timeout_s": None}],
    ids=str,
)
def test_settings_of_the_wrong_kind_are_refused_by_name(tmp_path, args):
    with pytest.raises(SnapshotError, match=f"{next(iter(args))}=.* must be"):
        Snapshots(tmp_path, **args)


def test_closing_after_a_failed_save_raises_and_still_gives_the_directory_free(tmp_path, tiny):
    state, plan = tiny
    snapshots = Snapshots(tmp_path, timeout_s=60)
    snapshots.open(Group(timeout_s=10))
    (snapshots.root / ".writing-step_0000000002.ok").mkdir()
    snapshots.save(snapshot_of(state, plan, 2))
    with pytest.raises(SaveError):
        snapshots.close()
    with Snapshots(tmp_path) as other:
        other.open(Group(timeout_s=10))


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, timeout=10).returncode:
        pytest.skip("this user may not mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_loses_only_the_save_that_did_not_fit(small_disk, tiny):
    state, plan = tiny
    with Snapshots(small_disk / "run", timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        save(snapshots, state, plan, 1)
        free = shutil.disk_usage(small_disk).free
        with pytest.raises(SaveError, match=r"step 2 could not be saved: .*newest good snapshot is step 1"):
            save(snapshots, *big(2, 16))
        assert snapshots.steps() == [1]
        assert shutil.disk_usage(small_disk).free >= free - 4096, "the failed save gave its room back"
        assert not differing(snapshots.restore(1, plan).state, state)
        save(snapshots, state, plan, 3)
        assert snapshots.steps() == [1, 3]


# One writer

OWNER = """
import sys, time
from etils import epath
from jaxckpt.snapshot.lock import RunLock
lock = RunLock(epath.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_directory_in_use_is_refused_naming_its_owner_and_free_after_a_sigkill(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        (tmp_path / "snapshots" / "step_0000000001").mkdir(parents=True)
        snapshots = Snapshots(tmp_path)
        for _ in range(2):  # a second try is refused too
            with pytest.raises(SnapshotError, match=rf'in use by another run .*"pid": {owner.pid}'):
                snapshots.open(Group(timeout_s=10))
        assert (tmp_path / "snapshots" / "step_0000000001").exists(), "what the owner may be writing is not swept"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
        owner.stdout.close()
    snapshots.open(Group(timeout_s=10))
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    snapshots.close()


def test_closing_gives_the_directory_free_and_open_takes_it_again(tmp_path):
    first, second = Snapshots(tmp_path), Snapshots(tmp_path)
    first.open(Group(timeout_s=10))
    with pytest.raises(SnapshotError, match="in use"):
        second.open(Group(timeout_s=10))
    first.close()
    second.open(Group(timeout_s=10))
    second.close()


def test_bad_arguments_and_places_are_refused(tmp_path):
    for args in (
        {"every": 0},
        {"keep": 0},
        {"every": None},
        {"on_failure": "shrug"},
        {"restore_bytes": 0},
        {"every_minutes": 0},
    ):
        with pytest.raises(SnapshotError, match=next(iter(args))):
            Snapshots(tmp_path, **args)
    with pytest.raises(SnapshotError, match="s3:// cannot be used"):
        Snapshots("s3://bucket/run")
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="cannot be written"):
        Snapshots(tmp_path / "file").open(Group(timeout_s=10))


def test_steps_can_be_listed_without_opening(tmp_path):
    assert Snapshots(tmp_path / "none").steps() == []
    steps.sweep(tmp_path / "snapshots")
    assert Snapshots(tmp_path).steps() == [] and not (tmp_path / "lock").exists()


def test_a_snapshot_cannot_be_changed_by_accident(tiny):
    snapshot = snapshot_of(*tiny)
    with pytest.raises(AttributeError):
        snapshot.data = {}  # type: ignore[misc]
    assert replace(snapshot, data={}).data == {}


def test_why_a_save_failed_is_told_to_its_end():
    error = RuntimeError("of Orbax")
    error.__cause__ = SnapshotError("no room:\n  /mnt/a: 5 MiB are needed, 3 are free\nFree some.")
    assert root_cause(error) == "no room: /mnt/a: 5 MiB are needed, 3 are free Free some."
    assert root_cause(RuntimeError("one\ntwo")) == "RuntimeError: one"
