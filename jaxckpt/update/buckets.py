"""Which weights are fetched, updated and written back together."""

import math
from dataclasses import dataclass
from typing import Any

from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.split import Split


@dataclass(frozen=True)
class Bucket:
    weights: tuple[str, ...]
    opt_state: tuple[str, ...]
    """paths of the state that belongs to them, in tree order"""
    nbytes: int
    """on each device, of what moves"""


def make_buckets(split: Split, plan: TrainState, *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of up to `bucket_bytes` on each device, in tree order; never one with a single weight beside others.

    With one weight XLA would turn a division by a scalar (Adam's bias correction) into a multiplication with its
    reciprocal, because the scalar has a single user then, and the weights would differ in the last bit.
    """
    weights = tree.flatten(plan.params if plan.master is None else plan.master)
    state = tree.flatten(plan.opt_state)
    owned: dict[str, list[str]] = {path: [] for path in split.weights}
    for path, weight in split.owner.items():
        if weight is not None:
            owned[weight].append(path)
    groups: list[list[str]] = [[]]
    size = 0
    for path in split.weights:
        n = sum(_moved(x) for x in (weights[path], *(state[s] for s in owned[path])))
        if len(groups[-1]) >= 2 and size + n > bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += n
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2] += groups.pop()
    return tuple(
        Bucket(
            tuple(group),
            tuple(s for p in group for s in owned[p]),
            sum(_moved(x) for p in group for x in (weights[p], *(state[s] for s in owned[p]))),
        )
        for group in groups
    )


def _moved(x: Any) -> int:
    return 0 if tier_of(x) == "device" else math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
