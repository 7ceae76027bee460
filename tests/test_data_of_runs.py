"""What a run is fed over its lives: the same batches again, or a refusal that says what changed."""

import logging

import grain
import numpy as np
import pytest

from jaxckpt.data.mixture import Mixture
from jaxckpt.data.randomized import Randomized
from jaxckpt.data.shuffle import Epochs
from jaxckpt.errors import DataError, SnapshotError
from jaxckpt.observe.metrics import read_metrics
from small import bits, make_run, train
from tiny import Examples, example

WATCHED = {"data_identity": {"content": "the same by name"}}


class Rows:
    """Rows that are read many at once; row i is example(first + i)."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return example(self.first + i)

    def read_rows(self, numbers):
        examples = [self[int(i)] for i in numbers]
        return {name: np.stack([e[name] for e in examples]) for name in examples[0]}


def mixture(*schedule):
    return Mixture({"a": Epochs(Rows(0, 7), seed=1), "b": Epochs(Rows(100, 9), seed=2)}, schedule)


def numbers(run_dir):
    return [(line["step"], line["example"]) for line in read_metrics(run_dir / "metrics.jsonl")]


def digests(reports):
    return [r.batch_digest for r in reports]


@pytest.fixture(scope="module")
def straight():
    """Twelve steps of four examples, over 40 examples."""
    return train(None, 12, data=Examples(40))[0]


def test_a_batch_that_is_another_than_in_an_earlier_life_stops_the_run(tmp_path):
    train(tmp_path, 6, **WATCHED)
    edited = Examples(20, lambda i: example(i + (1000 if i == 17 else 0)))  # in the batch of step 5
    with make_run(tmp_path, data=edited, resume=4, **WATCHED) as run:
        with pytest.raises(
            DataError, match=r"step 5: the batch has the digest \w+, and an earlier life .* examples \(16"
        ):
            list(run.train(6))
        assert run.snapshots.steps() == [2, 4]
    reports, _, _ = train(tmp_path, 6, **WATCHED)
    assert [r.step for r in reports] == [5, 6]


def test_a_batch_of_other_data_that_was_allowed_is_not_compared(tmp_path):
    train(tmp_path, 6, **WATCHED)
    other = {"data": Examples(20, lambda i: example(i + 50)), "data_identity": {"content": "other"}}
    with (
        pytest.raises(DataError, match="content was 'the same by name' and is 'other'"),
        make_run(tmp_path, resume=4, **other) as run,
    ):
        list(run.train(6))
    reports, _, _ = train(tmp_path, 6, resume=4, allow_changed=("data",), **other)
    assert [r.step for r in reports] == [5, 6]


def test_steps_from_the_first_on_are_skipped_in_a_mixture_too(tmp_path):
    weights = [(0, {"a": 1, "b": 1}), (2, {"a": 1, "b": 3})]
    whole, _, _ = train(None, 6, data=mixture((0, {"a": 1, "b": 1}), (4, {"a": 1, "b": 3})), **WATCHED)
    first, _, _ = train(tmp_path, 2, data=mixture(*weights), skip=[(1, 2)], **WATCHED)
    second, _, _ = train(tmp_path, 4, data=mixture(*weights), skip=[(1, 2)], **WATCHED)
    assert digests(first + second) == digests(whole[2:])


def test_data_edited_in_place_is_seen_in_the_last_batch_though_the_batch_size_may_change(tmp_path):
    train(tmp_path, 4, **WATCHED)
    edited = Examples(20, lambda i: example(i + (1000 if i == 13 else 0)))
    run = make_run(tmp_path, data=edited, global_batch=8, allow_changed=("global_batch",), **WATCHED)
    with run, pytest.raises(SnapshotError, match="the batch of step 4 had the digest"):
        list(run.train(6))


def test_allowing_other_stores_does_not_allow_other_text_in_one_that_stays(tmp_path):
    def given(**identity):
        names = {name.replace("_", "."): value for name, value in identity.items()}
        return {"config": {}, "allow_changed": ("data.stores",), "data_identity": {"seq_len": 8, **names}}

    train(tmp_path, 2, **given(a_content="1", a_tokenizer="t", b_content="2", b_tokenizer="t"))
    run = make_run(tmp_path, **given(a_content="9", a_tokenizer="t", c_content="3", c_tokenizer="t"))
    with run, pytest.raises(DataError, match=r"a.content was '1' and is '9'\."):
        list(run.train(4))
    reports, _, _ = train(tmp_path, 4, **given(a_content="1", a_tokenizer="t", c_content="3", c_tokenizer="t"))
    assert [r.step for r in reports] == [3, 4]


def test_allowing_another_batch_size_does_not_allow_other_data(tmp_path):
    allowed = {"config": {}, "allow_changed": ("data.batch_size", "data.weights")}
    train(tmp_path, 2, **allowed, **WATCHED)
    run = make_run(tmp_path, data_identity={"content": "other"}, **allowed)
    with run, pytest.raises(DataError, match="content was"):
        list(run.train(4))


def test_skipped_steps_give_the_run_the_batches_after_them(straight, tmp_path):
    reports, _, _ = train(tmp_path, 6, data=Examples(40), skip=[(3, 5)])
    assert digests(reports) == digests([*straight[:2], *straight[5:9]])
    assert numbers(tmp_path) == [(1, 0), (2, 4), (3, 20), (4, 24), (5, 28), (6, 32)]


def test_after_a_spike_one_goes_back_and_leaves_its_batches_out(straight, tmp_path):
    train(tmp_path, 6, data=Examples(40))
    with (
        make_run(tmp_path, data=Examples(40), skip=[(3, 4)]) as run,
        pytest.raises(DataError, match="goes on after step 6"),
    ):
        list(run.train(8))
    again, _, _ = train(tmp_path, 6, data=Examples(40), skip=[(3, 4)], resume=2)
    assert digests(again) == digests(straight[4:8])
    more, _, run = train(tmp_path, 8, data=Examples(40), skip=[(3, 4), (7, 7)])
    assert digests(more) == digests(straight[9:11])
    assert run._stream.state()["skipped"] == [[3, 4], [7, 7]]
    with (
        make_run(tmp_path, data=Examples(40)) as run,
        pytest.raises(DataError, match=r"trained with skip \[\[3, 4\], \[7, 7\]\]"),
    ):
        list(run.train(9))


def test_a_batch_size_that_changes_at_a_resume_uses_every_example_once(tmp_path):
    train(tmp_path, 3, data=Examples(40))
    with (
        make_run(tmp_path, data=Examples(40), global_batch=8) as run,
        pytest.raises(SnapshotError, match="global_batch: was 4, now 8"),
    ):
        list(run.train(5))
    train(tmp_path, 5, data=Examples(40), global_batch=8, allow_changed=("global_batch",))
    train(tmp_path, 7, data=Examples(40), global_batch=2, allow_changed=("global_batch",))
    assert numbers(tmp_path) == [(1, 0), (2, 4), (3, 8), (4, 12), (5, 20), (6, 28), (7, 30)]


def test_a_mixture_that_changes_its_weights_on_a_schedule_resumes_bit_for_bit_anywhere(tmp_path):
    weights = [(0, {"a": 1, "b": 1}), (3, {"a": 1, "b": 3}), (5, {"b": 1})]
    whole, _, _ = train(None, 8, data=mixture(*weights), **WATCHED)
    first, _, _ = train(tmp_path, 4, data=mixture(*weights), **WATCHED)
    second, _, _ = train(tmp_path, 8, data=mixture(*weights), **WATCHED)
    assert bits(first + second) == bits(whole)


def test_weights_that_change_at_a_resume_are_recorded_and_every_component_goes_on(tmp_path):
    before, after = {"a": 3, "b": 1}, {"a": 1, "b": 1}
    train(tmp_path, 4, data=mixture((0, before)), **WATCHED)
    train(tmp_path, 6, data=mixture((0, after)), **WATCHED)
    third, _, run = train(tmp_path, 8, data=mixture((0, after)), **WATCHED)
    assert run._stream.state()["segments"] == [[0, before], [16, after]]
    planned, _, _ = train(None, 8, data=mixture((0, before), (4, after)), **WATCHED)
    assert digests(third) == digests(planned[6:])


def test_an_earlier_life_with_other_weights_is_not_compared(tmp_path):
    train(tmp_path, 8, data=mixture((0, {"a": 1})), **WATCHED)
    reports, _, _ = train(tmp_path, 8, data=mixture((0, {"b": 1})), resume=4, **WATCHED)
    assert [r.step for r in reports] == [5, 6, 7, 8]


@pytest.mark.parametrize("source", [Examples(9), Rows(0, 9)], ids=["one by one", "many at once"])
def test_randomness_is_a_function_of_seed_and_example_number(source, tmp_path):
    def noisy(e, rng):
        return {**e, "x": (e["x"] + rng.normal(size=e["x"].shape)).astype(np.float32)}

    data = lambda seed: Randomized(Epochs(source, seed=0), noisy, seed=seed)
    whole, _, _ = train(None, 6, data=data(1), **WATCHED)
    first, _, _ = train(tmp_path, 2, data=data(1), **WATCHED)
    second, _, _ = train(tmp_path, 6, data=data(1), **WATCHED)
    assert bits(first + second) == bits(whole)
    assert len(set(digests(whole))) == 6 and not set(digests(train(None, 6, data=data(2), **WATCHED)[0])) & set(
        digests(whole)
    )
    seen = [data(1)[i]["x"] for i in range(18)]  # two epochs: the second draws anew
    assert len({x.tobytes() for x in seen}) == 18


def test_a_transform_that_changes_shapes_or_fails_is_named_with_its_example():
    rows = Epochs(Rows(0, 9), seed=None)
    for transform, message in [
        (lambda e, rng: {"x": e["x"][: 3 - (e["mask"].sum() == 1)]}, r"example \d: the transform makes field 'x'"),
        (lambda e, rng: {**e, **({"more": 1} if e["mask"].sum() == 1 else {})}, "always of the same fields"),
        (lambda e, rng: 1 // 0, "example 0: the transform raised ZeroDivisionError"),
        (lambda e, rng: None, "example 0: the transform must return a mapping"),
    ]:
        with pytest.raises(DataError, match=message):
            Randomized(rows, transform, seed=0).read_rows(np.arange(9))


def shuffled_in_a_window():
    """Forty examples in an order that only Grain's iterator knows."""
    data = grain.MapDataset.source(Examples(40)).repeat().to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(data, window_size=7, seed=3)


def test_an_iter_dataset_resumes_bit_for_bit(tmp_path):
    whole, _, _ = train(None, 9, data=shuffled_in_a_window())
    first, _, _ = train(tmp_path, 4, data=shuffled_in_a_window())
    second, _, _ = train(tmp_path, 9, data=shuffled_in_a_window())
    assert bits(first + second) == bits(whole) and len(set(digests(whole))) == 9


def test_steps_of_an_iter_dataset_are_skipped_too(tmp_path):
    whole, _, _ = train(None, 9, data=shuffled_in_a_window())
    first, _, _ = train(tmp_path, 4, data=shuffled_in_a_window(), skip=[(3, 4), (5, 5)])
    second, _, _ = train(tmp_path, 5, data=shuffled_in_a_window(), skip=[(3, 4), (5, 5)])
    assert digests(first + second) == digests([*whole[:2], *whole[4:6], whole[7]])


def test_a_run_does_not_go_over_from_random_access_to_an_iterator_or_back(tmp_path):
    train(tmp_path / "a", 2, data=Examples(40))
    with (
        make_run(tmp_path / "a", data=shuffled_in_a_window()) as run,
        pytest.raises(DataError, match="have no numbers"),
    ):
        list(run.train(4))
    train(tmp_path / "b", 2, data=shuffled_in_a_window())
    with (
        make_run(tmp_path / "b", data=Examples(40)) as run,
        pytest.raises(DataError, match="the data changed: dataset was"),
    ):
        list(run.train(4))


def test_data_to_evaluate_on_needs_random_access():
    with pytest.raises(DataError, match="cannot be resumed exactly"):
        make_run(data=Examples(40), held_out=shuffled_in_a_window(), eval_every=2)


def test_a_grain_data_set_that_is_no_permutation_is_refused_before_anything_is_trained():
    data = grain.MapDataset.range(4**8 + 1).shuffle(seed=1).map(lambda i: example(int(i)))
    with pytest.raises(DataError, match="65537"):
        make_run(data=data)


def test_a_batch_without_a_target_is_told(caplog):
    masked = Examples(40, lambda i: {**example(i), "mask": example(i)["mask"] * (not 4 <= i < 8)})
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        train(None, 3, data=masked)
    assert [r.getMessage() for r in caplog.records if "no target" in r.getMessage()] == [
        "step 2: the batch has no target, so nothing was learned from it"
    ]
