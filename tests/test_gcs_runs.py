"""Snapshots and whole runs on gs://: the same promises as in a local directory, with a server that fails now and then."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gcs import BUCKET
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, SaveError
from jaxckpt.observe.metrics import read_metrics
from jaxckpt.snapshot import gcs as objects
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.plan import make_plan, shardings
from jaxckpt.state.train_state import TrainState
from runs import command, finish, numbers, start, train
from tiny import differing, mesh_of

# After the first request that fails Orbax closes its event loop, and those beside it have nowhere to report to.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_state(mesh, step=1):
    """(state, plan) with leaves cut into shards, whole, packed, and a random key."""

    def init():
        leaf = lambda *shape: jnp.asarray(np.random.default_rng(step).normal(size=shape), jnp.float32)
        params = {"kernel": leaf(512, 512), "whole": leaf(300, 301), "bias": leaf(17)}
        return TrainState(jnp.int32(step), params, None, {"key": jax.random.key(step)}, {})

    plan = make_plan(jax.eval_shape(init), mesh, rules=[("kernel", P("fsdp")), ("whole", P())])
    return jax.jit(init, out_shardings=shardings(plan))(), plan


def save(snapshots, step):
    state, plan = make_state(mesh_of(fsdp=4), step)
    meta = {"format": FORMAT, "step": step, "leaves": leaf_table(plan)}
    snapshots.save(Snapshot(state, {"next_example": step}, meta), metrics={"loss": 1.0 / step})
    snapshots.wait()
    return state


def open_snapshots(name, **arguments):
    snapshots = Snapshots(f"gs://{BUCKET}/{name}", timeout_s=60, **arguments)
    snapshots.open(Group(timeout_s=10))
    return snapshots


def test_a_snapshot_on_gs_comes_back_bitwise_on_another_mesh_and_old_ones_go(gcs):
    with open_snapshots("bitwise", keep=2) as snapshots:
        for step in (1, 2, 3):
            state = save(snapshots, step)
        assert snapshots.steps() == [2, 3]
        assert {n.split("/")[2] for n in gcs.names("bitwise/snapshots/")} == {
            *("step_0000000002", "step_0000000003", "step_0000000002.ok", "step_0000000003.ok")
        }
        for axes in ({"fsdp": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 8}):
            found = snapshots.restore(3, make_state(mesh_of(**axes), 3)[1])
            assert not differing(found.state, state) and found.data == {"next_example": 3}
    assert gcs.names("bitwise/lock") == []


@pytest.mark.parametrize("action", [503, "refuse"], ids=str)
def test_saves_and_restores_get_through_a_server_that_fails_now_and_then(gcs, action):
    with open_snapshots(f"faults-{action}") as snapshots:
        fault = gcs.inject(action, every=17)
        state = save(snapshots, 1)
        found = snapshots.restore(1, make_state(mesh_of(fsdp=2), 1)[1])
        assert fault.hits >= 3 and not differing(found.state, state)


def test_a_save_that_the_server_refuses_is_an_error_leaves_nothing_and_the_next_one_succeeds(gcs):
    with open_snapshots("refused") as snapshots:
        save(snapshots, 1)
        gcs.inject(403, r"^POST.*step_0000000002/.*/c/")
        with pytest.raises(SaveError, match=r"step 2 could not be saved: .*Forbidden.*newest good snapshot is step 1"):
            save(snapshots, 2)
        gcs.clear()
        assert snapshots.steps() == [1] and gcs.names("refused/snapshots/step_0000000002") == []
        save(snapshots, 2)
        assert snapshots.steps() == [1, 2]


def test_a_run_that_has_lost_its_lock_commits_nothing(gcs):
    with open_snapshots("lost") as snapshots:
        save(snapshots, 1)
        objects.write(f"gs://{BUCKET}/lost/lock", b'{"owner": "x", "host": "node7", "pid": 5, "started": 1.0}')
        with pytest.raises(SaveError, match=r"node7, pid 5"):
            save(snapshots, 2)
        assert snapshots.steps() == [1]


@pytest.mark.parametrize("victim", ["state/params.kernel/c/1/0", "state/packed/c/0", "meta/data.json", "manifest.json"])
def test_a_changed_object_is_found(gcs, victim):
    name = f"changed-{victim.replace('/', '-')}"
    with open_snapshots(name) as snapshots:
        save(snapshots, 1)
        path = f"{steps.step_path(snapshots.root, 1)}/{victim}"
        content = bytearray(objects.read(path))
        content[len(content) // 3] ^= 1
        objects.write(path, bytes(content))
        with pytest.raises(DamagedSnapshot):
            snapshots.restore(1, make_state(mesh_of(fsdp=4), 1)[1])


def test_killed_inside_a_save_and_resumed_on_gs_is_bitwise_equal_to_a_local_run(gcs, tmp_path):
    settings = ("steps=9", "snapshots.every=3")
    train(tmp_path, *settings)
    run_dir = f"gs://{BUCKET}/killed"
    for file in (tmp_path / "compilation_cache").iterdir():
        objects.write(f"{run_dir}/compilation_cache/{file.name}", file.read_bytes())
    # The manifest comes when Orbax is done, and before the mark.
    gcs.inject("delay", "^POST.*step_0000000006/manifest.json", delay_s=30)
    process = start(command(run_dir, *settings), **gcs.env)
    deadline = time.monotonic() + 240
    while not any("step_0000000006/manifest.json" in text for text in gcs.requests):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    gcs.clear()
    left = objects.names(f"{run_dir}/snapshots")
    assert {"step_0000000003", "step_0000000003.ok", "step_0000000006"} <= left and "step_0000000006.ok" not in left
    output = finish(start(command(run_dir, *settings), **gcs.env))
    assert "continues after step 3 of 9" in output
    assert [bits(line) for line in read_metrics(f"{run_dir}/metrics.jsonl")] == [
        bits(line) for line in read_metrics(os.fspath(tmp_path / "metrics.jsonl"))
    ]
    assert len(numbers(tmp_path)) == 9


def bits(line):
    return {key: line[key] for key in ("step", "loss_bits", "grad_norm", "batch_digest")}
