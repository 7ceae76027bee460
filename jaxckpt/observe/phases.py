"""Where the time of a start goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def process_age_s() -> float:
    """Seconds since the operating system started this process: imports before the first line count too."""
    return time.time() - psutil.Process().create_time()


class Phases:
    """Seconds by phase, in the order of their end. Phases may overlap: each is the time from its own start to its own end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def line(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
