"""When a run saves its state, what goes into the snapshot, and what is checked before it counts."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt import exactness
from jaxckpt.beginning import Begun
from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.stream import BatchStream
from jaxckpt.distributed.sync import Agreement
from jaxckpt.errors import NonFiniteError
from jaxckpt.observe.report import Report
from jaxckpt.program import Program
from jaxckpt.snapshot.environment import environment
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.train_state import TrainState

log = logging.getLogger("jaxckpt")


class Saving:
    """Saves to `snapshots`, if there are any; `settings` are what the meta of every snapshot of this run holds."""

    def __init__(
        self,
        snapshots: Snapshots | None,
        plan: TrainState,
        stream: BatchStream | IteratedStream,
        program: Program,
        *,
        settings: Mapping[str, Any],
    ) -> None:
        self._snapshots, self._plan, self._stream, self._program = snapshots, plan, stream, program
        self._settings = dict(settings)
        self._saved: int | None = None
        self._saved_at = time.monotonic()
        self._agreement = Agreement()
        self._is_checked = False

    def begin(self, begun: Begun) -> None:
        """Told where the run begins: what is saved already, and whose snapshot it came from."""
        self._saved = begun.step if begun.is_saved else None
        self._settings["restored_from"] = begun.restored_from

    def is_due(self, step: int) -> bool:
        """Whether `step`, just dispatched, is to be saved: by its number, or by the time since the last save.

        Every process must ask at every step: they agree on a save that the clock of one asks for.
        """
        snapshots = self._snapshots
        if snapshots is None:
            return False
        is_due = snapshots.every is not None and step % snapshots.every == 0
        if snapshots.every_minutes is not None:
            is_overdue = time.monotonic() - self._saved_at >= 60 * snapshots.every_minutes
            is_due |= self._agreement.agreed_step(step, is_overdue) == step
        return is_due

    def save(self, state: TrainState, report: Report, *, before_commit: Callable[[], None]) -> None:
        """Starts to save the state after the step of `report`, unless it is saved. Raises NonFiniteError for a bad one."""
        step = report.step
        if self._snapshots is None or self._saved == step:
            return
        if bad := self._program.not_finite(state):
            raise NonFiniteError(f"step {step}: not finite any more: {', '.join(bad[:10])}. {self.way_back()}")
        if not self._is_checked:
            for warning in exactness.check_before_first_save(
                self._stream,
                step=step,
                digest=report.batch_digest,
                captured=self._program.captured,
                program=self._program.text,
            ):
                log.warning(warning)
            self._is_checked = True
        self._snapshots.save(
            Snapshot(state, self._stream.state(), self._meta(report)),
            metrics={"loss": report.loss, "eval_loss": report.eval_loss},
            before_commit=before_commit,
        )
        self._saved, self._saved_at = step, time.monotonic()
        self._agreement = Agreement()

    def newest(self) -> int | None:
        """The newest step that counts."""
        return next(reversed(self._snapshots.steps()), None) if self._snapshots else None

    def way_back(self) -> str:
        """What is left after a step that is not finite, and what to do."""
        if self._snapshots:
            self._snapshots.wait()  # a save that is under way counts too
        newest = self.newest()
        here = "Nothing of it was saved" + ("." if newest is None else f"; the newest snapshot is step {newest}.")
        return here + " Lower the learning rate or the clip, or let such updates be skipped (nonfinite: skip)."

    def _meta(self, report: Report) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": report.step,
            **self._settings,
            "leaves": leaf_table(self._plan),
            "captured": self._program.captured,
            "program": exactness.program_hash(self._program.text),
            "loss_bits": report.loss_bits,
            "batch_digest": report.batch_digest,
            **environment(),
        }
