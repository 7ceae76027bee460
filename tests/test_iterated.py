"""A user's grain.IterDataset: exact at every position, and refused where it could not be."""

import json
import logging
import threading

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from iterated_data import KINDS, epochs, example, few, packed, with_workers
from jaxckpt.data.iterated import IteratedBatches, refuse_shared_rows, rows_of_processes, same_examples
from jaxckpt.errors import DataError

ROWS = 3


def batches_of(dataset, rows=ROWS, **options):
    return IteratedBatches(dataset, rows=rows, **options)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_equal(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key].dtype == y[key].dtype and np.array_equal(x[key], y[key]), key


def through_json(batches):
    return {"0": json.loads(json.dumps(batches.state()))}


def restored(dataset, states, **options):
    batches = batches_of(dataset, **options)
    batches.restore(states)
    return batches


def check_exact(make, positions, after=5):
    """Reads on from each of `positions` in a fresh iterator and compares with one that never stopped."""
    reader = batches_of(make())
    states, read = {0: through_json(reader)}, []
    for position in range(1, max(positions) + after + 1):
        read.append(next(reader))
        states[position] = through_json(reader)
    reader.close()
    for position in positions:
        again = restored(make(), states[position])
        assert_equal(take(again, after), read[position : position + after])
        assert again.state() == states[position + after]["0"]
        again.close()
    return read


@pytest.mark.filterwarnings("ignore:.*Padding.*")
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_iterator_goes_on_with_the_same_batches_at_every_position(kind):
    read = check_exact(KINDS[kind], range(31))
    first = {key: value[0].tolist() for key, value in read[0].items()}
    assert any({k: v[0].tolist() for k, v in batch.items()} != first for batch in read[1:])


def test_worker_processes_go_on_with_the_same_batches():
    read = check_exact(lambda: with_workers(2), [4], after=3)
    seen = [int(x) for batch in read for x in batch["x"][:, 0]]
    # Each worker reads every second example, so they come in the order of the data set.
    assert seen == [int(row["x"][0]) for row in few(count=60)][:21]


def test_another_number_of_workers_is_refused():
    states = through_json(batches_of(with_workers(2)))
    for other, found in ((with_workers(3), "3"), (few(), "no")):
        with pytest.raises(DataError, match=f"mp_prefetch had 2 workers and has {found}, which would give other"):
            restored(other, states)


def test_examples_come_in_the_order_of_the_data_set_and_begin_again_at_its_end(caplog):
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        read = take(batches := batches_of(few()), 20)
    assert batches.state()["in_epoch"] == 60 - 2 * 23
    batches.close()
    seen = np.concatenate([batch["x"][:, 0] for batch in read]).tolist()
    expected = [int(row["x"][0]) for row in few()]
    assert seen == [*expected, *expected, *expected][:60]
    assert [r.getMessage() for r in caplog.records if "ends after" in r.getMessage()] == [
        "the data ends after 23 examples and begins again in the same order; .repeat() before .to_iter_dataset() gives "
        "each epoch its own"
    ]


def test_an_empty_data_set_is_refused_and_does_not_hang():
    with pytest.raises(DataError, match="ends before its first example"):
        next(batches_of(few().filter(lambda row: False)))


def test_the_number_of_rows_may_change_at_a_resume():
    reader = batches_of(epochs())
    take(reader, 4)
    on = restored(epochs(), through_json(reader), rows=5)
    small, large = take(reader, 5), take(on, 3)
    for key in ("x", "noise"):
        assert np.array_equal(np.concatenate([b[key] for b in small]), np.concatenate([b[key] for b in large]))
    assert on.state()["examples"] == reader.state()["examples"] == 27


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"processes": 2}, "it was saved by 1 processes and is to go on with 2"),
        ({"process": 1, "processes": 1}, "the states are of processes 0; none is of process 1"),
    ],
)
def test_another_number_of_processes_is_refused(change, says):
    states = through_json(batches_of(few()))
    with pytest.raises(DataError, match=says) as caught:
        restored(few(), states, **change)
    assert "Give a grain.MapDataset" in str(caught.value)


def test_each_process_goes_on_where_it_was():
    readers = [batches_of(few(50 * p), process=p, processes=2) for p in range(2)]
    for p, reader in enumerate(readers):
        take(reader, 2 + p)
    states = {str(p): json.loads(json.dumps(reader.state())) for p, reader in enumerate(readers)}
    for p, reader in enumerate(readers):
        on = restored(few(50 * p), states, process=p, processes=2)
        assert_equal(take(on, 2), take(reader, 2))
    with pytest.raises(DataError, match="it was saved by 1 processes"):
        restored(few(), {"0": states["0"]}, process=0, processes=2)


def test_a_data_set_of_another_make_is_refused_with_the_place():
    plain, mixed, windows, by_name = (
        through_json(batches_of(KINDS[k]())) for k in ("plain", "mixed", "shuffled in windows", "mixed by name")
    )
    for states, other, says in (
        (
            plain,
            "mixed",
            r"its state has \['next_index'\] at its top, where this data set has \['index', 'parents",
        ),
        (windows, "plain", r"\['parent_window_start_state', 'pos_in_window', 'window_index'\] at its top"),
        (mixed, "mixed by name", r"at parents, where this data set has \{\"a\""),
    ):
        with pytest.raises(DataError, match=says):
            restored(KINDS[other](), states)
    three = grain.IterDataset.mix([few(), few(), few()])
    with pytest.raises(DataError, match="its state has 2 parts at parents, where this data set has 3"):
        restored(three, mixed)
    with pytest.raises(DataError, match="version was 7 and is 1"):
        restored(few(), {"0": {**by_name["0"], "version": 7}})


def test_what_was_looked_at_or_read_ahead_does_not_count():
    reader = batches_of(few(), prefetch=4)
    fresh = reader.state()
    ahead = reader.peek(60)
    assert ahead is not None and reader.state() == fresh
    (first,) = take(reader, 1)
    assert first is ahead and reader.state()["examples"] == ROWS
    reader.close()
    assert_equal(take(reader, 2), take(batches_of(few()), 3)[1:])
    reader.rewind()
    assert reader.state() == fresh
    assert_equal(take(reader, 1), [first])


def failing_at(number):
    def fail(row):
        if row["x"][0] == number and not fail.is_mended:
            raise ValueError("bad sector")
        return row

    fail.is_mended = False
    return fail, grain.MapDataset.range(9).map(example).to_iter_dataset(grain.ReadOptions(1, 1)).map(fail)


def test_an_error_names_the_example_and_a_second_call_meets_the_same_batch():
    fail, dataset = failing_at(4)
    reader = batches_of(dataset)
    take(reader, 1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"example 4: reading it raised ValueError: bad sector"):
            next(reader)
    fail.is_mended = True
    assert next(reader)["x"][:, 0].tolist() == [3, 4, 5]


def test_examples_that_make_no_batch_are_named():
    shapes = grain.MapDataset.range(9).map(lambda i: {"x": np.zeros(2 if i == 4 else 3)}).to_iter_dataset()
    with pytest.raises(DataError, match=r"example 4: field 'x' is float64\[2\], but in example 3 of its batch"):
        take(batches_of(shapes), 2)
    large = grain.MapDataset.range(9).map(lambda i: {"x": np.int64(2**40 if i == 2 else i)}).to_iter_dataset()
    with pytest.raises(
        DataError, match=r"example 2: field 'x' holds 1099511627776 \(int64\), which does not fit int32"
    ):
        next(batches_of(large))
    text = grain.MapDataset.range(9).map(lambda i: {"x": "a"}).to_iter_dataset()
    with pytest.raises(DataError, match="example 0: field 'x' is str"):
        next(batches_of(text))


class Counting(grain.IterDataset):
    """A user's own source, with the state that it says."""

    def __init__(self, state, gate=None):
        super().__init__()
        self.saved, self.gate = state, gate

    def __iter__(self):
        return CountingIterator(self)

    def __str__(self):
        return "Counting"


class CountingIterator(grain.DatasetIterator):
    def __init__(self, owner):
        super().__init__()
        self.owner, self.number = owner, -1

    def __next__(self):
        if self.owner.gate is not None:
            self.owner.gate.wait()
        self.number += 1
        return example(self.number)

    def get_state(self):
        return self.owner.saved(self.number)

    def set_state(self, state):
        self.number = int(np.ravel(list(state.values()) if isinstance(state, dict) else state)[0])

    def __str__(self):
        return "CountingIterator"


def test_a_state_that_json_would_change_is_refused_with_its_place():
    sound = batches_of(Counting(lambda n: {"n": np.int64(n)}))
    take(sound, 2)
    assert sound.state()["grain"] == {"n": 5}
    on = restored(Counting(lambda n: {"n": np.int64(n)}), through_json(sound))
    assert_equal(take(on, 1), take(sound, 1))
    for state, says in (
        (lambda n: {0: n}, r"its state is \{0: -1\}, which JSON cannot hold"),
        (lambda n: {"n": {n}}, r"\['n'\] is \{-1\}, which JSON cannot hold"),
    ):
        with pytest.raises(DataError, match=says):
            batches_of(Counting(state)).state()


class Scribbling(CountingIterator):
    """Keeps one dict as its state, goes on writing in it, and in the one that it was given."""

    def __init__(self, owner):
        super().__init__(owner)
        self.kept = {"n": -1, "last": None}

    def __next__(self):
        row = super().__next__()
        self.kept |= {"n": self.number, "last": {"x": self.number}}
        return row

    def get_state(self):
        return self.kept

    def set_state(self, state):
        self.kept, self.number = state, state["n"]


def test_a_state_that_its_iterator_goes_on_writing_in_is_exact():
    class Source(Counting):
        def __iter__(self):
            return Scribbling(self)

    check_exact(lambda: Source(None), range(4))
    reader = batches_of(Source(None))
    take(reader, 2)
    states = through_json(reader)
    on = restored(Source(None), states)
    on.peek(60)
    on.close()
    assert next(on)["x"][:, 0].tolist() == [6, 7, 8] == next(reader)["x"][:, 0].tolist()


def test_data_that_does_not_come_can_be_left():
    gate = threading.Event()
    reader = batches_of(Counting(lambda n: {"n": n}, gate))
    assert reader.take(0.05) is None and reader.digest(0.05) is None and reader.state()["examples"] == 0
    reader.leave()
    gate.set()
    assert next(reader)["x"][:, 0].tolist() == [0, 1, 2]
    reader.close()


def test_a_data_set_with_a_trap_is_refused_and_warnings_are_handed_on():
    with pytest.raises(DataError, match="ConcatThenSplit"):
        batches_of(grain.experimental.ConcatThenSplitIterDataset(few(), length_struct={"x": 4}))
    assert "batched" in batches_of(few().batch(2)).warnings[0]
    assert batches_of(packed(grain.experimental.FirstFitPackIterDataset)).warnings == []


def test_processes_that_share_rows_or_draw_the_same_examples_are_found():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert rows_of_processes(NamedSharding(mesh, PartitionSpec("data")), 8) == {0: set(range(8))}
    refuse_shared_rows({0: range(4), 1: range(4, 8)})
    with pytest.raises(DataError, match=r"processes 1 and 2 both hold row 3 of each batch \(1 rows in all\)"):
        refuse_shared_rows({0: range(2), 1: range(2, 4), 2: range(3, 8)})
    first, second, other = (batches_of(d).digest(60) for d in (few(), few(), few(50)))
    assert same_examples([first, other]) is None
    warning = same_examples([other, first, second])
    assert warning is not None and warning.startswith("processes 1 and 2 draw the same examples")
