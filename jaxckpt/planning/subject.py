"""What of a run is planned: its state, its batch, and the programs that a step is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxckpt.planning.budget import largest_bucket
from jaxckpt.run import Run
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.moved import Buffers, DiskBytes, disk_bytes, host_buffers
from jaxckpt.update.nvme_programs import NvmeStep


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
    bucket_bytes: int = 0
    """of each device: the largest bucket that streams through the update"""
    buffers: Buffers = field(default_factory=Buffers)
    disk_bytes: DiskBytes = field(default_factory=DiskBytes)
    """of all devices"""
    activation_bytes: int = 0
    """of each device, kept from one program of a step to another"""


def outline_of(run: Run) -> tuple[TrainState, Any]:
    """The plan of the state and of the batch of a run that has not been opened."""
    return run.plan, run._program._batch


def subject_of(run: Run) -> Subject:
    """Traces the step of a run that has not been opened. Allocates nothing."""
    program: Any = run._program
    traced = program._step_fn.trace(program._plan, program._batch)
    buffers, placement = host_buffers(program._step_fn), run._placement
    if buffers.gradients:
        placement = replace(placement, grads="pinned_host")  # asked for or not
    bucket = largest_bucket(run.plan, placement.bucket_bytes)
    step = program._step_fn
    activations = step.beginning.activation_bytes if isinstance(step, NvmeStep) else 0
    return Subject(
        run.plan, program._batch, placement, parts_of(traced), bucket, buffers, disk_bytes(step), activations
    )


def parts_of(traced: Any) -> dict[str, Part]:
    """The programs of a traced step of any kind: one jit, gradients and update apart, or buckets from disks.

    Of the buckets from disks the largest stands for all, which differ in size alone.
    """
    if hasattr(traced, "parts"):
        return {name: Part(*part) for name, part in traced.parts.items()}
    return {"step": Part(traced)}
