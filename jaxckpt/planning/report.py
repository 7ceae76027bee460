"""The plan of a run as numbers: what each memory must hold, what fits, and how long a step takes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from jaxckpt.planning.bandwidth import Rates
from jaxckpt.planning.budget import COPIES_ON_DISK, bounded
from jaxckpt.planning.gpu import GpuPlan
from jaxckpt.state.memory import GroupSize, group_sizes, leaf_bytes
from jaxckpt.state.plan import Placement
from jaxckpt.update.moved import Buffers, DiskBytes, fetched_by_update, moved_bytes, off_device, stored

A_BUCKET = "update of a bucket"
"""the program, of a step with state on disks, that stands for those of all buckets: the largest"""


@dataclass(frozen=True)
class Use:
    """What one memory must hold, in bytes, by what it is for."""

    name: str
    parts: Mapping[str, int]
    limit: int | None = None
    """None: nobody has said"""
    limit_source: str = ""
    is_lower_bound: bool = False
    """whether there is more that nobody knows before the step is compiled"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "fits": self.fits}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, each as if it ran alone, and of all together."""

    compute_s: float | None
    h2d_s: float | None
    d2h_s: float | None
    disk_s: float | None
    exposed_s: float | None
    """of the transfers beside which the schedule computes nothing"""
    step_s: float | None
    """the longest of the three queues (compute with what it waits for, copies, disks); None where a rate is unknown"""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves: over each device's bus, and on each process's disks."""

    h2d: int = 0
    d2h: int = 0
    exposed_h2d: int = 0
    exposed_d2h: int = 0
    disk_read: int = 0
    disk_write: int = 0


@dataclass(frozen=True)
class PlanReport:
    target: str
    devices: int
    processes: int
    placement: Placement
    groups: Sequence[GroupSize]
    uses: Sequence[Use]
    programs: Mapping[str, GpuPlan]
    traffic: Traffic
    rates: Rates
    step: StepTime
    steps: int
    problems: Sequence[str] = ()
    nearest: Sequence[str] = ()
    """settings of the nearest placement that fits, or why there is none; empty where this one does"""
    notes: Sequence[str] = field(default=())

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON holds."""
        return {
            "target": self.target,
            "devices": self.devices,
            "processes": self.processes,
            "fits": self.fits,
            "problems": list(self.problems),
            "nearest": list(self.nearest),
            "placement": asdict(self.placement),
            "groups": [asdict(g) for g in self.groups],
            "memory": {use.name: use.to_dict() for use in self.uses},
            "programs": {name: plan.to_dict() for name, plan in self.programs.items()},
            "traffic": asdict(self.traffic),
            "rates": self.rates.to_dict(),
            "step": asdict(self.step),
            "steps": self.steps,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Saving:
    """How a run saves, as far as memory and disk go."""

    staging_bytes: int | None
    """None: as much as the state that must be copied"""
    restore_bytes: int | None
    snapshots_kept: int


def tier_bytes(groups: Sequence[GroupSize], tier: str) -> int:
    """Bytes a device of all groups in one tier."""
    return sum(g.bytes_per_device for g in groups if g.tier == tier)


def host_use(
    groups: Sequence[GroupSize],
    buffers: Buffers,
    saving: Saving,
    *,
    local_devices: int,
    process_bytes: int,
    programs: Mapping[str, GpuPlan] = MappingProxyType({}),
    limit: int | None = None,
    limit_source: str = "",
) -> Use:
    """Host memory of one process. `programs`: what the compiler has planned, if it was asked."""
    copied, whole = saved_bytes(groups, local_devices)
    pinned = _pinned_bytes(tier_bytes(groups, "pinned_host") + buffers.gradients, programs) - buffers.gradients
    staging, restoring = bounded(copied, saving.staging_bytes), bounded(whole, saving.restore_bytes)
    parts = {
        "state": pinned * local_devices,
        "gradients": buffers.gradients * local_devices,
        "buffers for disks": buffers.disks * local_devices,
        "cache for disks": buffers.cache * local_devices,
        "staging of a save": staging,
        "more while it resumes": max(0, restoring - staging),
        "the process itself": process_bytes,
    }
    return Use("host", {k: v for k, v in parts.items() if v}, limit, limit_source)


def _pinned_bytes(lasting: int, programs: Mapping[str, GpuPlan]) -> int:
    """Of each device while a step runs. No program is given all that lasts (state and gradients), where there are several;
    what it makes beside its arguments it takes more."""
    more = lambda p: p.host_peak_bytes - p.host_argument_bytes
    return max((max(lasting, p.host_argument_bytes) + more(p) for p in programs.values()), default=lasting)


def saved_bytes(groups: Sequence[GroupSize], local_devices: int) -> tuple[int, int]:
    """(bytes that a save copies, bytes that it holds) of one process: the next step would overwrite what is copied, also in
    host memory; on disks a save makes links. Copies of one shard on several devices are saved and read once."""
    held = [(g, min(g.bytes_per_device * local_devices, g.total_bytes)) for g in stored(groups)]
    return sum(n for g, n in held if g.tier != "nvme"), sum(n for _, n in held)


def on_disk_bytes(groups: Sequence[GroupSize], local_devices: int) -> int:
    """Bytes of one process's state of the tier nvme, once."""
    return sum(min(g.bytes_per_device * local_devices, g.total_bytes) for g in groups if g.tier == "nvme")


def disk_uses(
    groups: Sequence[GroupSize],
    saving: Saving,
    *,
    local_devices: int,
    snapshot_room: int | None,
    nvme_room: int | None,
    snapshot_source: str = "free in run_dir",
    nvme_source: str = "free in placement.nvme_dir",
) -> list[Use]:
    """What the snapshots of the whole run take where they are saved, and the tier nvme on each process's disks."""
    whole = sum(g.total_bytes for g in stored(groups))
    uses = [
        Use(
            "snapshots",
            {f"{saving.snapshots_kept} kept": whole * saving.snapshots_kept, "one being written": whole},
            snapshot_room,
            snapshot_source,
        )
    ]
    if nvme := on_disk_bytes(groups, local_devices):
        parts = {what: count * nvme for what, count in COPIES_ON_DISK.items()}
        uses.append(Use("nvme", parts, nvme_room, nvme_source))
    return uses


def traffic_of(
    groups: Sequence[GroupSize],
    programs: Mapping[str, GpuPlan],
    times: Mapping[str, int],
    *,
    gradient_bytes: int,
    disk: DiskBytes,
    microbatches: int,
    is_marking: bool = False,
) -> Traffic:
    """What a step moves: by the compiled schedules, or by what lives where if there are none.

    `times`: how often a step runs each program. `gradient_bytes`: of `Buffers`. `disk`: of each process. `is_marking`: whether what
    goes to disks is fetched once more, for its fingerprints. Of the buckets of state on disks only the largest was
    compiled: all of them move what lives where, the share of it that is exposed is the largest one's.
    """
    if programs:
        marks = {"h2d": tier_bytes(stored(groups), "nvme") * is_marking, "d2h": 0}
        update = {"h2d": fetched_by_update(groups, gradient_bytes), "d2h": off_device(groups)}
        moved = lambda way, of: sum(times[k] * of(p.host) for k, p in programs.items() if k != A_BUCKET)
        total = {way: moved(way, lambda host, way=way: host.total(way)[1]) for way in update}
        bare = {way: moved(way, lambda host, way=way: host.exposed_bytes(way)) for way in update}
        if A_BUCKET in programs:
            for way, nbytes in update.items():
                total[way] += nbytes + marks[way]
                bare[way] += round(nbytes * _exposed_share(programs[A_BUCKET], way)) + marks[way]
    else:
        to_device, from_device = moved_bytes(
            groups, gradient_bytes=gradient_bytes, microbatches=microbatches, is_marking=is_marking
        )
        bare = total = {"h2d": to_device, "d2h": from_device}
    return Traffic(total["h2d"], total["d2h"], bare["h2d"], bare["d2h"], disk.read, disk.written)


def _exposed_share(program: GpuPlan, way: str) -> float:
    total = program.host.total(way)[1]
    return program.host.exposed_bytes(way) / total if total else 1.0


def step_time(flops: int, devices: int, traffic: Traffic, rates: Rates) -> StepTime:
    """XLA puts the copies of both directions on one queue, so that their times add up; compute runs beside it."""
    over = lambda n, rate: 0.0 if not n else None if rate is None else n / rate.per_s
    compute = over(flops / devices, rates.flops)
    h2d, d2h = over(traffic.h2d, rates.h2d), over(traffic.d2h, rates.d2h)
    exposed = _sum(over(traffic.exposed_h2d, rates.h2d), over(traffic.exposed_d2h, rates.d2h))
    disk = _sum(over(traffic.disk_read, rates.disk_read), over(traffic.disk_write, rates.disk_write))
    queues = [_sum(compute, exposed), _sum(h2d, d2h), disk]
    known = [q for q in queues if q is not None]
    return StepTime(compute, h2d, d2h, disk, exposed, max(known) if len(known) == len(queues) else None)


def problems_of(uses: Sequence[Use], programs: Mapping[str, GpuPlan]) -> list[str]:
    """What does not fit, and what no step may do, a line each."""
    found = [
        f"{use.name}: {size(use.total)} needed{' at least' if use.is_lower_bound else ''}, {size(use.limit or 0)} there "
        f"({use.limit_source}): {size(use.total - (use.limit or 0))} too much"
        for use in uses
        if not use.fits
    ]
    return found + [f"{name}: {problem}" for name, plan in programs.items() for problem in plan.problems()]


def state_groups(plan: Any) -> list[GroupSize]:
    """The groups of the plan, the largest first within the order of the state; empty ones left out."""
    return [g for g in group_sizes(plan) if g.total_bytes]


def batch_bytes(batch: Any) -> int:
    """Bytes a device of one batch."""
    return sum(leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(batch))


def size(count: float) -> str:
    """Bytes for a reader: "1.25 GiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def _sum(*seconds: float | None) -> float | None:
    return None if any(s is None for s in seconds) else float(sum(s for s in seconds if s is not None))
