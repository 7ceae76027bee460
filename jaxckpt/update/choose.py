"""Which of the training steps a plan needs: all of one signature, (state, batch) -> (state, metrics)."""

from typing import Any

import jax
import optax

from jaxckpt.errors import PlanError
from jaxckpt.models.layers import Layers
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.nvme import tier_of
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.gradients import Loss
from jaxckpt.update.layered import make_layered_step
from jaxckpt.update.layered_eval import DiskEvalStep, make_layered_eval_step
from jaxckpt.update.nvme_step import make_nvme_step
from jaxckpt.update.step import make_eval_step, make_train_step


def make_any_step(
    model: Model,
    loss: Loss,
    tx: optax.GradientTransformation,
    plan: TrainState,
    batch: Any,
    *,
    layers: Layers | None,
    store: NvmeStore | None,
    placement: Placement,
    compute_dtype: Any,
    **settings: Any,
) -> Any:
    """The step for states laid out as `plan`; jitted, or traced, lowered and called like a jitted function.

    `store`: the files of the tier nvme, if anything is in it; it must be open when the step is called. `layers`: the model as a list of layer functions, which parameters off the device need. `settings`: the other arguments
    of `make_train_step`. Raises PlanError where no step can do it.
    """
    if not _do_params_leave(plan):
        settings |= {"placement": placement, "compute_dtype": compute_dtype}
        if store is None:
            return make_train_step(model, loss, tx, plan, batch, **settings)
        return make_nvme_step(model, loss, tx, plan, batch, store, **settings)
    if layers is None:
        raise PlanError(
            "parameters cannot live off the device here:\n  each layer must fetch its own weights, and the model is not known as "
            "a list of layer functions: give layers (a jaxckpt.Layers), or with a configuration model.layers; a llama needs "
            "scan_layers: false"
        )
    return make_layered_step(model, layers, tx, plan, batch, placement=placement, store=store, **settings)


def make_any_eval_step(
    model: Model,
    loss: Loss,
    plan: TrainState,
    batch: Any,
    *,
    layers: Layers | None,
    store: NvmeStore | None,
    gathered: frozenset[str],
) -> Any:
    """(params, model state, batch) -> (sum of losses, number of targets), with the model in eval mode; jitted, or called like
    a jitted function."""
    if layers is not None and store is not None and on_disk(tree.flatten(plan.params)):
        return DiskEvalStep(model, layers, plan, batch, store, gathered=gathered)
    if layers is not None and _do_params_leave(plan):
        return make_layered_eval_step(model, layers, plan, batch, gathered=gathered)
    return make_eval_step(model, loss, plan, batch, gathered=gathered)


def compiler_options(plan: TrainState, platform: str) -> dict[str, Any]:
    """What XLA must be told to compile a step of `plan` well on 'cpu', 'gpu' or another platform.

    By itself XLA's GPU compiler puts the end of each copy from and to the host right behind its start, on one card, so that
    nothing is hidden. Its latency-hiding scheduler overlapped half of the bytes in the plan of a small model whose layers
    fetch their weights, with no more memory. Where only the update streams it overlapped every copy to the host and half of
    those from there, as the forward and backward pass stand apart from it (`gradients.scheduled_apart`).
    On several cards it is on anyway, and half of the copies of a streamed update are beside computation.
    """
    tiers = {tier_of(x) for x in jax.tree.leaves(plan)}
    is_streamed = "pinned_host" in tiers and "nvme" not in tiers and plan.step.sharding.mesh.size == 1
    is_wanted = platform == "gpu" and (is_streamed or _do_params_leave(plan))
    return {"xla_gpu_enable_latency_hiding_scheduler": True} if is_wanted else {}


def _do_params_leave(plan: TrainState) -> bool:
    return any(tier_of(x) != "device" for x in jax.tree.leaves(plan.params))
