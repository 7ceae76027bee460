"""Which weights are updated together when their state streams through the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of
from jaxckpt.update.split import Split

SMALL_SHARE = 16
"""a leaf this many times smaller than another may leave its place in the tree to keep it company"""


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

    No bucket has a single weight, unless the tree has: XLA turns a division by a scalar into a multiplication by its
    reciprocal where the scalar has one user, as Adam's bias correction has when one leaf is updated alone, and then the
    last bit of the result differs from the update of the whole tree. So a leaf that fills a bucket takes a small one
    with it, the nearest in the tree that another bucket can spare, else it joins its smaller neighbour: only then is
    a bucket larger than `bucket_bytes`.
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
    order = {path: i for i, path in enumerate(split.weights)}
    place = {path: i for i, path in enumerate(split.owner)}
    return tuple(
        Bucket(
            tuple(sorted(group, key=order.__getitem__)),
            tuple(sorted((s for path in group for s in owned[path]), key=place.__getitem__)),
            sum(sizes[path] for path in group),
        )
        for group in _in_company(_greedy(sizes, bucket_bytes), sizes)
    )


def _greedy(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Resident weights first, then the others in tree order, each group as full as it gets."""
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


def _in_company(groups: list[list[str]], sizes: dict[str, int]) -> list[list[str]]:
    """Groups of at least two weights each, if there are two."""
    i = 0
    while i < len(groups) and len(groups) > 1:
        if len(groups[i]) > 1:
            i += 1
            continue
        (alone,) = groups[i]
        donor = _donor(groups, sizes, i)
        if donor is not None:
            small = min(groups[donor], key=sizes.__getitem__)
            groups[donor].remove(small)
            groups[i].append(small)
            i += 1
            continue
        near = [j for j in (i - 1, i + 1) if 0 <= j < len(groups)]
        into = min(near, key=lambda j: sum(sizes[path] for path in groups[j]))
        groups[into] = groups[into] + [alone]
        del groups[i]
        i = max(0, min(i, into) - 1)
    return groups


def _donor(groups: Sequence[Sequence[str]], sizes: dict[str, int], i: int) -> int | None:
    """The nearest group that can spare a leaf so small that it does not matter where it is updated."""
    (alone,) = groups[i]
    for j in sorted(range(len(groups)), key=lambda j: abs(j - i)):
        # A resident weight may go anywhere; else it should not add to what is fetched at a time.
        if j != i and len(groups[j]) > 2 and min(sizes[p] for p in groups[j]) * SMALL_SHARE <= sizes[alone]:
            return j
    return None
