"""What a budget chooses for a configured run: the same for its plan and for the run itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from jaxckpt import config as cf
from jaxckpt.planning import report
from jaxckpt.planning.budget import Budget, Choice, DoesNotFit, Needs, choose_placement
from jaxckpt.planning.gpu import GpuPlan
from jaxckpt.planning.nearest import as_setting, placement_settings
from jaxckpt.planning.report import Use
from jaxckpt.planning.subject import Subject
from jaxckpt.snapshot.leaves import stored_leaves
from jaxckpt.state.memory import GroupSize, leaf_bytes
from jaxckpt.state.train_state import TrainState


def choose(
    config: cf.RunConfig,
    plan: TrainState,
    batch: Any,
    budget: Budget,
    *,
    host_bytes: int,
    working_bytes: int = 0,
    local_devices: int | None = None,
) -> Choice:
    """The cheapest placement of the state of `plan`, whose tiers do not matter, within `budget`.

    `host_bytes`: see `process_bytes`. `working_bytes`: of each device, beside state and gradients. Raises DoesNotFit, with what would do.
    """

    def within(staging_bytes: int | None) -> Choice:
        needs = Needs(
            working_bytes=max(report.batch_bytes(batch), working_bytes),
            gradient_bytes=gradient_bytes(config, report.state_groups(plan)),
            host_bytes=host_bytes,
            staging_bytes=staging_bytes,
            restore_bytes=config.snapshots.restore_bytes,
            cache_bytes=config.placement.nvme_cache_bytes or 0,
            sums_gradients=sums_gradients(config.optimizer),
        )
        return choose_placement(
            plan,
            budget,
            needs=needs,
            local_devices=local_devices,
            bucket_bytes=config.placement.bucket_bytes,
            nvme_dir=tuple(config.placement.nvme_dir or ()),
        )

    try:
        return within(config.snapshots.staging_bytes)
    except DoesNotFit as e:
        least = least_staging(plan)
        try:
            choice = within(least)
        except DoesNotFit:
            raise e from None
        # A budget chooses the placement itself.
        tiers = placement_settings(choice.placement) if config.placement.budget == cf.Budget() else []
        lines = [f"snapshots.staging_bytes={as_setting(least)}", *tiers]
        raise DoesNotFit(
            f"{e}\n  Or saves copy less aside, and training waits for them longer: {' '.join(lines)}"
        ) from None


def process_bytes() -> int:
    """Host memory of this process beside state and buffers: in steps of 256 MiB, two at least, so that a plan and the run that
    it is for, or two processes of one run, do not differ by what one of them happens to have now."""
    step = 256 << 20
    return max(2, math.ceil(psutil.Process().memory_info().rss / step)) * step


def device_parts(subject: Subject, programs: Mapping[str, GpuPlan]) -> Mapping[str, int]:
    """What each device holds at its fullest, in bytes by what it is for, as the compiler has planned `programs`."""
    groups = report.state_groups(subject.plan)
    # A program is not given all of the state; the rest of it stays where it is meanwhile.
    lasting = report.tier_bytes(groups, "device") + report.batch_bytes(subject.batch) + subject.activation_bytes
    if any(program.target == "cpu" for program in programs.values()):
        # What is in host memory counts among the arguments of its programs.
        lasting += report.tier_bytes(groups, "pinned_host") + subject.buffers.gradients
    elsewhere = lambda p: max(0, lasting - p.argument_bytes) if len(programs) > 1 else 0
    fullest = max(programs.values(), key=lambda p: p.peak_bytes + elsewhere(p))
    return {
        "state and activations elsewhere" if subject.activation_bytes else "state elsewhere": elsewhere(fullest),
        "state and batch": fullest.argument_bytes,
        "results beside them": fullest.output_bytes - fullest.alias_bytes,
        "while the step runs": fullest.temp_bytes,
    }


def device_use(
    config: cf.RunConfig, subject: Subject, programs: Mapping[str, GpuPlan], limit: int | None, limit_source: str
) -> Use:
    """What each device must hold: by the compiler, or where nothing was compiled by arithmetic."""
    if programs:
        parts = device_parts(subject, programs)
    else:
        groups = report.state_groups(subject.plan)
        are_params_here = all(g.tier == "device" for g in groups if g.group == "params")
        parts = {
            "state": report.tier_bytes(groups, "device"),
            "batch": report.batch_bytes(subject.batch),
            "activations between layers": subject.activation_bytes,
            "gradients": gradient_bytes(config, groups) if are_params_here else 0,
            "buckets": 2 * subject.bucket_bytes,  # the one at hand, as it was and as it will be
        }
    found = {k: v for k, v in parts.items() if v}
    return Use("device", found, limit, limit_source, is_lower_bound=not programs)


def gradient_bytes(config: cf.RunConfig, groups: Sequence[GroupSize]) -> int:
    """Bytes a device of the gradients, which are summed up in float32 over microbatches."""
    params = sum(g.bytes_per_device for g in groups if g.group == "params")
    has_master = any(g.group == "master" for g in groups)
    return 2 * params if has_master and config.optimizer.accumulation_steps > 1 else params


def sums_gradients(optimizer: cf.Optimizer) -> bool:
    """Whether a step keeps gradients until all are there."""
    return optimizer.accumulation_steps > 1 or optimizer.max_grad_norm is not None or optimizer.nonfinite == "skip"


def least_staging(plan: TrainState) -> int:
    """Bytes that a save must be given to keep within them: it holds three shards of any leaf at a time."""
    parts = (leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in stored_leaves(plan).values())
    return 3 * max(parts)
