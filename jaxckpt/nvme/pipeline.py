"""Streams the leaves on disk through one update: reads the buckets ahead, writes those behind, a few in memory at a time."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxckpt.errors import OffloadError
from jaxckpt.nvme.array import Marks, NvmeArray, Place
from jaxckpt.nvme.rooms import Kind, shards, view
from jaxckpt.nvme.store import WAY_OUT, NvmeStore, told
from jaxckpt.snapshot.direct import read_shard, write_shard

Leaves = dict[str, jax.Array]


@dataclass(frozen=True)
class Moved:
    """What one step moved between the disks and this process."""

    bytes_read: int
    bytes_written: int
    busy_s: float
    """seconds in which at least one read or write was under way"""
    exposed_s: float
    """seconds that the step stood still for a read or a write"""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.busy_s - self.exposed_s)

    @property
    def bytes_per_s(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.busy_s if self.busy_s else 0.0


class Pipeline:
    """The order in which the leaves of a store are read and updated, and what of them stays in memory."""

    def __init__(
        self,
        store: NvmeStore,
        buckets: Sequence[Sequence[str]],
        *,
        visits: Sequence[Sequence[str]] = (),
        unread: frozenset[str] = frozenset(),
        slots: int = 4,
        cache_bytes: int = 0,
        threads: int = 4,
        wait_s: float = 600.0,
    ) -> None:
        """Only plans, as the store does; the first step starts the threads. `buckets`: the paths of the leaves that are
        updated together. `visits`: of those that are read together before, and given back as they were; any leaf as often as
        wanted. `unread`: leaves that their bucket writes without reading them.

        `slots` visits or buckets at most are in memory at a time, from the beginning of their read to the end of their use
        or write. As many buckets as fit in `cache_bytes` are kept besides and never read; they are written all the same, so
        that the files are whole after each step. A step ends with an error when it has waited `wait_s` seconds for one.
        """
        updated = [p for bucket in buckets for p in bucket]
        assert not buckets or sorted(updated) == sorted(store.paths), "each leaf is in one bucket"
        self.store, self.slots, self.wait_s = store, slots, wait_s
        self.turns = [tuple(paths) for paths in (*visits, *buckets)]
        """the leaves that a step takes, one turn after the other: first the visits"""
        self.visits, self.unread = len(visits), unread
        rooms = [self._rooms(paths) for paths in self.turns]
        self.cached: set[int] = set()
        """the numbers of the buckets that stay in memory: the first ones, for which a step would have to wait"""
        self.cached_bytes = 0
        for i, nbytes in list(enumerate(map(_bytes_of, rooms)))[self.visits :]:
            if nbytes and nbytes <= cache_bytes - self.cached_bytes:
                self.cached.add(i)
                self.cached_bytes += nbytes
        stay = {path for i in self.cached for path in self.turns[i]}
        visited, changed = self.turns[: self.visits], self.turns[self.visits :]
        self.bytes_read = sum(self._file_bytes(p) for paths in visited for p in paths if p not in stay)
        self.bytes_read += sum(self._file_bytes(p) for paths in changed for p in paths if p not in stay | unread)
        """by this process in a step, but for the first, which has nothing in its cache"""
        self.bytes_written = sum(self._file_bytes(p) for paths in changed for p in paths)
        read = [self._rooms([p for p in paths if p not in stay]) for paths in self.turns]
        read = [found for found in read if found]
        together = [sum(read[i : i + slots], start=Counter()) for i in range(max(1, len(read) - slots + 1))]
        self.buffer_bytes = _bytes_of(reduce(or_, together, Counter()))
        """host memory of this process that a step needs beside the cache: of each kind of room as many as it has at a time"""
        store.rooms.most_bytes = max(store.rooms.most_bytes, self.buffer_bytes)
        self.kept: dict[str, tuple[int, jax.Array]] = {}
        """of each leaf in a cached bucket its generation and what it holds"""
        self.readers = ThreadPoolExecutor(threads, thread_name_prefix="jaxckpt-nvme-read")
        self.writers = ThreadPoolExecutor(threads, thread_name_prefix="jaxckpt-nvme-write")
        self.clock = ThreadPoolExecutor(1, thread_name_prefix="jaxckpt-nvme-clock")

    def step(self) -> "Flow":
        """Begins to read. To be used as a context manager; only one at a time."""
        return Flow(self)

    def close(self) -> None:
        self.kept.clear()
        for pool in (self.readers, self.clock, self.writers):
            pool.shutdown(wait=False, cancel_futures=True)  # a thread that a dead disk holds must not hold up the end

    def _file_bytes(self, path: str) -> int:
        layout = self.store.layout(path)
        return len(self.store.devices(path)) * math.prod(layout.shard) * layout.dtype.itemsize

    def _rooms(self, bucket: Sequence[str]) -> Counter[Kind]:
        """The rooms that a bucket is read into: one for each shard on each device."""
        found: Counter[Kind] = Counter()
        for path in bucket:
            layout = self.store.layout(path)
            for devices in self.store.devices(path).values():
                found.update((layout.shard, layout.dtype, device) for device in devices)
        return found


def _bytes_of(rooms: Counter[Kind]) -> int:
    return sum(math.prod(shape) * dtype.itemsize * count for (shape, dtype, _), count in rooms.items())


class Flow:
    """One step: `take` and `release` every visit, `take` and `put` every bucket, in their order, then `finish`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._store = pipeline, pipeline.store
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._next, self._free = 0, pipeline.slots  # the bucket to read next, and the slots to read it into
        n = len(pipeline.turns)
        self._unread: list[int | None] = [None] * n  # shards that are still to come; None: not begun
        self._unwritten: list[int | None] = [None] * n
        self._parts: list[dict[str, list[jax.Array]]] = [{} for _ in range(n)]
        self._marks: dict[str, Marks | None] = {}
        self._active: dict[object, tuple[str, float]] = {}  # what is read or written: the file, since when
        self._busy_s, self._busy_since, self._exposed_s = 0.0, 0.0, 0.0
        self._computing, self._computed = 0, 0.0  # what the device was given and has not done; when it had done all
        counters = self._store.counters
        self._before = (counters.bytes_read, counters.bytes_written)

    def __enter__(self) -> "Flow":
        with self._changed:
            self._read_ahead()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            with self._changed:
                self._error = self._error or error  # what is queued does nothing any more
            self._settle()

    def follow(self, arrays: Any) -> None:
        """Says that the first bucket is not wanted before these arrays are computed."""
        with self._changed:
            self._computing += 1
        self._begin(self._pipeline.clock, self._tell_time, arrays)

    def take(self, i: int) -> Leaves:
        """The leaves of turn `i` in pinned host memory; waits until they are read. Those of a bucket are to be donated."""
        self._wait(
            lambda: self._unread[i] == 0, f"read {self._pipeline.turns[i][0] if self._pipeline.turns[i] else 'nothing'}"
        )
        taken = {}
        kept_leaves = self._pipeline.kept
        for path in self._pipeline.turns[i]:
            kept = kept_leaves.get(path) if i < self._pipeline.visits else kept_leaves.pop(path, None)
            if path in self._parts[i]:
                leaf = self._store.struct(path)
                sharding = leaf.sharding.with_memory_kind("pinned_host")
                parts = self._parts[i][path]
                taken[path] = jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts, dtype=leaf.dtype)
            else:
                assert kept is not None
                taken[path] = kept[1]
        if i >= self._pipeline.visits:
            self._parts[i] = {}
        return taken

    def release(self, i: int, after: Any) -> None:
        """Gives the leaves of visit `i` back, once these arrays are computed; nobody may use them then."""
        with self._changed:
            self._computing += 1
        self._begin(self._pipeline.clock, self._give_back_when_computed, i, after)

    def put(self, i: int, leaves: Leaves, marks: Mapping[str, Marks | None] | None = None) -> None:
        """Begins to write the new leaves of turn `i`, a bucket, once they are computed. Nobody else may keep or donate them.

        `marks`: of each leaf its fingerprint, uint32[2], and whether it is finite, bool[]; if None, see `NvmeArray`.
        """
        self._marks.update(marks or dict.fromkeys(leaves))
        jobs = [(path, place) for path in self._pipeline.turns[i] for place in self._store.devices(path)]
        with self._changed:
            self._unwritten[i] = len(jobs)
            self._computing += bool(jobs)
            if not jobs:
                self._release(i, leaves)
        if jobs:
            self._begin(self._pipeline.clock, self._write_when_computed, i, leaves, marks, jobs)

    def finish(self) -> tuple[dict[str, NvmeArray], Moved]:
        """Waits until all is written and makes it the current generation: {path: leaf}, and what was moved."""
        self._wait(lambda: all(n == 0 for n in self._unwritten), "write the last buckets")
        counters = self._store.counters
        moved = Moved(
            counters.bytes_read - self._before[0],
            counters.bytes_written - self._before[1],
            self._busy_s,
            self._exposed_s,
        )
        arrays = self._store.commit(self._marks)
        for path, (_, array) in list(self._pipeline.kept.items()):
            self._pipeline.kept[path] = (arrays[path].generation, array)
        return arrays, moved

    # ------------------------------------------------------------------------------------------ in any thread

    def _read_ahead(self) -> None:
        """Begins to read as many turns as there are slots for. With the lock held."""
        pipeline = self._pipeline
        while self._next < len(pipeline.turns) and self._error is None:
            i = self._next
            current = {path: self._store.current(path) for path in pipeline.turns[i]}
            needed = {p: x for p, x in current.items() if pipeline.kept.get(p, (-1,))[0] != x.generation}
            if needed if i < pipeline.visits else current and i not in pipeline.cached:
                if not self._free:
                    return
                self._free -= 1
            self._next += 1
            jobs = [(leaf, place) for leaf in needed.values() for place in self._store.devices(leaf.path)]
            self._parts[i] = {path: [] for path in needed}
            self._unread[i] = len(jobs)
            for leaf, place in jobs:
                self._begin(pipeline.readers, self._read, i, leaf, place)

    def _begin(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> None:
        """Calls in a thread of the pool; what it raises ends the step."""

        def safely() -> None:
            try:
                call(*args)
            except BaseException as e:
                self._fail(e)

        pool.submit(safely)

    def _read(self, i: int, leaf: NvmeArray, place: Place) -> None:
        """Reads one shard into memory of its own for each device that holds it."""

        def read() -> None:
            layout, devices = leaf.layout, self._store.devices(leaf.path)[place]
            rooms = [self._store.rooms.take(layout.shard, layout.dtype, d) for d in devices]
            if i < self._pipeline.visits or leaf.path not in self._pipeline.unread:
                first = view(rooms[0])
                read_shard(leaf.files[place], layout, place, [(leaf.box(place), first)], self._store.counters)
                for other in rooms[1:]:
                    np.copyto(view(other), first)
            with self._changed:
                self._parts[i][leaf.path] += rooms
                left = self._unread[i]
                assert left is not None
                self._unread[i] = left - 1

        self._do(read, leaf.files[place], "reading")

    def _tell_time(self, arrays: Any) -> bool:
        """Waits until the arrays are computed, and notes when that was; whether they could be."""
        try:
            jax.block_until_ready(arrays)
        except Exception as e:
            self._fail(e)
            return False
        with self._changed:
            self._computing -= 1
            self._computed = time.perf_counter()
        return True

    def _give_back_when_computed(self, i: int, after: Any) -> None:
        if self._tell_time(after):
            with self._changed:
                rooms = [room for parts in self._parts[i].values() for room in parts]
                self._unwritten[i], self._parts[i] = 0, {}
                if rooms:
                    self._store.rooms.give(rooms)
                    self._free += 1
                self._read_ahead()
                self._changed.notify_all()

    def _write_when_computed(self, i: int, leaves: Leaves, marks: Any, jobs: list[tuple[str, Place]]) -> None:
        # The marks, too: their memory is given away when it is written, and may be filled anew.
        if self._tell_time((leaves, marks)):
            # Here, in one thread: two that ask an array for its parts at the same time make JAX list them twice.
            parts = {path: shards(leaf) for path, leaf in leaves.items()}
            for path, place in jobs:
                device = self._store.devices(path)[place][0]
                (shard,) = [x for x in parts[path] if device in x.devices()]
                self._begin(self._pipeline.writers, self._write, i, leaves, path, place, shard)

    def _write(self, i: int, leaves: Leaves, path: str, place: Place, shard: jax.Array) -> None:
        """Writes one shard of a new leaf."""
        try:
            file = self._store.target(path, place)
        except BaseException as e:
            self._fail(told(e, path, "writing") if isinstance(e, Exception) else e)
            return
        self._do(lambda: self._write_out(i, leaves, path, shard, file), file, "writing")

    def _write_out(self, i: int, leaves: Leaves, path: str, shard: jax.Array, file: str) -> None:
        write_shard(file, view(shard), self._store.layout(path), self._store.counters, is_in_place=True)
        with self._changed:
            left = self._unwritten[i]
            assert left is not None
            self._unwritten[i] = left - 1
            if left == 1:
                self._release(i, leaves)

    def _release(self, i: int, leaves: Leaves) -> None:
        """Gives back, or keeps, the memory of a bucket that is written. With the lock held."""
        pipeline = self._pipeline
        if i in pipeline.cached:
            # The generation is that of the files only once the step is finished.
            pipeline.kept.update({path: (-1, leaf) for path, leaf in leaves.items()})
        elif leaves:
            self._store.rooms.give([x for leaf in leaves.values() for x in shards(leaf)])
            self._free += 1
        self._read_ahead()
        self._changed.notify_all()

    def _do(self, move: Callable[[], None], file: str, doing: str) -> None:
        """One read or write, with its time, unless the step has failed already."""
        with self._changed:
            if self._error is not None:
                return
            now, this = time.perf_counter(), object()
            if not self._active:
                self._busy_since = now
            self._active[this] = (file, now)
        try:
            move()
        except BaseException as e:
            self._fail(told(e, file, doing) if isinstance(e, Exception) else e)
        finally:
            with self._changed:
                del self._active[this]
                if not self._active:
                    self._busy_s += time.perf_counter() - self._busy_since
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ in the main thread

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        started = time.perf_counter()
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._error is not None or is_done(), self._pipeline.wait_s)
            # The device stood still only since it had done what it was given.
            self._exposed_s += self._idle_since(started)
            if self._error is not None:
                raise self._error
            if not in_time:
                now = time.perf_counter()
                slow = ", ".join(f"{file} for {now - since:.3g} s" for file, since in sorted(self._active.values()))
                raise OffloadError(
                    f"waited {self._pipeline.wait_s} s to {what}; now moving {slow or 'nothing'}. The disk is too slow or "
                    f"hangs: place less on it, name more directories in nvme_dir, or raise wait_s. {WAY_OUT}"
                )

    def _idle_since(self, started: float) -> float:
        """Seconds since `started` in which the device had nothing to do. With the lock held."""
        return 0.0 if self._computing else time.perf_counter() - max(started, self._computed)

    def _settle(self) -> None:
        """Waits until no thread touches memory or files any more; not for a disk that hangs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active, min(self._pipeline.wait_s, 10.0))
