"""Saving and restoring the whole of a run: asynchronous, atomic, durable, and strict about what fits."""

import importlib.metadata
import math
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import SaveError, SnapshotError
from jaxckpt.snapshot import orbax_io, steps
from jaxckpt.snapshot.lock import RunLock
from jaxckpt.state import tree
from jaxckpt.state.train_state import TrainState, narrow

FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """Everything that may influence training from here on. What is not in it must not."""

    state: TrainState
    data: dict[str, Any]
    """position in the data, small and the same on every process"""
    meta: dict[str, Any]
    """format, step, config, versions, mesh, placement and the table of leaves"""


class Snapshots:
    """The snapshots of the run directory `run_dir`, in `run_dir/snapshots`.

    Saves every `every` steps and keeps the newest `keep`. Use it as a context manager or call `close`: a process that
    leaves without waiting loses the save that is under way.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, every: int = 100, keep: int = 3, timeout_s: float = 600.0
    ) -> None:
        if every < 1 or keep < 1:
            raise SnapshotError(f"snapshots: every={every} and keep={keep} must both be at least 1")
        if "://" in str(run_dir):
            raise SnapshotError(
                f"run_dir {str(run_dir)!r}: only local paths can be written; give a directory of this machine"
            )
        self.run_dir = Path(run_dir).absolute()
        if odd := sorted(set("*?[") & set(str(self.run_dir))):
            raise SnapshotError(
                f"run_dir {str(self.run_dir)!r} holds {' and '.join(odd)}, which Orbax takes for a pattern: its snapshots could "
                "not be read again. Give a directory without these characters."
            )
        self.root = self.run_dir / "snapshots"
        self.every, self.keep, self.timeout_s = every, keep, timeout_s
        self._job: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: Group | None = None
        self._lock: RunLock | None = None

    def open(self, group: Group) -> None:
        """Takes the run directory for this run and sweeps what a killed process left. Every process calls it first."""
        if self._group is None:
            group.from_primary("open the run directory", self._prepare)
            self._group = group  # only now: after a refusal the next try must be refused too

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return steps.committed_steps(self.root)

    def read_meta(self, step: int) -> dict[str, Any]:
        """The `meta` of a step, without arrays. Raises SnapshotError where this version cannot read it."""
        directory = steps.step_path(self.root, step)
        try:
            meta = orbax_io.read_json(directory, "meta")
            found = int(meta["format"])
            if found <= FORMAT:
                return {**meta, "step": int(meta["step"]), "leaves": dict(meta["leaves"])}
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise SnapshotError(
                f"{directory}: the snapshot's meta cannot be read ({type(e).__name__}: {e}). Move this directory and its "
                ".ok mark away to continue from an older one."
            ) from e
        raise SnapshotError(
            f"{directory}: the snapshot has format {found}, written by jaxckpt "
            f"{meta.get('versions', {}).get('jaxckpt', '?')}; this is jaxckpt {_version('jaxckpt')}, which reads up to format "
            f"{FORMAT}. Update jaxckpt, or start a new run_dir."
        )

    def save(self, snapshot: Snapshot) -> None:
        """Starts writing `snapshot`, after the save before it is done.

        Returns when the state may be donated to the next step; the bytes go out in the background, see `check` and
        `wait`. Take the data position before drawing the next batch.
        """
        assert self._group is not None, "open() comes first"
        self.wait()
        step = int(snapshot.meta["step"])
        directory = steps.step_path(self.root, step)
        stored = {path: x for path, x in stored_leaves(snapshot.state).items() if math.prod(x.shape)}
        try:
            self._group.from_primary("start a snapshot", lambda: steps.check_writable(self.root))
            response = orbax_io.save_async(
                directory, state=stored, data=snapshot.data, meta=snapshot.meta, timeout_s=self.timeout_s
            )
        except Exception as e:
            raise self._failed(step, e) from e
        self._job = threading.Thread(target=self._finish, args=(step, response), name=f"jaxckpt-save-{step}")
        self._job.start()

    def check(self) -> None:
        """Raises SaveError if a save has failed; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises SaveError if a save has failed."""
        if self._job is not None:
            self._job.join()
            self._job = None
        self.check()

    def close(self) -> None:
        """Waits for the save that is under way and gives the run directory free."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._group = None

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore(self, step: int, plan: TrainState, *, compute_dtype: Any = None) -> Snapshot:
        """The snapshot of `step`, laid out as `plan`. Raises SnapshotError with every leaf that does not fit."""
        directory = steps.step_path(self.root, step)
        meta = self.read_meta(step)
        target = stored_leaves(plan)
        check_leaves(directory, meta["leaves"], leaf_table(plan))
        try:
            data = orbax_io.read_json(directory, "data")
            full = {path: x for path, x in target.items() if math.prod(x.shape)}
            arrays = orbax_io.load_state(directory, full, timeout_s=self.timeout_s)
        except Exception as e:
            raise SnapshotError(
                f"{directory}: the snapshot cannot be read: {_root_cause(e)}. Move this directory and its .ok mark away "
                "to continue from an older one."
            ) from e
        empty = {path: _zeros(x) for path, x in target.items() if path not in arrays}
        return Snapshot(_from_stored({**arrays, **empty}, plan, compute_dtype), data, meta)

    def _prepare(self) -> None:
        lock = None
        try:
            lock = RunLock(self.run_dir)
            steps.sweep(self.root)
            self._lock = lock
        except OSError as e:
            if lock is not None:
                lock.release()
            raise SnapshotError(
                f"run_dir {self.run_dir} cannot be written: {e}. Give another run_dir, or change its permissions."
            ) from e

    def _finish(self, step: int, response: Any) -> None:
        assert self._group is not None
        try:
            response.result(timeout=self.timeout_s)
            if self._group.is_primary:
                steps.commit(self.root, step)
        except BaseException as e:
            self._error = self._failed(step, e)
            return
        try:
            if self._group.is_primary:
                for old in self.steps()[: -self.keep]:
                    steps.delete(self.root, old)
        except OSError as e:
            self._error = SaveError(
                f"{self.root}: the snapshot of step {step} is saved, but an older one could not be deleted: {e}. Mend the "
                "directory's permissions, and start the same command again."
            )

    def _failed(self, step: int, error: BaseException) -> SaveError:
        if self._group is not None and self._group.is_primary:
            steps.discard_unfinished(self.root, step)
        newest = self.steps()[-1:]
        return SaveError(
            f"{self.root}: the snapshot of step {step} could not be saved: {_root_cause(error)}. "
            + (f"The newest good snapshot is step {newest[0]}." if newest else "There is no good snapshot yet.")
            + " Make room or mend the directory, and start the same command again."
        )


def stored_leaves(state: TrainState) -> dict[str, Any]:
    """{path: leaf} of what a snapshot holds: params at full precision (the master weights, where there are any, stand
    under `params`; the narrow copy is derived from them), opt_state, model_state and step."""
    full = TrainState(
        state.step, state.params if state.master is None else state.master, None, state.opt_state, state.model_state
    )
    return tree.flatten(full)


def leaf_table(state: TrainState) -> dict[str, dict[str, Any]]:
    """JSON of every stored leaf: shape, dtype, partition spec and memory kind."""
    return {
        path: {
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "spec": [list(a) if isinstance(a, tuple) else a for a in x.sharding.spec],
            "memory_kind": x.sharding.memory_kind,
        }
        for path, x in stored_leaves(state).items()
    }


def check_leaves(directory: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises SnapshotError listing every leaf that only one side has, or that differs in shape or dtype."""
    problems = [f"leaf {p!r} is in the snapshot and not in this model" for p in stored if p not in wanted]
    problems += [f"leaf {p!r} is in this model and not in the snapshot" for p in wanted if p not in stored]
    for path in (p for p in stored if p in wanted):
        for key in ("shape", "dtype"):
            if stored[path][key] != wanted[path][key]:
                problems.append(
                    f"leaf {path!r} has {key} {stored[path][key]} in the snapshot and {wanted[path][key]} in this model"
                )
    if problems:
        shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise SnapshotError(
            f"{directory} is a snapshot of another model or optimizer:\n"
            + "\n".join(f"  {p}" for p in shown)
            + "\nUse the model and optimizer that it was made with (its meta/data.json tells), or start a new run_dir."
        )


def environment() -> dict[str, Any]:
    """Versions and flags that can change the bits of a computation."""
    names = ("jaxckpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "grain", "numpy")
    device = jax.local_devices()[0]
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in names}},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_processes": jax.process_count(),
        "num_devices": jax.device_count(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(x.shape, x.dtype), out_shardings=x.sharding)()


def _from_stored(arrays: dict[str, jax.Array], plan: TrainState, compute_dtype: Any) -> TrainState:
    like = TrainState(
        plan.step, plan.params if plan.master is None else plan.master, None, plan.opt_state, plan.model_state
    )
    full = tree.unflatten(like, arrays)
    if plan.master is None:
        return full
    on_device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), plan.master)
    params_shardings = jax.tree.map(lambda x: x.sharding, plan.params)
    derive = jax.jit(lambda m: narrow(jax.device_put(m, on_device), compute_dtype)[0], out_shardings=params_shardings)
    return TrainState(full.step, derive(full.params), full.params, full.opt_state, full.model_state)


def _root_cause(error: BaseException) -> str:
    # Orbax hides the reason of a failed load at the bottom of a chain of 'incompatible handler' errors.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
