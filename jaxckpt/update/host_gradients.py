"""Gradients of a model that is run a layer at a time, in pinned host memory: the first program of a step of several."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState

Scratch = tuple[Any, Any, dict[str, Any]]
"""the numbers of the microbatches, the sums at the start (zeros), and the gradients' buffers, which hold anything"""


class HostGradients:
    """`gradients(params, model_state, step, batch, number, sums, grads)` -> (sums, grads), jitted, and what it needs.

    It runs once for each of `microbatches`, adding up `sums`, (loss sum, target count, norm), and `grads`. The buffers of
    `grads` are written in place, step after step.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        plan: TrainState,
        batch: Any,
        grads_plan: Mapping[str, Any],
        count_dtype: Any,
        microbatches: int,
    ) -> None:
        whole = replicated(plan.step.sharding.mesh)
        grads = shardings(dict(grads_plan))
        self.plan, self.batch, self.grads_plan, self.microbatches = plan, batch, dict(grads_plan), microbatches
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=whole)
        self.sums_plan = (scalar(jnp.float32), scalar(count_dtype), scalar(jnp.float32))
        self.number_plan = scalar(jnp.int32)
        self.jitted = jax.jit(
            gradients,
            in_shardings=(*shardings((plan.params, plan.model_state, plan.step, batch)), whole, whole, grads),
            out_shardings=(whole, grads),
            donate_argnums=6,
            keep_unused=True,  # buffers that are overwritten unread, and must be there to be written
        )

    def trace(self) -> jax.stages.Traced:
        plan, sums = self.plan, self.sums_plan
        given = (plan.params, plan.model_state, plan.step, self.batch)
        return self.jitted.trace(*given, self.number_plan, sums, self.grads_plan)

    def run(
        self, program: Any, params: Any, model_state: Any, step: Any, batch: Any, scratch: Scratch
    ) -> tuple[Any, dict[str, Any]]:
        """(the sums, the gradients) of a whole batch, by the program in any form; uses the buffers in `scratch` up."""
        numbers, sums, grads = scratch
        for number in numbers:
            sums, grads = program(params, model_state, step, batch, number, sums, grads)
        return sums, grads

    def make_scratch(self) -> Scratch:
        """What the first step needs, as arrays where the program expects them."""
        put = lambda value, x: jax.device_put(np.asarray(value, x.dtype), x.sharding)
        numbers = [put(i, self.number_plan) for i in range(self.microbatches)]
        return numbers, tuple(put(0, x) for x in self.sums_plan), self._empty()

    def traced_scratch(self) -> Scratch:
        """The same while a step is traced."""
        grads = {path: jnp.zeros(x.shape, x.dtype) for path, x in self.grads_plan.items()}
        numbers = [jnp.int32(i) for i in range(self.microbatches)]
        sums = tuple(jnp.zeros((), x.dtype) for x in self.sums_plan)
        return numbers, sums, jax.device_put(grads, shardings(self.grads_plan))

    def _empty(self) -> dict[str, jax.Array]:
        """Buffers of the gradients, made one after the other: all of them have no room on the device."""
        make = {}
        result = {}
        for path, x in self.grads_plan.items():
            kind = (x.shape, x.dtype, x.sharding)
            if kind not in make:
                make[kind] = jax.jit(lambda x=x: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)
            result[path] = make[kind]().block_until_ready()
        return result
