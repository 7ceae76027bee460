"""What the plan says of a leaf that lives on local disks between steps."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

SMALLEST_BYTES = 256 << 10
"""a leaf of this size or smaller is not worth a file of its own, and stays in pinned_host"""


@dataclass(frozen=True, eq=False)
class NvmeStruct:
    """A leaf of the plan in the tier `nvme`; to JAX a leaf like an array, which no jitted function may be given."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    """how it is cut, and the devices that the parts are fetched to, in the memory kind `device`"""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def resident(state: Any) -> Any:
    """The tree without its leaves on disk, which are None in it: what a jitted function may be given."""
    return jax.tree.map(lambda x: None if isinstance(x, NvmeStruct) else x, state)


def tier_of(x: Any) -> str:
    """'device', 'pinned_host' or 'nvme', of a leaf of the plan or of the state."""
    return "nvme" if isinstance(x, NvmeStruct) else x.sharding.memory_kind
