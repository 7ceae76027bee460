"""The loop: a run that stops and starts again is the run that never stopped."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxckpt import Snapshots, read_metrics
from jaxckpt.errors import ConfigError, DataError, NonFiniteError, PlanError, SnapshotError
from small import bits, make_run, train
from tiny import Examples, differing, example, squared_error


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Seven steps without a stop, with evaluation and without snapshots on the way."""
    return train(tmp_path_factory.mktemp("straight"), 7, every=100, held_out=Examples(8), eval_every=2, eval_batches=2)


def test_close_waits_for_the_save_under_way_whatever_holds_the_loop(tmp_path):
    run = make_run(tmp_path)
    reports = run.train(4)
    while next(reports).step < 2:
        pass
    run.close()  # the loop is not at its end, and not closed
    assert run.snapshots is not None and run.snapshots.steps() == [2]


def test_a_resumed_run_is_bitwise_the_one_that_never_stopped_with_evaluation(straight, tmp_path):
    evaluation = {"held_out": Examples(8), "eval_every": 2, "eval_batches": 2}
    first, _, _ = train(tmp_path, 3, **evaluation)
    second, state, run = train(tmp_path, 7, **evaluation)
    assert run.step == 7 and [r.step for r in second] == [4, 5, 6, 7]
    assert bits(first + second) == bits(straight[0])
    assert [r.eval_loss for r in first + second] == [r.eval_loss for r in straight[0]]
    assert not differing(state, straight[1])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss_bits"] for line in lines] == [r.loss_bits for r in straight[0]]


def test_evaluation_changes_nothing_in_training_and_neither_do_snapshots(straight):
    reports, state, _ = train(None, 7)
    assert bits(reports) == bits(straight[0]) and not differing(state, straight[1])
    assert all(r.eval_loss is None for r in reports)
    assert [r.step for r in straight[0] if r.eval_loss is not None] == [2, 4, 6]


def test_reports_cover_every_step_once_and_in_order(straight):
    assert [r.step for r in straight[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert all(r.tokens > 0 and r.tokens_per_s > 0 and r.lr is None and not r.skipped for r in straight[0])


def test_the_last_step_is_saved_and_starting_again_at_the_end_does_nothing(straight):
    run_dir = straight[2].snapshots.run_dir
    before = (run_dir / "metrics.jsonl").read_bytes()
    evaluation = {"held_out": Examples(8), "eval_every": 2, "eval_batches": 2}
    reports, state, run = train(run_dir, 7, every=100, **evaluation)
    assert reports == [] and run.step == 7 and not run.stopped and run.snapshots.steps() == [7]
    assert not differing(state, straight[1]), "what was saved last is what there was"
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_stop_request_ends_after_a_saved_step_and_training_goes_on_after_it(straight, tmp_path):
    with make_run(tmp_path, every=100) as run:
        first = list(run.train(7, should_stop=lambda: run.step == 3))
        assert run.stopped and run.step == 3 and run.snapshots.steps() == [3]
        second = list(run.train(7))
        assert not run.stopped and bits(first + second) == bits(straight[0])
        assert list(run.train(7)) == []


def test_a_stop_request_that_comes_after_the_compiler_is_done_still_stops_before_the_first_step(tmp_path):
    with make_run(tmp_path) as run:
        run._program.start()
        assert run._program.wait(lambda: False)
        assert list(run.train(7, should_stop=lambda: True)) == [] and run.stopped and run.step == 0
        assert len(list(run.train(2))) == 2 and not run.stopped


def test_a_loop_that_is_left_early_loses_no_line_and_no_step(straight, tmp_path):
    with make_run(tmp_path, every=100) as run:
        for report in run.train(7):
            if report.step == 2:
                break
        list(run.train(7))
        assert not differing(run.state, straight[1])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps to be resumed with something changed; a resume is refused before it writes."""
    run_dir = tmp_path_factory.mktemp("saved")
    train(run_dir, 2)
    return run_dir


@pytest.mark.parametrize("change", [{"seed": 1}, {"global_batch": 8}, {"max_grad_norm": 1.0}], ids=str)
def test_a_changed_setting_is_refused_by_name_with_both_values(saved, change):
    ((key, value),) = change.items()
    with (
        make_run(saved, **change) as run,
        pytest.raises(SnapshotError, match=rf"{key}: was .*, now {value}.*\n.*allow_changed"),
    ):
        list(run.train(4))


def test_other_data_is_refused(saved):
    other = Examples(20, lambda i: example(i + 1))
    with make_run(saved, data=other) as run, pytest.raises(DataError, match="data changed"):
        list(run.train(4))


def test_another_optimizer_is_refused_by_its_leaves(saved):
    with make_run(saved, optimizer=optax.sgd(0.1)) as run, pytest.raises(SnapshotError, match="opt_state/0/mu"):
        list(run.train(4))


def test_a_change_that_is_allowed_by_name_goes_on_from_the_same_example(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    reports, _, _ = train(copy, 3, global_batch=8, allow_changed=("global_batch",))
    assert [r.step for r in reports] == [3]
    with make_run(copy, global_batch=8) as run:
        run.open()
        assert run._stream.state()["next_example"] == 2 * 4 + 8


def scaled_loss(scale):
    table = jnp.asarray(scale, jnp.float32)
    return lambda model, batch: (lambda t, c: (t * table.sum(), c))(*squared_error(model, batch))


def test_an_array_that_the_loss_has_caught_must_be_the_same_after_a_resume(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        train(tmp_path, 1, loss=scaled_loss([1, 2]))
    assert "neither parameters nor model state (float32[2])" in caplog.text
    with make_run(tmp_path, loss=scaled_loss([1, 3])) as run, pytest.raises(SnapshotError, match="captured"):
        list(run.train(2))
    assert [r.step for r in train(tmp_path, 2, loss=scaled_loss([1, 2]))[0]] == [2]


def test_a_generator_is_no_data():
    with pytest.raises(DataError, match="generator"):
        make_run(data=(example(i) for i in range(8)))


def test_data_that_draws_from_numpys_global_generator_is_refused_at_the_first_snapshot(tmp_path):
    def noisy(i):
        return {**example(i), "x": np.random.normal(size=(3, 8)).astype(np.float32)}

    with make_run(tmp_path, data=Examples(20, noisy), data_identity={"content": "noisy"}) as run:
        with pytest.raises((DataError, SnapshotError), match="numpy"):
            list(run.train(2))
        assert run.snapshots.steps() == []


def broken(i):
    """From example 12 on, which is the fourth batch of four, the input is not a number."""
    good = example(i)
    return {**good, "x": good["x"] * np.float32(np.nan if i >= 12 else 1)}


def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_bad_is_saved(tmp_path):
    with make_run(tmp_path, data=Examples(20, broken)) as run:
        seen = []
        with pytest.raises(NonFiniteError, match=r"step 4: the loss is nan"):
            seen.extend(r.step for r in run.train(8))
        assert run.snapshots.steps() == [2]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_skipping_reports_the_step_and_goes_on(tmp_path):
    reports, state, _ = train(tmp_path, 6, data=Examples(20, broken), nonfinite="skip", every=3)
    assert [r.skipped for r in reports] == [False, False, False, True, True, False]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    line = read_metrics(tmp_path / "metrics.jsonl")[3]
    assert line["skipped"] is True and line["loss"] is None


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    # The update itself overflows: loss and gradient of this step are still finite.
    with make_run(tmp_path, optimizer=optax.sgd(1e38), every=1) as run:
        with pytest.raises(NonFiniteError, match=r"step 1: not finite any more: params/"):
            list(run.train(3))
        assert run.snapshots.steps() == []


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(ConfigError) as error:
        make_run(nonfinite="ignore", seed=None, global_batch="8", loss=3, placement={}, lr=1.0, allow_changed=["sede"])
    for found in ("nonfinite", "'ignore'", "seed", "global_batch", "loss", "jc.Placement", "lr must be", "sede"):
        assert found in str(error.value)
    with pytest.raises(ConfigError, match="needs held_out"):
        make_run(eval_every=2)
    with pytest.raises(PlanError, match="cannot be cut into 3 microbatches over 2 devices"):
        make_run(accumulation_steps=3)
    with pytest.raises(PlanError, match="no parameters"):
        make_run(model=lambda rngs: nnx.Dropout(0.5, rngs=rngs))


def test_a_caught_scalar_must_be_the_same_after_a_resume(tmp_path):
    def scaled(value):
        scale = jnp.float32(value)
        return lambda model, batch: (lambda t, c: (t * scale, c))(*squared_error(model, batch))

    train(tmp_path, 1, loss=scaled(1.0))
    with make_run(tmp_path, loss=scaled(7.0)) as run, pytest.raises(SnapshotError, match="float32"):
        list(run.train(2))


def test_another_program_is_refused_unless_allowed_by_name(tmp_path):
    twice = lambda model, batch: (lambda t, c: (t * 2.0, c))(*squared_error(model, batch))
    train(tmp_path, 1)
    with make_run(tmp_path, loss=twice) as run, pytest.raises(SnapshotError, match="not the program"):
        list(run.train(2))
    assert [r.step for r in train(tmp_path, 2, loss=twice, allow_changed=("program",))[0]] == [2]


def test_a_run_interrupted_inside_a_step_refuses_to_go_on(tmp_path):
    train(tmp_path, 2)
    with make_run(tmp_path) as run:
        run.open()
        program, run._program = run._program, lambda *_: (_ for _ in ()).throw(MemoryError("out of memory"))
        with pytest.raises(MemoryError):
            list(run.train(6))
        run._program = program
        with pytest.raises(ConfigError, match="interrupted inside a step"):
            list(run.train(6))
    reports, _, _ = train(tmp_path, 6)
    assert [r.step for r in reports] == [3, 4, 5, 6]


def test_leaving_the_loop_loses_no_line_and_the_last_step_is_saved_when_it_goes_on(tmp_path):
    with make_run(tmp_path) as run:
        for report in run.train(6):
            if report.step == 5:
                break
        assert run.step == 6
        assert list(run.train(6)) == []
        assert run.snapshots.steps()[-1] == 6
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_directory_that_orbax_takes_for_a_pattern_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match=r"\[.*pattern"):
        Snapshots(tmp_path / "lr[3e-4]")


def test_fields_of_a_batch_may_hold_dots_and_slashes():
    loss = lambda model, batch: squared_error(model, {"x": batch["image/x.y"], **batch})
    renamed = lambda i: {"image/x.y": example(i)["x"], **{k: v for k, v in example(i).items() if k != "x"}}
    with make_run(data=Examples(20, renamed), loss=loss) as run:
        assert [r.step for r in run.train(1)] == [1]
