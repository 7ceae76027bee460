"""The ways out of a plan that does not fit, as settings that can be given as they stand."""

import math

from jaxckpt.planning.report import Use
from jaxckpt.state.plan import Placement


def placement_settings(placement: Placement, given: Placement = Placement()) -> list[str]:
    """The lines `placement.key=value` that make `placement` of the one that was given; what is as given is left out."""
    lines = [
        f"placement.{name}={getattr(placement, name)}"
        for name in ("params", "master", "opt_state", "grads", "bucket_bytes")
        if getattr(placement, name) != getattr(given, name)
    ]
    if placement.paths != given.paths:
        paths = "{" + ", ".join(f"'{pattern}': {tier}" for pattern, tier in placement.paths) + "}"
        # A setting on the command line is merged into the patterns of the file, which then still come first.
        lines.append(
            f"placement.paths={paths}" + (" (in the file, in the place of those there)" if given.paths else "")
        )
    if placement.nvme_dir and placement.nvme_dir != given.nvme_dir:
        lines.append(f"placement.nvme_dir=[{', '.join(placement.nvme_dir)}]")
    return lines


def saving_settings(host: Use, restoring: int, least: int) -> list[str]:
    """Settings with which saves and resuming take no more of the host memory than the rest leaves; none where less than
    `least` is left. `restoring`: what resuming takes now."""
    staging = host.parts.get("staging of a save", 0)
    rest = host.total - max(staging, restoring)
    left = whole_units((host.limit or 0) - rest)
    if left < least:
        return []
    wanted = {"staging_bytes": staging, "restore_bytes": restoring}
    return [f"snapshots.{name}={as_setting(left)}" for name, takes in wanted.items() if takes > left]


def snapshots_that_fit(snapshots: Use | None, keep: int) -> list[str]:
    """The setting with which as many snapshots are kept as there is room for; none where `keep` fit, or not even one."""
    if snapshots is None:
        return []
    one = snapshots.parts["one being written"]
    more = math.ceil((snapshots.total - (snapshots.limit or 0)) / one)
    return [f"snapshots.keep={keep - more}"] if keep > more else []


def whole_units(nbytes: int) -> int:
    """Bytes, less what is beyond a whole number of a unit that a reader likes: at most 1/16 less."""
    unit = next((u for u in (1 << 30, 1 << 20, 1 << 10) if nbytes >= 16 * u), 1)
    return nbytes // unit * unit


def as_setting(nbytes: int) -> str:
    """As a configuration takes it: "12GiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
