"""After the first step: what the plan said, what it was, and by how much it erred."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import psutil

from jaxckpt.planning.report import size


@dataclass(frozen=True)
class Measured:
    nbytes: int
    is_device: bool
    """of the fullest local device; else of the process, where the backend does not tell"""


@dataclass(frozen=True)
class Comparison:
    planned: int
    measured: Measured

    @property
    def error(self) -> float:
        """The measured over the planned, less one: 0.014 where the step took 1.4 % more."""
        return self.measured.nbytes / self.planned - 1 if self.planned else 0.0

    def line(self) -> str:
        """One line for the log."""
        where = "of a device" if self.measured.is_device else "of the process (this backend does not tell of devices)"
        return f"plan: {size(self.planned)} {where}, measured {size(self.measured.nbytes)} ({100 * self.error:+.1f} %)"


def measure(devices: Sequence[Any] | None = None, *, process: Any = None) -> Measured:
    """The most that any local device has held since the process began; the process's resident set on CPU."""
    found = [_stats(d).get("peak_bytes_in_use") for d in (jax.local_devices() if devices is None else devices)]
    known = [n for n in found if n]
    if known:
        return Measured(max(known), True)
    return Measured((process or psutil.Process()).memory_info().rss, False)


def planned_bytes(compiled: Any, *, elsewhere: int = 0) -> int:
    """Device memory that the compiler has planned for a jitted step's executable, and `elsewhere` what it is not given."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + elsewhere
    )


def compare(executables: Sequence[Any]) -> str | None:
    """A line for the log after the first step; None where the backend does not tell what its devices have held (CPU)."""
    measured = measure()
    if not measured.is_device:
        return None
    return Comparison(max(map(planned_bytes, executables)), measured).line()


def check_measured(planned: int, *, before: int = 0, devices: Sequence[Any] | None = None) -> Comparison:
    """Compares the peak since the process began with `planned` bytes of a device.

    Where only the process is known, `before` (its bytes before the state was made) is taken off, and `planned` is that of
    all local devices together.
    """
    measured = measure(devices)
    if not measured.is_device:
        count = len(jax.local_devices() if devices is None else devices)
        return Comparison(planned * count, Measured(max(0, measured.nbytes - before), False))
    return Comparison(planned, measured)


def _stats(device: Any) -> Mapping[str, int]:
    return device.memory_stats() or {}  # the CPU has none
