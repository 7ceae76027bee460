"""A step made of two compiled programs, gradients into host memory and the update from there, that is used like one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.host_gradients import HostGradients, Scratch

Metrics = dict[str, jax.Array]


class TwoPrograms:
    """(state, batch) -> (state, metrics), donating the state; traced, lowered and compiled like a jitted function.

    First the program of `gradients`, once for each microbatch, then `update(state, batch, sums, grads)`. In one program
    XLA would not bound the gradients on their way to the host and back (27 GiB of device memory for 13B parameters in the
    plan for a GPU, 5.5 in two).
    """

    def __init__(self, gradients: HostGradients, update: Callable[..., Any]) -> None:
        plan, batch = gradients.plan, gradients.batch
        whole = replicated(plan.step.sharding.mesh)
        self.gradients, self._compiled = gradients, None
        self._update = jax.jit(
            update,
            in_shardings=(shardings(plan), shardings(batch), whole, shardings(gradients.grads_plan)),
            out_shardings=(shardings(plan), whole),
            donate_argnums=0,
            keep_unused=True,  # params that are the rounded master weights
        )

    def trace(self, plan: TrainState, batch: Any) -> "Traced":
        update = self._update.trace(plan, batch, self.gradients.sums_plan, self.gradients.grads_plan)
        return Traced(self, {**self.gradients.trace(), "update": update})

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self._compiled is None:
            self._compiled = self.trace(self.gradients.plan, self.gradients.batch).lower().compile()
        return self._compiled(state, batch)

    def run(self, programs: Any, state: TrainState, batch: Any, scratch: Scratch) -> tuple[Any, Scratch]:
        """((new state, metrics), the scratch of the next step). `programs` are both, in any form."""
        parts = (state.params, state.model_state, state.step)
        sums, grads = self.gradients.run(programs, *parts, batch, scratch)
        return programs["update"](state, batch, sums, grads), (*scratch[:2], grads)


@dataclass(frozen=True)
class Traced:
    """Both programs, traced; `jaxpr` is that of the whole step as one function."""

    step: TwoPrograms
    programs: Mapping[str, Any]
    """"gradients" and "update", traced"""

    @property
    def parts(self) -> dict[str, tuple[Any, int]]:
        """{what it does: (the program, how often a step runs it)}"""
        return {
            name: (p, self.step.gradients.microbatches if name == "gradients" else 1)
            for name, p in self.programs.items()
        }

    @property
    def jaxpr(self) -> Any:
        step = self.step
        programs = {"gradients": step.gradients.jitted, "update": step._update}
        whole = lambda state, batch: step.run(programs, state, batch, step.gradients.traced_scratch())[0]
        return jax.jit(whole).trace(step.gradients.plan, step.gradients.batch).jaxpr

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
        self._step, self.programs, self._scratch = step, programs, None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        scratch = self._step.gradients.make_scratch() if self._scratch is None else self._scratch
        # Donated from here on; a call that fails leaves no buffers behind.
        self._scratch = None
        result, self._scratch = self._step.run(self.programs, state, batch, scratch)
        return result
