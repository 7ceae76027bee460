"""What of a run is planned: its state, its batch, and the programs that a step is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.run import Run
from jaxckpt.state.memory import leaf_bytes
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.nvme_programs import NvmeStep
from jaxckpt.update.two_programs import TwoPrograms


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
    gradient_bytes: int = 0
    """a device, of the gradients' buffers in pinned host memory; 0 where gradients are on the device alone"""


def subject_of(run: Run) -> Subject:
    """Traces the step of a run that has not been opened. Allocates nothing."""
    program: Any = run._program
    traced = program._step_fn.trace(program._plan, program._batch)
    buffers = gradient_buffers(program._step_fn)
    return Subject(run.plan, program._batch, run._placement, parts_of(traced), buffers)


def gradient_buffers(step: Any) -> int:
    """Bytes a device that a step of any kind keeps in pinned host memory for gradients, from step to step."""
    kept: Any = ()
    if isinstance(step, NvmeStep):
        kept = step.beginning.scratch_plan
    elif isinstance(step, TwoPrograms):
        kept = step.gradients.grads_plan
    away = [x for x in jax.tree.leaves(kept) if x.sharding.memory_kind == "pinned_host"]
    return sum(leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in away)


def parts_of(traced: Any) -> dict[str, Part]:
    """The programs of a traced step of any kind: one jit, gradients and update apart, or buckets from disks.

    Of the buckets from disks the largest stands for all, which differ in size alone.
    """
    if hasattr(traced, "programs"):
        times = {"gradients": traced.step._microbatches}
        return {name: Part(program, times.get(name, 1)) for name, program in traced.programs.items()}
    return {"step": Part(traced)}
