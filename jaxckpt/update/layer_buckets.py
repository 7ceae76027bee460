"""Buckets of weights whose gradients come one group after the other, as the backward pass makes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.split import Split


def make_layer_buckets(
    split: Split, plan: TrainState, groups: Sequence[Sequence[str]], *, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], ...]:
    """For each group of weights, in the order in which their gradients come, the buckets that are updated then.

    A bucket never has a single weight beside others, see `make_buckets`; so a group of one waits for the next, and the
    last one keeps a small weight of an earlier group waiting for it. Within a group a large weight goes with small ones:
    the largest bucket decides how much of the device the update needs.
    """
    owned: dict[str, list[str]] = {path: [] for path in split.weights}
    for path, weight in split.owner.items():
        if weight is not None:
            owned[weight].append(path)
    weights = tree.flatten(plan.params if plan.master is None else plan.master)
    state = tree.flatten(plan.opt_state)
    sizes = {p: sum(_moved_bytes(x) for x in (weights[p], *(state[s] for s in own))) for p, own in owned.items()}
    make = lambda names: Bucket(
        tuple(names), tuple(s for s, w in split.owner.items() if w in set(names)), sum(sizes[p] for p in names)
    )
    packed = [_packed(group, sizes, bucket_bytes) for group in _without_single(groups, sizes)]
    return tuple(tuple(make(names) for names in group) for group in packed)


def _without_single(groups: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> list[list[str]]:
    """The groups, weights moved to a later one so that none has a single weight, if there are two weights at all."""
    result: list[list[str]] = []
    waiting: list[str] = []
    for group in groups:
        waiting += group
        result.append(waiting if len(waiting) > 1 else [])
        waiting = [] if len(waiting) > 1 else waiting
    if not waiting:
        return result
    for earlier in reversed(result):
        if len(earlier) > 2:
            small = min(earlier, key=lambda p: sizes[p])
            earlier.remove(small)
            waiting.append(small)
            break
        if earlier:
            waiting += earlier
            earlier.clear()
            break
    result[-1] = waiting
    return result


def _packed(group: Sequence[str], sizes: Mapping[str, int], bucket_bytes: int) -> list[list[str]]:
    """The largest with the smallest, then whatever is small and still fits."""
    left = sorted(group, key=lambda p: -sizes[p])
    buckets: list[list[str]] = []
    while len(left) > 1:
        bucket = [left.pop(0), left.pop()]
        while left and sum(sizes[p] for p in (*bucket, left[-1])) <= bucket_bytes:
            bucket.append(left.pop())
        buckets.append(bucket)
    if left and buckets:
        min(buckets, key=lambda names: sum(sizes[p] for p in names)).extend(left)
    elif left:
        buckets.append(left)
    return buckets


def _moved_bytes(x: Any) -> int:
    return 0 if tier_of(x) == "device" else math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
