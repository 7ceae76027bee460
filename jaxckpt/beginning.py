"""Where a run's state comes from: its newest good snapshot, another run's, or its own initialisation."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from etils import epath

from jaxckpt import exactness
from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.stream import BatchStream
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot
from jaxckpt.observe.phases import Phases
from jaxckpt.snapshot import resume as resuming
from jaxckpt.snapshot.leaves import check_leaves, leaf_table, stored_leaves, to_state
from jaxckpt.snapshot.origin import Origin
from jaxckpt.snapshot.restore import read_meta, read_snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.init import initialise
from jaxckpt.state.train_state import TrainState
from jaxckpt.tiers import Tiers

log = logging.getLogger("jaxckpt")

_NO_CHANGE_OF_DATA = {"data.batch_size", "data.weights", "data.weights_schedule", "data.skip"}
"""keys whose change leaves every example as it is"""


@dataclass(frozen=True)
class Begun:
    state: TrainState
    step: int
    """updates that the state has behind it"""
    meta: Mapping[str, Any] | None = None
    """of the snapshot that the run goes on from; None for one that begins at step 0"""
    restored_from: Mapping[str, Any] | None = None
    """path, step and patterns of the other run that this one began with, now or in an earlier life"""
    is_saved: bool = False
    """whether the run's own directory holds this very state"""


@dataclass(frozen=True)
class Beginning:
    """What must be known to begin; `begin` does it."""

    plan: TrainState
    init: Callable[[], TrainState]
    stream: BatchStream | IteratedStream
    group: Group
    snapshots: Snapshots | None
    resume: resuming.Resume
    origin: Origin | None
    training: Mapping[str, Any]
    """settings that must not change between two lives"""
    has_config: bool
    """whether configurations are compared, by those who know their keys, instead of `training`"""
    allow_changed: tuple[str, ...]
    compute_dtype: Any
    tiers: Tiers
    phases: Phases

    def begin(self, start_compiling: Callable[[int], None]) -> Begun:
        """The state on the devices, and the data at its place. A damaged snapshot is set aside and an older one taken.

        `start_compiling` is told the step that the run begins with, as soon as the model is known to fit.
        """
        if self.snapshots:
            self.snapshots.open(self.group)
            self.snapshots.check_space(self.plan)
        self.tiers.open(self.group, run_dir=self.snapshots and self.snapshots.run_dir)
        while True:
            step = resuming.choose(self.snapshots, self.resume) if self.snapshots else None
            try:
                begun = self._begin(step, start_compiling)
                break
            except DamagedSnapshot as e:
                if self.snapshots is None or step is None:
                    raise  # another run's, which is not ours to rename
                resuming.fall_back(self.snapshots, self.resume, step, e)
        if self.snapshots:
            resuming.set_later_aside(self.snapshots, self.resume, begun.step)
        return begun

    def is_compared_by_config(self, meta: Mapping[str, Any]) -> bool:
        return self.has_config and meta.get("config") is not None

    def _begin(self, step: int | None, start_compiling: Callable[[int], None]) -> Begun:
        if step is not None:
            assert self.snapshots is not None
            begun = self._continue(self.snapshots.root, step, start_compiling)
            assert begun.meta is not None
            return Begun(begun.state, step, begun.meta, begun.meta.get("restored_from"), is_saved=True)
        if self.origin is not None:
            return self._branch_off(self.origin, start_compiling)
        start_compiling(0)
        return Begun(self._initialise(), 0)

    def _continue(self, root: epath.Path, step: int, start_compiling: Callable[[int], None]) -> Begun:
        """Takes the whole of a snapshot, with its place in the data."""
        meta = read_meta(root, step)
        if not self.is_compared_by_config(meta):
            exactness.check_settings(root.parent, meta.get("training", {}), self.training, self.allow_changed)
        check_leaves(root, meta["leaves"], leaf_table(self.plan))  # before the compiler's minutes
        start_compiling(step)
        with self.phases.phase("restore"):
            snapshot = read_snapshot(
                root,
                step,
                self.plan,
                group=self.group,
                compute_dtype=self.compute_dtype,
                store=self.tiers.store,
                **self._limits(),
            )
            self.stream.restore(self._accepted_data(snapshot.data))
            if snapshot.data["identity"] == self.stream.state()["identity"]:  # unless other data was allowed by name
                exactness.check_batch(self.stream, step=step, digest=snapshot.meta["batch_digest"])
        return Begun(snapshot.state, step, meta)

    def _branch_off(self, origin: Origin, start_compiling: Callable[[int], None]) -> Begun:
        """Begins with another run's snapshot: as that run would go on, or anew with some of its leaves."""
        at = origin.locate(self.group)
        restored_from = {"path": str(at.root), "step": at.step, "paths": list(origin.patterns)}
        log.info("begins with step %d of %s", at.step, at.root)
        if not origin.patterns:
            begun = self._continue(at.root, at.step, start_compiling)
            return Begun(begun.state, at.step, begun.meta, restored_from)
        start_compiling(0)
        fresh = stored_leaves(self._initialise())  # first: on disk, what is read takes its place
        leaves = origin.read(at, self.plan, group=self.group, store=self.tiers.store, **self._limits())
        state = to_state({**fresh, **leaves}, self.plan, self.compute_dtype, store=self.tiers.store)
        return Begun(state, 0, None, restored_from)

    def _initialise(self) -> TrainState:
        with self.phases.phase("init"):
            return initialise(self.init, self.plan, to_disk=partial(self.tiers.to_disk, meet=self.group.barrier))

    def _limits(self) -> dict[str, Any]:
        if self.snapshots is None:
            return {}
        return {"timeout_s": self.snapshots.timeout_s, "restore_bytes": self.snapshots.restore_bytes}

    def _accepted_data(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data position, under the present data's identity where a change of data was allowed by name."""
        names = {n for n in self.allow_changed if n.partition(".")[0] in ("data", "seed")} - _NO_CHANGE_OF_DATA
        if names == {"data.stores"}:  # stores may come and go; one that stays must be what it was
            then, now = state["identity"], self.stream.identity
            stores = {key for key in {*then, *now} if key.endswith((".content", ".tokenizer"))}
            kept = {key: now[key] for key in stores & set(now) if key not in then}
            return {**state, "identity": {**{k: v for k, v in then.items() if k not in stores or k in now}, **kept}}
        return {**state, "identity": dict(self.stream.identity)} if names else state
