"""What of a run is planned: its state, its batch, and the programs that a step is made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.run import Run
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState


@dataclass(frozen=True)
class Part:
    """A traced program, and how often a step runs it."""

    traced: Any
    times: int = 1


@dataclass(frozen=True)
class Subject:
    plan: TrainState
    batch: Any
    placement: Placement
    programs: Mapping[str, Part]
    """a step runs them one after the other"""


def subject_of(run: Run) -> Subject:
    """Traces the step of a run that has not been opened. Allocates nothing."""
    program: Any = run._program
    traced = program._step_fn.trace(program._plan, program._batch)
    return Subject(run.plan, program._batch, run._placement, parts_of(traced))


def parts_of(traced: Any) -> dict[str, Part]:
    """The programs of a traced step of any kind: one jit, gradients and update apart, or buckets from disks.

    Of the buckets from disks the largest stands for all, which differ in size alone.
    """
    if hasattr(traced, "programs"):
        times = {"gradients": traced.step._microbatches}
        return {name: Part(program, times.get(name, 1)) for name, program in traced.programs.items()}
    if hasattr(traced, "begin"):
        largest = max(traced.updates, key=_argument_bytes)
        return {"gradients": Part(traced.begin), "update of a bucket": Part(largest)}
    return {"step": Part(traced)}


def _argument_bytes(traced: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(traced.args_info))
