"""What there is room for, and who says so: the configuration's budget, options of the plan, the target, the system."""

import os
import shutil
from pathlib import Path
from typing import Any

from jaxckpt import config as cf
from jaxckpt.data.command import parse_bytes
from jaxckpt.errors import DataError, PlanError
from jaxckpt.planning import guards
from jaxckpt.planning.budget import Budget
from jaxckpt.planning.targets import Target

Limit = tuple[int | None, str]
"""bytes, and what sets them; (None, '') where nobody has said"""

UNKNOWN: Limit = (None, "")


def budget_of(config: cf.RunConfig) -> Budget | None:
    """The budget of the configuration; None where it has none, and so names the tiers itself."""
    section = config.placement.budget
    if section == cf.Budget():
        return None
    return Budget(section.device, section.host, section.nvme if config.placement.nvme_dir else 0)


def device_limit(budget: Budget | None, given: str | None, target: Target | None) -> Limit:
    """Of each device. `given`: of --device-memory."""
    found = _given(budget and budget.device, "placement.budget.device", given, "--device-memory")
    if target is not None and not found:
        usable = target.usable_bytes()
        found.append((usable, f"{usable / target.memory_bytes:.0%} of {target.title}; XLA_CLIENT_MEM_FRACTION"))
    return _least(found)


def host_limit(budget: Budget | None, given: str | None, *, is_here: bool) -> Limit:
    """Of each process. `given`: of --host-memory; `is_here`: whether the run will be on this machine."""
    found = _given(budget and budget.host, "placement.budget.host", given, "--host-memory")
    here, source = guards.host_memory_limit() if is_here else UNKNOWN
    return _least(found + ([(here, source)] if here is not None else []))


def nvme_limit(config: cf.RunConfig) -> Limit:
    """Of the disks of each process."""
    section = config.placement
    if odd := [d for d in section.nvme_dir or () if os.path.exists(d) and not os.path.isdir(d)]:
        raise PlanError(f"placement.nvme_dir: {', '.join(odd)}: not a directory; give one on a local disk")
    found = _given(section.budget.nvme, "placement.budget.nvme", None, "")
    free = [free_bytes(d) for d in section.nvme_dir or ()]
    if known := [n for n in free if n is not None]:
        # Stripes take the same share of each, so the fullest disk ends first.
        found.append((min(known) * len(known), "free in placement.nvme_dir"))
    return _least(found)


def free_bytes(directory: Any) -> int | None:
    """Bytes free where a local directory is, or will be; None for gs:// and the like."""
    text = os.fspath(directory)
    if "://" in text:
        return None
    path = Path(text).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _given(budget: int | None, key: str, text: str | None, option: str) -> list[tuple[int, str]]:
    found = [] if budget is None else [(budget, key)]
    try:
        return [*found, (parse_bytes(text), option)] if text else found
    except DataError as e:
        raise PlanError(f"{option} {e}") from e


def _least(found: list[tuple[int, str]]) -> Limit:
    return min(found, default=UNKNOWN, key=lambda pair: pair[0])
