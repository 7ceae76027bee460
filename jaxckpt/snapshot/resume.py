"""Which snapshot a run continues from. Process 0 decides; a damaged one is set aside and an older one taken."""

import logging
from typing import Literal

from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import restore, steps
from jaxckpt.snapshot.snapshot import Snapshots

log = logging.getLogger("jaxckpt")

Resume = Literal["latest", "required", "never"] | int
"""latest: the newest good snapshot, or the start where there has never been one; required: there must be one; never: there
must be none; a number: back to that step, once, and afterwards on from what was trained since"""


def choose(snapshots: Snapshots, resume: Resume) -> int | None:
    """The step to continue from, None for a new run. Raises SnapshotError where what is wanted cannot be had, and never
    lets a run that has had snapshots begin anew unasked."""
    return snapshots.group.from_primary("choose the snapshot to resume from", lambda: _choose(snapshots.root, resume))


def fall_back(snapshots: Snapshots, resume: Resume, step: int, error: DamagedSnapshot) -> None:
    """Sets the damaged `step` aside so that `choose` finds an older one; raises `error` where that very step is wanted."""
    if step == resume:
        raise DamagedSnapshot(f"{error}\nresume: {resume} asks for this very step. Name another, or resume: latest.")
    snapshots.quarantine(step, str(error))


def set_later_aside(snapshots: Snapshots, resume: Resume, step: int) -> None:
    """After a return to an earlier step: what was trained after it counts no more, and stays under another name."""
    if isinstance(resume, int):
        names = snapshots.group.from_primary("set later snapshots aside", lambda: _set_aside(snapshots.root, step))
        if names:
            log.warning("resume: %d: the later snapshots are kept as %s", resume, ", ".join(names))


def _set_aside(root: epath.Path, step: int) -> list[str]:
    return [steps.set_aside(root, later) for later in steps.committed_steps(root) if later > step]


def _choose(root: epath.Path, resume: Resume) -> int | None:
    found = steps.committed_steps(root)
    if isinstance(resume, int):
        return _choose_step(root, found, resume)
    if resume == "never":
        if found:
            raise SnapshotError(
                f"resume: never, and {root} holds snapshots up to step {found[-1]}. Give another run_dir, or remove them "
                "(python -m jaxckpt rm)."
            )
        return None
    step = _newest_good(root, found)
    if step is not None:
        return step
    if aside := steps.quarantined(root):
        raise SnapshotError(
            f"{root}: no good snapshot is left; damaged: {', '.join(aside)}. To begin anew in this directory give "
            "resume: never; or give another run_dir."
        )
    if resume == "required":
        raise SnapshotError(f"resume: required, and {root} holds no snapshot. Is run_dir the right one?")
    return None


def _choose_step(root: epath.Path, found: list[int], wanted: int) -> int:
    # Snapshots of the life that went back to `wanted` are not later ones: the same command goes on from them, also when
    # retention has deleted `wanted` itself since.
    since = [step for step in found if step > wanted and _went_back_to(root, step) == wanted]
    step = _newest_good(root, since)
    if step is None:
        if wanted not in found:
            raise SnapshotError(
                f"resume: {wanted}, and {root} holds no snapshot of that step, but of {found or 'none'}."
            )
        restore.check_sayings(root, wanted)
        step = wanted
    return step


def _went_back_to(root: epath.Path, step: int) -> int | None:
    try:
        return restore.read_meta(root, step).get("went_back_to")
    except SnapshotError:
        return None


def _newest_good(root: epath.Path, found: list[int]) -> int | None:
    for step in reversed(found):
        try:
            restore.check_sayings(root, step)
            return step
        except DamagedSnapshot as e:
            name = steps.quarantine(root, step)
            log.error("%s\nThe damaged snapshot is now %s.", e, root / name)
    return None
