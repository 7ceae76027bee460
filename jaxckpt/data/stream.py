"""The global batches of a run as global `jax.Array`s, read ahead in threads, at a position that is one number."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jax.sharding import NamedSharding

from jaxckpt.data.batches import (
    GlobalBatches,
    PyTree,
    as_dataset,
    batch_sharding,
    local_rows,
    place_batch,
    read_example,
    struct_of,
)
from jaxckpt.data.course import Skip
from jaxckpt.data.guards import check_dataset
from jaxckpt.data.mixture import Mixture, Segment
from jaxckpt.data.position import Position
from jaxckpt.data.read_ahead import ReadAhead, wait_for
from jaxckpt.data.shuffle import reads_rows

log = logging.getLogger("jaxckpt")


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
        if isinstance(source, grain.MapDataset):
            for warning in check_dataset(source):
                log.warning("%s", warning)
        self._dataset = as_dataset(source)
        self._epoch_length = len(source)
        self._rows = local_rows(batch_sharding(sharding, global_batch), global_batch)
        # Grain's own defaults are 16 threads and 500 elements, and an element is a whole batch here.
        self._options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(1, num_threads))
        self._prefetch = prefetch
        self._ahead: ReadAhead | None = None
        identity = self._probe() if identity is None else identity
        self._position = Position(identity, global_batch=global_batch, skip=skip)
        self._mixture: Mixture | None = getattr(self._dataset, "mixture", None)
        self._resolve(())

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
            arrival = wait_for(self._ahead.get, f"example {self.example_of(self.batches)}", should_stop)
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
        self._position.batches += 1
        return batch

    def start(self) -> None:
        """Begins to read ahead, so that the first batch is ready when compilation or a restore is."""
        if self._ahead is None:
            self._ahead = ReadAhead(self._batches_on_device(), self._prefetch)

    def close(self) -> None:
        """Stops the threads and drops what was read ahead. The position stays; `next` starts again from there."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    # -------------------------------------------------------------------------------------------- the position

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the data is made of, by name."""
        return self._position.identity

    @property
    def batches(self) -> int:
        """Batches that were handed out, over all lives of the run."""
        return self._position.batches

    def example_of(self, batch: int) -> int:
        """Number of the first example of batch `batch` (from 0)."""
        return self._position.course.example(batch)

    def key(self, batch: int) -> str:
        """What decides the content of batch `batch`, hashed; see `Position.key`."""
        return self._position.key(batch, self._segments(self._position.course.end(batch + 1)))

    def state(self) -> dict[str, Any]:
        """The position as JSON, the same on every process. It counts only the batches that were handed out."""
        segments = self._segments(self._position.next_example)
        return {**self._position.state(), **({"segments": segments} if self._mixture else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`, in O(1). Its batch size may differ: the sequence of examples goes on without a gap.

        Likewise the weights of a mixture and what is to be skipped, from here on. Raises DataError where the data is
        another, or what was skipped before.
        """
        self._position.restore(state)
        self.close()
        self._resolve([Segment(int(start), weights) for start, weights in state.get("segments", [])])

    def rewind(self) -> None:
        """Back to the first batch."""
        self.close()
        self._position.batches = 0

    def _resolve(self, past: Sequence[Segment]) -> None:
        if self._mixture:
            self._mixture.resolve(past, self._position.next_example, self._position.course.example)

    def _segments(self, next_example: int) -> list[Any]:
        return [segment.as_json() for segment in self._mixture.past(next_example)] if self._mixture else []

    # ------------------------------------------------------------------------------------------- what it holds

    def batch_at(self, batch: int) -> PyTree:
        """This process's rows, as numpy, of batch `batch` (from 0), built now from no buffer; all of an earlier size."""
        course = self._position.course
        count = course.end(batch + 1) - course.example(batch)
        rows = self._rows if count == self.global_batch else np.arange(count)
        return GlobalBatches(self._dataset, course, rows, first=batch)[0]

    def batch_struct(self) -> PyTree:
        """The batch as `jax.ShapeDtypeStruct`s with shardings, from example 0, to compile a step early."""
        return struct_of(*read_example(self._dataset, 0), self.sharding, self.global_batch)

    def _batches_on_device(self) -> Any:
        """Iterator over the batches from the position on."""
        batches = GlobalBatches(self._dataset, self._position.course, self._rows, first=self.batches)
        if reads_rows(self._dataset):  # in one pass, which the thread that reads ahead does itself
            return (self._to_device(batches[k]) for k in itertools.count())
        return iter(batches.map(self._to_device).to_iter_dataset(self._options))

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

    def _to_device(self, batch: PyTree) -> PyTree:
        return place_batch(batch, self.sharding, self.global_batch, self._rows)
