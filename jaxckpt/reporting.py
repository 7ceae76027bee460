"""What the steps of a run did: their numbers, read one step late, checked, and written down."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt import exactness
from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.stream import BatchStream
from jaxckpt.distributed.watch import Watch
from jaxckpt.errors import NonFiniteError
from jaxckpt.observe.metrics import MetricsFile
from jaxckpt.observe.report import Report, make_report, metrics_line
from jaxckpt.saving import Saving

log = logging.getLogger("jaxckpt")


@dataclass(frozen=True)
class Pending:
    """A step that was dispatched, and whose numbers nobody has read yet."""

    step: int
    metrics: dict[str, jax.Array]
    batch: int
    """number of its batch"""
    moved: Mapping[str, float] | None
    """see `Tiers.moved`"""
    done: float | None = None
    """when it was done, by time.perf_counter, where it was when it was called; None: when its numbers are read"""


class Reporting:
    """Turns steps into reports and lines of metrics. `nonfinite` 'stop' ends the run at a step that is not finite."""

    def __init__(self, stream: BatchStream | IteratedStream, saving: Saving, *, nonfinite: str) -> None:
        self._stream, self._saving, self._nonfinite = stream, saving, nonfinite
        self._metrics: MetricsFile | None = None
        self._meta: Mapping[str, Any] | None = None
        self._clock = 0.0
        self.watch: Watch | None = None
        """is told of every step that is done"""
        self.last: Report | None = None

    def open(self, path: Any, *, step: int, meta: Mapping[str, Any] | None, is_own: bool) -> None:
        """Goes on with the metrics file at `path` after `step`. `meta` is of the snapshot that the run began with; `is_own`
        says that no other run wrote it."""
        self._meta = meta
        self._metrics = MetricsFile(path, resume_step=step)
        if self._metrics.last_step != step and is_own:
            log.warning(
                "metrics.jsonl ends at step %d and the run continues after step %d: lines are missing",
                self._metrics.last_step,
                step,
            )

    def start_clock(self) -> None:
        """The time until now belongs to no step."""
        self._clock = time.perf_counter()

    def read(self, pending: Pending) -> Report:
        """Waits for the step. Raises NonFiniteError, and DataError where an earlier life saw another batch."""
        values = jax.device_get(pending.metrics)
        previous, self._clock = self._clock, pending.done or time.perf_counter()
        report = make_report(
            pending.step,
            values,
            batch_key=self._stream.key(pending.batch),
            example=self._stream.example_of(pending.batch),
            seconds=self._clock - previous,
            offload=pending.moved,
        )
        if self._metrics:
            exactness.check_against_earlier_life(report, self._metrics.replaced, self._meta)
        if self.watch:
            self.watch.step = pending.step
        if report.skipped and self._nonfinite == "stop":
            raise NonFiniteError(
                f"step {report.step}: the loss is {report.loss} and the gradient's norm {report.grad_norm}. "
                f"{self._saving.way_back()}"
            )
        if report.tokens == 0:
            log.warning("step %d: the batch has no target, so nothing was learned from it", report.step)
        if report.skipped:
            log.warning(
                "step %d: loss %s, gradient norm %s: update skipped", report.step, report.loss, report.grad_norm
            )
        return report

    def write(self, report: Report, *, eval_loss: float | None = None) -> Report:
        report = replace(report, eval_loss=eval_loss)
        self.last = report
        if self._metrics:
            self._metrics.write(metrics_line(report))
        return report

    def sync(self) -> None:
        """Returns when the lines so far are on the disk."""
        if self._metrics:
            self._metrics.sync()

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()
