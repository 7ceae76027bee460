"""The training step for state on local disks: one jit for the gradient, then one for each bucket as it comes from the disk.

What a bucket's jit computes is what the bucket computes in the step for pinned host memory; only where its state comes
from differs, and so the bits of all tiers are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core

from jaxckpt.errors import PlanError, listed
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.pipeline import Flow, Moved, Pipeline
from jaxckpt.nvme.store import NvmeStore, is_all_finite
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import fingerprint
from jaxckpt.state.mesh import replicated
from jaxckpt.state.nvme import NvmeStruct
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.buckets import Bucket, make_buckets
from jaxckpt.update.gradients import Loss, kept, make_gradient_phase, mean_gradient
from jaxckpt.update.split import Split, split_update
from jaxckpt.update.step import learning_rate

Leaves = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Begun:
    """What the first jit leaves for the buckets, and for the new state."""

    sums: Leaves
    """the gradient of the sum of losses by weight, see `mean_gradient`; or the mean gradient that the update takes"""
    decided: Any
    """what every bucket needs: the scalars that cross from the global phase, whether the gradient is finite, and its
    denominator and norm"""
    step: jax.Array
    model_state: Any
    shared: Leaves
    """the new leaves of the optimizer's state that belong to no single weight"""
    metrics: dict[str, jax.Array]


def make_nvme_step(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    plan: TrainState,
    batch: Any,
    store: NvmeStore,
    *,
    seed: int,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    nonfinite: str = "stop",
    compute_dtype: Any = None,
    lr: optax.Schedule | None = None,
    gathered: frozenset[str] = frozenset(),
    placement: Placement = Placement(),
    is_marking: bool | None = None,
) -> "NvmeStep":
    """The step (state, batch) -> (state, metrics) of a plan with leaves in the tier nvme, whose files `store` holds.

    `is_marking`: whether every step computes the fingerprints of what it writes, which a snapshot needs. By default only
    where the device is no CPU: there they take longer than the update, and only a step that is saved reads its leaves
    once more for them. All else as in `make_train_step`. Raises PlanError where the optimizer cannot be split, or needs a leaf on disk at
    another time than its bucket's.
    """
    weights_plan = plan.params if plan.master is None else plan.master
    split = split_update(tx, weights_plan)
    _check(split, plan)
    phase = make_gradient_phase(
        model, loss, plan, batch, seed=seed, accumulation_steps=accumulation_steps, max_grad_norm=max_grad_norm,
        gathered=gathered,
    )  # fmt: skip
    is_skipping = nonfinite == "skip"
    # On CPU the last bits of an update depend on whether XLA fuses the gradient's division and clipping with it. In the step
    # with all state on the device it does, unless a norm inside the optimizer reads the clipped gradient, too: then it is
    # computed once for both.
    is_shared = bool(split.global_grads) and max_grad_norm is not None

    def begin(params: Any, model_state: Any, step: jax.Array, shared: Leaves, read: Leaves, batch: Any) -> _Begun:
        """`shared`: the optimizer's global leaves; `read`: the weights that its global phase reads."""
        found = phase(params, model_state, step, batch)
        flat, weights = tree.flatten(found.grads), tree.flatten(weights_plan)
        grads = {path: flat[path].astype(x.dtype) for path, x in weights.items()}
        there = {path: shardings(weights[path], "device") for path in read}
        cuts, changed = split.global_phase(grads, shared, jax.device_put(read, there))
        model_state_now, metrics = found.model_state, found.metrics
        decided = (cuts, found.finite, found.denominator, metrics["grad_norm"])
        if is_skipping:
            model_state_now, changed = kept(found.finite, (model_state_now, changed), (model_state, shared))
        if lr is not None:
            old = TrainState(step, None, None, tree.nest(shared), None)
            metrics = {**metrics, "lr": learning_rate(lr, old)}
        return _Begun(
            grads if is_shared else tree.flatten(found.sums), decided, step + 1, model_state_now, changed, metrics
        )

    buckets = make_buckets(split, weights_plan, plan.opt_state, bucket_bytes=placement.bucket_bytes)
    finish = None if is_shared else partial(mean_gradient, max_norm=max_grad_norm)
    updates = [_BucketUpdate(split, bucket, plan=plan, finish=finish, is_skipping=is_skipping) for bucket in buckets]
    is_cpu = plan.step.sharding.mesh.devices.flat[0].platform == "cpu"
    is_marking = not is_cpu if is_marking is None else is_marking
    return NvmeStep(plan, split, begin, updates, store, cache_bytes=placement.nvme_cache_bytes, is_marking=is_marking)


def _check(split: Split, plan: TrainState) -> None:
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
    problems += [f"params/{path}: parameters cannot live on disk: place them on the device" for path in on_disk(params)]
    if problems:
        raise PlanError("these leaves cannot be in the tier nvme:\n" + listed(problems))


class _BucketUpdate:
    """The update of one bucket, as a function of lists without names, so that buckets alike are compiled once."""

    def __init__(
        self, split: Split, bucket: Bucket, *, plan: TrainState, finish: Callable[..., Any] | None, is_skipping: bool
    ) -> None:
        has_master = plan.master is not None
        params, state = tree.flatten(plan.params), tree.flatten(plan.opt_state)
        weights = tree.flatten(plan.master) if has_master else params
        group = "master" if has_master else "params"
        self.weights = bucket.weights
        self.old = {f"{group}/{p}": weights[p] for p in bucket.weights}
        self.old |= {f"opt_state/{p}": state[p] for p in bucket.opt_state}
        """the plan of what the update reads and writes, by path in the whole state; the weights come first"""
        self.derived = {f"params/{p}": params[p] for p in bucket.weights} if has_master else {}
        """the plan of the params that are the master weights in another dtype"""
        self.on_disk = tuple(on_disk(self.old))
        self.shared = tuple(path for path, weight in split.owner.items() if weight is None)
        update = split.bucket(bucket.weights)
        n = len(bucket.weights)

        def compute(
            derived: list[Any], decided: Any, shared: list[Any], sums: list[Any], old: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            """(new leaves, new derived params)"""
            cuts, finite, denominator, norm = decided
            old = jax.device_put(old, [shardings(x, "device") for x in self.old.values()])
            # XLA would multiply by the reciprocal of a scalar that one leaf alone is divided by; in the step that has all
            # leaves the scalars have more users, and so a barrier must be one here.
            old[0], _ = jax.lax.optimization_barrier((old[0], (denominator, norm)))
            own = dict(zip(bucket.weights, old[:n], strict=True))
            own_state = dict(zip(bucket.opt_state, old[n:], strict=True))
            grads = [finish(g, denominator, norm) for g in sums] if finish else sums
            own_grads = {p: g.astype(own[p].dtype) for p, g in zip(bucket.weights, grads, strict=True)}
            updates, changed = update(cuts, dict(zip(self.shared, shared, strict=True)), own_grads, own_state, own)
            new: list[Any] = [optax.apply_updates(own[p], updates[p]) for p in bucket.weights]
            new += [changed[p] for p in bucket.opt_state]
            if is_skipping:
                new = kept(finite, new, old)
            derived = [x.astype(like.dtype) for x, like in zip(new, self.derived.values(), strict=False)]
            return _put(new, self.old), _put(derived, self.derived)

        self.compute = compute

    def trace(self, begun: _Begun) -> jax.stages.Traced:
        """The jitted update for arguments as the first jit leaves them (abstract)."""
        derived, old = [_struct(x) for x in self.derived.values()], [_struct(x) for x in self.old.values()]
        sums = [begun.sums[p] for p in self.weights]
        arguments = (derived, begun.decided, [begun.shared[p] for p in self.shared], sums, old)
        jitted = jax.jit(
            self.compute,
            in_shardings=shardings(arguments),
            out_shardings=(shardings(old), shardings(derived)),
            donate_argnums=(0, 4),
            keep_unused=True,  # the old derived params are given for their memory alone
        )
        return jitted.trace(*arguments)

    def trace_marks(self, whole: jax.sharding.NamedSharding) -> jax.stages.Traced:
        """The jitted fingerprint and finiteness of each leaf that goes to disk.

        Of what was stored, and so in a jit of its own: beside the update XLA may compute a value once more for them, and
        round it in another way.
        """
        leaves = [self.old[p] for p in self.on_disk]

        def mark(stored: list[Any]) -> list[Any]:
            there = jax.device_put(stored, [shardings(x, "device") for x in leaves])
            return [(fingerprint(x), is_all_finite(x)) for x in there]

        structs = [_struct(x) for x in leaves]
        return jax.jit(mark, in_shardings=(shardings(structs),), out_shardings=whole).trace(structs)


class NvmeStep:
    """The step, to be used like a jitted one: `trace`, `lower`, `compile`, call. Its `store` must be open when it is called."""

    def __init__(
        self,
        plan: TrainState,
        split: Split,
        begin: Callable[..., _Begun],
        updates: Sequence[_BucketUpdate],
        store: NvmeStore,
        *,
        cache_bytes: int,
        is_marking: bool,
    ) -> None:
        self._plan, self._split, self._begin = plan, split, begin
        self._updates, self._cache_bytes = updates, cache_bytes
        self._pipeline: Pipeline | None = None
        self.store, self.is_marking = store, is_marking
        self.moved: Moved | None = None
        """what the last step moved"""

    def trace(self, plan: TrainState, batch: Any) -> "Traced":
        del plan  # the one that it was made for
        return Traced(self, batch)

    def close(self) -> None:
        """Ends the threads; the store is its owner's."""
        if self._pipeline is not None:
            self._pipeline.close()

    def shared(self, state: TrainState) -> Leaves:
        """The leaves of the optimizer's state that belong to no single weight."""
        flat = tree.flatten(state.opt_state)
        return {path: flat[path] for path, weight in self._split.owner.items() if weight is None}

    def read(self, state: TrainState) -> Leaves:
        """The weights that the global phase reads."""
        flat = tree.flatten(state.params if state.master is None else state.master)
        return {path: flat[path] for path in self._split.weights if path in self._split.global_weights}

    def flow(self) -> Flow:
        if self._pipeline is None:
            buckets = [update.on_disk for update in self._updates]
            self._pipeline = Pipeline(self.store, buckets, cache_bytes=self._cache_bytes)
        return self._pipeline.step()


class Traced:
    """A step that is traced: the program as one, and the way to compile it."""

    def __init__(self, step: NvmeStep, batch: Any) -> None:
        self._step, plan = step, step._plan
        whole = replicated(plan.step.sharding.mesh)
        params = plan.params if plan.master is None else plan.master
        self._arguments = (plan.params, plan.model_state, plan.step, step.shared(plan), step.read(plan), batch)
        sums = {p: shardings(x, "device") for p, x in tree.flatten(params).items()}
        shared = shardings(step.shared(plan))
        fields: list[Any] = [sums, whole, plan.step.sharding, shardings(plan.model_state), shared, whole]
        placed = _Begun(*fields)
        jitted = jax.jit(
            step._begin, in_shardings=shardings(self._arguments), out_shardings=placed, donate_argnums=(1, 2)
        )
        self.begin = jitted.trace(*self._arguments)
        self._begun = _with_shardings(jax.eval_shape(jitted, *self._arguments), placed)
        self.updates = [update.trace(self._begun) for update in step._updates]
        self.marks = [update.trace_marks(whole) if step.is_marking else None for update in step._updates]

    @property
    def jaxpr(self) -> Any:
        """The whole step as one closed jaxpr: the first jit's arguments and the buckets' to all their results."""
        functions = [core.jaxpr_as_fun(traced.jaxpr) for traced in (self.begin, *self.updates)]
        arguments = [jax.tree.leaves(self._arguments)]
        arguments += [[_struct(x) for x in (*u.derived.values(), *u.old.values())] for u in self._step._updates]

        def composed(arguments: list[list[Any]]) -> list[Any]:
            shared = jax.tree.unflatten(jax.tree.structure(self._arguments), arguments[0])[3]
            results = functions[0](*arguments[0])
            begun = jax.tree.unflatten(jax.tree.structure(self._begun), results)
            for update, function, given in zip(self._step._updates, functions[1:], arguments[1:], strict=True):
                n = len(update.derived)
                sums = [begun.sums[p] for p in update.weights]
                middle = (begun.decided, [shared[p] for p in update.shared], sums)
                results = [*results, *function(*given[:n], *jax.tree.leaves(middle), *given[n:])]
            return results

        return jax.make_jaxpr(composed)(arguments)

    def lower(self) -> "Lowered":
        return Lowered(self._step, self.begin.lower(), list(zip(self.updates, self.marks, strict=True)))


class Lowered:
    def __init__(
        self,
        step: NvmeStep,
        begin: jax.stages.Lowered,
        updates: Sequence[tuple[jax.stages.Traced, jax.stages.Traced | None]],
    ) -> None:
        self._step, self._begin, self._updates = step, begin, updates

    def compile(self, options: Any = None) -> "Compiled":
        """Compiles each program once, however many buckets it is that of."""
        made: dict[Any, Any] = {}

        def compiled(traced: jax.stages.Traced) -> Any:
            key = _program(traced)
            if key not in made:
                made[key] = traced.lower().compile(options)
            return made[key]

        updates = [(compiled(update), compiled(marks) if marks else None) for update, marks in self._updates]
        return Compiled(self._step, self._begin.compile(options), updates)


class Compiled:
    """(state, batch) -> (state, metrics). The state that is given is used up, on disk as on the devices."""

    def __init__(self, step: NvmeStep, begin: Any, updates: Sequence[tuple[Any, Any]]) -> None:
        self._step, self._begin, self._updates = step, begin, updates

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        step, flat = self._step, tree.flatten(state)
        for leaf in on_disk(flat).values():
            leaf.check_current()
        shared = step.shared(state)
        with step.flow() as flow:  # reads ahead while the gradient is computed
            begun = _in_turn(self._begin(state.params, state.model_state, state.step, shared, step.read(state), batch))
            flow.follow(begun.decided)
            new: Leaves = {f"opt_state/{p}": x for p, x in begun.shared.items()}
            for i, (update, (compute, mark)) in enumerate(zip(step._updates, self._updates, strict=True)):
                old = {**{p: flat[p] for p in update.old}, **flow.take(i)}
                sums = [begun.sums.pop(p) for p in update.weights]  # so that they make room when they are used
                given = [flat[p] for p in update.derived]
                given = (given, begun.decided, list(shared.values()), sums, list(old.values()))
                results, derived = _in_turn(compute(*given))
                results = dict(zip(update.old, results, strict=True))
                stored = {p: results.pop(p) for p in update.on_disk}
                marks = _in_turn(mark(list(stored.values()))) if mark else [None] * len(stored)
                flow.put(i, stored, dict(zip(stored, marks, strict=True)))
                new |= results | dict(zip(update.derived, derived, strict=True))
                del given, old, stored
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


def _in_turn(results: Any) -> Any:
    """The results of one of the programs of a step; on the CPUs of several processes not before they are there.

    There the programs under way share a pool of threads and wait in it for the other processes, which may have begun with
    another one of them. A GPU runs them one after the other.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results


def _put(leaves: list[Any], plan: Mapping[str, Any]) -> list[Any]:
    return [jax.device_put(x, _struct(like).sharding) for x, like in zip(leaves, plan.values(), strict=True)]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    """A leaf as its bucket's jit gets and returns it: what lies on disk comes by way of pinned host memory."""
    sharding = x.sharding.with_memory_kind("pinned_host") if isinstance(x, NvmeStruct) else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _with_shardings(structs: Any, placed: Any) -> Any:
    """Abstract arrays with the shardings of a tree that may end before theirs does."""
    each = jax.tree.map(
        lambda s, below: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), below),
        placed,
        structs,
    )
    return jax.tree.unflatten(jax.tree.structure(structs), jax.tree.leaves(each))


def _program(traced: jax.stages.Traced) -> Any:
    """What tells the programs of two buckets apart: operations, constants, and where everything lies."""
    constants = tuple((np.shape(x), np.asarray(x).tobytes()) for x in traced.jaxpr.consts)
    placed = str((jax.tree.map(str, traced.args_info), traced.out_info))
    return str(traced.jaxpr), constants, placed
