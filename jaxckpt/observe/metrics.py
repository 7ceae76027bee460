"""`metrics.jsonl`: one line a step, each step once, also after a rollback."""

import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxckpt.errors import DataError, SaveError
from jaxckpt.snapshot import gcs, paths

log = logging.getLogger("jaxckpt")


def float_bits(value: Any) -> str:
    """8 hexadecimal digits: the bits of a float32, which a decimal cannot promise to keep."""
    return f"{int(np.asarray(value, np.float32).view(np.uint32)):08x}"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file, local or on gs://, without a last line that a kill has cut."""
    lines = []
    name = os.fspath(path)
    content = Path(name).read_bytes() if paths.is_local(name) else gcs.read(os.fspath(paths.resolve(name)))
    for line in content.splitlines(keepends=True):
        if line.endswith(b"\n"):
            lines.append(json.loads(line))
    return lines


class MetricsFile:
    """Appends lines; each reaches the operating system before `write` returns, so a killed process loses none.

    Lines that find no room wait in memory for the next `write` or `sync`. Training does not end for them, but `sync`
    raises, so no snapshot counts without them, and what becomes of the run is for who saves to say.

    A file on gs:// cannot grow: its lines gather in a private local file, and `sync` uploads all of them.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int) -> None:
        """Opens `path` and drops what lies after `resume_step`: the run is about to do those steps again."""
        self._path = os.fspath(path)
        self._private: str | None = None
        self._waiting = b""
        self._guard = threading.Lock()
        try:
            if paths.is_local(self._path):
                self._local = Path(self._path)
                self._local.parent.mkdir(parents=True, exist_ok=True)
            else:
                self._private = tempfile.mkdtemp(prefix="jaxckpt-metrics-")
                self._local = Path(self._private, "metrics.jsonl")
                _download(self._path, self._local)
            self.last_step, self.replaced = _truncate_after(self._local, resume_step, shown=self._path)
            """step of the last line that was kept, 0 if there is none; and the lines after it, of an earlier life, by step"""
            self._file: BinaryIO = self._local.open("ab", buffering=0)
        except OSError as e:
            self._remove_private()
            raise DataError(f"{self._path} cannot be written: {e}. Move it away: the snapshots do not need it.") from e
        except DataError:
            self._remove_private()
            raise

    def write(self, line: dict[str, Any]) -> None:
        with self._guard:
            is_first = not self._waiting
            self._waiting += (json.dumps(line) + "\n").encode()
            try:
                self._flush()
            except OSError as e:
                if is_first:
                    log.error("%s: a line could not be written and waits in memory: %s", self._path, e)

    def sync(self) -> None:
        """Returns when the lines are on the disk, or in the object, so that a snapshot never outlives the lines before it.

        May be called beside `write`, from another thread. Raises SaveError.
        """
        try:
            with self._guard:
                self._flush()
            if self._private is None:
                os.fsync(self._file.fileno())
            else:
                gcs.upload(os.fspath(self._local), self._path)
        except OSError as e:
            raise SaveError(f"{self._path}: the lines of metrics could not be written: {e}") from e

    def close(self) -> None:
        """Also uploads the lines since the last `sync`, if it can: a resumed run would do their steps again."""
        if self._file.closed:
            return
        try:
            if self._private is not None or self._waiting:
                self.sync()
        except SaveError as e:
            log.warning("%s", e)
        finally:
            self._file.close()
            self._remove_private()

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def _remove_private(self) -> None:
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)


def _download(path: str, local: Path) -> None:
    try:
        local.write_bytes(gcs.read(path))
    except FileNotFoundError:
        local.touch()


def _truncate_after(path: Path, step: int, *, shown: str) -> tuple[int, dict[int, dict[str, Any]]]:
    """Cuts the file before the first line of a later step; the step of the last line that stays, and the lines that go.

    Errors call the file `shown`.
    """
    last, replaced = 0, {}
    if not path.exists():
        return last, replaced
    with path.open("rb+") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # cut by a kill
            try:
                content = json.loads(line)
                found = content["step"]
                is_later = found > step
            except (ValueError, TypeError, KeyError) as e:
                raise DataError(
                    f"{shown}, line {number}: not a line of metrics ({type(e).__name__}: {e}), so what the resumed run will "
                    "write cannot be joined to it. Mend the line, or move the file away: the snapshots do not need it."
                ) from e
            if is_later or replaced:
                replaced[found] = content
            else:
                end, last = end + len(line), found
        file.truncate(end)
    return last, replaced
