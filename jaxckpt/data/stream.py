"""The global batches of a run as global `jax.Array`s, read ahead in threads, at a position that is one number."""

import hashlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.data.batches import GlobalBatches, PyTree, as_dataset, batch_sharding, local_rows, paths_of, read_example
from jaxckpt.data.course import Course, Skip, planned
from jaxckpt.data.mixture import Mixture, Segment
from jaxckpt.data.shuffle import reads_rows
from jaxckpt.errors import DataError

log = logging.getLogger("jaxckpt")

STATE_VERSION = 2
_POLL_S = 0.1
_CLOSE_POLL_S = 0.01
_TELL_EVERY_S = 60
_Arrival = tuple[PyTree, BaseException | None]


class BatchStream:
    """Iterator over the global batches: pytrees of `jax.Array`[global_batch, ...], for ever, read ahead in threads.

    Its whole state is the number of batches handed out, with the few numbers that say which examples they came from.
    Threads and buffers are rebuilt from it, so what was read ahead never counts.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int,
        sharding: NamedSharding,
        identity: Mapping[str, Any] | None = None,
        skip: Sequence[Skip] = (),
        num_threads: int = 2,
        prefetch: int = 2,
    ):
        """`source`: a grain.MapDataset or a sequence. `identity`: what it is made of, by name, as values that JSON holds;
        None: it is probed. `skip`: [(first step, last step)] whose batches are left out.

        `sharding` may cut more axes than the first, where an array has them. `prefetch` batches wait on the device.
        """
        self.global_batch = global_batch
        self.sharding = sharding
        self._row_sharding = batch_sharding(sharding, global_batch)
        self._dataset = as_dataset(source)
        self._epoch_length = len(source)
        self._rows = local_rows(self._row_sharding, global_batch)
        # Grain's own defaults are 16 threads and 500 elements, and an element is a whole batch here.
        self._options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(1, num_threads))
        self._prefetch = prefetch
        self._ahead: _ReadAhead | None = None
        self.identity: Mapping[str, Any] = self._probe() if identity is None else dict(identity)
        self._skip = tuple((int(a), int(b)) for a, b in skip)
        self._handed_out = 0
        self._go_on(Course.of(global_batch), ())

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return self.next_unless(lambda: False)

    def next_unless(self, should_stop: Callable[[], bool]) -> PyTree | None:
        """The next batch; or None once `should_stop` says yes while none has come, and the position stays.

        Data that never comes cannot be interrupted: its thread is left behind, and does not keep the process from ending.
        """
        self.start()
        assert self._ahead is not None
        arrival = None
        try:
            arrival = self._wait(self._ahead, should_stop)
        finally:  # also where Ctrl-C ends the wait, in a notebook
            if arrival is None:
                self._ahead.leave()
                self._ahead = None
        if arrival is None:
            return None
        batch, error = arrival
        if error is not None:
            self.close()  # the reader has moved on by one; a second call must meet the same batch again
            raise error
        self._handed_out += 1
        return batch

    def _wait(self, ahead: "_ReadAhead", should_stop: Callable[[], bool]) -> "_Arrival | None":
        began, told = time.monotonic(), 0
        while (arrival := ahead.get(_POLL_S)) is None and not should_stop():
            if (waited := int(time.monotonic() - began) // _TELL_EVERY_S) > told:
                told = waited
                log.warning("waiting for example %d since %d s", self.example_of(self.batches), told * _TELL_EVERY_S)
        return arrival

    def start(self) -> None:
        """Begins to read ahead, so that the first batch is ready when compilation or a restore is."""
        if self._ahead is None:
            self._ahead = _ReadAhead(self._batches_on_device(), self._prefetch)

    def close(self) -> None:
        """Stops the threads and drops what was read ahead. The position stays; `next` starts again from there."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    # -------------------------------------------------------------------------------------------- the position

    @property
    def batches(self) -> int:
        """Batches that were handed out, over all lives of the run."""
        return self._handed_out

    def example_of(self, batch: int) -> int:
        """Number of the first example of batch `batch` (from 0)."""
        return self._course.example(batch)

    def key(self, batch: int) -> str:
        """16 hexadecimal digits that stand for all that decides what batch `batch` holds: two of the same key are the same."""
        end = self._course.end(batch + 1)
        segments = [s.as_json() for s in self._mixture.past(end)] if self._mixture else []
        what = [self.identity, self._course.example(batch), end, segments]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """The position as JSON, the same on every process. It counts only the batches that were handed out."""
        next_example = self._course.end(self._handed_out)
        state = {
            "version": STATE_VERSION,
            "batches": self._handed_out,
            "next_example": next_example,
            "global_batch": self.global_batch,
            **self._course.until(self._handed_out).as_json(),
            "identity": dict(self.identity),
        }
        if self._mixture:
            state["segments"] = [s.as_json() for s in self._mixture.past(next_example)]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`, in O(1). Its batch size may differ: the sequence of examples goes on without a gap.

        Likewise the weights of a mixture and what is to be skipped, from here on. Raises DataError where the data is
        another, or what was skipped before.
        """
        if problems := self._differences(state):
            raise DataError(
                f"the data changed: {'; '.join(problems)}. The next example would not be the one that was due. "
                "Give the data (files, tokenizer, seq_len, holdout, seed) that the run began with, "
                "allow the change by name (data), or start a new run."
            )
        self.close()
        self._handed_out = int(state["batches"])
        self._go_on(Course.from_json(state), [Segment(int(start), w) for start, w in state.get("segments", [])])

    def rewind(self) -> None:
        """Back to the first batch."""
        self.close()
        self._handed_out = 0

    def _go_on(self, past: Course, segments: Sequence[Segment]) -> None:
        batches = self._handed_out
        if past.pieces[-1].global_batch != self.global_batch:
            past = past.with_batch_size(batches, self.global_batch)
        self._course = planned(past, batches, self._skip)
        self._mixture: Mixture | None = getattr(self._dataset, "mixture", None)
        if self._mixture:
            self._mixture.resolve(segments, self._course.end(batches), self._course.example)

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        if state.get("version") != STATE_VERSION:
            return [f"version was {state.get('version')!r} and is {STATE_VERSION!r}"]
        then, now = state.get("identity") or {}, json.loads(json.dumps(self.identity))
        names = dict.fromkeys([*then, *now])
        problems = [f"{k} was {then.get(k)!r} and is {now.get(k)!r}" for k in names if then.get(k) != now.get(k)]
        position = state.get("batches")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            problems.append(f"batches is {position!r}, not a number of batches")
        return problems

    # ------------------------------------------------------------------------------------------- what it holds

    def batch_at(self, batch: int) -> PyTree:
        """This process's rows, as numpy, of batch `batch` (from 0), built now from no buffer."""
        return self._global_batches(first=batch)[0]

    def batch_struct(self) -> PyTree:
        """The batch as `jax.ShapeDtypeStruct`s with shardings, from example 0, to compile a step early."""
        leaves, structure = read_example(self._dataset, 0)
        paths = paths_of(structure)
        structs = []
        for path, leaf in zip(paths, leaves, strict=True):
            shape = (self.global_batch, *leaf.shape)
            sharding = self._sharding(len(shape))
            try:
                sharding.shard_shape(shape)
            except ValueError as e:
                raise DataError(f"field '{path}' of shape {shape} cannot be cut as {sharding.spec}: {e}") from None
            structs.append(jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding))
        return jax.tree.unflatten(structure, structs)

    def _batches_on_device(self) -> Any:
        """Iterator over the batches from the position on."""
        batches = self._global_batches(first=self._handed_out)
        if reads_rows(self._dataset):  # in one pass, which the thread that reads ahead does itself
            return (self._to_device(batches[k]) for k in itertools.count())
        return iter(batches.map(self._to_device).to_iter_dataset(self._options))

    def _global_batches(self, *, first: int) -> GlobalBatches:
        return GlobalBatches(self._dataset, self._course, self._rows, first=first)

    def _probe(self) -> dict[str, str]:
        """An identity from outside, for data that brings none: a hash of the length and the bytes of eight examples."""
        digest = hashlib.sha256(str(self._epoch_length).encode())
        last = min(self._epoch_length, 2**31) - 1
        for number in sorted({i * last // 7 for i in range(8)}):
            leaves, structure = read_example(self._dataset, number)
            digest.update(str(structure).encode())
            for leaf in leaves:
                digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        return {"probe": digest.hexdigest()}

    def _sharding(self, rank: int) -> NamedSharding:
        spec = PartitionSpec(*self.sharding.spec[:rank])
        return NamedSharding(self.sharding.mesh, spec, memory_kind=self.sharding.memory_kind)

    def _to_device(self, batch: PyTree) -> PyTree:
        # No collective, and no order among processes: safe in threads.
        if self.sharding.is_fully_addressable:
            return jax.device_put(batch, jax.tree.map(lambda rows: self._sharding(rows.ndim), batch))
        return jax.tree.map(self._to_array, batch)

    def _to_array(self, rows: np.ndarray) -> jax.Array:
        shape, sharding = (self.global_batch, *rows.shape[1:]), self._sharding(rows.ndim)
        if all(axes is None for axes in sharding.spec[1:]):
            return jax.make_array_from_process_local_data(sharding, rows, shape)
        place = {row: i for i, row in enumerate(self._rows.tolist())}

        def piece(index: Any) -> np.ndarray:
            return rows[[place[row] for row in range(*index[0].indices(self.global_batch))]][:, *index[1:]]

        return jax.make_array_from_callback(shape, sharding, piece)


class _ReadAhead:
    """A thread that takes batches from an iterator and keeps `count` of them, or the error that ended them, at hand."""

    def __init__(self, batches: Any, count: int):
        self._batches = batches
        self._arrived: queue.Queue[_Arrival] = queue.Queue(max(1, count))
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="jaxckpt-read-ahead", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> _Arrival | None:
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def leave(self) -> None:
        """Leaves the thread to itself: it may sit in a read that never ends, and does not keep the process from ending."""
        self._is_left = True

    def close(self) -> None:
        """Ends the thread and the iterator. Waits for the read that is under way."""
        self._is_left = True
        while self._thread.is_alive():  # it may wait for room
            self.get(_CLOSE_POLL_S)
        self._batches.close()

    def _run(self) -> None:
        while not self._is_left:
            try:
                arrival = next(self._batches), None
            except BaseException as e:
                arrival = None, e
            self._arrived.put(arrival)
            if arrival[1] is not None:
                return
