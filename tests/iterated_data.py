"""Grain data sets that a user may bring, small and with an end. Worker processes import this, so it imports little."""

import grain
import numpy as np

experimental = grain.experimental
IN_THREADS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def example(number):
    return {"x": np.full(3, number, np.int32), "noise": np.float32(number / 7)}


def document(number):
    return {"tokens": np.full(1 + number * 5 % 7, number + 1, np.int32)}


def noisy(row, rng):
    return {"x": row["x"] + rng.integers(1 << 20, dtype=np.int32)}


def few(start=0, count=23, options=AT_ONCE):
    # Not Grain's shuffle: it takes 2 ms an example where there are 23, and 7 ms where there are 5.
    numbers = grain.MapDataset.range(count).map(lambda i: start + i * 7 % count)
    return numbers.map(example).to_iter_dataset(options)


def documents():
    return grain.MapDataset.range(40).map(document).to_iter_dataset(AT_ONCE)


def packed(kind):
    return kind(documents(), length_struct={"tokens": 8}, num_packing_bins=4, shuffle_bins=True, seed=5)


def with_workers(count):
    return few(count=60).mp_prefetch(grain.MultiprocessingOptions(num_workers=count))


def epochs():
    return grain.MapDataset.range(60).shuffle(3_000_000_002).map(example).repeat().to_iter_dataset(AT_ONCE)


def sieved():
    numbers = grain.MapDataset.range(50).filter(lambda x: x % 3 > 0).map(example)
    return numbers.to_iter_dataset(AT_ONCE).filter(lambda row: row["x"][0] % 4 > 0)


KINDS = {
    "plain": few,
    "in threads": lambda: few(options=IN_THREADS),
    "epochs": epochs,
    "filtered": sieved,
    "random": lambda: few().random_map(noisy, seed=11),
    "shuffled in windows": lambda: experimental.WindowShuffleIterDataset(few(count=50), window_size=30, seed=7),
    "mixed": lambda: grain.IterDataset.mix([few(), few(100, 9)], [3, 1]),
    "mixed by name": lambda: grain.IterDataset.mix({"a": few(), "b": few(100, 9)}, {"a": 1, "b": 2}),
    "interleaved": lambda: experimental.InterleaveIterDataset(
        [few(50 * i, 3 + i % 3) for i in range(5)], cycle_length=2
    ),
    "first fit": lambda: packed(experimental.FirstFitPackIterDataset),
    "best fit": lambda: packed(experimental.BestFitPackIterDataset),
    "ahead in a thread": lambda: experimental.ThreadPrefetchIterDataset(few(), prefetch_buffer_size=4),
}
