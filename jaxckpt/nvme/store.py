"""The files of the leaves that live on local disks: two for each shard, of which a step reads one and overwrites the other.

Nothing here is trusted after a restart: what lasts are snapshots, which hold hard links of these files. So there is no
journal, no sync and no order of writes; a store begins with an empty directory. In each of the directories given:

    <run id>.p<process>/lock     held by the process as long as it lives
    <run id>.p<process>/work/    the files, which go when the store is closed
    <run id>.p<process>/held/    not ours: what a snapshot has linked and still copies elsewhere; swept by the next store
"""

import contextlib
import errno
import functools
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.errors import OffloadError, PlanError, UnusableDiskError, listed
from jaxckpt.nvme.array import KEPT, Marks, NvmeArray, Place, box_of, holders, layout_of
from jaxckpt.nvme.directories import sweep, sweep_abandoned, take
from jaxckpt.nvme.rooms import Rooms, shards, view
from jaxckpt.snapshot.direct import Box, DamagedFile, Layout, read_shard, write_shard
from jaxckpt.snapshot.direct_file import Counters, File, make_file
from jaxckpt.state.fingerprint import fingerprint, of_array
from jaxckpt.state.nvme import NvmeStruct

GENERATIONS = 2
WAY_OUT = "Nothing of this step was kept; started again, the run continues from its newest snapshot."
log = logging.getLogger("jaxckpt")


@dataclass
class _Leaf:
    struct: NvmeStruct
    layout: Layout
    names: dict[Place, str]
    """the file of each shard without its last letter"""
    devices: dict[Place, list]
    """this process's devices that hold it"""
    generation: int = 0
    current: NvmeArray | None = field(default=None, repr=False)


class NvmeStore:
    """The working files of one process; its directories are its own from `open` to `close`.

    `write` gives a leaf its first bytes; from then on a step reads `current` and writes to `target`, and `commit` makes
    what was written the current generation. Raises OffloadError, with the file or directory, for what a disk refuses.
    """

    def __init__(
        self, dirs: Sequence[str], leaves: Mapping[str, NvmeStruct], *, run_id: str, snapshot_copies: int = 1
    ) -> None:
        """Only plans; `open` does the rest. `leaves` are by path in the state.

        The shards of this process are dealt out over `dirs`, so that all of them are read at the same time. There must be
        room for two generations and for `snapshot_copies` more, which is what linked snapshots come to hold.
        """
        if not dirs or len(set(map(os.path.realpath, dirs))) < len(dirs):
            raise PlanError(f"nvme_dir must name one or several different directories; found {list(dirs)}")
        self._roots = [os.path.join(d, f"{run_id}.p{jax.process_index()}") for d in dirs]
        self._snapshot_copies, self._is_open = snapshot_copies, False
        self.counters, self.rooms = Counters(), Rooms(0)
        self._locks: list[TextIO] = []
        self._leaves = self._lay_out(leaves)

    def open(self) -> None:
        """Takes the directories, with all the room that the leaves need in them, and removes what killed runs have left."""
        assert not self._is_open, "open() comes once"
        try:
            for root in self._roots:
                self._locks.append(take(root))
                sweep(root)
                sweep_abandoned(os.path.dirname(root))
            self._check_space(self._snapshot_copies)
            self._make_files()
            self._is_open = True
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise UnusableDiskError(
                    f"{e.filename or self._roots[0]}: {e.strerror or e}: the tier nvme needs directories that this process can "
                    f"make files in; found {[os.path.dirname(root) for root in self._roots]}. Name others in nvme_dir."
                ) from e
            raise

    @property
    def paths(self) -> list[str]:
        """Of all leaves, in the order given."""
        return list(self._leaves)

    def current(self, path: str) -> NvmeArray:
        """The newest generation of the leaf."""
        found = self._leaves[path].current
        if found is None:
            raise OffloadError(
                f"{path}: nothing was written to this leaf yet; give the store its first bytes by `write`"
            )
        return found

    def struct(self, path: str) -> NvmeStruct:
        return self._leaves[path].struct

    def layout(self, path: str) -> Layout:
        return self._leaves[path].layout

    def devices(self, path: str) -> Mapping[Place, list]:
        """The devices of this process that hold each shard of the leaf."""
        return self._leaves[path].devices

    def target(self, path: str, place: Place) -> str:
        """The file that the shard's next generation goes to, for `write_shard(..., is_in_place=True)`."""
        leaf = self._leaves[path]
        file = leaf.names[place] + "ab"[(leaf.generation + 1) % GENERATIONS]
        if os.stat(file).st_nlink > 1 or os.path.exists(file + KEPT):  # a snapshot has it now
            os.unlink(file)
            make_file(file, leaf.layout.file_bytes)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file + KEPT)
        return file

    def commit(self, marks: Mapping[str, Marks | None]) -> dict[str, NvmeArray]:
        """Makes what lies in the targets of these leaves their current generation; `marks` are (fingerprint, is finite).

        Where they are None they are found by reading the leaf, if anybody asks for them.
        """
        for path, known in marks.items():
            leaf = self._leaves[path]
            leaf.generation += 1
            letter, generation = "ab"[leaf.generation % GENERATIONS], leaf.generation
            struct = leaf.struct
            leaf.current = NvmeArray(
                struct.shape,
                struct.dtype,
                struct.sharding,
                path=path,
                layout=leaf.layout,
                files={place: name + letter for place, name in leaf.names.items()},
                generation=generation,
                marks=functools.cache(lambda path=path, known=known: known or self._read_marks(path)),
                is_current=lambda leaf=leaf, generation=generation: self._is_newest(leaf, generation),
            )
        return {path: self.current(path) for path in marks}

    def write(
        self,
        path: str,
        fill: Callable[[Box, np.ndarray], None],
        *,
        fingerprint: jax.Array | None = None,
        is_finite: jax.Array | None = None,
    ) -> NvmeArray:
        """Writes a whole leaf, shard after shard, with one shard of it in memory; not while a step runs.

        `fill(box, out)` is called for each distinct shard that this process holds, and writes that part of the leaf to
        `out`, an array of the shard's shape which holds anything. `fingerprint` (uint32[2]) and `is_finite` (bool[]) are
        of the whole leaf; without them, see `commit`.
        """
        leaf = self._leaves[path]
        for place, devices in leaf.devices.items():
            room = self.rooms.take(leaf.layout.shard, leaf.layout.dtype, devices[0])
            fill(box_of(leaf.layout, place), view(room))
            file = leaf.names[place]
            try:
                file = self.target(path, place)
                write_shard(file, view(room), leaf.layout, self.counters, is_in_place=True)
            except OSError as e:
                raise told(e, file, "writing") from e
            self.rooms.give([room])
        known = None if fingerprint is None or is_finite is None else (fingerprint, is_finite)
        return self.commit({path: known})[path]

    def write_array(
        self, path: str, x: jax.Array, fingerprint: jax.Array | None = None, is_finite: jax.Array | None = None
    ) -> NvmeArray:
        """As `write`, of a whole leaf that lies on the devices, laid out as the plan says."""
        bounds = lambda box: tuple(s.indices(n)[:2] for s, n in zip(box, x.shape, strict=True))
        parts = {bounds(shard.index): shard.data for shard in x.addressable_shards}
        fill = lambda box, out: np.copyto(out, np.asarray(parts[bounds(box)]))
        return self.write(path, fill, fingerprint=fingerprint, is_finite=is_finite)

    def write_arrays(self, arrays: Mapping[str, jax.Array]) -> dict[str, NvmeArray]:
        """As `write_array`, with their marks."""
        return {
            path: self.write_array(path, x, of_array(x), _all_finite(x, self.struct(path)))
            for path, x in arrays.items()
        }

    def _read_marks(self, path: str) -> Marks:
        leaf, array = self._leaves[path], self.current(path)
        parts = []
        for place, devices in leaf.devices.items():
            rooms = [self.rooms.take(leaf.layout.shard, leaf.layout.dtype, device) for device in devices]
            target = [(box_of(leaf.layout, place), view(rooms[0]))]
            try:
                read_shard(array.files[place], leaf.layout, place, target, self.counters)
            except (OSError, DamagedFile) as e:
                raise told(e, array.files[place], "reading") from e
            for other in rooms[1:]:
                np.copyto(view(other), view(rooms[0]))
            parts += rooms
        sharding = leaf.struct.sharding.with_memory_kind("pinned_host")
        whole = jax.make_array_from_single_device_arrays(array.shape, sharding, parts, dtype=array.dtype)
        marks = jax.block_until_ready(_marker(leaf.struct.sharding)(whole))
        self.rooms.give(shards(whole))
        return marks

    def close(self) -> None:
        """Removes the working files and gives the directories free. What snapshots have linked stays theirs."""
        self._is_open = False
        for leaf in self._leaves.values():
            leaf.generation, leaf.current = 0, None
        self.rooms.clear()
        for root, lock in zip(self._roots, self._locks, strict=False):
            shutil.rmtree(os.path.join(root, "work"), ignore_errors=True)
            lock.close()
        self._locks = []

    def __enter__(self) -> "NvmeStore":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_newest(self, leaf: _Leaf, generation: int) -> bool:
        return leaf.generation == generation and self._is_open

    def _lay_out(self, leaves: Mapping[str, NvmeStruct]) -> dict[str, _Leaf]:
        """Deals the shards of this process out: each to the directory that has got the fewest bytes so far."""
        dealt = [0] * len(self._roots)
        mine = jax.process_index()
        found = {}
        for path, struct in leaves.items():
            layout = layout_of(struct)
            found[path] = leaf = _Leaf(struct, layout, {}, {})
            for place, devices in holders(struct).items():
                here = [d for d in devices if d.process_index == mine]
                if here:
                    to = dealt.index(min(dealt))
                    dealt[to] += layout.file_bytes
                    name = ".".join(map(str, place)) + "."
                    leaf.names[place] = os.path.join(self._roots[to], "work", path.replace("/", "."), name)
                    leaf.devices[place] = here
        return found

    def _files(self) -> list[tuple[str, int]]:
        """The name without its last letter, and the size, of every shard's files."""
        return [(name, leaf.layout.file_bytes) for leaf in self._leaves.values() for name in leaf.names.values()]

    def _check_space(self, snapshot_copies: int) -> None:
        needed: dict[int, int] = defaultdict(int)
        roots: dict[int, list[str]] = defaultdict(list)
        for root in self._roots:
            device = os.stat(root).st_dev
            roots[device].append(root)
            needed[device] += sum(n for name, n in self._files() if name.startswith(root + os.sep))
        problems = []
        for device, n in needed.items():
            stat = os.statvfs(roots[device][0])
            free, total = stat.f_bavail * stat.f_frsize, (GENERATIONS + snapshot_copies) * n
            if free < total and stat.f_blocks:  # a file system in memory may have no limit of its own
                problems.append(
                    f"{', '.join(roots[device])}: {_size(total)} are needed ({GENERATIONS} generations of {_size(n)}, and "
                    f"{snapshot_copies} for linked snapshots) and {_size(free)} are free"
                )
        if problems:
            raise UnusableDiskError(
                "the disks of the nvme tier have too little room:\n"
                + listed(problems)
                + "\nFree some, name more directories in nvme_dir, or place less of the state on nvme."
            )

    def _make_files(self) -> None:
        files = self._files()
        for directory in {os.path.dirname(name) for name, _ in files}:
            os.makedirs(directory, exist_ok=True)
        for name, nbytes in files:
            for letter in "ab"[:GENERATIONS]:
                make_file(name + letter, nbytes)
        for root in self._roots:
            name = next((name for name, _ in files if name.startswith(root + os.sep)), None)
            if name is not None:
                with File(name + "a", os.O_RDWR) as file:
                    if not file.is_direct:
                        log.warning(
                            "%s: this file system cannot be read and written past the page cache (O_DIRECT), so that the nvme "
                            "tier also fills the page cache and is slower there",
                            root,
                        )


def told(error: Exception, file: str, doing: str) -> Exception:
    """What a disk has refused, as an OffloadError; any other error as it is."""
    if isinstance(error, DamagedFile):
        return OffloadError(f"{doing} the nvme tier: {error.found} {WAY_OUT}")
    if not isinstance(error, OSError):
        return error
    file = error.filename or file
    no, what = error.errno or 0, error.strerror or str(error)
    if no in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = "an unknown number of bytes"
        with contextlib.suppress(OSError):
            stat = os.statvfs(os.path.dirname(file))
            free = _size(stat.f_bavail * stat.f_frsize)
        hint = f"the disk is full, or a quota or limit is reached; {free} are free there. Free some"
    elif no in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENXIO, errno.ENODEV):
        hint = "the file or its disk is gone. See that the directory stays there while the run lives"
    elif no in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "it may not be written. Name a directory in nvme_dir that this process may write to"
    else:
        hint = "the disk fails. Name a directory on another one in nvme_dir"
    return OffloadError(f"{file}: {doing}: {what} (errno {no}): {hint}. {WAY_OUT}")


def _all_finite(x: jax.Array, struct: NvmeStruct) -> jax.Array:
    """bool[], the same on every process."""
    return jax.jit(is_all_finite, out_shardings=NamedSharding(struct.sharding.mesh, PartitionSpec()))(x)


@functools.cache
def _marker(sharding: NamedSharding) -> Any:
    """The jitted (fingerprint, is finite) of a leaf in pinned host memory."""

    def mark(x: jax.Array) -> Marks:
        x = jax.device_put(x, sharding)
        return fingerprint(x), is_all_finite(x)

    return jax.jit(mark, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def is_all_finite(x: jax.Array) -> jax.Array:
    """bool[], under jit; whole numbers always are."""
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.bool_(True)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes} bytes"
