"""Mixtures: proportions that are kept at every moment, and components that go on where they were when weights change."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.data.mixture import Mixture, Segment
from jaxckpt.data.rows import CutRows
from jaxckpt.data.shuffle import Epochs
from jaxckpt.errors import DataError

SIZES = {"a": 7, "b": 50, "c": 1}


def mixture(schedule, sizes=SIZES):
    """Row i of component k in its own order holds 1000 k + i."""
    rows = {
        name: Epochs(CutRows(1000 * k + np.arange(n + 1), seq_len=1), seed=None)
        for k, (name, n) in enumerate(sizes.items())
    }
    return Mixture(rows, schedule)


def drawn(mix, count, start=0):
    """[(component, number of its example)] of `count` examples."""
    which, index = mix.choose(np.arange(start, start + count))
    return list(zip(which.tolist(), index.tolist(), strict=True))


weights = st.dictionaries(st.sampled_from("abc"), st.floats(0, 100), min_size=1).filter(
    lambda w: sum(w.values()) > 1e-3
)


@settings(max_examples=80, deadline=None)
@given(first=weights, second=weights, change=st.integers(1, 40), count=st.integers(1, 120))
def test_every_component_is_read_in_its_own_order_without_a_gap_whatever_the_weights_do(first, second, change, count):
    mix = mixture([(0, first), (change, second), (change + 9, first), (change + 20, second)])
    mix.resolve([], 0, lambda batch: batch)
    found = drawn(mix, count)
    for k in range(3):
        own = [i for which, i in found if which == k]
        assert own == list(range(len(own)))
    counts = {name: sum(which == k for which, _ in found) for k, name in enumerate("abc")}
    assert mix.draws(count) == counts
    for name in "abc":
        if first.get(name, 0) == 0 and second.get(name, 0) == 0:
            assert counts[name] == 0


@settings(max_examples=60, deadline=None)
@given(w=weights, count=st.integers(1, 500))
def test_the_proportions_hold_at_every_moment(w, count):
    mix = mixture([(0, w)])
    total = sum(w.values())
    for name, n in mix.draws(count).items():
        assert abs(n - count * w.get(name, 0) / total) <= 2 + 2e-6 * count


@settings(max_examples=40, deadline=None)
@given(old=weights, new=weights, at=st.integers(0, 200), past=st.integers(1, 50))
def test_weights_that_change_at_a_resume_leave_the_past_alone_and_every_component_goes_on(old, new, at, past):
    before = mixture([(0, old), (past, new)])
    before.resolve([], 0, lambda batch: batch)
    recorded = [Segment(*s) for s in json.loads(json.dumps([s.as_json() for s in before.past(at)]))]
    after = mixture([(0, {"c": 1.0})])
    after.resolve(recorded, at, lambda batch: batch)
    assert drawn(after, at) == drawn(before, at)
    assert after.draws(at + 5) == {**before.draws(at), "c": before.draws(at)["c"] + 5}


@settings(max_examples=40, deadline=None)
@given(schedule=st.lists(weights, min_size=1, max_size=4), at=st.integers(0, 100))
def test_a_resume_with_the_same_schedule_changes_nothing(schedule, at):
    planned = [(17 * i, w) for i, w in enumerate(schedule)]
    whole, resumed = mixture(planned), mixture(planned)
    whole.resolve([], 0, lambda batch: 3 * batch)
    resumed.resolve(whole.past(at), at, lambda batch: 3 * batch)
    assert drawn(resumed, 300) == drawn(whole, 300)
    assert [s.as_json() for s in resumed.past(300)] == [s.as_json() for s in whole.past(300)]


def test_many_examples_at_once_are_those_one_by_one_far_from_the_start_too():
    mix = mixture([(0, {"a": 0.7, "b": 0.3}), (4000, {"b": 1, "c": 2})])
    mix.resolve([], 0, lambda batch: batch)
    for numbers in (np.arange(3990, 4110), np.arange(10**12, 10**12 + 40), np.array([5, 10**12, 4096, 0])):
        together = mix.read_rows(numbers)["tokens"]
        assert np.array_equal(together, [mix[i]["tokens"] for i in numbers])
        which, index = mix.choose(numbers)
        sizes = np.array(list(SIZES.values()))
        assert np.array_equal(together[:, 0], 1000 * which + index % sizes[which])


def test_a_component_of_the_smallest_weight_comes_at_last():
    assert mixture([(0, {"a": 1e-12, "b": 1.0})]).draws(1 << 21)["a"] >= 1


def test_what_was_read_before_the_weights_were_settled_is_forgotten():
    mix = mixture([(0, {"a": 1}), (2, {"b": 1})])
    mix.read_rows(np.arange(10))
    mix.resolve([], 0, lambda batch: batch)
    assert np.array_equal(mix.read_rows(np.arange(4))["tokens"][:, 0], [0, 1, 1000, 1001])


@settings(max_examples=60, deadline=None)
@given(old=weights, at=st.integers(1, 300), gone=st.sampled_from("abc"))
def test_a_component_may_be_taken_out_and_the_others_go_on_where_they_were(old, at, gone):
    before = mixture([(0, old)])
    drawn_before = before.draws(at)
    after = Mixture(
        {n: c for n, c in before.components.items() if n != gone}, [(0, {n: 1.0 for n in "abc" if n != gone})]
    )
    after.resolve(before.past(at), at, lambda batch: batch)
    drawn_after = after.draws(at + 10)
    assert drawn_after.pop(gone, 0) == drawn_before.pop(gone)
    assert {n: drawn_after[n] - drawn_before[n] for n in drawn_before} == dict.fromkeys(drawn_before, 5)
    after.read_rows(np.arange(at, at + 10))
    if drawn_before and before.draws(1)[gone]:
        with pytest.raises(DataError, match=f"example 0 came from '{gone}', which is no part of the mixture any more"):
            after.read_rows(np.arange(1))


def test_the_order_in_which_components_are_named_does_not_matter():
    one, other = mixture([(0, {"a": 2, "b": 1, "c": 1})]), mixture([(0, {"c": 1, "a": 2, "b": 1})])
    turned = Mixture(dict(reversed(other.components.items())), other.schedule)
    assert np.array_equal(one.read_rows(np.arange(99))["tokens"], turned.read_rows(np.arange(99))["tokens"])


def test_a_component_may_be_added_at_a_resume():
    before = mixture([(0, {"a": 1, "b": 1})], {"a": 7, "b": 50})
    after = mixture([(0, {"a": 1, "b": 1, "c": 2})])
    after.resolve(before.past(10), 10, lambda batch: batch)
    assert drawn(after, 10) == drawn(before, 10)
    assert after.draws(18) == {"a": 7, "b": 7, "c": 4}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([(0, {"a": 0.0, "b": 0})], "step 1: the weights sum to zero"),
        ([(0, {"x": 1})], "step 1: x is no store; there are a, b, c"),
        ([(0, {"a": -1, "b": 2})], "step 1: weights must be finite and at least 0; found {'a': -1}"),
        ([(0, {"a": float("nan")})], "must be finite"),
        ([(3, {"a": 1})], "first weights must hold from step 1"),
        ([(0, {"a": 1}), (5, {"a": 2}), (5, {"b": 1})], "steps must rise"),
        ([], "first weights must hold from step 1; found none"),
    ],
)
def test_weights_that_make_no_sense_are_refused(schedule, message):
    with pytest.raises(DataError, match=message):
        mixture(schedule)


def test_all_that_is_wrong_with_the_weights_is_said_at_once():
    with pytest.raises(DataError) as caught:
        mixture([(1, {"x": 1}), (0, {"a": 0})])
    assert len(str(caught.value).splitlines()) == 5
