"""What a user's own Grain data set does that would lose, repeat or silently change examples.

Grain 0.2.18, read and measured; tests/test_guards.py shows each fault in Grain itself, so it tells when one is mended.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import grain
from absl import flags
from grain._src.python.dataset.transformations import (
    batch,
    filter,
    flatmap,
    interleave,
    mix,
    prefetch,
    process_prefetch,
    repeat,
    shuffle,
)

from jaxckpt.errors import DataError, listed

# A hashed seed is below this once in 65536 times; one chosen by hand nearly always.
HAND_CHOSEN = 1 << 16


def hashed_seed(seed: int, purpose: str) -> int:
    """32 bits that have nothing in common with those of another seed or purpose: Grain adds its epoch to a seed."""
    return int.from_bytes(hashlib.sha256(f"jaxckpt seed {seed} {purpose}".encode()).digest()[:4])


def check_dataset(dataset: Any) -> list[str]:
    """Warnings about a Grain data set, or one DataError with everything in it that makes a run inexact."""
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    if isinstance(dataset, grain.DataLoader):
        raise DataError(
            "a grain.DataLoader cannot be resumed on another number of processes or workers: both decide the order of "
            "its examples. Give grain.MapDataset.source(data_source), with .shuffle(seed) and .map(...) as needed."
        )
    if not isinstance(dataset, grain.MapDataset | grain.IterDataset):
        raise DataError(f"expected a grain.MapDataset or a grain.IterDataset, not its iterator; found a {kind}.")
    problems, warnings, seeds = [], [], []
    for node, is_reseeded in _walk(dataset):
        problems += _problems(node, isinstance(dataset, grain.IterDataset))
        warnings += _warnings(node)
        if isinstance(node, shuffle.ShuffleMapDataset) and is_reseeded and node._seed < HAND_CHOSEN:
            seeds.append(node._seed)
    if problems:
        raise DataError(f"this Grain data set would not give every example once:\n{listed(problems)}")
    if seeds:
        warnings.append(
            f"shuffle(seed) with seed {' and '.join(map(str, sorted(set(seeds))))}: Grain adds the epoch to the seed, so "
            "epoch 1 of seed s has the order of epoch 0 of seed s + 1. Use jaxckpt.data.guards.hashed_seed(seed, 'shuffle'), "
            "or jaxckpt.data.ShuffledEpochs(source, seed=seed) instead of shuffle and repeat."
        )
    if _is_batched(dataset):
        warnings.append(
            "the data set is batched, so each of its batches is taken for one example. Leave .batch(...) out: "
            "global_batch examples are put together afterwards."
        )
    return warnings


def worker_counts(dataset: grain.IterDataset) -> list[int]:
    """How many workers or threads each mp_prefetch in `dataset` has: their number is a part of the order of examples."""
    contexts = [n._mp_context for n, _ in _walk(dataset) if isinstance(n, prefetch._MpContextIterDataset)]
    return sorted(c.process_count for c in contexts if c.process_index == 0)


def allow_workers() -> None:
    """Lets mp_prefetch begin in a program that does not parse absl's flags (grain issue 1355)."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _walk(dataset: Any) -> Iterator[tuple[Any, bool]]:
    """(node, whether it is repeated with another seed each epoch) of the whole graph, each once."""
    # A MapDataset that ends is repeated when batches are made of it, and then reseeded.
    to_visit = [(dataset, isinstance(dataset, grain.MapDataset))]
    seen = set()
    while to_visit:
        node, is_reseeded = to_visit.pop()
        if (id(node), is_reseeded) in seen:
            continue
        seen.add((id(node), is_reseeded))
        yield node, is_reseeded
        if isinstance(node, repeat.RepeatMapDataset):
            is_reseeded = node._reseed_each_epoch
        parents = list(getattr(node, "_parents", ()))  # a user's own node may not have called super().__init__
        if isinstance(node, interleave.InterleaveIterDataset):
            inside = node._datasets
            parents += [inside] if isinstance(inside, grain.MapDataset) else list(inside)
        to_visit += [(parent, is_reseeded) for parent in reversed(parents)]


def _problems(node: Any, is_iterated: bool) -> Iterator[str]:
    if isinstance(node, shuffle.ShuffleMapDataset):
        yield from _shuffle_problems(len(node))
    elif isinstance(node, shuffle.WindowShuffleMapDataset):
        length, window = len(node), node._window_size
        if length < sys.maxsize and length % window:
            yield (
                f"WindowShuffleMapDataset of {length} examples in windows of {window}: the last window is not full, and "
                f"then Grain leaves examples out and repeats others. Cut it to ds[:{length // window * window}], or use "
                "WindowShuffleIterDataset or jaxckpt.data.ShuffledEpochs(source, seed=...)."
            )
    elif isinstance(node, filter.FilterMapDataset | flatmap.FlatMapMapDataset) and not is_iterated:
        what = "filter" if isinstance(node, filter.FilterMapDataset) else "FlatMap"
        yield (
            f"{what} of a MapDataset: what it drops stays in its place as None, so an example's number says nothing. "
            "Filter the source before it becomes a MapDataset, or go on with .to_iter_dataset()."
        )
    elif isinstance(node, grain.experimental.RepeatIterDataset):
        if any(isinstance(below, interleave.InterleaveIterDataset) for below, _ in _walk(node)):
            yield (
                "RepeatIterDataset over mp_prefetch or InterleaveIterDataset: from the second epoch on, the state that "
                "Grain saves is not where it is. Leave it out: data that ends begins again by itself."
            )
    elif isinstance(node, grain.experimental.ConcatThenSplitIterDataset):
        yield (
            "ConcatThenSplitIterDataset: restored from a saved state, Grain drops a document wherever a row ended with "
            "one. Prepare the text with python -m jaxckpt prepare, which packs exactly, or use "
            "FirstFitPackIterDataset or BestFitPackIterDataset."
        )


def _shuffle_problems(length: int) -> Iterator[str]:
    if length == sys.maxsize:
        yield (
            "shuffle after repeat: without an epoch Grain draws at random, so examples come again before others have "
            "come at all. Put .shuffle(seed) before .repeat()."
        )
    elif length > 1 << 16 and _is_power_of_four(length - 1):
        yield (
            f"shuffle of {length} examples: for 4^k + 1 of them Grain's order is no permutation, one never comes and "
            f"another comes twice. Use ds[:{length - 1}], or jaxckpt.data.ShuffledEpochs(source, seed=...)."
        )


def _is_power_of_four(n: int) -> bool:
    return n.bit_count() == 1 and n.bit_length() % 2 == 1


def _warnings(node: Any) -> Iterator[str]:
    if isinstance(node, mix.MixedMapDataset) and isinstance(node._selection_map, mix.SelectionWithProportionsMap):
        lengths = [len(parent) for parent in node._parents]
        if min(lengths) < sys.maxsize:
            yield (
                f"mix of data sets of {', '.join(map(str, lengths))} examples: it counts as {len(node)}, where the "
                "first of them ends. Put .repeat() after each of them, before the mix."
            )


def _is_batched(dataset: Any) -> bool:
    """Whether what comes out last was batched, looked for through nodes that change no element."""
    while isinstance(dataset, _UNCHANGING):
        inside = dataset._datasets if isinstance(dataset, interleave.InterleaveIterDataset) else dataset._parents
        dataset = inside[0] if isinstance(inside, list | tuple) else None
    return isinstance(dataset, batch.BatchMapDataset | batch.BatchIterDataset | grain.experimental.RebatchIterDataset)


_UNCHANGING = (
    repeat.RepeatMapDataset,
    shuffle.ShuffleMapDataset,
    prefetch.PrefetchIterDataset,
    prefetch.ThreadPrefetchIterDataset,
    prefetch._MpContextIterDataset,
    process_prefetch.ProcessPrefetchIterDataset,
    process_prefetch._LazyWorkerSliceIterDataset,
    interleave.InterleaveIterDataset,
    grain.experimental.WithOptionsIterDataset,
)
