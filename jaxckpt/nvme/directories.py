"""The directories of working files: each belongs to one process from `take` to the end of that process, and what is in one
that belongs to nobody was left by a process that was killed. No state is ever continued from there."""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import OffloadError

_NAME = re.compile(r"[0-9a-f]{16}\.p\d+")
_SWEEPING_S = 10.0
"""in which another process that sweeps a directory is done with it"""


def take(root: str) -> TextIO:
    """The open file that holds the directory, which is made if it is not there. Raises OffloadError where another has it."""
    os.makedirs(root, exist_ok=True)
    deadline, owner = time.monotonic() + _SWEEPING_S, ""
    while (file := _try_to_take(root)) is None:
        # One that sweeps leaves no number, and the number of one that is dead only for a moment.
        before, owner = owner, Path(root, "lock").read_text().strip()
        if (owner and owner == before) or time.monotonic() > deadline:
            raise OffloadError(
                f"{root} is in use by another process (number {owner or 'unknown'}) of a run with the same id. Stop that one, "
                "or close the Run of this process that holds it."
            )
        time.sleep(0.05)
    file.write(str(os.getpid()))
    file.flush()
    return file


def sweep(root: str) -> None:
    """Removes all that is in a directory that was taken."""
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != "lock":
            os.unlink(entry.path)


def sweep_abandoned(directory: str) -> bool:
    """Removes what killed processes of any run have left in `directory`; whether nothing of theirs is there now."""
    is_clean = True
    for entry in os.scandir(directory) if os.path.isdir(directory) else ():
        if not _NAME.fullmatch(entry.name):
            continue
        try:
            if os.path.exists(os.path.join(entry.path, "lock")) and (file := _try_to_take(entry.path)):
                with file:
                    sweep(entry.path)
        except OSError:
            is_clean = False  # somebody else's, maybe
    return is_clean


def sweep_former(record: Any, directories: Sequence[str], group: Group) -> None:
    """Removes what killed lives of a run have left in directories that it no longer uses.

    `record`: the path (pathlib or epath, of the run) of the list of them, which `directories`, those it uses now, are put
    on. All processes call it, while the run is theirs alone. A directory that is not there stays on the list.
    """
    directories = [os.path.abspath(d) for d in directories]
    former: list[str] = group.from_primary("read where state on disks was", lambda: _read(record))
    left = [d for d in former if d not in directories]
    if left:
        swept = group.gather("sweep disks", [d for d in left if os.path.isdir(d) and sweep_abandoned(d)])
        left = [d for d in left if not all(d in found for found in swept)]
    now = [*directories, *left]
    if now != former:
        group.from_primary("note where state on disks is", lambda: record.write_text(json.dumps(now)))


def _read(record: Any) -> list[str]:
    try:
        return json.loads(record.read_text())
    except (FileNotFoundError, ValueError):  # cut short by a kill: what it named is swept by whoever uses it again
        return []


def _try_to_take(root: str) -> TextIO | None:
    file = open(os.path.join(root, "lock"), "a+")  # noqa: SIM115 (open as long as the lock is held)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    return file
