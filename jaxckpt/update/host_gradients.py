"""Gradients of a model that is run a layer at a time, in pinned host memory: the first program of a step of several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState

Scratch = tuple[Any, Any, dict[str, Any]]
"""the numbers of the microbatches, the sums at the start (zeros), and the gradients' buffers, which hold anything"""


class Weights(Protocol):
    """Weights that come from local disks for a while, turn by turn."""

    def take(self, i: int) -> dict[str, Any]:
        """{path in the whole state: the leaf in pinned host memory}"""
        ...

    def release(self, i: int, after: Any) -> None:
        """Says that the leaves of turn `i` are not used any more once these arrays are computed."""
        ...


class GradientBuffers:
    """The sums over microbatches that make the gradients of a batch: (loss sum, target count, norm), and `grads`, whose
    buffers are written in place, step after step."""

    def __init__(
        self, plan: TrainState, batch: Any, grads_plan: Mapping[str, Any], count_dtype: Any, microbatches: int
    ) -> None:
        self.plan, self.batch, self.grads_plan, self.microbatches = plan, batch, dict(grads_plan), microbatches
        self.whole = replicated(plan.step.sharding.mesh)
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=self.whole)
        self.sums_plan = (scalar(jnp.float32), scalar(count_dtype), scalar(jnp.float32))
        self.number_plan = scalar(jnp.int32)

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


class HostGradients(GradientBuffers):
    """`gradients(params, model_state, step, batch, number, sums, grads)` -> (sums, grads), jitted; it runs once for each of
    `microbatches`."""

    visits: Sequence[Sequence[str]] = ()
    activation_bytes = 0

    def __init__(self, gradients: Callable[..., Any], *buffers: Any) -> None:
        """`buffers`: the arguments of GradientBuffers."""
        super().__init__(*buffers)
        plan, grads = self.plan, shardings(self.grads_plan)
        given = shardings((plan.params, plan.model_state, plan.step, self.batch))
        self.jitted = jax.jit(
            gradients,
            in_shardings=(*given, self.whole, self.whole, grads),
            out_shardings=(self.whole, grads),
            donate_argnums=6,
            keep_unused=True,  # buffers that are overwritten unread, and must be there to be written
        )

    def trace(self) -> dict[str, jax.stages.Traced]:
        plan, sums = self.plan, self.sums_plan
        given = (plan.params, plan.model_state, plan.step, self.batch)
        return {"gradients": self.jitted.trace(*given, self.number_plan, sums, self.grads_plan)}

    def run(
        self,
        programs: Mapping[str, Any],
        params: Any,
        model_state: Any,
        step: Any,
        batch: Any,
        scratch: Scratch,
        weights: Weights | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """(the sums, the gradients) of a whole batch, by the programs in any form; uses the buffers in `scratch` up.

        `weights` gives those that are not in `params`, in the order of `visits`."""
        numbers, sums, grads = scratch
        for number in numbers:
            sums, grads = programs["gradients"](params, model_state, step, batch, number, sums, grads)
        return sums, grads
