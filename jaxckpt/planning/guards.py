"""What must hold before the backend starts: limits of the process that a run with state in host memory would run into.

Pure functions of numbers, an environment and paths, so that they can be asked about other machines than this one.
"""

import math
import resource
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxckpt.errors import PlanError, listed

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""the environment variable with the size in GiB of XLA's pool of pinned host memory, read when the backend starts"""
_POOL_DEFAULT = 64
_POOL_SLACK = 1.15
"""of the pool over what the plan puts into it: it is an arena, whose pieces do not fill it up"""


@dataclass(frozen=True)
class Miscompilation:
    feature: str
    fixed_in: tuple[int, ...]
    """the first version of jaxlib that may be trusted"""
    what: str


KNOWN = (
    Miscompilation(
        "activations offloaded under scan",
        (0, 12, 0),
        "XLA:GPU may read the offloaded residuals of a scan in reverse order, and the gradients are wrong without an error "
        "(openxla/xla pull requests 46231 and 46308). Set model.scan_layers to false, or use a later jax",
    ),
)


def pool_gib(pinned_bytes: int, environ: Mapping[str, str], *, is_started: bool = False) -> int | None:
    """The size in GiB that the pool of pinned host memory must be set to for one process; None where it is large enough.

    Raises PlanError where the environment sets one that is too small, or the backend has started with one.
    """
    text = environ.get(POOL, "")
    if text and not text.isdecimal():
        raise PlanError(f"{POOL}: {text!r} is no number of GiB")
    has = int(text) if text else _POOL_DEFAULT
    needed = math.ceil(pinned_bytes * _POOL_SLACK / 2**30)
    if needed <= has:
        return None
    if text or is_started:
        raise PlanError(
            f"{POOL}: {has} GiB{'' if text else ', the default,'} and this run puts {pinned_bytes / 2**30:.1f} GiB of state "
            f"into pinned host memory in each process; set it to {needed} or more"
            + (", in the environment of the process: JAX has started already." if is_started else ".")
        )
    return needed


def set_pool(pinned_bytes: int, environ: MutableMapping[str, str], *, is_started: bool = False) -> None:
    """Sets the pool's size for `pinned_bytes`, where it is too small and nobody has set one. Raises as `pool_gib`."""
    wanted = pool_gib(pinned_bytes, environ, is_started=is_started)
    if wanted is not None:
        environ[POOL] = str(wanted)


def check_limits(
    pinned_bytes: int,
    host_bytes: int,
    *,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    locked_limit: int | None = None,
) -> list[str]:
    """Warnings, a line each. Raises PlanError where `host_bytes` are more than this process may ever have.

    `locked_limit`: bytes that the process may lock (`ulimit -l`); -1: no limit; None: asked of the system.
    """
    limit, source = host_memory_limit(proc=proc, cgroups=cgroups)
    if limit is not None and host_bytes > limit:
        raise PlanError(
            f"host memory: this run needs {host_bytes / 2**30:.1f} GiB in each process, and {source} allows "
            f"{limit / 2**30:.1f} GiB. Move less to pinned_host (placement, or nvme for a part), or raise the limit."
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_limit is None else locked_limit
    if pinned_bytes and locked not in (-1, resource.RLIM_INFINITY) and locked < pinned_bytes:
        return [
            f"ulimit -l is {locked / 2**20:.0f} MiB and {pinned_bytes / 2**30:.1f} GiB are to be pinned; where the driver counts "
            "pinned memory (some containers), that fails: raise it (docker run --ulimit memlock=-1)"
        ]
    return []


def host_memory_limit(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, str]:
    """(bytes, what sets them): the least of the machine's memory and every cgroup this process is in; (None, '') if unknown."""
    found = [*_machine(proc), *_cgroup_limits(proc, cgroups)]
    return min(found, default=(None, ""), key=lambda pair: pair[0])


def check_versions(features: Sequence[str], jaxlib_version: str) -> None:
    """Raises PlanError for every one of `features` that this jaxlib is known to compile wrongly."""
    version = tuple(int(part) for part in jaxlib_version.split(".")[:3] if part.isdecimal())
    bad = [k for k in KNOWN if k.feature in features and version < k.fixed_in]
    if bad:
        lines = [f"{k.feature}: {k.what} (from {'.'.join(map(str, k.fixed_in))} on)." for k in bad]
        raise PlanError(f"jaxlib {jaxlib_version} is known to compile this wrongly:\n{listed(lines)}")


def _machine(proc: Path) -> Iterator[tuple[int, str]]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024, "the machine's memory"


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.strip().split(":", 2)
        if number == "0" and not controllers:  # version 2: one hierarchy, every level may set a limit
            yield from _walk(cgroups, path, "memory.max")
            yield from _walk(cgroups / "unified", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _walk(cgroups / "memory", path, "memory.limit_in_bytes")


def _walk(root: Path, path: str, name: str) -> Iterator[tuple[int, str]]:
    """The limits of a cgroup and of those above it; inside a container the path may name what is not mounted."""
    parts = [p for p in path.split("/") if p and p != ".."]
    for depth in range(len(parts), -1, -1):
        file = root.joinpath(*parts[:depth]) / name
        for text in _lines(file):
            if text.strip().isdecimal() and int(text) < 1 << 60:  # version 1 writes a huge number for none
                yield int(text), str(file)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
