"""Which snapshots stay. Only committed steps are counted."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxckpt.errors import SnapshotError


@dataclass(frozen=True)
class Retention:
    """The newest `keep` stay, every step that `keep_every` divides, the `keep_best` best by a metric, and pinned ones."""

    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    best_metric: Literal["loss", "eval_loss"] = "eval_loss"
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} must be an integer of at least {least}"
            for name, value, least in (("keep", self.keep, 1), ("keep_best", self.keep_best, 0))
            if not isinstance(value, int) or value < least
        ]
        if self.keep_every is not None and (not isinstance(self.keep_every, int) or self.keep_every < 1):
            problems.append(f"keep_every={self.keep_every!r} must be a positive integer, or None")
        if self.best_metric not in ("loss", "eval_loss"):
            problems.append(f"best_metric={self.best_metric!r} must be 'loss' or 'eval_loss'")
        if self.best_mode not in ("min", "max"):
            problems.append(f"best_mode={self.best_mode!r} must be 'min' or 'max'")
        if problems:
            raise SnapshotError("snapshots: " + "; ".join(problems))

    def superfluous(
        self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float | None]], pinned: Collection[int]
    ) -> list[int]:
        """Those of the committed `steps` (oldest first) that may go; `metrics` by step, as their marks hold them."""
        stay = {*steps[-self.keep :], *pinned, *self._best(steps, metrics)}
        if self.keep_every is not None:
            stay |= {step for step in steps if step % self.keep_every == 0}
        return [step for step in steps if step not in stay]

    def _best(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float | None]]) -> list[int]:
        values = {step: metrics.get(step, {}).get(self.best_metric) for step in steps}
        known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        sign = 1 if self.best_mode == "min" else -1
        # Of equals the newer one: it is the one that training continues from.
        return sorted(known, key=lambda step: (sign * known[step], -step))[: self.keep_best]
