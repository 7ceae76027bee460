"""Which snapshots stay, for every policy alone and together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt.errors import SnapshotError
from jaxckpt.snapshot.retention import Retention

STEPS = [10, 20, 30, 40, 50]


def gone(retention, steps=STEPS, metrics=None, pinned=()):
    return retention.superfluous(steps, metrics or {}, pinned)


def test_the_newest_stay():
    assert gone(Retention(keep=2)) == [10, 20, 30]
    assert gone(Retention(keep=5)) == gone(Retention(keep=9)) == []


def test_every_step_that_keep_every_divides_stays():
    assert gone(Retention(keep=1, keep_every=20)) == [10, 30]


def test_pinned_steps_stay():
    assert gone(Retention(keep=1), pinned={10, 99}) == [20, 30, 40]


@pytest.mark.parametrize("mode, kept", [("min", 20), ("max", 30)])
def test_the_best_stay_by_the_metric_and_the_newest_always(mode, kept):
    metrics = {10: {"loss": 2.0}, 20: {"loss": 1.0}, 30: {"loss": 3.0}, 40: {"loss": 2.5}, 50: {"loss": 2.6}}
    retention = Retention(keep=1, keep_best=1, best_metric="loss", best_mode=mode)
    assert gone(retention, metrics=metrics) == [s for s in STEPS if s not in (kept, 50)]


def test_of_equally_good_ones_the_newer_stays_and_what_has_no_number_is_never_the_best():
    metrics = {10: {"loss": 1.0}, 20: {"loss": 1.0}, 30: {"loss": None}, 40: {"loss": float("nan")}, 50: {}}
    assert gone(Retention(keep=1, keep_best=1, best_metric="loss"), metrics=metrics) == [10, 30, 40]


def test_bad_numbers_are_named_all_at_once():
    with pytest.raises(SnapshotError) as error:
        Retention(keep=0, keep_every=0, keep_best=-1, best_metric="accuracy", best_mode="up")  # type: ignore[arg-type]
    for word in ("keep=0", "keep_every=0", "keep_best=-1", "'accuracy'", "'up'"):
        assert word in str(error.value)


@given(
    st.lists(st.integers(1, 10**6), unique=True, max_size=30).map(sorted),
    st.integers(1, 5),
    st.integers(0, 5),
    st.none() | st.integers(1, 50),
)
def test_the_newest_is_never_superfluous_and_no_more_than_asked_goes(steps, keep, keep_best, keep_every):
    metrics = {step: {"loss": float(step % 7)} for step in steps}
    left = Retention(keep, keep_every, keep_best, "loss").superfluous(steps, metrics, ())
    assert set(left) <= set(steps[:-keep]) and len(steps) - len(left) >= min(len(steps), keep)
