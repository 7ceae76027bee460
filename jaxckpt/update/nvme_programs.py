"""A step of many compiled programs, with state that streams from local disks between them, that is used like one."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxckpt.errors import PlanError, listed
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.pipeline import Moved, Pipeline
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.disk_bucket import DiskBucket, Leaves, kind_of, struct_of
from jaxckpt.update.nvme_begin import Beginning, given_of
from jaxckpt.update.split import Split


def check_on_disk(split: Split, plan: TrainState) -> None:
    """Raises PlanError with the leaves that cannot be in the tier nvme."""
    master = {} if plan.master is None else tree.flatten(plan.master)
    state, params = tree.flatten(plan.opt_state), tree.flatten(plan.params)
    problems = [
        f"opt_state/{path} belongs to no single weight, and every bucket needs it: place it on the device"
        for path in on_disk(state)
        if split.owner[path] is None
    ]
    problems += [
        f"master/{path} is read by the optimizer before any bucket is updated: place the master weights in pinned_host"
        for path in on_disk(master)
        if path in split.global_weights
    ]
    problems += [
        f"params/{path}: parameters cannot live on disk: place them in pinned_host, or on the device"
        for path in on_disk(params)
    ]
    if problems:
        raise PlanError("these leaves cannot be in the tier nvme:\n" + listed(problems))


class NvmeStep:
    """The step, to be used like a jitted one: `trace`, `lower`, `compile`, call. Its `store` must be open when it is called."""

    def __init__(
        self,
        plan: TrainState,
        split: Split,
        beginning: Beginning,
        updates: Sequence[DiskBucket],
        store: NvmeStore,
        *,
        cache_bytes: int,
        is_marking: bool | None = None,
    ) -> None:
        """`is_marking`: whether every step computes the fingerprints of what it writes, which a snapshot needs. By default
        only where the device is no CPU: there they take longer than the update, and only a step that is saved reads its
        leaves once more for them.
        """
        is_cpu = plan.step.sharding.mesh.devices.flat[0].platform == "cpu"
        self.plan, self.split, self.beginning, self.updates = plan, split, beginning, updates
        self._cache_bytes, self._microbatches = cache_bytes, beginning.microbatches
        self._pipeline: Pipeline | None = None
        self.store, self.is_marking = store, not is_cpu if is_marking is None else is_marking
        self.moved: Moved | None = None
        """what the last step moved"""

    def trace(self, plan: TrainState, batch: Any) -> "Traced":
        del plan, batch  # those that it was made for
        return Traced(self)

    def close(self) -> None:
        """Ends the threads; the store is its owner's."""
        if self._pipeline is not None:
            self._pipeline.close()

    @property
    def pipeline(self) -> Pipeline:
        if self._pipeline is None:
            buckets = [update.on_disk for update in self.updates]
            self._pipeline = Pipeline(self.store, buckets, cache_bytes=self._cache_bytes)
        return self._pipeline


class Traced:
    """A step that is traced: its programs, the whole as one, and the way to compile it."""

    def __init__(self, step: NvmeStep) -> None:
        self.step = step
        self._first, self._begun = step.beginning.trace()
        self._updates = [update.trace(self._begun) for update in step.updates]
        whole = replicated(step.plan.step.sharding.mesh)
        self._marks = [update.trace_marks(whole) if step.is_marking else None for update in step.updates]

    @property
    def programs(self) -> dict[str, jax.stages.Traced]:
        """Those that a step begins with, and of the buckets, which differ in size alone, the largest."""
        nbytes = lambda x: math.prod(x.shape) * x.dtype.itemsize
        largest = max(self._updates, key=lambda traced: sum(map(nbytes, jax.tree.leaves(traced.args_info))))
        return {**self._first, "update of a bucket": largest}

    @property
    def jaxpr(self) -> Any:
        """The whole step as one closed jaxpr, of all arguments to all results; the gradients of one microbatch stand for
        those of all."""
        beginning = self.step.beginning
        functions = {name: _function(traced) for name, traced in self._first.items()}
        updates = [_function(traced) for traced in self._updates]
        given = [[[struct_of(x) for x in part.values()] for part in (u.derived, u.old)] for u in self.step.updates]

        def composed(first: Any, scratch: Any, given: list[Any]) -> list[Any]:
            begun, _ = beginning.run(functions, first, scratch)
            results = jax.tree.leaves(begun)
            for update, function, (derived, old) in zip(self.step.updates, updates, given, strict=True):
                shared = [first.shared[p] for p in update.shared]
                sums = [begun.sums[p] for p in update.weights]
                results += jax.tree.leaves(function(derived, begun.decided, shared, sums, old))
            return results

        return jax.make_jaxpr(composed)(beginning.given, beginning.scratch_plan, given)

    def lower(self) -> "Lowered":
        first = {name: traced.lower() for name, traced in self._first.items()}
        return Lowered(self.step, first, list(zip(self._updates, self._marks, strict=True)))


class Lowered:
    def __init__(
        self,
        step: NvmeStep,
        first: Mapping[str, jax.stages.Lowered],
        updates: Sequence[tuple[jax.stages.Traced, jax.stages.Traced | None]],
    ) -> None:
        self._step, self._first, self._updates = step, first, updates

    def compile(self, options: Any = None) -> "Compiled":
        """Compiles each program once, however many buckets it is that of."""
        made: dict[Any, Any] = {}

        def compiled(traced: jax.stages.Traced) -> Any:
            key = kind_of(traced)
            if key not in made:
                made[key] = traced.lower().compile(options)
            return made[key]

        first = {name: lowered.compile(options) for name, lowered in self._first.items()}
        updates = [(compiled(update), compiled(marks) if marks else None) for update, marks in self._updates]
        programs = {**first, **{f"of buckets, {i}": program for i, program in enumerate(made.values())}}
        return Compiled(self._step, programs, updates)


class Compiled:
    """(state, batch) -> (state, metrics). The state that is given is used up, on disk as on the devices.

    `programs` are all of a step's, each once.
    """

    def __init__(self, step: NvmeStep, programs: Mapping[str, Any], updates: Sequence[tuple[Any, Any]]) -> None:
        self._step, self.programs, self._updates = step, programs, updates
        self._scratch: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        step, flat = self._step, tree.flatten(state)
        for leaf in on_disk(flat).values():
            leaf.check_current()
        given = given_of(step.split, state, batch)
        with step.pipeline.step() as flow:  # reads ahead while the gradient is computed
            begun = self._begin(given)
            flow.follow(begun.decided)
            new: Leaves = {f"opt_state/{p}": x for p, x in begun.shared.items()}
            for i, (update, (compute, mark)) in enumerate(zip(step.updates, self._updates, strict=True)):
                old = {**{p: flat[p] for p in update.old}, **flow.take(i)}
                sums = [begun.sums.pop(p) for p in update.weights]  # so that they make room when they are used
                derived = [flat[p] for p in update.derived]
                arguments = (derived, begun.decided, list(given.shared.values()), sums, list(old.values()))
                results, derived = _in_turn(compute(*arguments))
                results = dict(zip(update.old, results, strict=True))
                stored = {p: results.pop(p) for p in update.on_disk}
                marks = _in_turn(mark(list(stored.values()))) if mark else [None] * len(stored)
                flow.put(i, stored, dict(zip(stored, marks, strict=True)))
                new |= results | dict(zip(update.derived, derived, strict=True))
                del arguments, old, stored
            arrays, step.moved = flow.finish()
        new |= arrays
        take = lambda group, old: tree.map_with_path(lambda path, _: new[f"{group}/{path}"], old)
        return (
            TrainState(
                begun.step,
                take("params", state.params),
                None if state.master is None else take("master", state.master),
                take("opt_state", state.opt_state),
                begun.model_state,
            ),
            begun.metrics,
        )

    def _begin(self, given: Any) -> Any:
        beginning = self._step.beginning
        scratch = beginning.make_scratch() if self._scratch is None else self._scratch
        # Donated from here on; a call that fails leaves no buffers behind.
        self._scratch = None
        begun, self._scratch = beginning.run(self.programs, given, scratch)
        return _in_turn(begun)


def _in_turn(results: Any) -> Any:
    """The results of one of the programs of a step; on the CPUs of several processes not before they are there.

    There the programs under way share a pool of threads and wait in it for the other processes, which may have begun with
    another one of them. A GPU runs them one after the other.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results


def _function(traced: jax.stages.Traced) -> Callable[..., Any]:
    """A traced program as a function to be traced into a larger one."""
    flat, result = core.jaxpr_as_fun(traced.jaxpr), jax.tree.structure(traced.out_info)
    return lambda *arguments: jax.tree.unflatten(result, flat(*jax.tree.leaves(arguments)))
