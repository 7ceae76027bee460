"""What the planned state weighs, before anything is allocated."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of


@dataclass(frozen=True)
class GroupSize:
    group: str
    tier: str
    leaves: int
    total_bytes: int
    """over the whole mesh, each element counted once"""
    bytes_per_device: int


def group_sizes(plan: Any) -> list[GroupSize]:
    """One entry a (group of state, tier), in the state's order."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, x in tree.flatten(plan).items():
        entry = sums[path.split("/")[0], tier_of(x)]
        entry[0] += 1
        entry[1] += leaf_bytes(x.shape, x.dtype)
        entry[2] += leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype)
    return [GroupSize(group, kind, *numbers) for (group, kind), numbers in sums.items()]


def leaf_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        dtype = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).dtype
        shape = (*shape, 2)
    return math.prod(shape) * dtype.itemsize


def memory_table(plan: Any) -> Table:
    table = Table("state", "tier", "leaves", "total", "per device", title="Where the training state lives")
    for size in group_sizes(plan):
        table.add_row(
            size.group,
            size.tier,
            str(size.leaves),
            mebibytes(size.total_bytes),
            mebibytes(size.bytes_per_device),
        )
    return table


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"
