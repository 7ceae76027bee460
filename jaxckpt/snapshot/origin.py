"""Where a run without snapshots of its own begins: at another run's snapshot, the whole of it or some leaves."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import SnapshotError, listed
from jaxckpt.snapshot import restore
from jaxckpt.snapshot.leaves import leaf_table, stored_leaves
from jaxckpt.snapshot.locate import Located, locate
from jaxckpt.state.train_state import TrainState


@dataclass(frozen=True)
class Origin:
    path: str
    """RUN_DIR, RUN_DIR@STEP or RUN_DIR@PIN, local or gs://"""
    patterns: Sequence[str] = ()
    """regexes on the paths of the leaves to take; none: the whole snapshot, with its step and its place in the data"""

    def locate(self, group: Group) -> Located:
        """The snapshot, found by process 0 for all."""
        root, step = group.from_primary("find the snapshot to begin with", lambda: _as_json(locate(self.path)))
        return Located(epath.Path(root), step)

    def read(self, at: Located, plan: TrainState, *, group: Group, **limits: Any) -> dict[str, jax.Array]:
        """The leaves that match, laid out as in `plan`. Raises SnapshotError with every pattern that matches nothing and
        every leaf that does not fit."""
        stored, wanted = restore.read_meta(*at)["leaves"], leaf_table(plan)
        problems, taken = [], {}
        for pattern in self.patterns:
            found = [path for path in stored if re.search(pattern, path)]
            taken.update(dict.fromkeys(found))
            if not found:
                groups = sorted({"/".join(path.split("/")[:2]) for path in stored})
                problems.append(f"{pattern!r} matches no leaf of the snapshot; there are {', '.join(groups[:20])}")
        for path in taken:
            there, here = (_kind(table[path]) if path in table else "no such leaf" for table in (stored, wanted))
            if there != here:
                problems.append(f"leaf {path!r} is {there} in the snapshot; this model has {here}")
        if problems:
            raise SnapshotError(
                f"restore_from {self.path}: the leaves that restore_paths names cannot be taken:\n"
                + listed(problems)
                + "\nGive patterns that leave these out, or the model of that run (python -m jaxckpt inspect shows it)."
            )
        target = {path: x for path, x in stored_leaves(plan).items() if path in taken}
        return restore.read_leaves(*at, target, group=group, **limits)


def _as_json(at: Located) -> list[Any]:
    return [os.fspath(at.root), at.step]


def _kind(leaf: dict[str, Any]) -> str:
    return f"{leaf['dtype']}{leaf['shape']}"
