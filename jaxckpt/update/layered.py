"""One training step whose parameters live off the device: every layer fetches its own weights, forward and backward.

The layers stand one after the other in the program, each with a vjp of its own that computes its forward pass again, so
that of a layer only its input stays. Barriers bind each fetch to what the computation has reached, and the update of a
layer begins as soon as its gradient is there: nothing of the size of the model is ever on the device.

What must know all gradients before it may change a weight (a global norm, whether all is finite, a sum over
microbatches) takes two programs instead: gradients to pinned host memory, then the update from there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxckpt.models.layers import Layers
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import Model, TrainState, step_key
from jaxckpt.update.chain import Chain
from jaxckpt.update.gradients import clipped, denominator_of, split_microbatches, step_metrics
from jaxckpt.update.host import fetched
from jaxckpt.update.layer_buckets import make_layer_buckets
from jaxckpt.update.parts import Leaves, Parts, make_parts
from jaxckpt.update.split import split_update
from jaxckpt.update.step import learning_rate
from jaxckpt.update.two_programs import TwoPrograms

Receive = Callable[[Leaves], Any]
"""(some gradients of the loss sum by path) -> what the next layer's fetch waits for"""
Begin = Callable[[jax.Array], Receive]
"""(number of targets) -> Receive"""


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
) -> Any:
    """(state, batch) -> (state, metrics) as `make_train_step` has it, for the loss that `layers` are; donates the state.

    Master weights and optimizer state may live in pinned host memory or on the device. One jitted function; where the
    update has to wait for all gradients, `TwoPrograms`, which is traced, compiled and called like one.

    Equal to `make_train_step` bit for bit in float32 on one device, but for the order in which XLA sums; with a narrower
    compute dtype XLA may round gradients where `make_train_step` keeps them exact within a fusion. Raises PlanError where
    the model or the optimizer does not come apart, see `make_parts` and `split_update`.
    """
    split = split_update(tx, plan.params if plan.master is None else plan.master)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // accumulation_steps, *x.shape[1:]), x.dtype), batch
    )
    parts = make_parts(model, layers, plan, rows, gathered)
    groups = _groups(parts)
    buckets = make_layer_buckets(split, plan, groups, bucket_bytes=placement.bucket_bytes)
    backward = _make_backward(parts, plan)
    # In the order and behind the barrier of `global_norm`.
    norm_of = lambda squares: jnp.sqrt(sum(jax.lax.optimization_barrier([squares[p] for p in split.weights])))
    mesh = plan.step.sharding.mesh
    with_lr = lambda metrics, state: metrics if lr is None else {**metrics, "lr": learning_rate(lr, state)}

    def fused(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        chain, squares, waiting = Chain(split, plan, state), {}, {}
        remaining = iter(buckets)
        marks: list[Any] = []
        chain.begin(_no_gradient, jax.tree.leaves(batch))

        def begin(count: jax.Array) -> Receive:
            denominator = denominator_of(count)

            def receive(grads: Leaves) -> Any:
                grads = {path: _mean(g, denominator) for path, g in grads.items()}
                squares.update({path: jnp.sum(jnp.square(g)) for path, g in grads.items()})
                waiting.update(grads)
                for bucket in next(remaining):
                    own = {path: waiting.pop(path) for path in bucket.weights}
                    chain.update(bucket, own, chain.after(list(own.values())))
                marks.append(chain.done[-1] if chain.done else [])
                return marks[-2] if len(marks) > 1 else []

            return receive

        key = jax.random.fold_in(step_key(seed, state.step), 0)
        total, count = backward(tree.flatten(state.params), state.model_state, batch, key, begin)
        mean, norm = total / denominator_of(count), norm_of(squares)
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        metrics = step_metrics(mean, norm, count, finite, batch, plan)
        return jax.device_put(chain.end(), shardings(plan)), with_lr(metrics, state)

    grads_plan = _grads_plan(plan, is_summed=accumulation_steps > 1)

    def gradients(
        params: Any, model_state: Any, step: jax.Array, batch: Any, number: jax.Array, sums: Any, grads: Leaves
    ) -> tuple[Any, Leaves]:
        """Of microbatch `number`: ((loss sum, target count, norm) so far, the gradient sum so far in host memory)."""
        squares: Leaves = {}
        result: Leaves = {}
        marks: list[Any] = []
        if accumulation_steps > 1:
            microbatches = split_microbatches(batch, batch_plan, accumulation_steps)
            batch = jax.tree.map(lambda x: x[number], microbatches)
        is_first = number == 0

        def begin(count: jax.Array) -> Receive:
            denominator = denominator_of(sums[1] + count)

            def receive(own: Leaves) -> Any:
                if accumulation_steps > 1:
                    old = fetched({path: grads[path] for path in own}, grads_plan, list(own.values()))
                    own = {p: jnp.where(is_first, 0, old[p]) + g.astype(old[p].dtype) for p, g in own.items()}
                    own = jax.lax.optimization_barrier(own)
                squares.update({p: jnp.sum(jnp.square(_mean(g, denominator))) for p, g in own.items()})
                result.update(jax.device_put(own, {path: grads_plan[path].sharding for path in own}))
                marks.append([squares[path] for path in own])
                return marks[-2] if len(marks) > 1 else []

            return receive

        key = jax.random.fold_in(step_key(seed, step), number)
        total, count = backward(tree.flatten(params), model_state, batch, key, begin)
        return (sums[0] + total, sums[1] + count, norm_of(squares)), result

    batch_plan = batch

    def update(state: TrainState, batch: Any, sums: Any, grads: Leaves) -> tuple[TrainState, dict[str, jax.Array]]:
        total, count, norm = sums
        denominator = denominator_of(count)
        mean = total / denominator
        finite = jnp.isfinite(mean) & jnp.isfinite(norm)
        chain = Chain(split, plan, state, finite=finite if nonfinite == "skip" else None)

        def grad(path: str, after: Any) -> jax.Array:
            g = _mean(fetched({path: grads[path]}, grads_plan, after)[path], denominator)
            return g if max_grad_norm is None else clipped(g, norm, max_grad_norm)

        chain.begin(grad, [norm])
        for bucket in (bucket for group in buckets for bucket in group):
            after = chain.after([norm])
            chain.update(bucket, {path: grad(path, after) for path in bucket.weights}, after)
        metrics = step_metrics(mean, norm, count, finite, batch, plan)
        return jax.device_put(chain.end(), shardings(plan)), with_lr(metrics, state)

    is_waiting = accumulation_steps > 1 or max_grad_norm is not None or nonfinite == "skip"
    if is_waiting or split.kind != "leaf" or placement.grads == "pinned_host":
        return TwoPrograms(gradients, update, plan, batch, grads_plan, parts.count_dtype, accumulation_steps)
    return jax.jit(
        fused,
        in_shardings=(shardings(plan), shardings(batch)),
        out_shardings=(shardings(plan), replicated(mesh)),
        donate_argnums=0,
    )


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


def _mean(g: jax.Array, denominator: jax.Array) -> jax.Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32)) / denominator


def _no_gradient(path: str, after: Any) -> jax.Array:
    raise AssertionError(f"an update of kind 'leaf' reads the gradient of {path} in its global phase")
