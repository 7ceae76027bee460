"""Which weights are updated together when their state streams through the device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of
from jaxckpt.update.split import Split


@dataclass(frozen=True)
class Bucket:
    """Whole leaves that are fetched, updated and written back together."""

    weights: tuple[str, ...]
    """paths in tree order"""
    opt_state: tuple[str, ...]
    """paths of the optimizer state that belongs to these weights, in tree order"""
    nbytes: int
    """what is fetched (and written back) for it on each device; 0: all of it is on the device anyway"""


def make_buckets(
    split: Split,
    weights_plan: Any,
    opt_state_plan: Any,
    *,
    bucket_bytes: int,
    moves: Callable[[str], bool] | None = None,
) -> tuple[Bucket, ...]:
    """Every weight of `weights_plan` (the tree that the optimizer updates) in one bucket, up to `bucket_bytes` each.

    A bucket takes its weights in tree order as long as what moves of them and of their state fits. Weights of which
    nothing moves share the first bucket. `moves` decides that for a path such as 'weights/attn/wq' or
    'opt_state/0/mu/attn/wq'; by default, a leaf moves whose plan says another tier than the device.

    A leaf larger than `bucket_bytes` is a bucket by itself: no leaf is ever cut, because many optimizers (lamb,
    adafactor, muon) need it whole.
    """
    weights, states = tree.flatten(weights_plan), tree.flatten(opt_state_plan)
    owned: dict[str, list[str]] = {path: [] for path in split.weights}
    for path, weight in split.owner.items():
        if weight is not None:
            owned[weight].append(path)

    def size(name: str, x: Any) -> int:
        does_move = moves(name) if moves else tier_of(x) != "device"
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize if does_move else 0

    sizes = {
        path: size(f"weights/{path}", weights[path]) + sum(size(f"opt_state/{s}", states[s]) for s in owned[path])
        for path in split.weights
    }
    place = {path: i for i, path in enumerate(split.owner)}
    return tuple(
        Bucket(
            tuple(group),
            tuple(sorted((s for path in group for s in owned[path]), key=place.__getitem__)),
            sum(sizes[path] for path in group),
        )
        for group in _greedy(sizes, bucket_bytes)
    )


def _greedy(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Those of which nothing moves first, then the others in tree order, each group as full as it gets."""
    groups: list[list[str]] = [[path for path, n in sizes.items() if not n], []]
    filled = 0
    for path, nbytes in sizes.items():
        if not nbytes:
            continue
        if groups[-1] and filled + nbytes > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(path)
        filled += nbytes
    return [group for group in groups if group]
