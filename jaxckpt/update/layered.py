"""One training step whose parameters live off the device: every layer fetches its own weights, forward and backward.

The layers stand one after the other in the program, each with a vjp of its own that computes its forward pass again, so
that of a layer only its input stays. Barriers bind each fetch to what the computation has reached, and the update of a
layer begins as soon as its gradient is there: nothing of the size of the model is ever on the device.

What must know all gradients before it may change a weight (a global norm, whether all is finite, a sum over
microbatches) takes two programs instead: gradients to pinned host memory, then the update from there. So does state on
local disks, with a program for each bucket of the update.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxckpt.models.layers import Layers
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import Model, TrainState, step_key
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.chain import Chain, global_phase
from jaxckpt.update.disk_bucket import DiskBucket
from jaxckpt.update.gradients import (
    denominator_of,
    kept,
    mean_gradient,
    mean_gradient_apart,
    norm_of,
    split_microbatches,
    square_sums,
    step_metrics,
)
from jaxckpt.update.host import fetched
from jaxckpt.update.host_gradients import HostGradients
from jaxckpt.update.layer_buckets import make_layer_buckets
from jaxckpt.update.layer_programs import LayerGradients
from jaxckpt.update.nvme_begin import LayerByLayer, given_of
from jaxckpt.update.nvme_programs import NvmeStep, check_on_disk
from jaxckpt.update.parts import Leaves, Parts, make_parts
from jaxckpt.update.split import Split, split_update
from jaxckpt.update.step import learning_rate
from jaxckpt.update.two_programs import TwoPrograms

Receive = Callable[[Leaves], Any]
"""(some gradients of the loss sum by path) -> what the next layer's fetch waits for"""
Begin = Callable[[jax.Array], Receive]
"""(number of targets) -> Receive"""
Metrics = dict[str, jax.Array]


def make_layered_step(
    model: Model,
    layers: Layers,
    tx: optax.GradientTransformation,
    plan: TrainState,
    batch: Any,
    *,
    seed: int,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    nonfinite: str = "stop",
    lr: optax.Schedule | None = None,
    gathered: frozenset[str] = frozenset(),
    placement: Placement = Placement(),
    store: NvmeStore | None = None,
    is_marking: bool | None = None,
) -> Any:
    """(state, batch) -> (state, metrics) as `make_train_step` has it, for the loss that `layers` are; donates the state.

    Master weights and optimizer state may live in pinned host memory or on the device: then it is one jitted function, or
    `TwoPrograms` where the update has to wait for all gradients. Or in the tier nvme, whose files `store` holds: then it
    is an `NvmeStep` (see there for `is_marking`). Both are traced, compiled and called like a jitted function.

    Equal to `make_train_step` bit for bit in float32 on one device, but for the order in which XLA sums; with a narrower
    compute dtype XLA may round gradients where `make_train_step` keeps them exact within a fusion. Raises PlanError where
    the model or the optimizer does not come apart, see `make_parts` and `split_update`.
    """
    split = split_update(tx, plan.params if plan.master is None else plan.master)
    check_on_disk(split, plan)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // accumulation_steps, *x.shape[1:]), x.dtype), batch
    )
    parts = make_parts(model, layers, plan, rows, gathered)
    buckets = make_layer_buckets(split, plan, _groups(parts), bucket_bytes=placement.bucket_bytes)
    step = _Layered(
        split, parts, buckets, plan, batch, seed=seed, accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm, is_skipping=nonfinite == "skip", lr=lr,
    )  # fmt: skip
    is_waiting = accumulation_steps > 1 or max_grad_norm is not None or nonfinite == "skip"
    if store is not None:
        return step.from_disk(store, rows, cache_bytes=placement.nvme_cache_bytes, is_marking=is_marking)
    if is_waiting or split.kind != "leaf" or placement.grads == "pinned_host":
        return TwoPrograms(step.host_gradients(), step.update)
    return jax.jit(
        step.fused,
        in_shardings=(shardings(plan), shardings(batch)),
        out_shardings=(shardings(plan), replicated(plan.step.sharding.mesh)),
        donate_argnums=0,
    )


class _Layered:
    """The functions that the kinds of layered steps are made of, to be traced under jit."""

    def __init__(
        self,
        split: Split,
        parts: Parts,
        buckets: Sequence[Sequence[Bucket]],
        plan: TrainState,
        batch: Any,
        *,
        seed: int,
        accumulation_steps: int,
        max_grad_norm: float | None,
        is_skipping: bool,
        lr: optax.Schedule | None,
    ) -> None:
        self._split, self._parts, self._buckets = split, parts, buckets
        self._plan, self._batch, self._lr = plan, batch, lr
        self._seed, self._accumulation_steps = seed, accumulation_steps
        self._max_grad_norm, self._is_skipping = max_grad_norm, is_skipping
        self._backward = _make_backward(parts, plan)
        self._grads_plan = _grads_plan(plan, is_summed=accumulation_steps > 1)

    def host_gradients(self) -> HostGradients:
        return HostGradients(self.gradients, *self._buffers())

    def layer_gradients(self, microbatch: Any) -> LayerGradients:
        """The same where weights come from the disks."""
        return LayerGradients(self._parts, microbatch, self._added, self._norm, self._seed, *self._buffers())

    def _buffers(self) -> tuple[Any, ...]:
        return self._plan, self._batch, self._grads_plan, self._parts.count_dtype, self._accumulation_steps

    def from_disk(self, store: NvmeStore, microbatch: Any, *, cache_bytes: int, is_marking: bool | None) -> NvmeStep:
        """The step whose buckets come from the disks, in the order of `update`, and maybe the weights of the layers."""
        split, plan = self._split, self._plan
        finish = partial(mean_gradient, max_norm=self._max_grad_norm)
        updates = [
            DiskBucket(split, bucket, plan=plan, finish=finish, is_skipping=self._is_skipping)
            for group in self._buckets
            for bucket in group
        ]
        given = given_of(split, plan, self._batch)
        has_weights = bool(on_disk(tree.flatten(plan.params)))
        gradients = self.layer_gradients(microbatch) if has_weights else self.host_gradients()
        beginning = LayerByLayer(gradients, self.decide, given, global_grads=split.global_grads)
        return NvmeStep(plan, split, beginning, updates, store, cache_bytes=cache_bytes, is_marking=is_marking)

    def fused(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """The whole step: each bucket is updated as soon as its gradients are there."""
        chain, squares, waiting = Chain(self._split, self._plan, state), {}, {}
        remaining = iter(self._buckets)
        marks: list[Any] = []
        chain.begin(_no_gradient, jax.tree.leaves(batch))

        def begin(count: jax.Array) -> Receive:
            denominator = denominator_of(count)

            def receive(grads: Leaves) -> Any:
                squares.update(zip(grads, square_sums(list(grads.values()), count), strict=True))
                grads = {path: mean_gradient(g, denominator) for path, g in grads.items()}
                waiting.update(grads)
                for bucket in next(remaining):
                    own = {path: waiting.pop(path) for path in bucket.weights}
                    chain.update(bucket, own, chain.after(list(own.values())))
                marks.append(chain.done[-1] if chain.done else [])
                return marks[-2] if len(marks) > 1 else []

            return receive

        key = jax.random.fold_in(step_key(self._seed, state.step), 0)
        total, count = self._backward(tree.flatten(state.params), state.model_state, batch, key, begin)
        metrics, _ = self._metrics(total, count, self._norm(squares, count), batch, state)
        return jax.device_put(chain.end(), shardings(self._plan)), metrics

    def gradients(
        self, params: Any, model_state: Any, step: jax.Array, batch: Any, number: jax.Array, sums: Any, grads: Leaves
    ) -> tuple[Any, Leaves]:
        """Of microbatch `number`: ((loss sum, target count, norm) so far, the gradient sum so far in host memory)."""
        squares: Leaves = {}
        result: Leaves = {}
        marks: list[Any] = []
        plan = self._grads_plan
        if self._accumulation_steps > 1:
            microbatches = split_microbatches(batch, self._batch, self._accumulation_steps)
            batch = jax.tree.map(lambda x: x[number], microbatches)
        is_first = number == 0

        def begin(count: jax.Array) -> Receive:
            def receive(own: Leaves) -> Any:
                own, found = self._added(own, {path: grads[path] for path in own}, is_first, sums[1] + count)
                squares.update(found)
                result.update(jax.device_put(own, {path: plan[path].sharding for path in own}))
                marks.append([squares[path] for path in own])
                return marks[-2] if len(marks) > 1 else []

            return receive

        key = jax.random.fold_in(step_key(self._seed, step), number)
        total, count = self._backward(tree.flatten(params), model_state, batch, key, begin)
        count += sums[1]
        return (sums[0] + total, count, self._norm(squares, count)), result

    def _added(self, own: Leaves, sums: Leaves, is_first: jax.Array, count: jax.Array) -> tuple[Leaves, Leaves]:
        """(the sums of some gradients and those of the microbatches before, their squares summed up)"""
        if self._accumulation_steps > 1:
            old = fetched(sums, self._grads_plan, list(own.values()))
            own = {p: jnp.where(is_first, 0, old[p]) + g.astype(old[p].dtype) for p, g in own.items()}
            own = jax.lax.optimization_barrier(own)
        return own, dict(zip(own, square_sums(list(own.values()), count), strict=True))

    def update(self, state: TrainState, batch: Any, sums: Any, grads: Leaves) -> tuple[TrainState, Metrics]:
        """From the gradients in host memory, bucket by bucket."""
        total, count, norm = sums
        metrics, finite = self._metrics(total, count, norm, batch, state)
        chain = Chain(self._split, self._plan, state, finite=finite if self._is_skipping else None)
        grad = self._grad_of(grads, denominator_of(count), norm)
        chain.begin(self._grad_of(grads, denominator_of(count), norm, is_apart=True), [norm])
        for bucket in (bucket for group in self._buckets for bucket in group):
            # Not [norm] alone: XLA would take the fetch of a gradient here for the one in the global phase, and compute the
            # clipped gradient once for both, which rounds in another way than where it is fused with the update.
            after = chain.after([norm, count])
            chain.update(bucket, {path: grad(path, after) for path in bucket.weights}, after)
        return jax.device_put(chain.end(), shardings(self._plan)), metrics

    def decide(
        self, step: jax.Array, shared: Leaves, read: Leaves, batch: Any, sums: Any, grads: Leaves
    ) -> tuple[Any, jax.Array, Leaves, Metrics]:
        """What `update` does before its first bucket; see `LayerByLayer`."""
        total, count, norm = sums
        old = TrainState(step, None, None, tree.nest(shared), None)
        metrics, finite = self._metrics(total, count, norm, batch, old)
        grad = self._grad_of(grads, denominator_of(count), norm, is_apart=True)
        weights, state = tree.flatten(self._weights()), tree.flatten(self._plan.opt_state)
        fetch = lambda path, after: fetched({path: read[path]}, weights, after)[path]
        there = fetched(shared, state, [norm])
        cuts, changed = global_phase(self._split, there, weights, grad, fetch, [norm])
        if self._is_skipping:
            changed = kept(finite, changed, there)
        changed = jax.device_put(changed, {path: state[path].sharding for path in changed})
        return (cuts, finite, denominator_of(count), norm), step + 1, changed, metrics

    def _grad_of(
        self, grads: Leaves, denominator: jax.Array, norm: jax.Array, *, is_apart: bool = False
    ) -> Callable[[str, Any], jax.Array]:
        """(path, after) -> the gradient that the update takes, on the device once `after` is there; `is_apart`: for norms."""
        mean = mean_gradient_apart if is_apart else mean_gradient

        def grad(path: str, after: Any) -> jax.Array:
            g = fetched({path: grads[path]}, self._grads_plan, after)[path]
            return mean(g, denominator, norm, self._max_grad_norm)

        return grad

    def _metrics(
        self, total: jax.Array, count: jax.Array, norm: jax.Array, batch: Any, state: TrainState
    ) -> tuple[Metrics, jax.Array]:
        """(the metrics of the step, whether the loss and the gradient are finite)"""
        mean = total / denominator_of(count)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        metrics = step_metrics(mean, norm, count, finite, batch, self._plan)
        return metrics if self._lr is None else {**metrics, "lr": learning_rate(self._lr, state)}, finite

    def _norm(self, squares: Leaves, count: jax.Array) -> jax.Array:
        return norm_of([squares[p] for p in self._split.weights], denominator_of(count))

    def _weights(self) -> Any:
        return self._plan.params if self._plan.master is None else self._plan.master


def _groups(parts: Parts) -> list[tuple[str, ...]]:
    """Weights in the order in which their gradients are complete: of the head alone, the layers, the embedding."""
    return [tuple(p for p in parts.head if p not in parts.embed), *reversed(parts.layers), parts.embed]


def _make_backward(parts: Parts, plan: TrainState) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(params by path, model state, batch, key, begin) -> (sum of losses, number of targets).

    `begin` is called when the number of targets is known, and what it returns gets the gradients of each of `_groups` as
    soon as they are there.
    """
    params_plan = tree.flatten(plan.params)
    device = {path: shardings(x, "device") for path, x in params_plan.items()}

    def backward(
        params: Leaves, model_state: Any, batch: Any, key: jax.Array, begin: Begin
    ) -> tuple[jax.Array, jax.Array]:
        bound = parts.bind(model_state, key)
        fetch = lambda paths, after: fetched({path: params[path] for path in paths}, params_plan, after)
        # Sharding the gradient like its parameter turns the all-reduce over fsdp into a reduce-scatter; behind a barrier,
        # what comes after does not change its bits, see `make_gradient_phase`.
        own = lambda grads: jax.lax.optimization_barrier(
            {p: jax.lax.with_sharding_constraint(g, device[p]) for p, g in grads.items()}
        )
        entry = jax.tree.leaves(batch)
        x, context, streams = bound.embed(fetch(parts.embed, entry), batch)
        xs = []
        for i, names in enumerate(parts.layers):
            # While layer i - 1 computes, and not before.
            weights = fetch(names, jax.tree.leaves(xs[-1]) if xs else entry)
            xs.append(x)
            x = bound.layer(i, weights, x, context)

        weights = fetch(parts.head, jax.tree.leaves(xs[-1]) if xs else entry)
        run = lambda weights, x: bound.head(weights, x, batch, streams)
        total, pull, count = jax.vjp(run, weights, x, has_aux=True)
        head_grads, dx = pull(jnp.ones_like(total))
        shared = {path: head_grads.pop(path) for path in parts.head if path in parts.embed}
        # A count that the compiler knows would be multiplied into the update, which rounds in another way.
        total, count = jax.lax.optimization_barrier((total, count))
        receive = begin(count)
        gate = receive(own(head_grads))

        before = dx
        for i in reversed(range(len(parts.layers))):
            # While the backward pass of layer i + 1 computes, and not before the update of layer i + 2 is done.
            weights = fetch(parts.layers[i], [*jax.tree.leaves(before), *gate])
            # Else XLA would take the forward pass again for the one that was, and keep all of it.
            x, dx_in = jax.lax.optimization_barrier((xs[i], dx))
            _, pull = jax.vjp(lambda weights, x, i=i: bound.layer(i, weights, x, context), weights, x)
            before, (grads, dx) = dx, pull(dx_in)
            gate = receive(own(grads))

        weights = fetch(parts.embed, [*jax.tree.leaves(before), *gate])
        _, pull = jax.vjp(lambda weights: bound.embed(weights, batch)[0], weights)
        (grads,) = pull(dx)
        receive(own({p: g + shared[p] if p in shared else g for p, g in grads.items()}))
        return total, count

    return backward


def _grads_plan(plan: TrainState, *, is_summed: bool) -> dict[str, Any]:
    """The gradients between the two programs: like params in pinned host memory, a sum in float32 at least."""

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jnp.promote_types(x.dtype, jnp.float32) if is_summed else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=shardings(x, "pinned_host") if x.ndim else x.sharding)

    return {path: struct(x) for path, x in tree.flatten(plan.params).items()}


def _no_gradient(path: str, after: Any) -> jax.Array:
    raise AssertionError(f"an update of kind 'leaf' reads the gradient of {path} in its global phase")
