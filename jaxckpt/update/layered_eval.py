"""The loss of a model whose parameters live off the device: one forward pass, every layer fetching its own weights.

From pinned host memory in one program, from local disks in a program for each part.
"""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.models.layers import Layers
from jaxckpt.nvme.pipeline import Pipeline
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.compiling import Compiler, in_turn
from jaxckpt.update.host import fetched
from jaxckpt.update.layer_programs import PartPrograms, traced_apart, visits_of
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


class DiskEvalStep:
    """The same for parameters of which some are in the tier nvme, in `store`, which must be open when it is called."""

    def __init__(
        self,
        model: Model,
        layers: Layers,
        plan: TrainState,
        batch: Any,
        store: NvmeStore,
        *,
        gathered: frozenset[str] = frozenset(),
    ) -> None:
        self._parts = parts = make_parts(model, layers, plan, batch, gathered, is_training=False)
        self._plan, self._batch, self._store = plan, batch, store
        self._programs = PartPrograms(parts, plan, batch, key_of=lambda step, number: jax.random.key(0))
        self._pipeline: Pipeline | None = None

    def __call__(self, params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        if self._pipeline is None:
            self._pipeline = Pipeline(self._store, (), visits=visits_of(self._plan, self._order))
        flat = tree.flatten(params)
        with self._pipeline.step() as flow:
            turns = enumerate(zip(self._compiled, self._order, strict=True))

            def call(*arguments: Any) -> Any:
                i, (program, names) = next(turns)
                taken = flow.take(i)
                result = in_turn(program([taken.get(f"params/{p}", flat[p]) for p in names], model_state, *arguments))
                flow.release(i, result)
                return result

            x, context, streams = call(batch)
            for _ in self._parts.layers:
                x = call(x, context)
            sums = call(batch, x, streams)
            flow.finish()
        return sums

    def close(self) -> None:
        """Ends the threads; the store is its owner's."""
        if self._pipeline is not None:
            self._pipeline.close()

    @property
    def _order(self) -> list[tuple[str, ...]]:
        return [self._parts.embed, *self._parts.layers, self._parts.head]

    @cached_property
    def _compiled(self) -> list[Any]:
        """A program for each part, in order."""
        run, parts, state = self._programs, self._parts, self._plan.model_state
        _, context, streams = run.entered
        whole = replicated(self._plan.step.sharding.mesh)
        sums = tuple(jax.ShapeDtypeStruct((), dtype, sharding=whole) for dtype in (jnp.float32, parts.count_dtype))

        def enter(weights: list[Any], state: Any, batch: Any) -> Any:
            return run.enter(weights, state, None, batch, None)

        def layer(weights: list[Any], state: Any, x: Any, context: Any, *, i: int) -> Any:
            return run.forward(i)(weights, state, None, None, x, context)

        def leave(weights: list[Any], state: Any, batch: Any, x: Any, streams: Any) -> Any:
            return run.leave(weights, state, None, batch, None, x, streams)

        traced = [traced_apart(enter, (run.given(parts.embed), state, self._batch), run.entered)]
        for i, names in enumerate(parts.layers):
            given = (run.given(names), state, run.xs[i], context)
            traced.append(traced_apart(partial(layer, i=i), given, run.xs[i + 1]))
        traced.append(traced_apart(leave, (run.given(parts.head), state, self._batch, run.xs[-1], streams), sums))
        return list(map(Compiler(), traced))
