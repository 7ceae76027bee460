"""Saving and restoring the whole of a run: asynchronous, atomic, durable, checked, and strict about what fits."""

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, SaveError, SnapshotError
from jaxckpt.nvme import array
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot import completion, linked, manifest, orbax_io, packing, paths, restore, steps
from jaxckpt.snapshot.leaves import array_directory, num_bytes, stored_leaves, words
from jaxckpt.snapshot.lock import RunLock
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.retention import Retention
from jaxckpt.state import fingerprint
from jaxckpt.state.train_state import TrainState

log = logging.getLogger("jaxckpt")

_SPARE_BYTES = 1 << 20
"""room for the metadata of a snapshot"""


class Snapshots:
    """The snapshots of the run directory `run_dir` (local, or gs://bucket/...), in `run_dir/snapshots`.

    Saves every `every` steps, every `every_minutes` minutes, or both. Keeps the newest `keep`, every step that
    `keep_every` divides, the `keep_best` best by `best_metric` ('loss' or 'eval_loss'; `best_mode` 'min' or 'max'), and
    what is pinned. `on_failure` 'continue' trains on after a save that failed, in a run of one process. Use it as a context manager or call
    `close`: a process that leaves without waiting loses the save that is under way.

    staging_bytes: host memory that a save may take for copies of device memory. restore_bytes: what a restore may have
    in flight. copy_bytes_per_s: how fast leaves on local disks are copied to a run_dir on another file system; on the same
    one they are linked. None leaves them unbounded.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        every: int | None = 100,
        every_minutes: float | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        best_metric: Literal["loss", "eval_loss"] = "eval_loss",
        best_mode: Literal["min", "max"] = "min",
        on_failure: Literal["stop", "continue"] = "stop",
        staging_bytes: int | None = None,
        restore_bytes: int | None = 4 << 30,
        copy_bytes_per_s: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.run_dir = paths.resolve(run_dir)
        self.root = self.run_dir / "snapshots"
        self.retention = Retention(keep, keep_every, keep_best, best_metric, best_mode)
        self.every, self.every_minutes, self.on_failure = every, every_minutes, on_failure
        self.staging_bytes, self.restore_bytes, self.timeout_s = staging_bytes, restore_bytes, timeout_s
        self.copy_bytes_per_s = copy_bytes_per_s
        self._check_arguments()
        self._job: threading.Thread | None = None
        self._error: SaveError | None = None
        self._is_told = False
        self._group: Group | None = None
        self._lock: RunLock | None = None
        self._metrics: dict[int, dict[str, float | None]] = {}

    # ---------------------------------------------------------------------------------------------- lifetime

    def open(self, group: Group) -> None:
        """Takes the run directory for this run and sweeps what a killed process left. Every process calls it first."""
        if self.on_failure == "continue" and jax.process_count() > 1:
            raise SnapshotError(
                "snapshots.on_failure: continue is for runs of one process; where one of several cannot write its part, the "
                "others cannot either, and the run stops. Use on_failure: stop, and start the same command again."
            )
        if self._group is None:
            group.from_primary("open the run directory", self._prepare)
            self._group = group  # only now: after a refusal the next try must be refused too

    @property
    def group(self) -> Group:
        """The processes that opened the run directory together."""
        assert self._group is not None, "open() comes first"
        return self._group

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

    # ---------------------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return steps.committed_steps(self.root)

    def read_meta(self, step: int) -> dict[str, Any]:
        """The `meta` of a step, without arrays. Raises SnapshotError where this version cannot read it."""
        return restore.read_meta(self.root, step)

    def restore(
        self, step: int, plan: TrainState, *, compute_dtype: Any = None, store: NvmeStore | None = None
    ) -> Snapshot:
        """The snapshot of `step`, laid out as `plan`, every bit of it checked. Leaves that the plan has on local disks are
        written to `store`.

        Raises SnapshotError with every leaf that does not fit, DamagedSnapshot where a leaf or file is not what was
        saved, on every process alike.
        """
        return restore.read_snapshot(
            self.root,
            step,
            plan,
            group=self.group,
            compute_dtype=compute_dtype,
            store=store,
            timeout_s=self.timeout_s,
            restore_bytes=self.restore_bytes,
        )

    def quarantine(self, step: int, why: str) -> None:
        """Renames a damaged step, so that it counts no more and stays for who wants to look."""
        name = self.group.from_primary("quarantine a snapshot", lambda: steps.quarantine(self.root, step))
        log.error("%s\nThe damaged snapshot is now %s.", why, self.root / name)

    # ---------------------------------------------------------------------------------------------- saving

    def check_space(self, plan: TrainState) -> None:
        """Raises SnapshotError where the disk cannot take one snapshot of `plan`. Process 0 looks for all."""
        needed = sum(num_bytes(x) for x in words(stored_leaves(plan)).values()) + _SPARE_BYTES
        self.group.from_primary("look for free space", lambda: self._check_space(needed))

    def save(
        self,
        snapshot: Snapshot,
        *,
        metrics: Mapping[str, float | None] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts writing `snapshot`, after the save before it is done.

        Returns when the state may be donated to the next step; the bytes go out in the background, see `check` and
        `wait`. Take the data position before drawing the next batch. `metrics` (loss, eval_loss) are what keep_best looks
        at; process 0 calls `before_commit` in the background, when all is written and nothing counts yet.
        """
        self._join()
        self.check()
        self._error, self._is_told = None, False
        step = int(snapshot.meta["step"])
        directory = steps.step_path(self.root, step)
        leaves = words(stored_leaves(snapshot.state))
        on_disk = array.on_disk(leaves)
        large, small = packing.split({path: x for path, x in leaves.items() if path not in on_disk})
        held = None
        try:
            needed = sum(num_bytes(x) for x in (*large.values(), *on_disk.values())) + packing.packed_bytes(small)
            self.group.from_primary("start a snapshot", lambda: self._check_place(needed + _SPARE_BYTES))
            held = completion.hold(on_disk, step, self.group, copy_bytes_per_s=self.copy_bytes_per_s)
            on_host = {path: x for path, x in large.items() if orbax_io.takes_from_host(x)}
            # Dispatched before the caller may donate the arrays; the values are waited for in the background.
            fingerprints = {path: fingerprint.of_array(x) for path, x in large.items() if path not in on_host}
            fingerprints.update({path: x.fingerprint for path, x in on_disk.items()})
            host = packing.to_host(small)
            packed, table = packing.pack(host)
            response = orbax_io.save_async(
                directory,
                state={**large, packing.NAME: packed},
                data=snapshot.data,
                meta=snapshot.meta,
                timeout_s=self.timeout_s,
                staging_bytes=self.staging_bytes,
            )
        except Exception as e:
            if held is not None:
                held.release()
            self._error = self._failed(step, e)
            self.check()
            return

        # Bytes take longer than words: one process may have more to write or to copy than another.
        group = Group(timeout_s=self.timeout_s)
        shapes = {path: x.shape for path, x in on_host.items()}
        arrays = list(large)

        def complete() -> dict[str, str]:
            found = completion.complete(directory, response, held, shapes, group=group)
            return {**found, **_hex(fingerprints, host)}

        def commit(found: Mapping[str, str]) -> None:
            self._check_complete(directory, arrays)
            linked.describe(directory, held.leaves)
            text = manifest.describe(directory, step=step, fingerprints=found, packed=table)
            before_commit()
            if self._lock is not None:
                self._lock.check()
            steps.commit(self.root, step, manifest=text, metrics=dict(metrics or {}))
            self._metrics[step] = dict(metrics or {})

        self._job = threading.Thread(target=self._finish, args=(step, complete, commit), name=f"jaxckpt-save-{step}")
        self._job.start()

    def check(self) -> None:
        """Tells of a save that has failed: raises its SaveError, or logs it where on_failure is 'continue'. Does not
        wait."""
        if self._error is None or self._is_told:
            return
        self._is_told = True
        if self.on_failure == "stop":
            error, self._error = self._error, None
            raise error
        log.error("%s Training goes on; the next snapshot will be tried as usual.", self._error)

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises SaveError if the newest save has failed."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _join(self) -> None:
        if self._job is not None:
            self._job.join()
            self._job = None

    def _finish(
        self, step: int, complete: Callable[[], dict[str, str]], commit: Callable[[Mapping[str, str]], None]
    ) -> None:
        try:
            fingerprints = complete()
            if self.group.is_primary:
                commit(fingerprints)
        except BaseException as e:
            self._error = self._failed(step, e)
            if not threading.main_thread().is_alive():
                print(
                    f"{self._error} The process left without waiting for it: use `with`, or close().", file=sys.stderr
                )
            return
        try:
            if self.group.is_primary:
                found = self.steps()
                pinned = steps.pins(self.root).values()
                for old in self.retention.superfluous(found, self._metrics, pinned):
                    steps.delete(self.root, old)
                    self._metrics.pop(old, None)
        except (OSError, SnapshotError) as e:  # also a pin that cannot be read: which step it keeps is not known
            self._error = SaveError(
                f"{self.root}: the snapshot of step {step} is saved, but older ones could not be deleted: {e} Mend that, "
                "and start the same command again."
            )

    def _failed(self, step: int, error: BaseException) -> SaveError:
        if self._group is not None and self._group.is_primary:
            steps.discard_unfinished(self.root, step)
        try:
            newest = self.steps()[-1:]
        except OSError:
            newest = []  # what cannot be listed is not promised
        return SaveError(
            f"{self.root}: the snapshot of step {step} could not be saved: {restore.root_cause(error).rstrip('.')}. "
            + (f"The newest good snapshot is step {newest[0]}." if newest else "There is no good snapshot yet.")
            + " Make room or mend the directory"
            + (", and start the same command again." if self.on_failure == "stop" else ".")
        )

    # ---------------------------------------------------------------------------------------------- checks

    def _check_arguments(self) -> None:
        problems = []
        if self.every is None and self.every_minutes is None:
            problems.append("every and every_minutes are both None; one of them must say when to save")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            problems.append(f"every={self.every!r} must be an integer of at least 1, or None")
        if self.every_minutes is not None and not _is_positive(self.every_minutes):
            problems.append(f"every_minutes={self.every_minutes!r} must be a positive number, or None")
        if self.copy_bytes_per_s is not None and not _is_positive(self.copy_bytes_per_s):
            problems.append(f"copy_bytes_per_s={self.copy_bytes_per_s!r} must be a positive number, or None")
        if not _is_positive(self.timeout_s):
            problems.append(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if self.on_failure not in ("stop", "continue"):
            problems.append(f"on_failure={self.on_failure!r} must be 'stop' or 'continue'")
        for name in ("staging_bytes", "restore_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                problems.append(f"{name}={value!r} must be a positive integer of bytes, or None")
        if problems:
            raise SnapshotError("snapshots: " + "; ".join(problems))

    def _prepare(self) -> None:
        lock = None
        try:
            lock = RunLock(self.run_dir)
            if whole := [name for name in steps.sweep(self.root) if steps.is_step(name)]:
                log.warning("removed what was never marked as saved: %s", ", ".join(whole))
            self._metrics = {step: _metrics_of(self.root, step) for step in self.steps()}
            self._lock = lock
        except OSError as e:
            if lock is not None:
                lock.release()
            raise SnapshotError(
                f"run_dir {self.run_dir} cannot be written: {e}. Give another run_dir, or change its permissions."
            ) from e

    def _check_place(self, needed: int) -> None:
        steps.check_writable(self.root)
        self._check_space(needed)

    def _check_space(self, needed: int) -> None:
        free = steps.free_bytes(self.root)
        if free is not None and free < needed:
            raise SnapshotError(
                f"{self.root}: a snapshot takes {needed / 2**20:.1f} MiB, {_SPARE_BYTES >> 20} of them in reserve, and "
                f"{math.floor(free / 2**20 * 10) / 10} MiB are free. Keep fewer snapshots (snapshots.keep), or give another "
                "run_dir."
            )

    def _check_complete(self, directory: epath.Path, large: list[str]) -> None:
        if missing := [
            path for path in large if not (directory / "state" / array_directory(path) / "zarr.json").exists()
        ]:
            raise OSError(f"Orbax wrote no array for {missing[:5]} in {directory}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _metrics_of(root: epath.Path, step: int) -> dict[str, float | None]:
    try:
        return dict(steps.read_mark(root, step)["metrics"])
    except DamagedSnapshot:
        return {}  # told when the step is restored or verified


def _hex(given: Mapping[str, jax.Array], host: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Fingerprints as text: those of device arrays, which are `given`, and those of arrays in memory."""
    return {path: fingerprint.to_hex(x) for path, x in {**given, **fingerprint.np_fingerprints(host)}.items()}
