"""An update in buckets, one after the other, while a step is traced: what every kind of streamed update is made of."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxckpt.state import tree
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.dataflow import Operand, Program, run
from jaxckpt.update.gradients import Gradients, kept
from jaxckpt.update.host import WINDOW, fetched
from jaxckpt.update.split import Cuts, Leaves, Split


class Chain:
    """The update of one `state`; `finite`, if given, decides whether anything changes.

    `done` holds for every bucket so far its new weights on the device: what a fetch waits for.
    """

    def __init__(self, split: Split, plan: TrainState, state: TrainState, *, finite: jax.Array | None = None) -> None:
        self._split, self._state, self._finite = split, state, finite
        self._params_plan, self._state_plan = tree.flatten(plan.params), tree.flatten(plan.opt_state)
        self._weights_plan = self._params_plan if plan.master is None else tree.flatten(plan.master)
        self._weights = tree.flatten(state.params if state.master is None else state.master)
        self._opt_state = tree.flatten(state.opt_state)
        self._new_params: Leaves = {}
        self._new_master: Leaves = {}
        self._new_state: Leaves = {}
        self._cuts: Cuts = ()
        self._shared: Leaves = {}
        self.done: list[list[jax.Array]] = []

    def begin(self, grad: Callable[[str, Any], jax.Array], after: Any) -> None:
        """The global phase; `grad(path, after)` gives a gradient on the device that is there only after `after`."""
        own = {path: x for path, x in self._opt_state.items() if self._split.owner[path] is None}
        self._shared = fetched(own, self._state_plan, after)
        weight = lambda path, after: fetched({path: self._weights[path]}, self._weights_plan, after)[path]
        self._cuts, changed = global_phase(self._split, self._shared, self._weights_plan, grad, weight, after)
        self._new_state.update(self._put_back(self._keep(changed, self._shared), self._state_plan))

    def after(self, first: Any) -> Any:
        """What the fetch for the next bucket waits for; `first` when it is among the first."""
        return self.done[-WINDOW] if len(self.done) >= WINDOW else first

    def update(self, bucket: Bucket, grads: Leaves, after: Any) -> None:
        """Fetches, updates and writes back one bucket; `grads` on the device, of its weights alone."""
        weights = fetched({path: self._weights[path] for path in bucket.weights}, self._weights_plan, after)
        opt_state = fetched({path: self._opt_state[path] for path in bucket.opt_state}, self._state_plan, after)
        grads = {path: grads[path].astype(x.dtype) for path, x in weights.items()}
        updates, changed = self._split.bucket(bucket.weights)(self._cuts, self._shared, grads, opt_state, weights)
        new = self._keep(optax.apply_updates(weights, updates), weights)
        self._new_state.update(self._put_back(self._keep(changed, opt_state), self._state_plan))
        if self._state.master is not None:
            self._new_master.update(self._put_back(new, self._weights_plan))
            new = {path: x.astype(self._params_plan[path].dtype) for path, x in new.items()}
        self._new_params.update(self._put_back(new, self._params_plan))
        self.done.append(list(new.values()))

    def end(self) -> TrainState:
        """The state one step later; every weight was updated once."""
        state = self._state
        return TrainState(
            state.step + 1,
            tree.unflatten(state.params, self._new_params),
            None if state.master is None else tree.unflatten(state.master, self._new_master),
            tree.unflatten(state.opt_state, self._new_state),
            state.model_state,
        )

    def _keep(self, new: Any, old: Leaves) -> Leaves:
        return new if self._finite is None else kept(self._finite, new, old)

    def _put_back(self, leaves: Leaves, plan: dict[str, Any]) -> Leaves:
        return jax.device_put(leaves, {path: plan[path].sharding for path in leaves})


def make_streamed_update(
    split: Split, buckets: Sequence[Bucket], plan: TrainState, *, is_skipping: bool
) -> Callable[[TrainState, Gradients], TrainState]:
    """(state, gradients) -> the state one step later, to be traced under jit; its model state is the old one.

    Every leaf is put where `plan` has it. With `is_skipping` nothing but the step changes unless the gradients are finite.
    """

    def update(state: TrainState, found: Gradients) -> TrainState:
        grads = tree.flatten(found.grads)
        # As the backward pass leaves them: to wait for the divided, float32 ones would have all of those made first. A norm
        # inside the optimizer needs all of those, and only then they have the bits that they have on the device.
        first = list(grads.values()) if split.global_grads else jax.tree.leaves(found.sums)
        chain = Chain(split, plan, state, finite=found.finite if is_skipping else None)
        chain.begin(lambda path, after: grads[path], first)
        for bucket in buckets:
            chain.update(bucket, {path: grads[path] for path in bucket.weights}, chain.after(first))
        return chain.end()

    return update


def global_phase(
    split: Split,
    shared: Leaves,
    plan: dict[str, Any],
    grad: Callable[[str, Any], jax.Array],
    weight: Callable[[str, Any], jax.Array],
    after: Any,
) -> tuple[Cuts, Leaves]:
    """`Split.global_phase` with one gradient on the device at a time: each is fetched when the scalars made of the one
    before it (its part of a norm) are there."""
    leaves = [(grad, path) for path in sorted(split.global_grads)]
    leaves += [(weight, path) for path in sorted(split.global_weights)]
    names = sorted(shared)
    structs = [jax.ShapeDtypeStruct(plan[path].shape, plan[path].dtype) for _, path in leaves]

    def phase(values: list[Any], old: list[Any]) -> tuple[Cuts, Leaves]:
        group = lambda kind: {p: v for (f, p), v in zip(leaves, values, strict=True) if f is kind}
        return split.global_phase(group(grad), dict(zip(names, old, strict=True)), group(weight))

    like = [jax.ShapeDtypeStruct(shared[p].shape, shared[p].dtype) for p in names]
    closed, shape = jax.make_jaxpr(phase, return_shape=True)(structs, like)
    program = Program(closed)
    known: dict[int, Any] = {len(leaves) + i: shared[path] for i, path in enumerate(names)}

    def compute(targets: Sequence[Operand]) -> list[Any]:
        steps, needed = program.part(targets, frozenset(known))
        fetch = lambda i: leaves[i][0](leaves[i][1], after)
        return run(steps, {i: known[i] if i in known else fetch(i) for i in sorted(needed)}, targets)

    ndim = lambda x: program.avals[x].ndim if isinstance(x, int) else 0
    for operation in program.operations:
        if not any(map(ndim, operation.results)) and any(map(ndim, operation.operands)):
            after = compute(operation.results)
            known.update(zip(operation.results, after, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shape), compute(program.outputs))
