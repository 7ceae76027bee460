"""What there is room for, and who says so: the configuration's budget, options of the plan, the target, the system."""

import os
import shutil
from collections import Counter
from pathlib import Path

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


def host_limit(budget: Budget | None, given: str | None, *, is_here: bool, local_devices: int) -> Limit:
    """Of each process. `given`: of --host-memory; `is_here`: whether the run will be on the CPUs of this machine, whose
    devices' memory is the host's."""
    if not is_here:
        return _least(_given(budget and budget.host, "placement.budget.host", given, "--host-memory"))
    both = None
    if budget is not None and budget.host is not None and budget.device is not None:
        both = budget.host + budget.device * local_devices
    found = _given(both, "placement.budget, host and devices", given, "--host-memory")
    here, source = guards.host_memory_limit()
    return _least(found + ([(here, source)] if here is not None else []))


def nvme_limit(config: cf.RunConfig) -> Limit:
    """Of the disks of each process."""
    section = config.placement
    directories = section.nvme_dir or ()
    if odd := [d for d in directories if os.path.exists(d) and not os.path.isdir(d)]:
        raise PlanError(f"placement.nvme_dir: {', '.join(odd)}: not a directory; give one on a local disk")
    found = _given(section.budget.nvme, "placement.budget.nvme", None, "")
    # Stripes take the same share of each directory, so the disk with the least room for its share ends first.
    shares = Counter(map(file_system, directories))
    room = [free_bytes(d) * len(directories) // shares[file_system(d)] for d in directories]
    return _least(found + [(n, "free in placement.nvme_dir") for n in room])


def snapshot_limit(config: cf.RunConfig, nvme_bytes: int) -> Limit:
    """Of the run directory, of which state on disks takes `nvme_bytes` where that lies on the same file system."""
    if "://" in os.fspath(config.run_dir):
        return UNKNOWN
    directories = config.placement.nvme_dir or ()
    beside = [d for d in directories if file_system(d) == file_system(config.run_dir)]
    taken = nvme_bytes * len(beside) // len(directories) if directories else 0
    source = "free in run_dir" + (", beside state on nvme" if taken else "")
    return max(0, free_bytes(config.run_dir) - taken), source


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes free where a local directory is, or will be."""
    return shutil.disk_usage(_existing(directory)).free


def file_system(directory: str | os.PathLike[str]) -> int:
    """A number that is the same for directories on one file system."""
    return os.stat(_existing(directory)).st_dev


def _existing(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _given(budget: int | None, key: str, text: str | None, option: str) -> list[tuple[int, str]]:
    found = [] if budget is None else [(budget, key)]
    try:
        return [*found, (parse_bytes(text), option)] if text else found
    except DataError as e:
        raise PlanError(f"{option} {e}") from e


def _least(found: list[tuple[int, str]]) -> Limit:
    return min(found, default=UNKNOWN, key=lambda pair: pair[0])
