"""One infinite sequence in global batches: exact at every position, on every mesh, for every number of processes."""

import itertools
import json
import random
import threading

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxckpt.data.batches import GlobalBatches, as_dataset, local_rows
from jaxckpt.data.course import Course
from jaxckpt.data.reproducible import check_reproducible
from jaxckpt.data.shuffle import ShuffledEpochs
from jaxckpt.data.stream import BatchStream
from jaxckpt.errors import DataError

COUNTER = itertools.count()


class Examples:
    """Random access to {"x": int32[3], "nested": {"y": float32[]}}; example i is a function of i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        i = int(index)
        rng = np.random.default_rng((7, i))
        return {"x": np.array([i, 10 * i, rng.integers(100)], np.int32), "nested": {"y": np.float32(rng.normal())}}


class Each:
    """Random access to `make(i)`, for a data set with a flaw."""

    def __init__(self, make, n=64):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(int(i))


def sharding_of(spec=None, **axes):
    axes = axes or {"data": 1}
    count = int(np.prod(list(axes.values())))
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:count]
    )
    return NamedSharding(mesh, spec or PartitionSpec())


def stream_of(source, global_batch=4, sharding=None, **options):
    options = {"identity": {"content": "f"}, **options}
    return BatchStream(source, global_batch=global_batch, sharding=sharding or sharding_of(), **options)


def take(stream, count):
    return [jax.tree.map(np.asarray, next(stream)) for _ in range(count)]


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Positions


@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_epochs_are_repeated_without_loss_across_their_borders(n):
    stream = stream_of(Examples(n), global_batch=5)
    seen = np.concatenate([batch["x"][:, 0] for batch in take(stream, 2 * n)])
    assert np.array_equal(seen, np.arange(10 * n) % n)
    stream.close()


def test_a_shuffled_source_gives_each_example_once_an_epoch_even_where_batches_straddle_epochs():
    stream = stream_of(ShuffledEpochs(Examples(17), seed=0), global_batch=4)
    seen = np.concatenate([batch["x"][:, 0] for batch in take(stream, 17)])
    for epoch in range(4):
        assert sorted(seen[17 * epoch : 17 * (epoch + 1)]) == list(range(17))
    stream.close()


def test_a_grain_shuffle_is_reshuffled_each_epoch_when_a_finite_data_set_is_repeated():
    stream = stream_of(grain.MapDataset.source(Examples(8)).shuffle(seed=1), global_batch=8)
    first, second = (batch["x"][:, 0] for batch in take(stream, 2))
    assert sorted(first) == sorted(second) == list(range(8)) and not np.array_equal(first, second)
    stream.close()


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 99), handed_out=st.integers(0, 6), prefetch=st.integers(1, 3))
def test_a_restored_stream_continues_bit_for_bit(n, seed, handed_out, prefetch):
    source = ShuffledEpochs(Examples(n), seed=seed)
    whole = stream_of(source)
    expected = take(whole, handed_out + 3)
    first = stream_of(source, prefetch=prefetch)
    take(first, handed_out)
    state = json.loads(json.dumps(first.state()))
    assert state == {
        "version": 2,
        "batches": handed_out,
        "next_example": 4 * handed_out,
        "global_batch": 4,
        "pieces": [[0, 0, 4]],
        "skipped": [],
        "identity": {"content": "f"},
    }
    second = stream_of(source)
    next(second)  # a position that restore must forget, with its read-ahead
    second.restore(state)
    assert all(same(a, b) for a, b in zip(take(second, 3), expected[handed_out:], strict=True))
    for s in (whole, first, second):
        s.close()


def test_state_counts_what_was_handed_out_and_not_what_was_read_ahead():
    reads = []
    stream = stream_of(Each(lambda i: (reads.append(i), {"x": np.int32(i)})[1]), prefetch=3)
    stream.start()
    next(stream)
    next(stream)
    stream.close()  # waits for no thread, so only a lower bound of the reads is known
    assert stream.state()["next_example"] == 8 and len(reads) >= 8
    assert np.array_equal(take(stream, 1)[0]["x"], [8, 9, 10, 11])
    stream.close()


@pytest.mark.parametrize("other", [1, 3, 8])
def test_another_batch_size_continues_at_the_exact_example(other):
    before = stream_of(Examples(50))
    take(before, 3)
    after = stream_of(Examples(50), global_batch=other)
    after.restore(before.state())
    seen = np.concatenate([batch["x"][:, 0] for batch in take(after, 2)])
    assert np.array_equal(seen, 12 + np.arange(2 * other)) and after.state()["next_example"] == 12 + 2 * other
    before.close()
    after.close()


def test_a_seek_reads_nothing_that_lies_before():
    reads = []
    stream = stream_of(Each(lambda i: (reads.append(i), {"x": np.int32(i)})[1], n=10**9), prefetch=1)
    del reads[:]
    stream.restore(stream.state() | {"batches": 25 * 10**10})
    next(stream)
    stream.close()
    assert reads[:4] == [0, 1, 2, 3] and max(reads) < 20 and stream.example_of(stream.batches) == 10**12 + 4


def test_batch_at_is_the_batch_of_the_stream_and_moves_nothing():
    stream = stream_of(ShuffledEpochs(Examples(9), seed=2))
    expected = take(stream, 3)[2]
    state = stream.state()
    assert same(stream.batch_at(2), expected) and stream.state() == state
    stream.close()


def test_close_ends_the_threads():
    for stream in [stream_of(Examples(9)) for _ in range(3)]:
        before = set(threading.enumerate())
        next(stream)
        started = set(threading.enumerate()) - before
        assert started
        stream.close()
        for thread in started:
            thread.join(timeout=30)
        assert not [thread for thread in started if thread.is_alive()]


def test_closing_does_not_wait_for_a_read_that_never_ends():
    is_reading, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def make(i):
        if i >= 4:
            is_reading.set()
            may_end.wait(10)
            ended.set()
        return {"x": np.int32(i)}

    stream = stream_of(Each(make), num_threads=0)
    next(stream)
    assert is_reading.wait(40)
    stream.close()
    assert not ended.is_set()
    may_end.set()


# Meshes and processes


@settings(max_examples=30, deadline=None)
@given(rows_each=st.integers(1, 5), processes=st.sampled_from([1, 2, 4]), k=st.integers(0, 20), data=st.data())
def test_the_rows_of_any_number_of_processes_make_the_same_global_batch(rows_each, processes, k, data):
    parent = as_dataset(ShuffledEpochs(Examples(13), seed=5))
    global_batch = rows_each * processes
    order = data.draw(st.permutations(range(global_batch)))  # a mesh may give a process any rows
    rows = [sorted(order[p::processes]) for p in range(processes)]
    course = Course.of(global_batch)
    whole = GlobalBatches(parent, course, range(global_batch))[k]
    parts = [GlobalBatches(parent, course, r)[k] for r in rows]

    def joined(*leaves):
        result = np.empty((global_batch, *leaves[0].shape[1:]), leaves[0].dtype)
        for r, leaf in zip(rows, leaves, strict=True):
            result[r] = leaf
        return result

    assert same(jax.tree.map(joined, *parts), whole)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"data": 8}, PartitionSpec("data")),
        ({"data": 2, "fsdp": 4}, PartitionSpec(("data", "fsdp"))),
        ({"fsdp": 4, "data": 2}, PartitionSpec(("data", "fsdp"), None)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, PartitionSpec(("data", "fsdp"))),
        ({"tensor": 8}, PartitionSpec()),
    ],
)
def test_every_mesh_gives_the_same_global_batches(axes, spec):
    sharding = sharding_of(spec, **axes)
    stream, reference = stream_of(Examples(20), 8, sharding), stream_of(Examples(20), 8)
    struct = stream.batch_struct()
    for _ in range(3):
        batch, expected = next(stream), next(reference)
        assert same(jax.tree.map(np.asarray, batch), jax.tree.map(np.asarray, expected))
        described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), batch)
        assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), struct)
    assert len(next(stream)["x"].addressable_shards) == 8 and np.array_equal(local_rows(sharding, 8), np.arange(8))
    stream.close()
    reference.close()


def test_a_step_compiled_from_batch_struct_takes_the_batch():
    stream = stream_of(Each(lambda i: {"x": i, "y": np.arange(3) / 3, "z": np.ones(2, ">i4")}))
    step = jax.jit(lambda b: b["x"].sum() + b["y"].sum() + b["z"].sum()).lower(stream.batch_struct()).compile()
    assert step(next(stream)) == np.float32(6 + 4 + 8)  # 0+1+2+3, four times 0+1/3+2/3, eight ones
    stream.close()


def test_a_batch_that_the_mesh_cannot_divide_names_batches_that_fit():
    sharding = sharding_of(PartitionSpec(("data", "fsdp")), data=2, fsdp=4)
    with pytest.raises(DataError, match=r"batch of 12 .* 8 shards \(mesh axes data=2, fsdp=4\)\. Use 8 or 16"):
        stream_of(Examples(4), 12, sharding)
    with pytest.raises(DataError, match=r"batch of 3 .*Use 8\."):
        stream_of(Examples(4), 3, sharding)


@pytest.mark.parametrize("spec", [("data", "seq"), (None, "seq"), (None, ("data", "seq"))])
def test_a_batch_may_be_cut_along_its_columns_too(spec):
    source = Each(lambda i: {"tokens": np.arange(8, dtype=np.int32) + 100 * i, "weight": np.float32(i)})
    stream, reference = stream_of(source, 4, sharding_of(PartitionSpec(*spec), data=2, seq=4)), stream_of(source, 4)
    struct = stream.batch_struct()
    for _ in range(2):
        batch, expected = next(stream), next(reference)
        assert same(jax.tree.map(np.asarray, batch), jax.tree.map(np.asarray, expected))
        assert jax.tree.map(lambda x: x.sharding, batch) == jax.tree.map(lambda x: x.sharding, struct)
    stream.close()
    reference.close()


def test_columns_that_the_mesh_cannot_divide_are_refused_with_the_field():
    with pytest.raises(DataError, match=r"field 'x' of shape \(4, 3\) cannot be cut as"):
        stream_of(Examples(4), 4, sharding_of(PartitionSpec(None, "data"), data=2)).batch_struct()


def test_batches_before_the_first_do_not_wrap_around():
    with pytest.raises(IndexError):
        GlobalBatches(as_dataset(Examples(14)), Course.of(4), [1, 2])[-1]


# What cannot be a source


def generator():
    yield {"x": np.zeros(1)}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (generator(), "builtins.generator"),
        (iter([1]), "builtins.list_iterator"),
        (map(abs, [1]), "builtins.map"),
        (grain.MapDataset.range(3).to_iter_dataset(), "IterDataset"),
        ({"x": np.zeros((4, 2))}, "builtins.dict"),
        ("text", "builtins.str"),
        (None, "builtins.NoneType"),
    ],
)
def test_what_has_no_random_access_is_refused_with_its_type_and_the_way_out(source, name):
    with pytest.raises(DataError, match=rf"type .*{name}.*position is not a number.*grain\.MapDataset, or a sequence"):
        stream_of(source)


def test_a_torch_loader_is_refused_and_a_torch_data_set_taken():
    torch_data = pytest.importorskip("torch.utils.data")

    class Dataset(Examples, torch_data.Dataset):
        pass

    with pytest.raises(DataError, match=r"type torch\.utils\.data\.dataloader\.DataLoader"):
        stream_of(torch_data.DataLoader(Dataset(8)))
    stream = stream_of(Dataset(8))
    assert same(take(stream, 1)[0], take(stream_of(Examples(8), prefetch=1), 1)[0])
    stream.close()


def test_an_empty_source_is_refused():
    with pytest.raises(DataError, match="data set is empty"):
        stream_of([])


# Bad examples: number and field in every message


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: {"a": {"b": "text"}}, r"example 8: field 'a/b' is str"),
        (lambda i: {"a": np.zeros(2), "b": None}, r"example 8: field 'b' is NoneType"),
        (lambda i: {"a": [1, 2]}, r"example 8: field 'a' is list"),
        (lambda i: {"a": np.array(["x"])}, r"example 8: field 'a' is an array of dtype <U1"),
        (lambda i: {"a": 2**70}, r"example 8: field 'a' is an array of dtype object"),
        (lambda i: {"a": np.zeros(i % 3)}, r"example 9: field 'a' is float64\[0\], but in example 8 .* float64\[2\]"),
        (
            lambda i: {"a": np.zeros(2, "fd"[i % 2])},
            r"example 9: field 'a' is float64\[2\], but in example 8 .* float32",
        ),
        (lambda i: {"ab"[i % 2]: np.zeros(2)}, r"example 9 has the structure .*'b'.*example 8"),
        (
            lambda i: {"a": np.array([0, 2**31 + (i - 11)])},
            r"example 11: field 'a' holds 2147483648 \(int64\)",
        ),
        (lambda i: {"a": np.uint64(2**32 if i == 10 else 0)}, r"example 10: field 'a' holds 4294967296"),
        (
            lambda i: {"a": np.full((2, 2), 1e39 if i == 9 else np.inf)},
            r"example 9: field 'a' holds 1e\+39",
        ),
        (lambda i: {}, r"example 8 has no array"),
        (lambda i: None, r"example 8 is None, which is how a filter"),
        (lambda i: 1 // 0, r"example 8: reading it raised ZeroDivisionError: integer"),
        (lambda i: next(iter([])), r"example 8: reading it raised StopIteration"),
    ],
)
def test_a_bad_example_is_named(make, message, prefetch):
    stream = stream_of(Each(lambda i: make(i) if i >= 8 else {"a": np.zeros(2)}), prefetch=prefetch)
    take(stream, 2)
    for _ in range(2):  # the same error again: no batch is skipped by asking twice
        with pytest.raises(DataError, match=message):
            next(stream)
        assert stream.state()["next_example"] == 8
    stream.close()


def test_the_users_exception_is_chained():
    def fail(i):
        raise KeyError("no such file")

    with pytest.raises(DataError) as caught:
        next(stream_of(Each(fail)))
    assert isinstance(caught.value.__cause__, KeyError)


def test_64_bit_values_become_32_bit_ones_and_one_buffer_may_be_reused():
    buffer = np.zeros(2, np.int64)

    def reuse(i):
        buffer[:] = i
        return {"i": buffer, "f": i / 3, "b": i % 2 == 0, "bf": np.asarray(i, jax.numpy.bfloat16)}

    (batch,) = take(stream_of(Each(reuse), prefetch=1), 1)
    assert {k: str(v.dtype) for k, v in batch.items()} == {"i": "int32", "f": "float32", "b": "bool", "bf": "bfloat16"}
    assert np.array_equal(batch["i"], [[0, 0], [1, 1], [2, 2], [3, 3]])
    assert np.array_equal(batch["f"], np.array([0, 1 / 3, 2 / 3, 1], np.float32))


# States


def test_a_state_of_other_data_lists_every_difference():
    stream = stream_of(Examples(4), identity={"content": "new", "seq_len": 4})
    state = stream.state() | {"batches": -1, "identity": {"content": "old", "tokenizer": "t"}}
    expected = (
        "the data changed: content was 'old' and is 'new'; tokenizer was 't' and is None; seq_len was None and is 4; "
        "batches is -1"
    )
    with pytest.raises(DataError, match=expected):
        stream.restore(state)
    with pytest.raises(DataError, match="version was 1 and is 2"):
        stream.restore({"version": 1})
    assert stream.state()["next_example"] == 0


# Reproducibility


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda i: {"a": i, "b": {"c": np.random.rand()}}, r"differs in 'b/c'.*numpy's global random generator \(np"),
        # 4 x 156 words are one round of the generator: its position in the block comes out where it was.
        (lambda i: {"a": np.random.rand(78)}, r"differs in 'a'.*numpy's global random generator \(np"),
        (lambda i: {"a": random.random()}, r"differs in 'a'.*it uses Python's random module\."),
        (lambda i: {"a": random.random(), "b": np.random.rand()}, r"'a', 'b'.*numpy's .* and it uses Python's random"),
        (lambda i: {"a": next(COUNTER)}, r"differs in 'a'.*an unknown source"),
    ],
)
def test_a_batch_that_is_no_function_of_its_number_is_refused_with_the_likely_cause(make, cause):
    with pytest.raises(DataError, match=cause) as caught:
        check_reproducible(stream_of(Each(make)), 1)
    assert "np.random.default_rng((seed, i))" in str(caught.value)


def test_examples_that_change_shape_from_reading_to_reading_are_refused():
    lengths = iter([3] * 4 + [2] * 4)
    with pytest.raises(DataError, match="differs in 'a'"):
        check_reproducible(stream_of(Each(lambda i: {"a": np.zeros(next(lengths))})), 0)


def test_a_reproducible_batch_that_draws_from_a_global_generator_is_warned_about():
    def reseeded(i):
        np.random.seed(i)
        return {"a": np.random.rand()}

    warning = check_reproducible(stream_of(Each(reseeded)), 1)
    assert warning is not None and "uses numpy's global random generator" in warning and "same twice" in warning


def test_a_function_of_the_number_is_reproducible_with_nan_too():
    assert check_reproducible(stream_of(Examples(10)), 2) is None
    assert check_reproducible(stream_of(Each(lambda i: {"a": np.nan})), 2) is None
    augmented = grain.MapDataset.source(Examples(10)).random_map(lambda e, rng: {"r": rng.random()}, seed=1)
    assert check_reproducible(stream_of(augmented), 2) is None
