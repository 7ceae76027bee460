"""`metrics.jsonl`: one line a step, each step once, also after a rollback."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxckpt.errors import DataError


def float_bits(value: Any) -> str:
    """8 hexadecimal digits: the bits of a float32, which a decimal cannot promise to keep."""
    return f"{int(np.asarray(value, np.float32).view(np.uint32)):08x}"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file, without a last line that a kill has cut."""
    lines = []
    for line in Path(path).read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            lines.append(json.loads(line))
    return lines


class MetricsFile:
    """Appends lines; each reaches the operating system before `write` returns, so a killed process loses none."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Opens `path` and drops what lies after `resume_step`: the run is about to do those steps again."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.last_step = _truncate_after(path, resume_step)
            """step of the last line that was kept, 0 if there is none"""
            self._file: TextIO = path.open("a")
        except OSError as e:
            raise DataError(f"{path} cannot be written: {e}. Move it away: the snapshots do not need it.") from e

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns when the lines are on the disk, so that a snapshot never outlives the lines before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _truncate_after(path: Path, step: int) -> int:
    """Cuts the file before the first line of a later step; the step of the last line that stays."""
    last = 0
    if not path.exists():
        return last
    with path.open("rb+") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # cut by a kill
            try:
                found = json.loads(line)["step"]
                is_later = found > step
            except (ValueError, TypeError, KeyError) as e:
                raise DataError(
                    f"{path}, line {number}: not a line of metrics ({type(e).__name__}: {e}), so what the resumed run will "
                    "write cannot be joined to it. Mend the line, or move the file away: the snapshots do not need it."
                ) from e
            if is_later:
                break
            end, last = end + len(line), found
        file.truncate(end)
    return last
