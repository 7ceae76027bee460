"""Which examples each step is trained on: an account that is exact over changed batch sizes and skipped steps."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.data.course import Course, check_skip, planned
from jaxckpt.errors import DataError


def batches(course, count):
    """[(first example, number of examples)] of the first `count` batches."""
    return [(course.example(n), course.end(n + 1) - course.example(n)) for n in range(count)]


def test_batches_follow_one_another():
    assert batches(Course.of(4), 3) == [(0, 4), (4, 4), (8, 4)]
    assert Course.of(4).end(0) == 0


def test_skipped_steps_are_left_out_and_the_later_ones_move_up():
    assert batches(planned(Course.of(4), 0, [(2, 3)]), 3) == [(0, 4), (12, 4), (16, 4)]
    assert batches(planned(Course.of(4), 0, [(1, 1)]), 2) == [(4, 4), (8, 4)]
    # The second range counts steps as the first one left them: its step 3 is what was step 5.
    assert batches(planned(Course.of(4), 0, [(2, 3), (3, 3)]), 3) == [(0, 4), (12, 4), (20, 4)]
    assert batches(planned(Course.of(4), 0, [(2, 3), (2, 2)]), 3) == [(0, 4), (16, 4), (20, 4)]


skips = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=4).map(
    lambda pairs: sorted((a, a + n) for a, n in pairs)
)


@settings(max_examples=150, deadline=None)
@given(skip=skips)
def test_skipping_is_removing_from_the_list_of_batches(skip):
    reference = [4 * n for n in range(200)]
    for first, last in skip:
        del reference[first - 1 : last]
    assert [example for example, _ in batches(planned(Course.of(4), 0, skip), 60)] == reference[:60]


@settings(max_examples=150, deadline=None)
@given(skip=skips, stop=st.integers(0, 40))
def test_a_resume_anywhere_goes_on_as_if_nothing_had_happened(skip, stop):
    whole = planned(Course.of(3), 0, skip)
    recorded = json.loads(json.dumps(whole.until(stop).as_json()))
    resumed = planned(Course.from_json(recorded), stop, skip)
    assert batches(resumed, 60) == batches(whole, 60)
    assert resumed.until(stop) == whole.until(stop) and resumed.end(stop) == whole.end(stop)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=5))
def test_changed_batch_sizes_use_every_example_once(sizes):
    course, batch = Course.of(sizes[0][0]), 0
    for size, count in sizes:
        course = course.with_batch_size(batch, size)
        batch += count
        course = Course.from_json(json.loads(json.dumps(course.until(batch).as_json())))
    seen = [e for n in range(batch) for e in range(course.example(n), course.end(n + 1))]
    assert seen == list(range(sum(size * count for size, count in sizes)))


def test_another_batch_size_after_a_skip_goes_on_after_the_last_example_trained_on():
    course = planned(Course.of(4), 0, [(2, 3)]).until(3)
    assert batches(planned(course.with_batch_size(3, 5), 3, [(2, 3)]), 5) == [
        (0, 4),
        (12, 4),
        (16, 4),
        (20, 5),
        (25, 5),
    ]


def test_what_is_still_to_be_skipped_may_change_at_a_resume_and_what_was_skipped_may_not():
    course = planned(Course.of(4), 0, [(2, 2), (9, 9)]).until(5)
    assert course.as_json()["skipped"] == [[2, 2]]
    assert batches(planned(course, 5, [(2, 2), (6, 7)]), 6)[-1] == (32, 4)
    with pytest.raises(
        DataError, match=r"skip is \[\], but the steps before step 6 were trained with skip \[\[2, 2\]\]"
    ):
        planned(course, 5, [])
    with pytest.raises(DataError, match=r"skip \[4, 4\]: the run goes on after step 5.*snapshot of step 3 or earlier"):
        planned(course, 5, [(2, 2), (4, 4)])
    with pytest.raises(DataError, match=r"skip \[5, 5\]: the run goes on after step 5"):
        planned(course, 5, [(2, 2), (5, 5)])
    assert batches(planned(course, 5, [(2, 2), (6, 6)]), 6)[-1] == (28, 4)


@pytest.mark.parametrize("skip", [[(0, 3)], [(3, 2)], [(5, 6), (2, 3)]])
def test_ranges_that_are_none_are_refused(skip):
    with pytest.raises(DataError, match="skip cannot be used"):
        check_skip(skip)
