"""A step made of two compiled programs, gradients into host memory and the update from there, that is used like one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState

Metrics = dict[str, jax.Array]


class TwoPrograms:
    """(state, batch) -> (state, metrics), donating the state; traced, lowered and compiled like a jitted function.

    `gradients(params, model_state, step, batch, number, sums, grads)` runs once for each of `microbatches`, adding up
    `sums`, (loss sum, target count, norm), and `grads`; then `update(state, batch, sums, grads)`. In one program XLA
    would not bound the gradients on their way to the host and back (27 GiB of device memory for 13B parameters in the
    plan for a GPU, 5.5 in two). The gradients' buffers are written in place, step after step.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        update: Callable[..., Any],
        plan: TrainState,
        batch: Any,
        grads_plan: Mapping[str, Any],
        count_dtype: Any,
        microbatches: int,
    ) -> None:
        whole = replicated(plan.step.sharding.mesh)
        state, batch_shardings, grads = shardings(plan), shardings(batch), shardings(dict(grads_plan))
        self._plan, self._batch, self._grads_plan = plan, batch, dict(grads_plan)
        self._microbatches, self._compiled = microbatches, None
        scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=whole)
        self._sums_plan = (scalar(jnp.float32), scalar(count_dtype), scalar(jnp.float32))
        self._number_plan = scalar(jnp.int32)
        self._gradients = jax.jit(
            gradients,
            in_shardings=(state.params, state.model_state, state.step, batch_shardings, whole, whole, grads),
            out_shardings=(whole, grads),
            donate_argnums=6,
            keep_unused=True,  # buffers that are overwritten unread, and must be there to be written
        )
        self._update = jax.jit(
            update,
            in_shardings=(state, batch_shardings, whole, grads),
            out_shardings=(state, whole),
            donate_argnums=0,
            keep_unused=True,  # params that are the rounded master weights
        )

    def trace(self, plan: TrainState, batch: Any) -> "Traced":
        gradients = self._gradients.trace(
            plan.params, plan.model_state, plan.step, batch, self._number_plan, self._sums_plan, self._grads_plan
        )
        update = self._update.trace(plan, batch, self._sums_plan, self._grads_plan)
        return Traced(self, {"gradients": gradients, "update": update})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self._compiled is None:
            self._compiled = self.trace(self._plan, self._batch).lower().compile()
        return self._compiled(state, batch)

    def run(
        self, programs: Any, state: TrainState, batch: Any, numbers: Sequence[Any], sums: Any, grads: Any
    ) -> tuple[Any, Any]:
        """((new state, metrics), the gradients' buffers). `programs` are both, in any form; `numbers` count the
        microbatches and `sums` are zeros."""
        gradients, update = programs["gradients"], programs["update"]
        for number in numbers:
            sums, grads = gradients(state.params, state.model_state, state.step, batch, number, sums, grads)
        return update(state, batch, sums, grads), grads

    def zeros(self) -> tuple[list[Any], Any]:
        """The numbers of the microbatches and the sums at the start, as arrays where the programs expect them."""
        put = lambda value, x: jax.device_put(np.asarray(value, x.dtype), x.sharding)
        numbers = [put(i, self._number_plan) for i in range(self._microbatches)]
        return numbers, tuple(put(0, x) for x in self._sums_plan)

    def empty_gradients(self) -> dict[str, jax.Array]:
        """Buffers of the gradients, made one after the other: all of them have no room on the device."""
        make = {}
        result = {}
        for path, x in self._grads_plan.items():
            kind = (x.shape, x.dtype, x.sharding)
            if kind not in make:
                make[kind] = jax.jit(lambda x=x: jnp.zeros(x.shape, x.dtype), out_shardings=x.sharding)
            result[path] = make[kind]().block_until_ready()
        return result


@dataclass(frozen=True)
class Traced:
    """Both programs, traced; `jaxpr` is that of the whole step as one function."""

    step: TwoPrograms
    programs: Mapping[str, Any]
    """"gradients" and "update", traced; a step runs the first once a microbatch, then the second"""

    @property
    def jaxpr(self) -> Any:
        step = self.step

        def whole(state: TrainState, batch: Any) -> Any:
            grads = {path: jnp.zeros(x.shape, x.dtype) for path, x in step._grads_plan.items()}
            grads = jax.device_put(grads, shardings(step._grads_plan))
            programs = {"gradients": step._gradients, "update": step._update}
            numbers = [jnp.int32(i) for i in range(step._microbatches)]
            sums = tuple(jnp.zeros((), x.dtype) for x in step._sums_plan)
            return step.run(programs, state, batch, numbers, sums, grads)[0]

        return jax.jit(whole).trace(step._plan, step._batch).jaxpr

    def lower(self) -> "Lowered":
        return Lowered(self.step, {name: program.lower() for name, program in self.programs.items()})


@dataclass(frozen=True)
class Lowered:
    step: TwoPrograms
    programs: Mapping[str, Any]

    def compile(self, options: Any = None) -> "Compiled":
        return Compiled(self.step, {name: program.compile(options) for name, program in self.programs.items()})


class Compiled:
    """Callable (state, batch) -> (state, metrics); owns the gradients' buffers, made at the first call."""

    def __init__(self, step: TwoPrograms, programs: Mapping[str, Any]) -> None:
        self._step, self.programs, self._grads = step, programs, None
        self._numbers, self._zeros = step.zeros()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        grads = self._step.empty_gradients() if self._grads is None else self._grads
        # Donated from here on; a call that fails leaves no buffers behind.
        self._grads = None
        result, self._grads = self._step.run(self.programs, state, batch, self._numbers, self._zeros, grads)
        return result
