"""Grain's traps: that they are still there in the installed Grain, and that a data set with one is refused."""

import json
import sys

import grain
import numpy as np
import pytest
from absl import flags

from jaxckpt.data.guards import allow_workers, check_dataset, hashed_seed, worker_counts
from jaxckpt.errors import DataError

MapDataset, IterDataset, experimental = grain.MapDataset, grain.IterDataset, grain.experimental


def numbers(n):
    return MapDataset.range(n)


def refusal(dataset):
    with pytest.raises(DataError) as caught:
        check_dataset(dataset)
    return str(caught.value)


def order(n, seed):
    return [experimental.index_shuffle(i, max_index=n - 1, seed=seed, rounds=4) for i in range(n)]


def test_a_sound_data_set_says_nothing():
    sound = numbers(100).shuffle(hashed_seed(0, "shuffle")).map(lambda x: {"x": x}).repeat()
    assert check_dataset(sound) == [] and check_dataset(sound.to_iter_dataset()) == []
    packed = experimental.FirstFitPackIterDataset(
        sound.to_iter_dataset(), length_struct={"x": 8}, num_packing_bins=4
    )  # fmt: skip
    assert check_dataset(packed) == []
    mixed = MapDataset.mix([numbers(3).repeat(), numbers(5).repeat()], [1, 2])
    assert check_dataset(mixed) == [] and check_dataset(MapDataset.concatenate([numbers(3), numbers(4)])) == []


def test_grain_still_has_no_permutation_for_four_to_the_k_and_one():
    found = np.bincount(order(4**8 + 1, seed=1), minlength=4**8 + 1)
    assert found[-1] == 0 and found.max() == 2, "Grain has mended its shuffle: the guard may go"
    assert len(set(order(4**7 + 1, seed=1))) == 4**7 + 1


@pytest.mark.parametrize("k", [8, 9, 15])
def test_a_shuffle_that_is_no_permutation_is_refused(k):
    assert f"Use ds[:{4**k}]" in refusal(numbers(4**k + 1).shuffle(1).repeat())
    for n in (4**k, 4**k + 2, 4**k * 2 + 1, 4**7 + 1):
        assert not any("permutation" in w for w in check_dataset(numbers(n).shuffle(1)))


def test_a_shuffle_without_an_epoch_is_refused():
    drawn = [numbers(9).repeat().shuffle(1)[i] for i in range(9)]
    assert len(set(drawn)) < 9
    assert "Put .shuffle(seed) before .repeat()" in refusal(numbers(9).repeat().shuffle(1))


def window(n, size, seed):
    return experimental.WindowShuffleMapDataset(numbers(n), window_size=size, seed=seed)


def test_a_window_shuffle_whose_last_window_is_not_full_is_refused():
    drawn = [[window(10, 4, seed)[i] for i in range(10)] for seed in range(20)]
    assert any(len(set(d)) < 10 for d in drawn), "Grain has mended its window shuffle: the guard may go"
    assert "Cut it to ds[:8]" in refusal(window(10, 4, 0))
    assert check_dataset(window(12, 4, 0)) == []
    assert check_dataset(experimental.WindowShuffleMapDataset(numbers(10).repeat(), window_size=4, seed=0)) == []


def test_seeds_that_follow_one_another_are_warned_of_once():
    def epoch(seed, number):
        shuffled = numbers(9).shuffle(seed).repeat()
        return [shuffled[i] for i in range(9 * number, 9 * number + 9)]

    assert epoch(3, 1) == epoch(4, 0), "Grain hashes its seeds now: the guard may go"
    assert epoch(hashed_seed(3, "x"), 1) != epoch(hashed_seed(4, "x"), 0)
    mixed = MapDataset.mix([numbers(9).shuffle(4).repeat(), numbers(9).shuffle(3).repeat()])
    (warning,) = check_dataset(mixed)
    assert "with seed 3 and 4" in warning and "hashed_seed" in warning
    # Batches of a MapDataset repeat it, those of an IterDataset do not.
    assert len(check_dataset(numbers(9).shuffle(3))) == 1
    assert check_dataset(numbers(9).shuffle(3).to_iter_dataset()) == []
    assert len(check_dataset(numbers(9).shuffle(3).repeat().to_iter_dataset())) == 1
    assert check_dataset(numbers(9).shuffle(3).repeat(reseed_each_epoch=False)) == []


def test_a_hashed_seed_depends_on_seed_and_purpose_alone():
    assert hashed_seed(0, "shuffle") == 2692205629
    assert len({hashed_seed(s, p) for s in range(50) for p in ("shuffle", "noise")}) == 100
    assert all(0 <= hashed_seed(s, "shuffle") < 2**32 for s in range(50))


class Twice(experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element):
        return [element] * 2


def test_what_drops_examples_by_making_them_none_is_refused_unless_it_is_iterated():
    filtered = numbers(9).filter(lambda x: x % 2 == 0)
    assert filtered[1] is None and Twice().flat_map(1) == [1, 1]
    assert "filter of a MapDataset" in refusal(filtered.shuffle(1))
    assert "FlatMap of a MapDataset" in refusal(numbers(9).apply(Twice()))
    assert check_dataset(filtered.to_iter_dataset()) == [] == check_dataset(numbers(9).apply(Twice()).to_iter_dataset())


def test_a_mix_that_ends_with_its_shortest_part_is_warned_of():
    (warning,) = check_dataset(MapDataset.mix([numbers(3), numbers(50)]))
    assert "of 3, 50 examples: it counts as 6" in warning


ROWS = [{"t": np.full(n, i + 1)} for i, n in enumerate([4, 4, 2, 6, 4, 4, 4])]


def test_grain_still_drops_a_document_when_concat_then_split_is_restored():
    def rows():
        source = MapDataset.source(ROWS).to_iter_dataset()
        return experimental.ConcatThenSplitIterDataset(source, length_struct={"t": 4})

    state = json.loads(json.dumps(iter(rows()).get_state()))
    restored = iter(rows())
    restored.set_state(state)
    assert next(iter(rows()))["t"].tolist() == [1, 1, 1, 1]
    assert next(restored)["t"].tolist() == [2, 2, 2, 2], "Grain has mended ConcatThenSplit: the guard may go"
    assert "drops a document wherever a row ended with one" in refusal(rows())
    assert "drops a document" in refusal(rows().map(lambda x: x).batch(2))


def test_grain_still_saves_a_wrong_state_in_the_second_epoch_of_what_it_interleaves():
    def twice():
        parts = [numbers(3).to_iter_dataset(), MapDataset.range(10, 13).to_iter_dataset()]
        return experimental.RepeatIterDataset(experimental.InterleaveIterDataset(parts, cycle_length=2), 2)

    whole = list(twice())
    iterator = iter(twice())
    for _ in range(8):
        next(iterator)
    restored = iter(twice())
    restored.set_state(json.loads(json.dumps(iterator.get_state())))
    assert list(restored) != whole[8:], "Grain has mended RepeatIterDataset: the guard may go"
    assert "from the second epoch on" in refusal(twice().map(lambda x: x))
    workers = grain.MultiprocessingOptions(num_workers=2)
    assert "from the second epoch on" in refusal(
        experimental.RepeatIterDataset(numbers(9).to_iter_dataset().mp_prefetch(workers))
    )
    assert check_dataset(experimental.RepeatIterDataset(numbers(9).to_iter_dataset())) == []


def test_every_problem_is_told_at_once_however_deep_it_lies():
    short = numbers(4**8 + 1).shuffle(1).to_iter_dataset()
    inner = experimental.InterleaveIterDataset([short, window(10, 4, 0).to_iter_dataset()], cycle_length=2)
    message = refusal(IterDataset.mix({"a": inner.map(lambda x: x)}))
    assert "no permutation" in message and "last window is not full" in message and message.count("\n") == 2


def test_data_that_is_batched_already_is_warned_of():
    workers = grain.MultiprocessingOptions(num_workers=2)
    for dataset in (
        numbers(9).batch(3),
        numbers(9).batch(3).repeat(),
        numbers(9).to_iter_dataset().batch(3),
        numbers(9).to_iter_dataset().batch(3).mp_prefetch(workers),
        numbers(9).batch(3).to_iter_dataset(),
    ):
        (warning,) = check_dataset(dataset)
        assert "Leave .batch(...) out" in warning
    assert check_dataset(numbers(9).batch(3).map(lambda x: x[0])) == []


def test_what_is_no_grain_data_set_is_refused():
    loader = grain.load(range(9), num_epochs=1, shuffle=True, seed=1)
    assert "grain.MapDataset.source(data_source)" in refusal(loader)
    assert "not its iterator; found a" in refusal(iter(numbers(3).to_iter_dataset()))
    assert "found a builtins.list" in refusal([1, 2])


def test_the_number_of_workers_is_found_wherever_it_stands():
    def workers(n):
        return numbers(9).to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=n))

    assert worker_counts(numbers(9).to_iter_dataset()) == [] == worker_counts(workers(0))
    assert worker_counts(workers(1)) == [1] and worker_counts(workers(3).map(lambda x: x).batch(2)) == [3]
    assert worker_counts(IterDataset.mix([workers(3), workers(2), workers(2)])) == [2, 2, 3]
    threads = experimental.multithread_prefetch(numbers(9).to_iter_dataset(), num_threads=4, buffer_size=1)
    assert worker_counts(threads) == [4]


def test_workers_are_allowed_in_a_program_that_does_not_parse_flags():
    was_parsed = flags.FLAGS.is_parsed()
    try:
        flags.FLAGS.unparse_flags()
        with pytest.raises(flags.UnparsedFlagAccessError):
            flags.FLAGS.grain_enable_multiprocess_worker_profiling  # noqa: B018
        allow_workers()
        assert flags.FLAGS.grain_enable_multiprocess_worker_profiling is False
        allow_workers()
    finally:
        flags.FLAGS.mark_as_parsed() if was_parsed else flags.FLAGS.unparse_flags()


def test_the_private_names_of_grain_that_the_guards_read_are_there():
    """A newer Grain that renames one would disarm a guard in silence."""
    ds = numbers(9)
    assert ds.shuffle(3)._seed == 3 and ds.repeat()._reseed_each_epoch is True and len(ds.repeat()) == sys.maxsize
    assert window(8, 4, 0)._window_size == 4
    assert type(MapDataset.mix([ds, ds])._selection_map).__name__ == "SelectionWithProportionsMap"
    assert [type(p) for p in ds.map(lambda x: x).to_iter_dataset()._parents] == [type(ds.map(lambda x: x))]
    prefetched = ds.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    (inner,) = prefetched._parents
    assert len(inner._datasets) == 2
    context = inner._datasets[1]._parents[0]._mp_context
    assert (context.process_index, context.process_count) == (1, 2)
