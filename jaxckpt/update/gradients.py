"""From a batch to a gradient: forward, backward, microbatches, and what must be known of all gradients at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import ConfigError
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import combine, fingerprint
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import Model, TrainState, step_key

Loss = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
"""loss(model, batch) -> (sum over targets, number of targets)"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """What the update needs of a batch."""

    grads: Any
    """of the mean loss over all targets, clipped, at least float32, of the structure and sharding of `params`"""
    model_state: Any
    """as the forward pass left it"""
    finite: jax.Array
    """bool[], whether the loss and the norm of the gradient are"""
    sums: Any
    """what `grads` are made from by `mean_gradient`: the gradient of the sum of losses, before any division"""
    denominator: jax.Array
    """float32[] that `sums` are divided by"""
    metrics: dict[str, jax.Array]
    """loss, grad_norm (before clipping), tokens (targets), finite, batch_digest (uint32[2])"""


def make_gradient_phase(
    model: Model,
    loss: Loss,
    plan: TrainState,
    batch: Any,
    *,
    seed: int,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    gathered: frozenset[str] = frozenset(),
    is_apart: bool = False,
) -> Callable[[Any, Any, jax.Array, Any], Gradients]:
    """(params, model state, step, batch) -> Gradients, to be traced under jit; see `make_train_step` for the arguments.

    With `is_apart` a GPU schedules the forward and backward pass by themselves, see `scheduled_apart`; microbatches are a loop
    anyway. A CPU has nothing to hide, and XLA may round in another way in a loop there.
    """
    forward = make_forward(model, loss, plan, gathered)
    gradients = _make_sums(forward, plan, batch, accumulation_steps)

    def phase(params: Any, model_state: Any, step: jax.Array, batch: Any) -> Gradients:
        args = (params, model_state, batch, step_key(seed, step))
        if is_apart and accumulation_steps == 1:
            apart = partial(scheduled_apart, gradients)
            together = lambda _, *args: gradients(*args)
            found = jax.lax.platform_dependent(step, *args, cuda=apart, rocm=apart, default=together)
        else:
            found = gradients(*args)
        # What comes after must not change how XLA adds the gradient up over the devices: then all tiers have the same bits.
        total, count, sums, model_state = jax.lax.optimization_barrier(found)
        denominator = denominator_of(count)
        mean = total / denominator
        grad_norm = norm_of(square_sums(jax.tree.leaves(sums), count), denominator)
        grads = jax.tree.map(lambda g: mean_gradient(g, denominator, grad_norm, max_grad_norm), sums)
        finite = jnp.isfinite(mean) & jnp.isfinite(grad_norm)
        metrics = step_metrics(mean, grad_norm, count, finite, batch, plan)
        return Gradients(grads, model_state, finite, sums, denominator, metrics)

    return phase


def scheduled_apart(
    gradients: Callable[..., Any], step: jax.Array, params: Any, model_state: Any, batch: Any, key: jax.Array
) -> Any:
    """gradients(params, model_state, batch, key), which has the structure and dtypes of `params`, as a computation of its own.

    XLA's latency-hiding scheduler takes on every computation that has a copy from or to the host in it, and moves the rest of
    it around, too: it made the forward pass of several layers again before the backward pass of the first, which took as much
    memory as the moments that were in host memory. It leaves alone what has no such copy.
    """
    like = jax.eval_shape(gradients, params, model_state, batch, key)
    total, count = (jnp.zeros(x.shape, x.dtype) for x in like[:2])

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, params, _, _, model_state = carry
        total, count, sums, model_state = gradients(params, model_state, batch, key)
        return number + 1, sums, total, count, model_state

    # A loop that is run once, which XLA does not know: a call is not fused, and a branch would keep all weights until its end,
    # while here the gradients take their room (592 and 552 MiB in the plan of a small model, 554 when not apart).
    start = (step, params, total, count, model_state)
    _, sums, total, count, model_state = jax.lax.while_loop(lambda carry: carry[0] <= step, body, start)
    return total, count, sums, model_state


def mean_gradient(
    g: jax.Array, denominator: jax.Array, norm: jax.Array | None = None, max_norm: float | None = None
) -> jax.Array:
    """A leaf of the gradient of the mean loss, clipped if there is a norm to clip to.

    On CPU its bits are the same in all programs only where the update stands behind it in the same one: XLA fuses the two,
    and rounds a product and a sum once instead of twice.
    """
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32)) / denominator
    return g if norm is None or max_norm is None else clipped(g, norm, max_norm)


def mean_gradient_apart(g: jax.Array, denominator: jax.Array, *clipping: Any) -> jax.Array:
    """`mean_gradient` for a norm of it, computed by itself on a CPU.

    In the step with everything on the device it is in memory first, because the update reads it, too. Where only a norm reads
    it XLA divides within the sum, and then some processors (with AVX-512) add up in another order.
    """
    like = jax.eval_shape(mean_gradient, g, denominator, *clipping)

    def in_a_branch(g: jax.Array, denominator: jax.Array, *clipping: Any) -> jax.Array:
        # Which XLA does not know to be taken always; it fuses nothing across, while it drops barriers before it fuses. In
        # the branch it would multiply by the reciprocal of a scalar, which only one leaf is divided by there.
        each = jnp.broadcast_to(denominator, g.shape)
        otherwise = lambda *_: jnp.zeros(like.shape, like.dtype)
        return jax.lax.cond(denominator > 0, mean_gradient, otherwise, g, each, *clipping)

    return jax.lax.platform_dependent(g, denominator, *clipping, cpu=in_a_branch, default=mean_gradient)


def denominator_of(count: jax.Array) -> jax.Array:
    """float32[] to divide sums over targets by: a batch without targets changes nothing."""
    return jnp.where(count > 0, count, 1).astype(jnp.float32)


def square_sums(sums: Sequence[jax.Array], count: jax.Array) -> list[jax.Array]:
    """float32[] of each of some gradients of the sum of losses, to the same bits in every program.

    A CPU adds up in an order that depends on what else XLA fuses with the sum, and so it gets a computation of its own there.
    """
    add_up = lambda sums: [jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32)))) for g in sums]

    def in_a_branch(sums: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        # XLA does not know that it is always taken, and fuses nothing across; barriers it drops before it fuses.
        return jax.lax.cond(count >= 0, add_up, lambda sums: [jnp.float32(jnp.nan) for _ in sums], sums)

    return jax.lax.platform_dependent(list(sums), count, cpu=in_a_branch, default=lambda sums, _: add_up(sums))


def norm_of(squares: Sequence[jax.Array], denominator: jax.Array) -> jax.Array:
    """float32[], the norm of the mean gradient (sqrt of the sum of squares, as optax.tree.norm), from `square_sums` of all.

    The sums of the leaves stand behind a barrier: XLA turns a sum of all-reduces into an all-reduce of sums where nobody
    else uses them, which rounds in another order.
    """
    return jnp.sqrt(sum(jax.lax.optimization_barrier(list(squares)))) / denominator


def clipped(g: jax.Array, norm: jax.Array, max_norm: float) -> jax.Array:
    """As optax.clip_by_global_norm does, given the norm."""
    limit = jnp.float32(max_norm)
    return jnp.where(norm < limit, g, g / norm * limit)


def kept(finite: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the loss and the gradient were finite, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def step_metrics(
    mean: jax.Array, grad_norm: jax.Array, count: jax.Array, finite: jax.Array, batch: Any, plan: TrainState
) -> dict[str, jax.Array]:
    # One gather of a few kilobytes a device; left split, the sums over it cost 6 % of a small step on CPU.
    whole_batch = jax.lax.with_sharding_constraint(batch, replicated(plan.step.sharding.mesh))
    return {
        "loss": mean,
        "grad_norm": grad_norm,
        "tokens": count,
        "finite": finite,
        "batch_digest": combine([fingerprint(x) for x in jax.tree.leaves(whole_batch)]),
    }


def make_forward(
    model: Model, loss: Loss, plan: TrainState, gathered: frozenset[str], *, is_training: bool = True
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Any]]]:
    """(params, model state, batch, key) -> (loss sum, (target count, new model state)).

    Left alone, XLA's partitioner may keep a sharded weight where it is and replicate the batch instead, which repeats
    the whole computation on every device of the fsdp axis. A model that shards itself constrains its activations (it
    finds the mesh by jax.sharding.get_abstract_mesh()); the weights of any other are gathered here.
    """
    mesh = plan.step.sharding.mesh
    whole = tree.map_with_path(lambda path, x: replicated(mesh) if path in gathered else x.sharding, plan.params)

    def forward(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        params = jax.lax.with_sharding_constraint(params, whole)
        module = model.bind(params, model_state, key)
        if not is_training:
            module.eval()
        # A variable made anew in the pass (Linen's statistics) must look like the one that `take_apart` made.
        with nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            total, count = checked_loss(loss, module, batch)
        return total, (count, model.unbind(module) if is_training else None)

    return forward


def _make_sums(
    forward: Callable[..., Any], plan: TrainState, batch_plan: Any, accumulation_steps: int
) -> Callable[..., Any]:
    """(params, model state, batch, key) -> (loss sum, target count, gradient of the loss sum, model state)."""
    params_shardings = shardings(plan.params)

    def one(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[Any, ...]:
        (total, (count, new_model_state)), grads = jax.value_and_grad(forward, has_aux=True)(
            params, model_state, batch, key
        )
        # Sharding the gradient like its parameter turns the all-reduce over fsdp into a reduce-scatter.
        return total, count, jax.lax.with_sharding_constraint(grads, params_shardings), new_model_state

    def accumulated(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[Any, ...]:
        if accumulation_steps == 1:
            return one(params, model_state, batch, jax.random.fold_in(key, 0))

        def body(carry: tuple[Any, ...], inputs: tuple[Any, jax.Array]) -> tuple[tuple[Any, ...], None]:
            total, count, grads, model_state = carry
            microbatch, number = inputs
            t, c, g, model_state = one(params, model_state, microbatch, jax.random.fold_in(key, number))
            # Else XLA may add a gradient up right into the sum so far, which rounds in another way than a layer at a time.
            g = jax.lax.optimization_barrier(g)
            grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, g)
            return (total + t, count + c, grads, model_state), None

        microbatches = split_microbatches(batch, batch_plan, accumulation_steps)
        first = jax.tree.map(lambda x: x[0], microbatches)
        count = jax.eval_shape(forward, params, model_state, first, key)[1][0]
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        start = (jnp.float32(0), jnp.zeros((), count.dtype), zeros, model_state)
        carry, _ = jax.lax.scan(body, start, (microbatches, jnp.arange(accumulation_steps)))
        return carry

    return accumulated


def split_microbatches(batch: Any, batch_plan: Any, count: int) -> Any:
    """The batch with a leading axis of `count` microbatches."""

    def split(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        # Microbatch i takes every `count`-th row, so that each device only reads rows it already holds.
        x = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, P(None, *sharding.spec)))

    return jax.tree.map(split, batch, shardings(batch_plan))


def checked_loss(loss: Loss, module: nnx.Module, batch: Any) -> tuple[jax.Array, jax.Array]:
    result = loss(module, batch)
    if not (isinstance(result, tuple) and len(result) == 2 and all(jnp.shape(x) == () for x in result)):
        raise ConfigError(
            "loss(model, batch) must return two scalars, (sum over targets, number of targets); "
            f"found {jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), result)}"
        )
    total, count = result
    count = jnp.asarray(count)
    # A count of targets is exact as an integer; a sum of weights stays a float.
    exact = jnp.int32 if jnp.issubdtype(count.dtype, jnp.integer) else jnp.float32
    return jnp.asarray(total, jnp.float32), count.astype(exact)
