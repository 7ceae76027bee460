"""What of a run is planned: its state, its batch, and the programs that a step is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt.run import Run
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState


@dataclass(frozen=True)
class Subject:
    plan: TrainState
    batch: Any
    placement: Placement
    programs: Mapping[str, Any]
    """name: traced program; a step runs them one after the other"""


def subject_of(run: Run) -> Subject:
    """Traces the step of a run that has not been opened. Allocates nothing."""
    program: Any = run._program
    traced = program._step_fn.trace(program._plan, program._batch)
    return Subject(run.plan, program._batch, run._placement, {"step": traced})
