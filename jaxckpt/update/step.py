"""One pure training step, jitted once: (state, batch) -> (state, metrics)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.nvme import resident, tier_of
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import Model, TrainState, narrow
from jaxckpt.update.buckets import make_buckets
from jaxckpt.update.chain import make_streamed_update
from jaxckpt.update.gradients import Gradients, kept, make_forward, make_gradient_phase
from jaxckpt.update.gradients import Loss as Loss
from jaxckpt.update.host import fetched
from jaxckpt.update.split import split_update


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
    placement: Placement = Placement(),
) -> jax.stages.Wrapped:
    """The jitted step for states laid out as `plan` and batches laid out as `batch` (ShapeDtypeStructs); donates the state.

    Parameters whose path is in `gathered` are made whole before the model sees them, see `make_forward`.

    The gradient is that of (sum of losses) / (number of targets) over the whole batch, exact for any padding and
    any `accumulation_steps`. `max_grad_norm` clips as optax.clip_by_global_norm does. With `nonfinite="skip"` an
    update whose loss or gradient is not finite changes nothing but `step`.

    Metrics, all replicated scalars: loss, grad_norm (before clipping), tokens (targets), lr (if given), finite,
    batch_digest (uint32[2]).
    """
    mesh = plan.step.sharding.mesh
    gradient_phase = make_gradient_phase(
        model,
        loss,
        plan,
        batch,
        seed=seed,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        gathered=gathered,
        is_apart=_is_streamed(plan) and plan.step.sharding.mesh.size == 1,
    )

    is_skipping = nonfinite == "skip"
    update = _make_update(tx, plan, placement, compute_dtype=compute_dtype, is_skipping=is_skipping)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        found = gradient_phase(state.params, state.model_state, state.step, batch)
        metrics, model_state = found.metrics, found.model_state
        if is_skipping:
            model_state = kept(found.finite, model_state, state.model_state)
        new = update(state, found)
        new = TrainState(state.step + 1, new.params, new.master, new.opt_state, model_state)
        if lr is not None:
            metrics = {**metrics, "lr": learning_rate(lr, state)}
        return jax.device_put(new, shardings(plan)), metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings(plan), shardings(batch)),
        out_shardings=(shardings(plan), replicated(mesh)),
        donate_argnums=0,
    )


def _make_update(
    tx: optax.GradientTransformation, plan: TrainState, placement: Placement, *, compute_dtype: Any, is_skipping: bool
) -> Callable[[TrainState, Gradients], TrainState]:
    """(state, gradients) -> the state with what the optimizer changes, on the device at once or in buckets."""
    if not _is_streamed(plan):
        return make_whole_update(tx, compute_dtype=compute_dtype, is_skipping=is_skipping)
    weights_plan = plan.params if plan.master is None else plan.master
    split = split_update(tx, weights_plan)
    buckets = make_buckets(split, weights_plan, plan.opt_state, bucket_bytes=placement.bucket_bytes)
    return make_streamed_update(split, buckets, plan, is_skipping=is_skipping)


def _is_streamed(plan: TrainState) -> bool:
    return any(tier_of(x) != "device" for x in jax.tree.leaves((plan.params, plan.master, plan.opt_state)))


def make_whole_update(
    tx: optax.GradientTransformation, *, compute_dtype: Any, is_skipping: bool
) -> Callable[[TrainState, Gradients], TrainState]:
    """(state, gradients) -> the state with what the optimizer changes: optax on the whole tree at once."""

    def update(state: TrainState, found: Gradients) -> TrainState:
        weights = state.params if state.master is None else state.master
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), found.grads, weights)
        updates, opt_state = tx.update(grads, state.opt_state, weights)
        new_weights = optax.apply_updates(weights, updates)
        if is_skipping:
            new_weights, opt_state = kept(found.finite, (new_weights, opt_state), (weights, state.opt_state))
        params, master = (new_weights, None) if state.master is None else narrow(new_weights, compute_dtype)
        return TrainState(state.step, params, master, opt_state, state.model_state)

    return update


def make_eval_step(
    model: Model, loss: Loss, plan: TrainState, batch: Any, *, gathered: frozenset[str] = frozenset()
) -> jax.stages.Wrapped:
    """Jitted (params, model state, batch) -> (sum of losses, number of targets), with the model in eval mode."""
    forward = make_forward(model, loss, plan, gathered, is_training=False)

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
    """Jitted state -> {path: bool}: which floating-point leaves hold only finite numbers; not those on disk (`resident`).

    Model state may hold infinities on purpose (an attention mask), so that only NaN counts there.
    """

    leaves_plan = tree.flatten(resident(plan))

    def check(state: TrainState) -> dict[str, jax.Array]:
        found: dict[str, jax.Array] = {}
        for path, x in tree.flatten(state).items():
            if jnp.issubdtype(x.dtype, jnp.inexact):
                # One after the other: what lives in host memory has no room on the device all at once.
                x = fetched({path: x}, leaves_plan, list(found.values())[-1:])[path]
                found[path] = ~jnp.isnan(x).any() if path.startswith("model_state/") else jnp.isfinite(x).all()
        return found

    return jax.jit(check, in_shardings=(shardings(resident(plan)),), out_shardings=replicated(plan.step.sharding.mesh))


def learning_rate(lr: optax.Schedule, state: TrainState) -> jax.Array:
    """float32[] of the update that comes next."""
    return jnp.asarray(lr(_updates_taken(state)), jnp.float32)


def _updates_taken(state: TrainState) -> jax.Array:
    """The optimizer's own count, which stands still when an update is skipped; the step, for one that keeps none."""
    counts = [x for path, x in tree.flatten(state.opt_state).items() if path.split("/")[-1] == "count" and x.ndim == 0]
    return counts[-1] if counts else state.step
