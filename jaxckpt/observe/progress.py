"""A progress bar on a terminal, plain lines elsewhere."""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PLAIN_INTERVAL_S = 5.0


class TrainingProgress:
    """Shows the step, the losses and the speed of a run; use as a context manager."""

    def __init__(self, console: Console, *, total: int, start: int = 0) -> None:
        self._console, self._total, self._start = console, total, start
        self._bar: Progress | None = None
        self._task = None
        self._last_line = 0.0
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> "TrainingProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, step: int, *, loss: float, eval_loss: float | None, tokens_per_s: float) -> None:
        held_out = "" if eval_loss is None else f"  held-out {eval_loss:.4f}"
        text = f"loss {loss:.4f}{held_out}  {tokens_per_s:,.0f} tokens/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        now = time.monotonic()
        is_due = eval_loss is not None or step == self._total or now - self._last_line >= PLAIN_INTERVAL_S
        if is_due and (self._bar is None or eval_loss is not None):
            self._last_line = now
            self._console.print(f"step {step}/{self._total}  {text}", highlight=False, markup=False, soft_wrap=True)


class BytesProgress:
    """Shows how many of `total` bytes are done; use as a context manager."""

    def __init__(self, console: Console, what: str, *, total: int, plain_interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._console, self._what, self._total, self._interval_s = console, what, total, plain_interval_s
        self._done = 0
        self._guard = threading.Lock()
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> "BytesProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """Called from any thread."""
        with self._guard:
            self._done += num_bytes
            if self._bar and self._task is not None:
                self._bar.update(self._task, completed=self._done)
            elif time.monotonic() - self._last_line >= self._interval_s:
                self._last_line = time.monotonic()
                done, total = self._done / 2**20, self._total / 2**20
                self._console.print(f"{self._what}: {done:.0f} of {total:.0f} MiB", highlight=False, soft_wrap=True)
