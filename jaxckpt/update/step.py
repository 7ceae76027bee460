"""One pure training step, jitted once: (state, batch) -> (state, metrics)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import ConfigError
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import combine, fingerprint
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import Model, TrainState, narrow, step_key

Loss = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
"""loss(model, batch) -> (sum over targets, number of targets)"""


def make_train_step(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    plan: TrainState,
    batch: Any,
    *,
    seed: int,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    nonfinite: str = "stop",
    compute_dtype: Any = None,
    lr: optax.Schedule | None = None,
    gathered: frozenset[str] = frozenset(),
) -> jax.stages.Wrapped:
    """The jitted step for states laid out as `plan` and batches laid out as `batch` (ShapeDtypeStructs); donates the state.

    Parameters whose path is in `gathered` are made whole before the model sees them, see `_forward`.

    The gradient is that of (sum of losses) / (number of targets) over the whole batch, exact for any padding and
    any `accumulation_steps`. `max_grad_norm` clips as optax.clip_by_global_norm does. With `nonfinite="skip"` an
    update whose loss or gradient is not finite changes nothing but `step`.

    Metrics, all replicated scalars: loss, grad_norm (before clipping), tokens (targets), lr (if given), finite,
    batch_digest (uint32[2]).
    """
    weights_plan = plan.params if plan.master is None else plan.master
    mesh = plan.step.sharding.mesh
    forward = _make_forward(model, loss, plan, gathered)
    gradients = _make_gradients(forward, plan, batch, accumulation_steps)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        total, count, grads, model_state = gradients(state, batch, step_key(seed, state.step))
        denominator = jnp.where(count > 0, count, 1).astype(jnp.float32)  # a batch without targets changes nothing
        mean = total / denominator
        grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / denominator, grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(mean) & jnp.isfinite(grad_norm)
        if max_grad_norm is not None:
            limit = jnp.float32(max_grad_norm)
            grads = jax.tree.map(lambda g: jnp.where(grad_norm < limit, g, g / grad_norm * limit), grads)

        weights = jax.device_put(
            state.params if state.master is None else state.master, shardings(weights_plan, "device")
        )
        opt_state = jax.device_put(state.opt_state, shardings(plan.opt_state, "device"))
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)
        updates, new_opt_state = tx.update(grads, opt_state, weights)
        new_weights = optax.apply_updates(weights, updates)
        if nonfinite == "skip":
            keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            new_weights, new_opt_state = keep(new_weights, weights), keep(new_opt_state, opt_state)
            model_state = keep(model_state, state.model_state)

        params, master = (new_weights, None) if state.master is None else narrow(new_weights, compute_dtype)
        new = TrainState(state.step + 1, params, master, new_opt_state, model_state)
        # One gather of a few kilobytes a device; left split, the sums over it cost 6 % of a small step on CPU.
        whole_batch = jax.lax.with_sharding_constraint(batch, replicated(mesh))
        metrics = {
            "loss": mean,
            "grad_norm": grad_norm,
            "tokens": count,
            "finite": finite,
            "batch_digest": combine([fingerprint(x) for x in jax.tree.leaves(whole_batch)]),
        }
        if lr is not None:
            metrics["lr"] = jnp.asarray(lr(_updates_taken(state)), jnp.float32)
        return jax.device_put(new, shardings(plan)), metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings(plan), shardings(batch)),
        out_shardings=(shardings(plan), replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(
    model: Model, loss: Loss, plan: TrainState, batch: Any, *, gathered: frozenset[str] = frozenset()
) -> jax.stages.Wrapped:
    """Jitted (params, model state, batch) -> (sum of losses, number of targets), with the model in eval mode."""
    forward = _make_forward(model, loss, plan, gathered, is_training=False)

    def eval_step(params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        total, (count, _) = forward(params, model_state, batch, jax.random.key(0))
        return total, count

    replicate = replicated(plan.step.sharding.mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings(plan.params), shardings(plan.model_state), shardings(batch)),
        out_shardings=replicate,
    )


def make_finite_check(plan: TrainState) -> jax.stages.Wrapped:
    """Jitted state -> {path: bool}: which floating-point leaves hold only finite numbers.

    Model state may hold infinities on purpose (an attention mask), so that only NaN counts there.
    """

    def check(state: TrainState) -> dict[str, jax.Array]:
        state = jax.device_put(state, shardings(plan, "device"))
        return {
            path: ~jnp.isnan(x).any() if path.startswith("model_state/") else jnp.isfinite(x).all()
            for path, x in tree.flatten(state).items()
            if jnp.issubdtype(x.dtype, jnp.inexact)
        }

    return jax.jit(check, in_shardings=(shardings(plan),), out_shardings=replicated(plan.step.sharding.mesh))


def _make_forward(
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
            total, count = _checked_loss(loss, module, batch)
        return total, (count, model.unbind(module) if is_training else None)

    return forward


def _make_gradients(
    forward: Callable[..., Any], plan: TrainState, batch_plan: Any, accumulation_steps: int
) -> Callable[..., Any]:
    """(state, batch, key) -> (loss sum, target count, gradient of the loss sum, model state)."""
    params_shardings = shardings(plan.params)

    def one(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[Any, ...]:
        (total, (count, new_model_state)), grads = jax.value_and_grad(forward, has_aux=True)(
            params, model_state, batch, key
        )
        # Sharding the gradient like its parameter turns the all-reduce over fsdp into a reduce-scatter.
        return total, count, jax.lax.with_sharding_constraint(grads, params_shardings), new_model_state

    def accumulated(state: TrainState, batch: Any, key: jax.Array) -> tuple[Any, ...]:
        if accumulation_steps == 1:
            return one(state.params, state.model_state, batch, jax.random.fold_in(key, 0))

        def body(carry: tuple[Any, ...], inputs: tuple[Any, jax.Array]) -> tuple[tuple[Any, ...], None]:
            total, count, grads, model_state = carry
            microbatch, number = inputs
            t, c, g, model_state = one(state.params, model_state, microbatch, jax.random.fold_in(key, number))
            grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, g)
            return (total + t, count + c, grads, model_state), None

        microbatches = jax.tree.map(split, batch, shardings(batch_plan))
        first = jax.tree.map(lambda x: x[0], microbatches)
        count = jax.eval_shape(forward, state.params, state.model_state, first, key)[1][0]
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), state.params)
        start = (jnp.float32(0), jnp.zeros((), count.dtype), zeros, state.model_state)
        carry, _ = jax.lax.scan(body, start, (microbatches, jnp.arange(accumulation_steps)))
        return carry

    def split(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        # Microbatch i takes every accumulation_steps-th row, so that each device only reads rows it already holds.
        x = x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, P(None, *sharding.spec)))

    return accumulated


def _updates_taken(state: TrainState) -> jax.Array:
    """The optimizer's own count, which stands still when an update is skipped; the step, for one that keeps none."""
    counts = [x for path, x in tree.flatten(state.opt_state).items() if path.split("/")[-1] == "count" and x.ndim == 0]
    return counts[-1] if counts else state.step


def _checked_loss(loss: Loss, module: nnx.Module, batch: Any) -> tuple[jax.Array, jax.Array]:
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
