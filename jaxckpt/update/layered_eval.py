"""The loss of a model whose parameters live off the device: one forward pass, every layer fetching its own weights."""

from typing import Any

import jax

from jaxckpt.models.layers import Layers
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.host import fetched
from jaxckpt.update.parts import make_parts


def make_layered_eval_step(
    model: Model, layers: Layers, plan: TrainState, batch: Any, *, gathered: frozenset[str] = frozenset()
) -> jax.stages.Wrapped:
    """As `make_eval_step`, for the loss that `layers` are: (params, model state, batch) -> (sum of losses, targets)."""
    parts = make_parts(model, layers, plan, batch, gathered, is_training=False)
    params_plan = tree.flatten(plan.params)

    def eval_step(params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        flat = tree.flatten(params)
        fetch = lambda paths, after: fetched({path: flat[path] for path in paths}, params_plan, jax.tree.leaves(after))
        bound = parts.bind(model_state, jax.random.key(0))
        before, (x, context, streams) = batch, bound.embed(fetch(parts.embed, batch), batch)
        for i, names in enumerate(parts.layers):
            weights = fetch(names, before)  # while the layer before computes
            before, x = x, bound.layer(i, weights, x, context)
        return bound.head(fetch(parts.head, before), x, batch, streams)

    return jax.jit(
        eval_step,
        in_shardings=(shardings(plan.params), shardings(plan.model_state), shardings(batch)),
        out_shardings=replicated(plan.step.sharding.mesh),
    )
