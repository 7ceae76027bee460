"""How fast bytes move: measured on this machine, or given, or as the vendor publishes it."""

import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt.errors import PlanError
from jaxckpt.planning.targets import Target

PCIE_SHARE = 0.8
"""of the published rate, which packet headers and the protocol leave (H2D copies of pinned memory on PCIe Gen4 and Gen5)"""
FLOPS_SHARE = 0.5
"""of the published rate, which training of large models reaches; `--flops` gives another"""
_BUFFER = 64 << 20
_FILE = 256 << 20


@dataclass(frozen=True)
class Rate:
    per_s: float
    """bytes (or operations) a second"""
    source: str
    """measured, given, or what share of the published"""


@dataclass(frozen=True)
class Rates:
    """Of one device (h2d, d2h, flops) and of one process (disks); None where nobody knows."""

    h2d: Rate | None = None
    d2h: Rate | None = None
    flops: Rate | None = None
    disk_read: Rate | None = None
    disk_write: Rate | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def published(target: Target) -> Rates:
    """What a device of this kind will do, from its vendor's figures."""
    pcie = Rate(target.pcie_bandwidth * PCIE_SHARE, f"{PCIE_SHARE:.0%} of the published")
    return Rates(h2d=pcie, d2h=pcie, flops=Rate(target.bf16_flops * FLOPS_SHARE, f"{FLOPS_SHARE:.0%} of the published"))


def measured_here(devices: int = 1) -> Rates:
    """What one of `devices` simulated devices of this machine does: copies in memory and float32 products. Takes 0.3 s.

    Memory and cores are shared, so each device has its part.
    """
    copy = Rate(_copy_rate() / devices, "measured")
    return Rates(h2d=copy, d2h=copy, flops=Rate(_matmul_rate() / devices, "measured"))


def measure_disk(directory: str | os.PathLike[str]) -> tuple[Rate, Rate]:
    """(reading, writing) of a file of 256 MiB in `directory`, past the page cache where the file system allows it.

    The file is removed. Raises PlanError where the directory cannot be written to.
    """
    block = mmap.mmap(-1, 8 << 20)  # aligned to a page, as O_DIRECT wants it
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".bandwidth-") as file:
            direct = _open_direct(file.name)
            try:
                os.posix_fallocate(direct, 0, _FILE)
                write = _timed(lambda at: os.pwritev(direct, [block], at), len(block))
                os.fdatasync(direct)
                read = _timed(lambda at: os.preadv(direct, [block], at), len(block))
            finally:
                os.close(direct)
    except OSError as e:
        raise PlanError(f"{directory}: its speed cannot be measured: {e}. Give --disk-read and --disk-write.") from e
    return Rate(read, "measured"), Rate(write, "measured")


def parse_rate(option: str, text: str) -> Rate:
    """ "25GB/s", "25 GiB/s", "3e9" or "400TFLOP/s". Raises PlanError."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kKMGTP]?i?)(?:B|FLOP|FLOPS|flop)?(?:/s)?", text.strip())
    if not found:
        raise PlanError(f"{option} {text!r}: expected a rate as in 25GB/s, 3.2GiB/s or 400TFLOP/s")
    prefix = found[2]
    base = 1024 if prefix.endswith("i") else 1000
    value = float(found[1]) * base ** " KMGTP".index(prefix[:1].upper() or " ")
    if not value > 0:
        raise PlanError(f"{option} {text!r}: expected more than nothing")
    return Rate(value, "given")


def with_given(rates: Rates, given: Mapping[str, Rate | None]) -> Rates:
    """`rates`, with what was given in their place."""
    return replace(rates, **{name: rate for name, rate in given.items() if rate is not None})


def _copy_rate() -> float:
    source, target = np.ones(_BUFFER, np.uint8), np.empty(_BUFFER, np.uint8)
    return _BUFFER / _best(lambda: np.copyto(target, source), 3)


def _matmul_rate(n: int = 512) -> float:
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return 2 * n**3 / _best(lambda: product(x).block_until_ready(), 5)


def _best(run: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _timed(transfer: Callable[[int], int], block: int) -> float:
    """Bytes a second over the whole file; stops after a second on a slow disk."""
    started, done = time.perf_counter(), 0
    while done < _FILE and (done == 0 or time.perf_counter() - started < 1.0):
        done += transfer(done % _FILE)
    return done / (time.perf_counter() - started)


def _open_direct(name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems
        return os.open(Path(name), os.O_RDWR)
