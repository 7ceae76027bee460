"""From what a user writes to a snapshot: a run directory, its snapshots, or a step, local or on gs://."""

import os
import re
from typing import NamedTuple

from etils import epath

from jaxckpt.errors import SnapshotError
from jaxckpt.snapshot import paths, steps

_STEP_DIRECTORY = re.compile(r"^step_(\d{10})$")


class Located(NamedTuple):
    root: epath.Path
    """the directory of snapshots"""
    step: int


def locate(text: str | os.PathLike[str]) -> Located:
    """The snapshot that `text` names: RUN_DIR, RUN_DIR/snapshots or a step's directory, with @STEP or @PIN behind.

    Without either, the newest. Raises SnapshotError, which says what there is.
    """
    place, name = split_name(str(text))
    directory = paths.resolve(place)
    if match := _STEP_DIRECTORY.match(directory.name):
        if name is not None and name != str(int(match[1])):
            raise SnapshotError(
                f"{text}: {directory} is the directory of one step; give it, or the run's with @{name}."
            )
        return _checked(directory.parent, int(match[1]), text)
    root = snapshots_of(directory)
    if name is None:
        found = steps.committed_steps(root)
        if not found:
            raise SnapshotError(f"{text}: no snapshot found in {root}. Give a run directory that has been saved to.")
        return Located(root, found[-1])
    if name.isdecimal():
        return _checked(root, int(name), text)
    pins = steps.pins(root)
    if name not in pins:
        raise SnapshotError(f"{text}: no pin {name!r} in {root}; there are {sorted(pins) or 'none'}.")
    return _checked(root, pins[name], text)


def locate_step(text: str, step: int | None = None) -> Located:
    """As `locate`, or the snapshot of `step` where one is given beside `text`, which then must not name another."""
    if step is None:
        return locate(text)
    if split_name(text)[1] is not None:
        raise SnapshotError(f"{text} and --step {step}: give one of the two.")
    found = locate(f"{text}@{step}")
    if found.step != step:
        raise SnapshotError(
            f"{text} is the directory of step {found.step}, and --step asks for {step}: give one of the two."
        )
    return found


def root_of(text: str) -> epath.Path:
    """The directory of snapshots of a run, which may be named by one of its steps. Raises SnapshotError where it is not there."""
    directory = paths.resolve(text)
    root = directory.parent if _STEP_DIRECTORY.match(directory.name) else snapshots_of(directory)
    if not root.is_dir():
        raise SnapshotError(f"{root} does not exist. Give a run directory that has been saved to.")
    return root


def split_name(text: str) -> tuple[str, str | None]:
    """('path', 'step or pin') of 'path@step'; an @ before the last slash belongs to the path."""
    place, at, name = text.rpartition("@")
    return (place, name) if at and name and "/" not in name else (text, None)


def snapshots_of(directory: epath.Path) -> epath.Path:
    """`directory/snapshots` of a run directory; a directory of snapshots itself."""
    return directory if directory.name == "snapshots" else directory / "snapshots"


def _checked(root: epath.Path, step: int, text: str | os.PathLike[str]) -> Located:
    found = steps.committed_steps(root)
    if step not in found:
        raise SnapshotError(f"{text}: no snapshot of step {step} in {root}; there are {found or 'none'}.")
    return Located(root, step)
