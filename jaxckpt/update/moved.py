"""What a step of any kind keeps in host memory beside the state, and what it moves to and from the devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt.state.memory import GroupSize, leaf_bytes
from jaxckpt.update.nvme_programs import NvmeStep
from jaxckpt.update.two_programs import TwoPrograms


@dataclass(frozen=True)
class Buffers:
    """Host memory that a step keeps from step to step beside the state, in bytes for each device."""

    gradients: int = 0
    """in pinned host memory, where a step of several programs puts them"""
    disks: int = 0
    """that state of the tier nvme is read into, updated in and written from"""
    cache: int = 0
    """of the same tier, what is not read again"""

    @property
    def total(self) -> int:
        return self.gradients + self.disks + self.cache


def host_buffers(step: Any) -> Buffers:
    """Of a step whose store need not be open."""
    kept: Any = ()
    disks = cache = 0
    if isinstance(step, NvmeStep):
        kept = step.beginning.scratch_plan
        devices = len(step.plan.step.sharding.addressable_devices)
        disks, cache = step.pipeline.buffer_bytes // devices, step.pipeline.cached_bytes // devices
    elif isinstance(step, TwoPrograms):
        kept = step.gradients.grads_plan
    away = [x for x in jax.tree.leaves(kept) if x.sharding.memory_kind == "pinned_host"]
    return Buffers(sum(leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in away), disks, cache)


@dataclass(frozen=True)
class DiskBytes:
    """What a step of this process reads from local disks, and writes."""

    read: int = 0
    written: int = 0


def disk_bytes(step: Any) -> DiskBytes:
    """Of a step whose store need not be open."""
    found = step.pipeline if isinstance(step, NvmeStep) else None
    return DiskBytes(found.bytes_read, found.bytes_written) if found else DiskBytes()


def moved_bytes(
    groups: Sequence[GroupSize], *, gradient_bytes: int, microbatches: int, is_marking: bool
) -> tuple[int, int]:
    """(to, from) each device in a step, by what lives where: `groups` of the state, and gradients as in `Buffers`.

    `is_marking`: whether what goes to disks is fetched once more, for its fingerprints.
    """
    # Forward and backward of each microbatch fetch a layer each, and a sum of gradients is fetched to be added to.
    layers = 2 * microbatches * off_device(groups, "params") + gradient_bytes * microbatches * (microbatches > 1)
    marks = is_marking * sum(g.bytes_per_device for g in stored(groups) if g.tier == "nvme")
    to_device = layers + fetched_by_update(groups, gradient_bytes) + marks
    return to_device, gradient_bytes * microbatches + off_device(groups)


def fetched_by_update(groups: Sequence[GroupSize], gradient_bytes: int) -> int:
    """Bytes a device: gradients from host memory, and all state off the device but params that are derived."""
    return gradient_bytes + sum(g.bytes_per_device for g in stored(groups) if g.tier != "device")


def off_device(groups: Sequence[GroupSize], *names: str) -> int:
    """Bytes a device of what does not live there, of all groups or of some."""
    return sum(g.bytes_per_device for g in groups if g.tier != "device" and (not names or g.group in names))


def stored(groups: Sequence[GroupSize]) -> list[GroupSize]:
    """What a snapshot holds: the narrow params are derived from the master weights, where there are any."""
    has_master = any(g.group == "master" for g in groups)
    return [g for g in groups if not (has_master and g.group == "params")]
