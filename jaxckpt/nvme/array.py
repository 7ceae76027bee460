"""A leaf of the training state that lies on local disks: one file for each distinct shard, in the snapshots' own format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxckpt.errors import OffloadError
from jaxckpt.snapshot.direct import Box, Layout, local_chunk_shape, read_shard
from jaxckpt.snapshot.direct_file import Counters
from jaxckpt.state.nvme import NvmeStruct

Marks = tuple[jax.Array, jax.Array]
KEPT = ".kept"
"""the end of the name of an empty file that says of the file beside it what a hard link says elsewhere: do not overwrite"""
Place = tuple[int, ...]
"""where a shard lies in the grid of shards, as in the name of its file in a zarr3 array: c/0/3"""


@dataclass(frozen=True, eq=False)
class NvmeArray(NvmeStruct):
    """What a training state holds for such a leaf; to JAX a leaf that no jitted function may be given.

    Like a donated array it is gone once the step that was given it returns: its files are those that the step after
    that overwrites. Whoever wants to keep one makes a hard link of it before the next step; a file with a second name
    is never written to again. Where the file system has no hard links, it keeps the file open and makes an empty one of
    the same name and `KEPT`: the store then puts a new file in its place.
    """

    path: str
    """of the leaf in the state: 'opt_state/0/mu/layers/wq'"""
    layout: Layout
    files: Mapping[Place, str]
    """the file of each distinct shard that a device of this process holds; none of them may be written to by others"""
    generation: int
    """how often the leaf was written since the store was opened"""
    marks: Callable[[], Marks]
    """for `fingerprint` and `is_finite`"""
    is_current: Callable[[], bool]
    """whether no newer generation has taken its place"""

    @property
    def fingerprint(self) -> jax.Array:
        """uint32[2] of the whole leaf, over all processes; see jaxckpt.state.fingerprint.

        Where the step has not computed it, the leaf is read once for it and for `is_finite`, on all processes together, so
        that it must be asked for before the next step and in the same order everywhere.
        """
        return self.marks()[0]

    @property
    def is_finite(self) -> jax.Array:
        """bool[], whether all of the leaf is; see `fingerprint`."""
        return self.marks()[1]

    @property
    def owned(self) -> dict[Place, str]:
        """Those of `files` that this process saves: over all processes each shard once."""
        mine = jax.process_index()
        return {place: self.files[place] for place, process in savers(self).items() if process == mine}

    def box(self, place: Place) -> Box:
        """The part of the leaf that the shard at `place` is."""
        return box_of(self.layout, place)

    def read(self, place: Place, counters: Counters | None = None) -> np.ndarray:
        """One shard of this process from its file. Raises DamagedSnapshot where the file holds anything else."""
        self.check_current()
        out = np.empty(self.layout.shard, self.layout.dtype)
        read_shard(self.files[place], self.layout, place, [(self.box(place), out)], counters or Counters())
        return out

    def check_current(self) -> None:
        """Raises OffloadError where the files may hold a later generation."""
        if not self.is_current():
            raise OffloadError(
                f"{self.path}: generation {self.generation} of this leaf has been overwritten by a later step, or its store "
                "is closed. Use the state that the newest step returned."
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole leaf, read from its files; only where this process has all of it."""
        if copy is False:
            raise ValueError(f"{self.path} lies on disk and cannot be had without a copy")
        places = list(self.layout.shards_of(tuple(slice(0, n) for n in self.shape)))
        if missing := [place for place in places if place not in self.files]:
            raise OffloadError(
                f"{self.path}: {len(missing)} of its {len(places)} shards lie on the disks of other processes, so that this one "
                "cannot read it whole. Read the shards in `files`, or a snapshot."
            )
        whole = np.empty(self.shape, self.layout.dtype)
        for place in places:
            whole[self.box(place)] = self.read(place)
        return whole if dtype is None else whole.astype(dtype)


def layout_of(struct: NvmeStruct) -> Layout:
    """How a leaf lies on disk: as a snapshot on a local disk would write it."""
    shard = struct.sharding.shard_shape(struct.shape)
    dtype = np.dtype(struct.dtype)
    return Layout(struct.shape, shard, local_chunk_shape(shard, dtype.itemsize), dtype)


def holders(struct: NvmeStruct) -> dict[Place, list[Any]]:
    """The devices of all processes that hold each distinct shard, in the order of the mesh."""
    shard = struct.sharding.shard_shape(struct.shape)
    found: dict[Place, list[Any]] = {}
    for device, index in struct.sharding.devices_indices_map(struct.shape).items():
        starts = [s.indices(n)[0] for s, n in zip(index, struct.shape, strict=True)]
        place = tuple(start // n for start, n in zip(starts, shard, strict=True))
        found.setdefault(place, []).append(device)
    return found


def savers(struct: NvmeStruct) -> dict[Place, int]:
    """The process that saves each distinct shard: that of the first device which holds it."""
    return {place: devices[0].process_index for place, devices in holders(struct).items()}


def box_of(layout: Layout, place: Place) -> Box:
    """The part of the array that the shard at `place` is."""
    return tuple(slice(p * n, (p + 1) * n) for p, n in zip(place, layout.shard, strict=True))


def on_disk(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Those leaves of a flat plan or state that live on disk."""
    return {path: x for path, x in flat.items() if isinstance(x, NvmeStruct)}
