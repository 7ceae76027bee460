"""How far a token store is: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxckpt.observe.progress import PLAIN_INTERVAL_S


class PrepareProgress:
    """Shows bytes of the inputs, tokens per second and the time left; use as a context manager."""

    def __init__(self, console: Console, *, plain_interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._console, self._interval_s = console, plain_interval_s
        self._phase, self._total = "", 0
        self._bar: Progress | None = None
        self._begin(0)

    def __enter__(self) -> "PrepareProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def phase(self, name: str, total_bytes: int) -> None:
        """What follows is of another kind, and begins anew."""
        self._close()
        self._phase, self._total = name, total_bytes
        self._begin(0)
        if self._console.is_terminal:
            speed = TextColumn("{task.fields[speed]}")
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), speed)
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(name, total=total_bytes, speed="")
            self._bar.start()

    def show(self, done_bytes: int, tokens: int) -> None:
        """`done_bytes` of the inputs are behind, and `tokens` more were encoded."""
        now = time.monotonic()
        if self._first_bytes is None:  # an earlier life may have done most of it
            self._first_bytes, self._begun = done_bytes, now
        self._tokens += tokens
        seconds = max(now - self._begun, 1e-3)
        speed = f"{self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
        if self._bar:
            self._bar.update(self._task, completed=done_bytes, speed=speed)
        elif now - self._last_line >= self._interval_s:
            self._last_line = now
            new = done_bytes - self._first_bytes
            left = f"{(self._total - done_bytes) * seconds / new:,.0f} s left" if new else ""
            text = f"{self._phase}: {done_bytes / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB"
            self.say("  ".join(part for part in (text, speed, left) if part))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _begin(self, tokens: int) -> None:
        self._tokens, self._first_bytes = tokens, None
        self._begun = self._last_line = time.monotonic()

    def _close(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
