"""What a run does about state that lives off the device: its files, what a step moves, and what was promised of it."""

import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import optax

from jaxckpt.distributed.sync import Group
from jaxckpt.nvme.array import NvmeArray
from jaxckpt.nvme.directories import sweep_former
from jaxckpt.nvme.store import NvmeStore, is_all_finite
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import fingerprint
from jaxckpt.state.memory import group_sizes
from jaxckpt.state.mesh import replicated
from jaxckpt.state.nvme import NvmeStruct, tier_of
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.buckets import make_buckets
from jaxckpt.update.moved import host_buffers, moved_bytes
from jaxckpt.update.self_check import self_check
from jaxckpt.update.split import split_update

log = logging.getLogger("jaxckpt")


class Tiers:
    """Of one run; nothing is touched before `open`. `run_dir` names the run's files on the disks of the tier nvme."""

    def __init__(
        self,
        plan: TrainState,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        *,
        run_dir: str | None,
        microbatches: int,
    ) -> None:
        self._plan, self._optimizer, self._placement = plan, optimizer, placement
        leaves = {path: x for path, x in tree.flatten(plan).items() if isinstance(x, NvmeStruct)}
        name = hashlib.sha256(run_dir.encode()).hexdigest()[:16] if run_dir else uuid.uuid4().hex[:16]
        self.store = NvmeStore(placement.nvme_dir, leaves, run_id=name) if leaves else None
        """the files of the tier nvme; None where nothing is in it"""
        self.step_fn: Any = None
        """the step that moves them, once it is made"""
        self._is_open = False
        self._mesh = plan.step.sharding.mesh
        self._microbatches = microbatches

    def open(self, group: Group, *, run_dir: Any = None) -> None:
        """Takes the room that the tier nvme needs, and gives back what former lives of the run have left; all processes call
        it. `run_dir`: the path of the run's own directory, if it has one. Raises OffloadError where a disk refuses."""
        if run_dir is not None:
            sweep_former(run_dir / "nvme.json", [] if self.store is None else self._placement.nvme_dir, group)
        if self.store is not None and not self._is_open:
            self.store.open()
            self._is_open = True

    def check_update(self) -> None:
        """Says in the log whether the update in buckets is that of plain optax, tried on a tiny tree: seconds."""
        weights = self._plan.params if self._plan.master is None else self._plan.master
        if all(tier_of(x) == "device" for x in jax.tree.leaves(self._plan)):
            return
        split = split_update(self._optimizer, weights)
        buckets = make_buckets(split, weights, self._plan.opt_state, bucket_bytes=self._placement.bucket_bytes)
        found = self_check(self._optimizer, weights, buckets, is_apart=self.store is not None)
        log.log(logging.INFO if found.is_bitwise else logging.WARNING, "%s", found.text())

    def moved(self) -> dict[str, float] | None:
        """What the step that was called last moves, in this process; None where all state is on the device.

        Bytes to and from the devices, and of the tier nvme: bytes, seconds in which the disks worked, and how many of
        them the step stood still for.
        """
        nvme = getattr(self.step_fn, "moved", None)
        to_device, from_device = self._on_the_bus
        if not (to_device or from_device or nvme):
            return None
        found: dict[str, float] = {"to_device_bytes": to_device, "from_device_bytes": from_device}
        if nvme is not None:
            found |= {
                "nvme_read_bytes": nvme.bytes_read,
                "nvme_written_bytes": nvme.bytes_written,
                "nvme_bytes_per_s": nvme.bytes_per_s,
                "nvme_hidden_s": nvme.hidden_s,
                "nvme_exposed_s": nvme.exposed_s,
            }
        return found

    @cached_property
    def _on_the_bus(self) -> tuple[int, int]:
        """Bytes to and from the devices of this process in a step, as the plan has it."""
        one = moved_bytes(
            group_sizes(self._plan),
            gradient_bytes=host_buffers(self.step_fn).gradients,
            microbatches=self._microbatches,
            is_marking=getattr(self.step_fn, "is_marking", False),
        )
        to_device, from_device = (n * len(self._plan.step.sharding.addressable_devices) for n in one)
        return to_device, from_device

    def close(self) -> None:
        if self.store is not None and self._is_open:
            self.step_fn.close()
            self.store.close()
            self._is_open = False

    def to_disk(self, arrays: Mapping[str, jax.Array], *, meet: Callable[[str], None]) -> dict[str, NvmeArray]:
        """The leaves on disk instead of on the devices. All processes call it; `meet` is a barrier between them."""
        marks = {
            path: jax.jit(_marks, out_shardings=replicated(self._mesh)).lower(x).compile() for path, x in arrays.items()
        }
        # A process that compiles longer than another may wait for it in a program must not be late for the program.
        meet("compile what looks at the first state")
        assert self.store is not None, "open() comes first"
        return {
            path: self.store.write_array(path, x, *jax.block_until_ready(marks[path](x))) for path, x in arrays.items()
        }


def _marks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return fingerprint(x), is_all_finite(x)
