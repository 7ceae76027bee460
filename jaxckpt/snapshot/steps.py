"""The directory of committed steps: what is there, what counts, and how it goes; local or on gs://.

A step counts only once its durable mark exists beside its directory: data, manifest, fsync of the tree and of the parent, then
`step_N.ok`. Locally a deletion removes the mark first and renames the directory before it empties it; on gs://, where
nothing can be renamed, the mark is the first object to go and the last to come. So a kill at any moment leaves no step
that looks whole and is not.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import gcs
from jaxckpt.snapshot.paths import is_local

log = logging.getLogger("jaxckpt")

TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""what Orbax writes a directory under until all of it is there"""
MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{10})")
_PIN = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MARK = ".ok"
_LATE_ROUNDS, _LATE_S = 6, 0.5
_DELETED = ".deleted-"
_UNFINISHED = ".writing-"


def step_path(root: epath.Path, step: int) -> epath.Path:
    return root / f"step_{step:010d}"


def is_step(name: str) -> bool:
    """Whether `name` is that of a step's directory."""
    return _STEP.fullmatch(name) is not None


def committed_steps(root: epath.Path) -> list[int]:
    """Steps with their mark, oldest first; never the one that is being written. One listing."""
    names = _names(root)
    return sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)) and name + _MARK in names)


# ------------------------------------------------------------------------------------------------ the mark


def commit(root: epath.Path, step: int, *, manifest: str, metrics: Mapping[str, float | None]) -> None:
    """Makes the finished directory of `step` durable, with `manifest` in it, and marks it. A metric that is not finite
    becomes null. Raises OSError, and then the step does not count."""
    directory = step_path(root, step)
    content = {
        "committed_at": time.time(),
        "manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest(),
        "metrics": {k: v if v is not None and math.isfinite(v) else None for k, v in metrics.items()},
        "step": step,
    }
    mark = _canonical({**content, "sha256": _sha256(content)})
    if is_local(root):
        _write_durable(directory / MANIFEST, manifest)
        _fsync_tree(directory)
        _fsync(root)
        _write_durable(root / (directory.name + _MARK), mark)
    else:
        gcs.write(os.fspath(directory / MANIFEST), manifest.encode())
        gcs.write(os.fspath(directory) + _MARK, mark.encode())


def read_mark(root: epath.Path, step: int) -> dict[str, Any]:
    """The mark of `step`: committed_at, manifest_sha256, metrics, step, sha256.

    Raises DamagedSnapshot where it holds anything but what `commit` wrote, and SnapshotError where there is none.
    """
    path = root / (step_path(root, step).name + _MARK)
    try:
        text = (path.read_bytes() if is_local(path) else gcs.read(os.fspath(path))).decode()
        mark = json.loads(text)
    except FileNotFoundError:
        there = ", ".join(map(str, committed_steps(root))) or "none"
        raise SnapshotError(f"{root}: there is no snapshot of step {step}; the steps there are: {there}") from None
    except ValueError as e:
        raise DamagedSnapshot(f"{path}: the mark is no JSON ({e}), so what was saved cannot be told") from e
    if isinstance(mark, dict) and set(mark) == {"step", "committed_at"}:
        raise SnapshotError(
            f"{path}: the snapshot was written by an earlier jaxckpt, in format 1, which this version does not read. Go on "
            "with that version, or start a new run_dir."
        )
    try:
        expected = _canonical({**mark, "sha256": _sha256({k: v for k, v in mark.items() if k != "sha256"})})
        is_whole = text == expected and mark["step"] == step and isinstance(mark["metrics"], dict)
        is_whole = is_whole and isinstance(mark["manifest_sha256"], str) and isinstance(mark["committed_at"], float)
    except (TypeError, KeyError, AttributeError, ValueError):
        is_whole = False
    if not is_whole:
        raise DamagedSnapshot(f"{path}: the mark is not what was written for step {step}: {text[:300]!r}")
    return mark


# ------------------------------------------------------------------------------------------------ removal


def delete(root: epath.Path, step: int) -> None:
    """Removes `step`, its mark first. Raises OSError; a step that is half gone no longer counts, and `sweep` ends it."""
    directory = step_path(root, step)
    mark = root / (directory.name + _MARK)
    if not is_local(root):
        gcs.delete(os.fspath(mark))
        gcs.delete_all(gcs.objects_under(os.fspath(directory)))
        return
    mark.unlink(missing_ok=True)
    _fsync(root)  # otherwise a power cut could keep the mark and lose files of the directory
    gone = root / (_DELETED + directory.name)
    os.rename(directory, gone)
    _fsync(root)
    shutil.rmtree(gone, ignore_errors=True)


def discard_unfinished(root: epath.Path, step: int) -> None:
    """Frees the space of a save that failed, wherever it failed; a step with its mark stays. Raises nothing."""
    name = step_path(root, step).name
    try:
        for _ in range(_LATE_ROUNDS):
            names = _names(root)
            own = [n for n in names if n in (name, _UNFINISHED + name + _MARK) or n.startswith(name + TMP_SUFFIX)]
            if name + _MARK in names or not own:
                break
            for left in own:
                _remove(root, left)
            if is_local(root):
                break
            time.sleep(_LATE_S)  # the save's other requests may still be on their way, and make an object anew
    except OSError as e:
        log.warning("%s: what the save of step %d left behind could not be removed: %s", root, step, e)


def sweep(root: epath.Path) -> list[str]:
    """Removes what a killed process left behind; the names of what was removed. Only while no other process writes here.

    Pins, quarantined and superseded steps stay, and whatever is not ours; so do steps that are whole but for their mark
    where no step has one, see `_keep_what_lost_its_mark`.
    """
    if is_local(root):
        root.mkdir(parents=True, exist_ok=True)
    _keep_what_lost_its_mark(root)
    names = _names(root)
    left = [
        n for n in names if n.startswith((_DELETED, _UNFINISHED)) or _STEP.sub("", n, count=1).startswith(TMP_SUFFIX)
    ]
    for name in names:
        base = name.removesuffix(_MARK)
        # Without a mark: Orbax had finished, but whether every byte is on the disk is not known, so it does not count.
        if _STEP.fullmatch(base) and not {base, base + _MARK} <= names:
            left.append(name)
    for name in left:
        _remove(root, name)
    return sorted(left)


def _keep_what_lost_its_mark(root: epath.Path) -> None:
    """Where no step counts, sets aside those that have all but their mark, so that a run does not delete its last copy.

    A kill inside the first save leaves one such step, and the run begins anew. It never leaves two: their marks were
    lost, and as damaged ones they keep the run from beginning anew unasked.
    """
    names = _names(root)
    found = sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)))
    if any(step_path(root, step).name + _MARK in names for step in found):
        return
    whole = [step for step in found if (step_path(root, step) / MANIFEST).exists()]
    for step in whole:
        name = _move_aside(root, step, "damaged_" if len(whole) > 1 else "unmarked_")
        log.warning(
            "%s/%s has no mark (%s), so it does not count: its save was cut short, or the mark was removed. It is now %s.",
            *(root, step_path(root, step).name, step_path(root, step).name + _MARK, name),
        )


def quarantine(root: epath.Path, step: int) -> str:
    """Sets a damaged step aside, never to be deleted by us; its new name, damaged_step_N or damaged_step_N.1 and so on."""
    return _move_aside(root, step, "damaged_")


def set_aside(root: epath.Path, step: int) -> str:
    """Sets aside a step that lies after the one a run goes back to; its new name, superseded_step_N or with .1 and so on."""
    return _move_aside(root, step, "superseded_")


def _move_aside(root: epath.Path, step: int, prefix: str) -> str:
    name = step_path(root, step).name
    names = _names(root)
    taken = {n.removesuffix(_MARK) for n in names}
    target = next(t for i in range(len(taken) + 1) if (t := f"{prefix}{name}" + (f".{i}" if i else "")) not in taken)
    if is_local(root):
        # The directory first: a mark alone counts for nothing, and is swept if the process dies here.
        os.rename(root / name, root / target)
        if name + _MARK in names:
            os.rename(root / (name + _MARK), root / (target + _MARK))
        _fsync(root)
        return target
    old = [os.fspath(root / (name + _MARK))] if name + _MARK in names else []
    old += list(gcs.objects_under(os.fspath(root / name)))
    before, after = os.fspath(root / name), os.fspath(root / target)
    gcs.copy_all([(path, after + path.removeprefix(before)) for path in old])
    gcs.delete(before + _MARK)
    gcs.delete_all(old)
    return target


# ------------------------------------------------------------------------------------------------ pins


def quarantined(root: epath.Path) -> list[str]:
    """Names of the damaged steps that were set aside."""
    return sorted(n for n in _names(root) if n.startswith("damaged_") and not n.endswith(_MARK))


def pin(root: epath.Path, step: int, name: str) -> None:
    """Keeps `step` from retention under `name`. Raises SnapshotError."""
    _check_pin_name(name)
    _check_is_no_step(name)
    if step not in (there := committed_steps(root)):
        raise SnapshotError(f"{root}: there is no snapshot of step {step} to pin; the steps there are: {there}")
    if (other := pins(root).get(name, step)) != step:
        raise SnapshotError(
            f"{root}: the pin {name!r} holds step {other} already; remove it first, or take another name"
        )
    text = _canonical({"step": step})
    path = root / f"pin_{name}"
    _write_durable(path, text) if is_local(root) else gcs.write(os.fspath(path), text.encode())


def unpin(root: epath.Path, name: str) -> None:
    """Removes the pin; its step is retention's again. Raises SnapshotError where there is no such pin."""
    _check_pin_name(name)
    if f"pin_{name}" not in _names(root):
        raise SnapshotError(
            f"{root}: there is no pin {name!r}; the pins are: {', '.join(sorted(pins(root))) or 'none'}"
        )
    _remove(root, f"pin_{name}")


def pins(root: epath.Path) -> dict[str, int]:
    """{name: step} of every pin, also of one whose step is gone. Raises SnapshotError for a pin that cannot be read."""
    found = {}
    for name in sorted(n for n in _names(root) if n.startswith("pin_")):
        path = root / name
        try:
            text = path.read_bytes() if is_local(root) else gcs.read(os.fspath(path))
            found[name.removeprefix("pin_")] = int(json.loads(text)["step"])
        except (ValueError, TypeError, KeyError) as e:
            raise SnapshotError(
                f"{path}: not a pin ({type(e).__name__}: {e}), so which step it keeps is not known. Write "
                '{"step": N} into it, or remove it.'
            ) from e
    return found


def _check_pin_name(name: str) -> None:
    if not _PIN.fullmatch(name):
        raise SnapshotError(f"pin {name!r}: expected a name of letters, digits, '.', '_' and '-', at most 200")


def _check_is_no_step(name: str) -> None:
    if name.isdecimal():
        raise SnapshotError(
            f"pin {name!r}: PATH@{name} means step {int(name)}, so no pin can be called that. Add a letter."
        )


# ------------------------------------------------------------------------------------------------ the place


def check_writable(root: epath.Path) -> None:
    """Raises OSError where nothing can be written: an Orbax that fails at its first directory leaves threads waiting for
    its writers, and the process cannot end."""
    probe = root / (_UNFINISHED + "probe")
    if is_local(root):
        probe.write_bytes(bytes(4096))
        probe.unlink()
    else:
        gcs.write(os.fspath(probe), b"")
        gcs.delete(os.fspath(probe))


def free_bytes(root: epath.Path) -> int | None:
    """Bytes that this user may still write below `root`; None on gs://."""
    return shutil.disk_usage(root).free if is_local(root) else None


def _names(root: epath.Path) -> set[str]:
    if not is_local(root):
        return gcs.names(os.fspath(root))
    return set(os.listdir(root)) if os.path.isdir(root) else set()


def _remove(root: epath.Path, name: str) -> None:
    path = root / name
    if not is_local(path):
        # The prefix of a step is no object itself; a mark has nothing under it.
        gcs.delete(os.fspath(path))
        gcs.delete_all(gcs.objects_under(os.fspath(path)))
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _write_durable(path: epath.Path, text: str) -> None:
    """All of `text` at `path`, or nothing; on the disk when this returns."""
    unfinished = path.parent / (_UNFINISHED + path.name)
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(unfinished, path)
    _fsync(path.parent)


def _fsync(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_tree(root: epath.Path) -> None:
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            _fsync(Path(directory, name))
        _fsync(directory)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sha256(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()
