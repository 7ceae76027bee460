"""Restores leaves to local disks: each shard is read, fingerprinted and written to the store, a few at a time in memory."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.nvme.array import NvmeArray, layout_of
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot import direct, host_arrays, shards
from jaxckpt.snapshot.direct import Box
from jaxckpt.snapshot.orbax_seam import mover
from jaxckpt.state.np_fingerprint import np_fingerprint
from jaxckpt.state.nvme import NvmeStruct

_THREADS = 8
Entries = dict[str, list[tuple[str, host_arrays.Sums]]]


def read_into(
    store: NvmeStore | None,
    directory: epath.Path,
    leaves: Mapping[str, NvmeStruct],
    fingerprints: Mapping[str, str],
    *,
    restore_bytes: int | None = None,
) -> tuple[dict[str, NvmeArray], Entries]:
    """The leaves of the snapshot in `directory`, in `store`; and what the parts that were read add to each fingerprint.

    `fingerprints` are those that were saved. Every process reads the shards that its devices hold, at most
    `restore_bytes` of them at a time, or one. Raises DamagedSnapshot where a checksum is wrong.
    """
    if not leaves:
        return {}, {}
    if store is None:
        raise SnapshotError(
            f"{next(iter(leaves))} and {len(leaves) - 1} more leaves live on disk, and no store was given"
        )
    entries: Entries = {path: [] for path in leaves}

    def read(path: str) -> NvmeArray:
        struct = leaves[path]
        read_box = _reader(directory / "state" / shards.array_directory(path), struct)

        def fill(box: Box, out: np.ndarray) -> None:
            read_box(box, out)
            sums = np_fingerprint(out, [s.start for s in box], struct.shape)
            entries[path].append((host_arrays.part_name(box, struct.shape), sums.tolist()))

        saved = fingerprints.get(path, "0" * 16)
        halves = np.array([int(saved[:8], 16), int(saved[8:], 16)], np.uint32)
        # A state that is not finite is never saved.
        marks = _everywhere(halves, struct), _everywhere(np.bool_(True), struct)
        return store.write(_own_path(path, store), fill, fingerprint=marks[0], is_finite=marks[1])

    largest = max(layout_of(x).file_bytes for x in leaves.values())
    threads = _THREADS if restore_bytes is None else max(1, min(_THREADS, restore_bytes // largest))
    with ThreadPoolExecutor(threads, thread_name_prefix="jaxckpt-restore") as pool:
        jobs = {path: pool.submit(read, path) for path in leaves}
        try:
            return {path: job.result() for path, job in jobs.items()}, entries
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _own_path(path: str, store: NvmeStore) -> str:
    """The leaf's path in the training state: master weights stand under `params` in a snapshot."""
    master = path.replace("params/", "master/", 1)
    return master if master in store.paths else path


def _reader(root: epath.Path, struct: NvmeStruct) -> Callable[[Box, np.ndarray], None]:
    """read(box, out) of the array in the directory `root`, every byte that it takes checked."""
    array = shards.open_array(root)
    if (array.shape, array.dtype) != (struct.shape, np.dtype(struct.dtype)):
        raise DamagedSnapshot(
            f"{root}/zarr.json describes {array.dtype}{list(array.shape)}, the leaf is {struct.dtype}{list(struct.shape)}"
        )
    layout = direct.read_layout(str(root)) if mover().is_trusted(str(root)) else None

    def read_directly(box: Box, out: np.ndarray) -> None:
        assert layout is not None
        for place in layout.shards_of(box):
            direct.read_shard(layout.file(str(root), place), layout, place, [(box, out)], mover().counters)

    def read(box: Box, out: np.ndarray) -> None:
        sizes = zip(box, array.shard_shape, strict=True)
        reach = [range(s.start // n, -(-s.stop // n)) for s, n in sizes]
        for cell in (cell for cell in array.cells() if all(c in r for c, r in zip(cell, reach, strict=True))):
            for starts, block in shards.iter_chunks(array, cell):
                _copy_common(block, starts, out, [s.start for s in box])

    return read if layout is None else read_directly


def _copy_common(source: np.ndarray, source_starts: Any, target: np.ndarray, target_starts: Any) -> None:
    """Copies what two blocks of an array, which begin at these elements, have in common."""
    here, there = [], []
    for n, a, m, b in zip(source.shape, source_starts, target.shape, target_starts, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return
        here.append(slice(start - a, stop - a))
        there.append(slice(start - b, stop - b))
    target[tuple(there)] = source[tuple(here)]


def _everywhere(value: Any, struct: NvmeStruct) -> jax.Array:
    sharding = NamedSharding(struct.sharding.mesh, PartitionSpec())
    return jax.make_array_from_callback(np.shape(value), sharding, lambda index: value[index])
