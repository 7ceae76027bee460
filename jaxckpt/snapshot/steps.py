"""The directory of committed steps: what is there, what counts, and how it goes.

A step counts only once its durable mark exists beside it: data, fsync of the tree, rename, fsync of the parent, then
`step_N.ok`. Deletion removes the mark first and renames the directory before it empties it, so a kill at any
moment leaves no step that looks whole and is not.
"""

import json
import os
import re
import shutil
import time
from pathlib import Path

from jaxckpt.snapshot.orbax_io import TMP_SUFFIX

_STEP = re.compile(r"^step_(\d{10})$")
_MARK = ".ok"
_DELETED = ".deleted-"
_UNFINISHED = ".w"


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:010d}"


def committed_steps(root: Path) -> list[int]:
    """Steps with their mark, oldest first; never the one that is being written."""
    names = set(os.listdir(root)) if root.is_dir() else set()
    return sorted(int(m[1]) for name in names if (m := _STEP.match(name)) and name + _MARK in names)


def check_writable(root: Path) -> None:
    """Raises OSError where nothing can be written: an Orbax that fails at its first directory leaves threads waiting for
    its writers, and the process cannot end."""
    probe = root / (".probe" + _UNFINISHED)
    probe.write_bytes(bytes(4096))
    probe.unlink()


def commit(root: Path, step: int) -> None:
    """Makes the finished directory of `step` durable and marks it."""
    directory = step_path(root, step)
    _fsync_tree(directory)
    _fsync(root)
    mark = directory.with_name(directory.name + _MARK)
    unfinished = mark.with_name(mark.name + _UNFINISHED)
    with unfinished.open("w") as file:
        json.dump({"step": step, "committed_at": time.time()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(mark)
    _fsync(root)


def delete(root: Path, step: int) -> None:
    directory = step_path(root, step)
    directory.with_name(directory.name + _MARK).unlink(missing_ok=True)
    gone = root / (_DELETED + directory.name)
    directory.rename(gone)
    _fsync(root)
    shutil.rmtree(gone, ignore_errors=True)


def discard_unfinished(root: Path, step: int) -> None:
    """Frees the space of a save that failed, wherever it failed; a step with its mark stays. Raises nothing."""
    name = step_path(root, step).name
    names = set(os.listdir(root)) if root.is_dir() else set()
    if name + _MARK not in names:
        for left in (n for n in names if n in (name, name + _MARK + _UNFINISHED) or n.startswith(name + TMP_SUFFIX)):
            _remove(root / left)


def sweep(root: Path) -> list[str]:
    """Removes what a killed process left behind; the names of what was removed. Only while no other process writes here."""
    root.mkdir(parents=True, exist_ok=True)
    names = set(os.listdir(root))
    left = [n for n in names if TMP_SUFFIX in n or n.startswith(_DELETED) or n.endswith(_UNFINISHED)]
    left += [n for n in names if n.endswith(_MARK) and n.removesuffix(_MARK) not in names]
    # Renamed by Orbax but killed before the mark: whether every byte is on disk is not known, so it does not count.
    left += [n for n in names if _STEP.match(n) and n + _MARK not in names]
    for name in left:
        _remove(root / name)
    return sorted(left)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            _fsync(Path(directory, name))
        _fsync(Path(directory))
