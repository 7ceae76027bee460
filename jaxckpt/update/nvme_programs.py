"""A step of many compiled programs, with state that streams from local disks between them, that is used like one."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxckpt.errors import PlanError, listed
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.pipeline import Flow, Moved, Pipeline
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.compiling import Compiler, in_turn
from jaxckpt.update.disk_bucket import DiskBucket, Leaves, struct_of
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
        f"params/{path} is read by the optimizer before any bucket is updated: place the parameters in pinned_host"
        for path in on_disk(params)
        if plan.master is None and path in split.global_weights
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
        self._cache_bytes = cache_bytes
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
            buckets = [(*update.on_disk, *update.derived_on_disk) for update in self.updates]
            derived = frozenset(path for update in self.updates for path in update.derived_on_disk)
            self._pipeline = Pipeline(
                self.store, buckets, visits=self.beginning.visits, unread=derived, cache_bytes=self._cache_bytes
            )
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
    def parts(self) -> dict[str, tuple[jax.stages.Traced, int]]:
        """{what it does: (the program, how often a step runs one like it)}; of the buckets, and of the layers, which differ in
        size alone, the largest."""
        nbytes = lambda x: math.prod(x.shape) * x.dtype.itemsize
        size = lambda traced: sum(map(nbytes, jax.tree.leaves(traced.args_info)))
        alike: dict[str, list[jax.stages.Traced]] = {}
        for name, traced in self._first.items():
            alike.setdefault(name.partition("/")[0], []).append(traced)
        beginning = self.step.beginning
        times = lambda name: 1 if name in beginning.once else beginning.microbatches
        first = {name: (max(found, key=size), times(name) * len(found)) for name, found in alike.items()}
        return {**first, "update of a bucket": (max(self._updates, key=size), 1)}

    @property
    def jaxpr(self) -> Any:
        """The whole step as one closed jaxpr, of all arguments to all results; the gradients of one microbatch stand for
        those of all."""
        beginning = self.step.beginning
        functions = {name: _function(traced) for name, traced in self._first.items()}
        updates = [_function(traced) for traced in self._updates]
        given = [[[struct_of(x) for x in part.values()] for part in (u.derived, u.old)] for u in self.step.updates]
        first = beginning.given._replace(params=jax.tree.map(struct_of, beginning.given.params))

        def composed(first: Any, scratch: Any, given: list[Any]) -> list[Any]:
            weights = _AtHand(beginning.visits, tree.flatten(first.params))
            begun, _ = beginning.run(functions, first, scratch, weights)
            results = jax.tree.leaves(begun)
            for update, function, (derived, old) in zip(self.step.updates, updates, given, strict=True):
                shared = [first.shared[p] for p in update.shared]
                sums = [begun.sums[p] for p in update.weights]
                results += jax.tree.leaves(function(derived, begun.decided, shared, sums, old))
            return results

        return jax.make_jaxpr(composed)(first, beginning.scratch_plan, given)

    def lower(self) -> "Lowered":
        return Lowered(self.step, self._first, list(zip(self._updates, self._marks, strict=True)))


class Lowered:
    def __init__(
        self,
        step: NvmeStep,
        first: Mapping[str, jax.stages.Traced],
        updates: Sequence[tuple[jax.stages.Traced, jax.stages.Traced | None]],
    ) -> None:
        self._step, self._first, self._updates = step, first, updates

    def compile(self, options: Any = None) -> "Compiled":
        """Compiles each program once, however many buckets or layers it is that of."""
        compiled = Compiler(options)
        first = {name: compiled(traced) for name, traced in self._first.items()}
        updates = [(compiled(update), compiled(marks) if marks else None) for update, marks in self._updates]
        return Compiled(self._step, dict(enumerate(compiled.programs)), first, updates)


class Compiled:
    """(state, batch) -> (state, metrics). The state that is given is used up, on disk as on the devices.

    `programs` are all of a step's, each once.
    """

    def __init__(
        self,
        step: NvmeStep,
        programs: Mapping[Any, Any],
        first: Mapping[str, Any],
        updates: Sequence[tuple[Any, Any]],
    ) -> None:
        self._step, self.programs, self._updates = step, programs, updates
        self._first = {name: lambda *args, run=run: in_turn(run(*args)) for name, run in first.items()}
        self._scratch: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        step, flat = self._step, tree.flatten(state)
        for leaf in on_disk(flat).values():
            leaf.check_current()
        given = given_of(step.split, state, batch)
        with step.pipeline.step() as flow:  # reads ahead while the gradient is computed
            begun = self._begin(given, flow)
            flow.follow(begun.decided)
            new: Leaves = {f"opt_state/{p}": x for p, x in begun.shared.items()}
            n = len(step.beginning.visits)
            for i, (update, (compute, mark)) in enumerate(zip(step.updates, self._updates, strict=True), n):
                taken = flow.take(i)
                old = {p: taken.get(p, flat[p]) for p in update.old}
                sums = [begun.sums.pop(p) for p in update.weights]  # so that they make room when they are used
                derived = [taken.get(p, flat[p]) for p in update.derived]
                del taken
                arguments = (derived, begun.decided, list(given.shared.values()), sums, list(old.values()))
                results, derived = in_turn(compute(*arguments))
                results = dict(zip(update.old, results, strict=True))
                stored = {p: results.pop(p) for p in update.on_disk}
                marks = in_turn(mark(list(stored.values()))) if mark else [None] * len(stored)
                marks = dict(zip(stored, marks, strict=True))
                results |= dict(zip(update.derived, derived, strict=True))
                # No snapshot holds these, so that nobody asks for their marks.
                stored |= {p: results.pop(p) for p in update.derived_on_disk}
                flow.put(i, stored, {**dict.fromkeys(stored), **marks})
                new |= results
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

    def _begin(self, given: Any, flow: Flow) -> Any:
        beginning = self._step.beginning
        scratch = beginning.make_scratch() if self._scratch is None else self._scratch
        # Donated from here on; a call that fails leaves no buffers behind.
        self._scratch = None
        begun, self._scratch = beginning.run(self._first, given, scratch, flow)
        return begun


class _AtHand:
    """Weights that are there without a disk, while the whole step is traced."""

    def __init__(self, visits: Sequence[Sequence[str]], params: Mapping[str, Any]) -> None:
        self._visits, self._params = visits, params

    def take(self, i: int) -> Leaves:
        return {path: self._params[path.removeprefix("params/")] for path in self._visits[i]}

    def release(self, i: int, after: Any) -> None:
        del i, after


def _function(traced: jax.stages.Traced) -> Callable[..., Any]:
    """A traced program as a function to be traced into a larger one."""
    flat, result = core.jaxpr_as_fun(traced.jaxpr), jax.tree.structure(traced.out_info)
    return lambda *arguments: jax.tree.unflatten(result, flat(*jax.tree.leaves(arguments)))
