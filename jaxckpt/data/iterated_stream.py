"""A user's `grain.IterDataset` in the place of a `BatchStream`: Grain keeps its position, on each process its own."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
from jax.sharding import NamedSharding

from jaxckpt.data.batches import PyTree, batch_sharding, local_rows, place_batch, struct_of
from jaxckpt.data.course import Skip
from jaxckpt.data.iterated import IteratedBatches, refuse_shared_rows, rows_of_processes, same_examples
from jaxckpt.data.position import Position
from jaxckpt.data.read_ahead import wait_for
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DataError

log = logging.getLogger("jaxckpt")


class IteratedStream:
    """Iterator over the global batches that the processes' own examples make: as `BatchStream`, for the same processes only.

    Each process draws as many examples for a batch as its devices hold rows of it. A batch cannot be made again.
    """

    def __init__(
        self,
        source: grain.IterDataset,
        *,
        global_batch: int,
        sharding: NamedSharding,
        group: Group,
        identity: Mapping[str, Any] | None = None,
        skip: Sequence[Skip] = (),
    ):
        rows = batch_sharding(sharding, global_batch)
        refuse_shared_rows(rows_of_processes(rows, global_batch))
        self.global_batch, self.sharding, self._group = global_batch, sharding, group
        self._rows = local_rows(rows, global_batch)
        self._batches = IteratedBatches(
            source, rows=len(self._rows), process=jax.process_index(), processes=jax.process_count()
        )
        for warning in self._batches.warnings:
            log.warning("%s", warning)
        identity = {"dataset": str(source)} if identity is None else identity
        self._position = Position(identity, global_batch=global_batch, skip=skip)
        self._drawn = 0
        """examples of all processes that were drawn, handed out or skipped"""
        self._is_compared = jax.process_count() == 1

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return self.next_unless(lambda: False)

    def next_unless(self, should_stop: Callable[[], bool]) -> PyTree | None:
        """As `BatchStream.next_unless`."""
        self._compare_processes()
        while self._drawn < self.example_of(self.batches):  # steps to be skipped: drawn, and left
            if self._take(should_stop) is None:
                return None
        batch = self._take(should_stop)
        if batch is None:
            return None
        self._position.batches += 1
        return place_batch(batch, self.sharding, self.global_batch, self._rows)

    def start(self) -> None:
        """Begins to read ahead."""
        self._batches.start()

    def close(self) -> None:
        """Stops the threads and drops what was read ahead. The position stays."""
        self._batches.close()

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the data is made of, by name."""
        return self._position.identity

    @property
    def batches(self) -> int:
        """Batches that were handed out, over all lives of the run."""
        return self._position.batches

    def example_of(self, batch: int) -> int:
        """Number of the first example of batch `batch` (from 0), counted over all processes."""
        return self._position.course.example(batch)

    def key(self, batch: int) -> str:
        """What decides the content of batch `batch`, hashed; see `Position.key`."""
        return self._position.key(batch)

    def state(self) -> dict[str, Any]:
        """The position as JSON, the same on every process, which all must call this: it holds the states of all."""
        states = self._group.gather("tell where the data stands", self._batches.state())
        return {**self._position.state(), "drawn": self._drawn, "iterators": {str(i): s for i, s in enumerate(states)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`. Raises DataError for another data set, or another number of processes or of its workers."""
        if "iterators" not in state:
            raise DataError(
                "the run was trained on data with random access, and goes on with a grain.IterDataset, whose examples have no "
                "numbers. Give a grain.MapDataset, or start a new run."
            )
        self._position.restore(state)
        self._batches.restore(state["iterators"])
        self._drawn = int(state["drawn"])

    def batch_struct(self) -> PyTree:
        """The batch as `jax.ShapeDtypeStruct`s with shardings, from the batch that comes next, which stays where it is."""
        batch = wait_for(self._batches.peek, "the first example", lambda: False)
        leaves, structure = jax.tree.flatten(batch)
        return struct_of([leaf[0] for leaf in leaves], structure, self.sharding, self.global_batch)

    def _take(self, should_stop: Callable[[], bool]) -> PyTree | None:
        batch = None
        try:
            batch = wait_for(self._batches.take, f"example {self._drawn}", should_stop)
        finally:  # also where Ctrl-C ends the wait, in a notebook
            if batch is None:
                self._batches.leave()
            else:
                self._drawn += self.global_batch
        return batch

    def _compare_processes(self) -> None:
        if not self._is_compared:
            self._is_compared = True
            digest = wait_for(self._batches.digest, "the first example", lambda: False)
            if warning := same_examples(self._group.gather("compare the first examples", digest)):
                log.warning("%s", warning)
