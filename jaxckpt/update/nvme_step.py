"""The training step for state on local disks: one jit for the gradient, then one for each bucket as it comes from the disk.

What a bucket's jit computes is what the bucket computes in the step for pinned host memory; only where its state comes
from differs, and so the bits of all tiers are the same.
"""

from functools import partial
from typing import Any

import jax
import optax

from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.buckets import make_buckets
from jaxckpt.update.disk_bucket import Begun, DiskBucket, Leaves
from jaxckpt.update.gradients import Loss, kept, make_gradient_phase, mean_gradient
from jaxckpt.update.nvme_begin import OneProgram, given_of
from jaxckpt.update.nvme_programs import NvmeStep, check_on_disk
from jaxckpt.update.split import split_update
from jaxckpt.update.step import learning_rate


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
) -> NvmeStep:
    """The step (state, batch) -> (state, metrics) of a plan with leaves in the tier nvme, whose files `store` holds.

    `is_marking`: see NvmeStep. All else as in `make_train_step`. Raises PlanError where the optimizer cannot be split, or
    needs a leaf on disk at another time than its bucket's.
    """
    weights_plan = plan.params if plan.master is None else plan.master
    split = split_update(tx, weights_plan)
    check_on_disk(split, plan)
    phase = make_gradient_phase(
        model, loss, plan, batch, seed=seed, accumulation_steps=accumulation_steps, max_grad_norm=max_grad_norm,
        gathered=gathered,
    )  # fmt: skip
    is_skipping = nonfinite == "skip"
    # On CPU the last bits of an update depend on whether XLA fuses the gradient's division and clipping with it. In the step
    # with all state on the device it does, unless a norm inside the optimizer reads the clipped gradient, too: then it is
    # computed once for both.
    is_shared = bool(split.global_grads) and max_grad_norm is not None

    def begin(params: Any, model_state: Any, step: jax.Array, shared: Leaves, read: Leaves, batch: Any) -> Begun:
        """See `Given`."""
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
        sums = grads if is_shared else tree.flatten(found.sums)
        return Begun(sums, decided, step + 1, model_state_now, changed, metrics)

    buckets = make_buckets(split, weights_plan, plan.opt_state, bucket_bytes=placement.bucket_bytes)
    finish = None if is_shared else partial(mean_gradient, max_norm=max_grad_norm)
    updates = [DiskBucket(split, bucket, plan=plan, finish=finish, is_skipping=is_skipping) for bucket in buckets]
    beginning = OneProgram(begin, plan, given_of(split, plan, batch))
    cache_bytes = placement.nvme_cache_bytes
    return NvmeStep(plan, split, beginning, updates, store, cache_bytes=cache_bytes, is_marking=is_marking)
