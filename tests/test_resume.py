"""Which snapshot a run goes on from: the newest good one, the one that was asked for, or another run's."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt import flatten, read_metrics
from jaxckpt.errors import ConfigError, DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.leaves import stored_leaves
from small import bits, make_run, train
from tiny import Mlp, differing, to_numpy


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Eight steps with a snapshot after every second."""
    return train(tmp_path_factory.mktemp("straight"), 8)


def flip(path, offset=-20, bit=3):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def damage(run_dir, step, name="state/packed/c/0"):
    flip(steps.step_path(run_dir / "snapshots", step) / name)


def names(run_dir):
    return sorted(p.name for p in (run_dir / "snapshots").iterdir() if p.is_dir())


# Damage


@pytest.mark.parametrize("name", ["state/packed/c/0", "meta/data.json", "data/data.json", "manifest.json", "_METADATA"])
def test_a_damaged_snapshot_is_set_aside_and_the_newest_good_one_goes_on_bitwise(straight, tmp_path, name, caplog):
    train(tmp_path, 6)
    damage(tmp_path, 6, name if name != "_METADATA" else "state/_METADATA")
    reports, state, _ = train(tmp_path, 8)
    assert [r.step for r in reports] == [5, 6, 7, 8], "from step 4, the newest good one"
    assert bits(reports) == bits(straight[0])[4:] and not differing(state, straight[1])
    assert names(tmp_path) == ["damaged_step_0000000006", *(f"step_000000000{n}" for n in (2, 4, 6, 8))]
    said = caplog.text
    assert "step_0000000006" in said and name.rpartition("/")[2].removesuffix("0") in said
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_a_run_whose_snapshots_are_all_damaged_never_begins_anew_unasked(tmp_path):
    train(tmp_path, 4)
    for step in (2, 4):
        damage(tmp_path, step)
    for _ in range(2):  # the second time they are quarantined already
        with make_run(tmp_path) as run, pytest.raises(SnapshotError, match="no good snapshot is left.*damaged_step"):
            run.open()
    reports, _, _ = train(tmp_path, 2, resume="never")
    assert [r.step for r in reports] == [1, 2]
    assert names(tmp_path) == ["damaged_step_0000000002", "damaged_step_0000000004", "step_0000000002"]


# What the user wants


def test_required_wants_a_snapshot_and_never_wants_none(tmp_path):
    with make_run(tmp_path, resume="required") as run, pytest.raises(SnapshotError, match="resume: required"):
        run.open()
    train(tmp_path, 2, resume="never")
    with make_run(tmp_path, resume="never") as run, pytest.raises(SnapshotError, match="holds snapshots up to step 2"):
        run.open()
    assert [r.step for r in train(tmp_path, 4, resume="required")[0]] == [3, 4]


def test_a_step_number_goes_back_once_and_then_on_and_loses_nothing(straight, tmp_path):
    train(tmp_path, 8)
    reports, _, _ = train(tmp_path, 5, resume=4)
    assert bits(reports) == bits(straight[0])[4:5]
    kept = ["superseded_step_0000000006", "superseded_step_0000000008"]
    assert names(tmp_path) == [f"step_000000000{n}" for n in (2, 4, 5)] + kept
    reports, state, _ = train(tmp_path, 8, resume=4)
    assert [r.step for r in reports] == [6, 7, 8], "the same command goes on"
    assert not differing(state, straight[1])


def test_the_command_that_went_back_goes_on_when_retention_has_deleted_its_step(straight, tmp_path):
    train(tmp_path, 4)
    with make_run(tmp_path, resume=2, keep=1) as run:
        list(run.train(6))
    assert steps.committed_steps(tmp_path / "snapshots") == [6]
    reports, state, _ = train(tmp_path, 8, resume=2)
    assert [r.step for r in reports] == [7, 8]
    assert not differing(state, straight[1])


def test_a_step_that_cannot_be_had_is_an_error_and_nothing_changes(tmp_path):
    train(tmp_path, 4)
    with make_run(tmp_path, resume=3) as run, pytest.raises(SnapshotError, match=r"resume: 3, .* but of \[2, 4\]"):
        run.open()
    damage(tmp_path, 2)
    before = names(tmp_path)
    with make_run(tmp_path, resume=2) as run, pytest.raises(DamagedSnapshot, match="asks for this very step"):
        run.open()
    assert names(tmp_path) == before and steps.committed_steps(tmp_path / "snapshots") == [2, 4]


@pytest.mark.parametrize(
    "args",
    [{"resume": "newest"}, {"resume": True}, {"restore_paths": ["a"]}, {"restore_from": "x", "restore_paths": ["("]}],
    ids=str,
)
def test_wishes_that_make_no_sense_are_refused(tmp_path, args):
    with pytest.raises(ConfigError, match=f"{'restore_paths' if 'restore_paths' in args else 'resume'}"):
        make_run(tmp_path, **args)


# Another run


def test_restore_from_goes_on_as_the_other_run_would_and_its_own_snapshots_come_first(straight, tmp_path):
    source = straight[2].snapshots.run_dir
    steps.pin(source / "snapshots", 6, "good")
    before = names(source)
    reports, state, _ = train(tmp_path / "a", 7, restore_from=f"{source}@4")
    assert bits(reports) == bits(straight[0])[4:7]
    reports, state, _ = train(tmp_path / "a", 8, restore_from=f"{source}@2")
    assert [r.step for r in reports] == [8] and not differing(state, straight[1])
    assert [r.step for r in train(tmp_path / "b", 8, restore_from=f"{source}@good")[0]] == [7, 8]
    meta = json.loads((tmp_path / "a/snapshots/step_0000000008/meta/data.json").read_text())
    assert meta["restored_from"] == {"path": f"{source}/snapshots", "step": 4, "paths": []}
    assert names(source) == before
    steps.unpin(source / "snapshots", "good")


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_restore_paths_takes_those_leaves_and_begins_at_step_0(straight, tmp_path, compute_dtype):
    source = straight[2].snapshots.run_dir
    with make_run(
        tmp_path, restore_from=str(source), restore_paths=["^params/inner"], compute_dtype=compute_dtype
    ) as run:
        run.open()
        found = to_numpy(stored_leaves(run.state))
        assert run.step == 0 and int(run.state.step) == 0
    with make_run(None, compute_dtype=compute_dtype) as fresh:
        fresh.open()
        new = to_numpy(stored_leaves(fresh.state))
    old = flatten(straight[1])
    for path, x in found.items():
        expected = old[path] if path.startswith("params/inner") else new[path]
        assert np.array_equal(x, expected), path
    assert not np.array_equal(old["params/inner/kernel"], new["params/inner/kernel"])
    if compute_dtype:
        assert np.array_equal(run.state.params["inner"]["kernel"], old["params/inner/kernel"].astype(jnp.bfloat16))


def test_what_restore_from_cannot_give_is_listed_at_once(straight, tmp_path):
    source = straight[2].snapshots.run_dir
    other = {"model": lambda rngs: Mlp(rngs, width=12, dropout=0.2, has_norm=True)}
    wish = {"restore_from": str(source), "restore_paths": ["^params/inner", "^nothing"]}
    with make_run(tmp_path, **wish, **other) as run, pytest.raises(SnapshotError) as error:
        run.open()
    for text in (
        "'^nothing' matches no leaf",
        "leaf 'params/inner/kernel' is float32[8, 16] in the snapshot; this model has float32[8, 12]",
        "leaf 'params/inner/bias'",
    ):
        assert text in str(error.value)
    for place in (tmp_path / "none", f"{source}@3", f"{source}@nobody"):
        with (
            make_run(tmp_path / "c", restore_from=str(place)) as run,
            pytest.raises(SnapshotError, match="no (snapshot|pin)"),
        ):
            run.open()


def test_a_damaged_source_is_an_error_and_stays_as_it_is(tmp_path):
    train(tmp_path / "a", 4)
    damage(tmp_path / "a", 4)
    with make_run(tmp_path / "b", restore_from=str(tmp_path / "a")) as run, pytest.raises(DamagedSnapshot):
        run.open()
    assert names(tmp_path / "a") == ["step_0000000002", "step_0000000004"]
