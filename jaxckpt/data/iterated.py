"""Batches from a user's `grain.IterDataset`, whose position only Grain knows: exact, but for the same processes only."""

import copy
import hashlib
import itertools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxckpt.data.batches import PyTree, as_example, batch_sharding, stack_examples
from jaxckpt.data.guards import allow_workers, check_dataset, worker_counts
from jaxckpt.data.read_ahead import ReadAhead
from jaxckpt.errors import DataError

log = logging.getLogger("jaxckpt")

STATE_VERSION = 1
_POLL_S = 0.1
WAY_OUT = "Give a grain.MapDataset, whose position is a number, to change it; or go on as before, or start a new run."


@dataclass(frozen=True)
class Place:
    """After which example of this process, counted over all and in this epoch, and what Grain calls that place."""

    examples: int = 0
    in_epoch: int = 0
    grain: Any = None  # None: the beginning


class IteratedBatches:
    """This process's part of each batch: pytrees of numpy [rows, ...], for ever, read ahead in a thread.

    The dataset gives single examples, other ones on each process: shard it with `ds[process::processes]` before
    `.to_iter_dataset()`. One that ends begins again, in the same order. Grain's state travels with each batch, so what
    was read ahead never counts.
    """

    def __init__(
        self, dataset: grain.IterDataset, *, rows: int, process: int = 0, processes: int = 1, prefetch: int = 2
    ):
        """`rows`: of each global batch, that this process supplies. `prefetch` batches wait. Raises what `check_dataset` does."""
        self.warnings = check_dataset(dataset)
        self.workers = worker_counts(dataset)
        if self.workers:
            allow_workers()
        self._dataset = dataset
        self._rows, self._process, self._processes, self._prefetch = rows, process, processes, prefetch
        self._place = Place()
        self._ahead: ReadAhead | None = None
        self._held: tuple[PyTree, Place] | None = None

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        while (batch := self.take(_POLL_S)) is None:
            pass
        return batch

    def take(self, timeout_s: float) -> PyTree | None:
        """The next batch; or None where none has come after `timeout_s`, and the position stays."""
        batch = self.peek(timeout_s)
        if self._held is not None:
            _, self._place = self._held
            self._held = None
        return batch

    def peek(self, timeout_s: float) -> PyTree | None:
        """What `take` will give, without taking it."""
        self.start()
        if self._held is None:
            assert self._ahead is not None
            arrival = self._ahead.get(timeout_s)
            if arrival is None:
                return None
            self._held, error = arrival
            if error is not None:
                self.close()  # a second call must meet the same batch again
                raise error
        assert self._held is not None
        return self._held[0]

    def start(self) -> None:
        """Begins to read ahead."""
        if self._ahead is None:
            self._ahead = ReadAhead(_Draws(self._dataset, self._rows, self._place), self._prefetch)

    def close(self) -> None:
        """Ends threads and workers, waits for the read that is under way. The position stays; `take` starts again from there."""
        self._held = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def leave(self) -> None:
        """As `close`, but a read that never ends is left to itself."""
        self._held = None
        if self._ahead is not None:
            self._ahead.leave()
            self._ahead = None

    # -------------------------------------------------------------------------------------------- the position

    def state(self) -> dict[str, Any]:
        """The place after the last batch that was taken, as JSON. Each process has its own, and all are saved."""
        return {
            "version": STATE_VERSION,
            "process": self._process,
            "processes": self._processes,
            "workers": self.workers,
            "examples": self._place.examples,
            "in_epoch": self._place.in_epoch,
            "grain": _as_json(self._first_state() if self._place.grain is None else self._place.grain, "its state"),
        }

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues where this process was; `states` are those of all processes, by their numbers as text.

        `rows` may have changed. Raises DataError where the number of processes or workers has, or the data set's make.
        """
        problems = self._differences(states)
        if problems:
            raise DataError(
                f"the data is a grain.IterDataset, which goes on only as it was saved: {'; '.join(problems)}. {WAY_OUT}"
            )
        mine = states[str(self._process)]
        self.close()
        self._place = Place(int(mine["examples"]), int(mine["in_epoch"]), mine["grain"])

    def rewind(self) -> None:
        """Back to the first batch."""
        self.close()
        self._place = Place()

    def _differences(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        if len(states) != self._processes or any(s.get("processes") != self._processes for s in states.values()):
            return [f"it was saved by {len(states)} processes and is to go on with {self._processes}"]
        if str(self._process) not in states:
            return [f"the states are of processes {', '.join(sorted(states))}; none is of process {self._process}"]
        mine = states[str(self._process)]
        if mine.get("version") != STATE_VERSION:
            return [f"version was {mine.get('version')!r} and is {STATE_VERSION!r}"]
        if mine["workers"] != self.workers:
            was, now = (", ".join(map(str, w)) or "no" for w in (mine["workers"], self.workers))
            return [f"mp_prefetch had {was} workers and has {now}, which would give other examples"]
        return list(_structure_problems(mine["grain"], self._first_state(), ""))

    def _first_state(self) -> dict[str, Any]:
        iterator = iter(self._dataset)
        try:
            return iterator.get_state()
        finally:
            iterator.close()

    def digest(self, timeout_s: float) -> str | None:
        """sha256 in hex of the batch that comes next, for `same_examples`; None where none has come after `timeout_s`."""
        batch = self.peek(timeout_s)
        if batch is None:
            return None
        content = hashlib.sha256()
        for path, leaf in jax.tree.leaves_with_path(batch):
            content.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        return content.hexdigest()


class _Draws:
    """Iterator of (batch, the place after it). Grain's iterator belongs to the thread that calls `next`."""

    def __init__(self, dataset: grain.IterDataset, rows: int, place: Place):
        self._dataset, self._rows, self._place = dataset, rows, place
        self._iterator: grain.DatasetIterator | None = None
        self._is_told = False

    def __next__(self) -> tuple[PyTree, Place]:
        numbers = range(self._place.examples, self._place.examples + self._rows)
        batch = stack_examples((as_example(self._draw(number), number) for number in numbers), numbers)
        assert self._iterator is not None
        # Copied, because Grain goes on writing in its own.
        self._place = replace(self._place, grain=copy.deepcopy(self._iterator.get_state()))
        return batch, self._place

    def _draw(self, number: int) -> Any:
        while True:
            try:
                if self._iterator is None:
                    self._iterator = self._opened()
                example = next(self._iterator)
            except StopIteration:
                self._begin_again()
            except Exception as error:
                raise DataError(f"example {number}: reading it raised {type(error).__name__}: {error}") from error
            else:
                self._place = replace(self._place, examples=number + 1, in_epoch=self._place.in_epoch + 1)
                return example

    def _opened(self) -> grain.DatasetIterator:
        iterator = iter(self._dataset)
        if self._place.grain is not None:
            iterator.set_state(copy.deepcopy(self._place.grain))
        return iterator

    def _begin_again(self) -> None:
        """From the first example, with a fresh iterator: in a second epoch of RepeatIterDataset, the state that
        InterleaveIterDataset and mp_prefetch give is not where they are."""
        if self._place.in_epoch == 0:
            raise DataError(
                "the data set is empty: it ends before its first example. Check its paths, filters and shards."
            )
        if not self._is_told:
            self._is_told = True
            log.warning(
                "the data ends after %d examples and begins again in the same order; .repeat() before "
                ".to_iter_dataset() gives each epoch its own",
                self._place.in_epoch,
            )
        self.close()
        self._place = replace(self._place, in_epoch=0, grain=None)

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def _as_json(value: Any, where: str) -> Any:
    """`value` as JSON gives it back, or a DataError where that would be something else."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(v, f"{where}[{key!r}]") for key, v in value.items()}
    raise DataError(
        f"{where} is {value!r}, which JSON cannot hold. Let get_state return dicts with text as keys, lists, numbers "
        "and text."
    )


def _structure_problems(saved: Any, fresh: Any, where: str) -> Iterator[str]:
    """Where a saved state has another make than a fresh one. Numbers differ of course, and None stands for any part."""
    place = where.strip("/") or "its top"
    if saved is None or fresh is None:
        return
    if isinstance(saved, Mapping) != isinstance(fresh, Mapping) or isinstance(saved, list) != isinstance(
        fresh, list | tuple
    ):
        yield f"its state has {json.dumps(saved)[:60]} at {place}, where this data set has {json.dumps(fresh)[:60]}"
    elif isinstance(saved, Mapping):
        if set(saved) != set(fresh):
            yield f"its state has {sorted(saved)} at {place}, where this data set has {sorted(fresh)}"
        else:
            yield from itertools.chain.from_iterable(
                _structure_problems(saved[key], fresh[key], f"{where}/{key}") for key in saved
            )
    elif isinstance(saved, list):
        if len(saved) != len(fresh):
            yield f"its state has {len(saved)} parts at {place}, where this data set has {len(fresh)}"
        else:
            yield from itertools.chain.from_iterable(
                _structure_problems(a, b, f"{where}/{i}") for i, (a, b) in enumerate(zip(saved, fresh, strict=True))
            )


def rows_of_processes(sharding: NamedSharding, global_batch: int) -> dict[int, set[int]]:
    """{process: the rows of a global batch that its devices hold}."""
    rows: dict[int, set[int]] = {}
    places = batch_sharding(sharding, global_batch).devices_indices_map((global_batch,))
    for device, index in places.items():
        rows.setdefault(device.process_index, set()).update(range(*index[0].indices(global_batch)))
    return rows


def refuse_shared_rows(rows: Mapping[int, Collection[int]]) -> None:
    """DataError where two processes supply the same row of a batch: each would draw an example of its own for it."""
    for (a, rows_a), (b, rows_b) in itertools.combinations(sorted(rows.items()), 2):
        if both := set(rows_a) & set(rows_b):
            raise DataError(
                f"processes {a} and {b} both hold row {min(both)} of each batch ({len(both)} rows in all), and a "
                "grain.IterDataset gives each process examples of its own. Give a grain.MapDataset, or a mesh on which "
                "each process has its own rows."
            )


def same_examples(digests: Sequence[str]) -> str | None:
    """A warning where two processes draw the same examples; `digests`: of the first batch of every process."""
    for a, b in itertools.combinations(range(len(digests)), 2):
        if digests[a] == digests[b]:
            return (
                f"processes {a} and {b} draw the same examples. Give each process its own: "
                "ds[jax.process_index() :: jax.process_count()] before .to_iter_dataset()."
            )
    return None
