"""When a run saves, what stays, and what a failed or interrupted save does to it."""

import logging
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt import read_metrics
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import SaveError, SnapshotError
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.train_state import TrainState
from small import bits, make_run, train
from tiny import Examples, differing, example, mesh_of


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight"), 8)


def test_a_run_may_save_by_time_alone_and_counts_steps_beside(tmp_path):
    _, _, run = train(tmp_path / "time", 3, every=None, policy={"every_minutes": 1e-9})
    assert run.snapshots.steps() == [1, 2, 3]
    _, _, run = train(tmp_path / "hour", 5, every=2, policy={"every_minutes": 60})
    assert run.snapshots.steps() == [2, 4, 5]


def test_every_kth_the_best_and_pinned_snapshots_stay_beside_the_newest(tmp_path):
    policy = {"keep_every": 4, "keep_best": 1, "best_metric": "loss", "best_mode": "max"}
    with make_run(tmp_path, every=1, keep=1, policy=policy) as run:
        for report in run.train(9):
            if report.step == 6:
                run.snapshots.wait()
                steps.pin(run.snapshots.root, 6, "mine")
        losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")}
        best = max(losses, key=lambda step: losses[step])
        assert run.snapshots.steps() == sorted({4, 6, 8, 9, best})
    # What is best is known to the next life too, from the marks.
    steps.unpin(tmp_path / "snapshots", "mine")
    with make_run(tmp_path, every=1, keep=1, policy=policy) as run:
        list(run.train(10))
        assert run.snapshots.steps() == sorted({4, 8, 10, best})


def test_the_best_by_evaluation_is_one_that_was_evaluated(tmp_path):
    evaluation = {"held_out": Examples(8), "eval_every": 2, "eval_batches": 2}
    reports, _, run = train(tmp_path, 7, every=1, keep=1, policy={"keep_best": 1}, **evaluation)
    values = {r.step: r.eval_loss for r in reports if r.eval_loss is not None}
    assert set(values) == {2, 4, 6}
    assert run.snapshots.steps() == sorted({min(values, key=lambda step: values[step]), 7})


def block(run_dir, step):
    """Makes the save of `step` fail: a directory lies where its mark is to be written."""
    place = run_dir / "snapshots" / f".writing-step_{step:010d}.ok"
    place.mkdir(parents=True)
    return place


def test_training_stops_within_a_step_of_a_failed_save(tmp_path):
    with make_run(tmp_path, every=2) as run:
        run.open()
        block(tmp_path, 4)
        seen = []
        with pytest.raises(
            SaveError, match=r"step 4 could not be saved: IsADirectoryError.*newest good snapshot is step 2"
        ):
            for report in run.train(1000):
                seen.append(report.step)
                time.sleep(0.05)  # a step that takes longer than the failing save
        assert seen[-1] <= 6 and run.snapshots.steps() == [2]


def test_training_may_go_on_after_a_failed_save_and_loses_only_that(straight, tmp_path, caplog):
    with make_run(tmp_path, every=2, policy={"on_failure": "continue"}) as run:
        run.open()
        block(tmp_path, 4)
        reports = list(run.train(8))
        assert run.snapshots.steps() == [2, 6, 8]
    assert bits(reports) == bits(straight[0])
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) == 1 and "step 4 could not be saved" in said[0] and "Training goes on" in said[0]


def test_a_failed_last_save_is_an_error_whatever_was_asked_for(tmp_path):
    with make_run(tmp_path, every=2, policy={"on_failure": "continue"}) as run:
        run.open()
        block(tmp_path, 4)
        with pytest.raises(SaveError, match="step 4 could not be saved"):
            list(run.train(4))


def test_a_state_that_no_disk_can_hold_is_refused_at_the_start(tmp_path):
    huge = jax.ShapeDtypeStruct((1 << 30, 1 << 20), np.float32, sharding=NamedSharding(mesh_of(), P()))
    with Snapshots(tmp_path, timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        with pytest.raises(
            SnapshotError, match=r"a snapshot takes 4294967297\.0 MiB, 1 of them in reserve, and [\d.]+ MiB are free"
        ):
            snapshots.check_space(TrainState(None, {"w": huge}, None, {}, {}))


def test_a_stop_while_data_is_late_saves_the_last_step_and_loses_nothing(straight, tmp_path):
    is_late, late, asked = threading.Event(), threading.Event(), []

    def make(i):
        if i >= 12 and is_late.is_set() and not late.is_set():
            late.wait(60)
        return example(i)

    def should_stop():
        asked.append(run.step)
        return asked.count(3) > 1  # not right after the step, but while the batch after it does not come

    try:
        with make_run(tmp_path, every=100, data=Examples(20, make), num_threads=0) as run:
            is_late.set()  # the constructor looks at some examples
            reports = list(run.train(8, should_stop=should_stop))
            assert run.stopped and run.snapshots.steps() == [3] and [r.step for r in reports] == [1, 2, 3]
    finally:
        late.set()
    more, state, _ = train(tmp_path, 8)
    assert bits(reports + more) == bits(straight[0]) and not differing(state, straight[1])


def test_a_stop_before_the_first_step_trains_nothing_and_saves_nothing(tmp_path):
    with make_run(tmp_path) as run:
        assert list(run.train(4, should_stop=lambda: True)) == []
        assert run.stopped and run.step == 0 and run.snapshots.steps() == []
        assert [r.step for r in run.train(2)] == [1, 2], "it may be asked again"
