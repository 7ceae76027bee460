"""One process of a group that saves, or restores and checks, a state whose every element is known: prints what it cost.

python layouts.py save|restore RUN_DIR PROCESSES NUMBER PORT DEVICES AXES SPEC KIND
AXES: {"data": 2, "fsdp": 4}; SPEC: partition spec of the matrix, such as ["fsdp", null]; KIND: its memory kind, or nvme: on disk,
in RUN_DIR/nvme.
"""

# ruff: noqa: E402 (the processes must have joined before anything asks JAX for devices)
import json
import resource
import sys
import threading
import time
from contextlib import ExitStack

from jaxckpt.distributed.start import join, use_cpu_devices

ACTION, RUN_DIR, PROCESSES, NUMBER, PORT, DEVICES, AXES, SPEC, KIND = sys.argv[1:]
use_cpu_devices(int(DEVICES))
if int(PROCESSES) > 1:
    join(f"127.0.0.1:{PORT}", int(PROCESSES), int(NUMBER), timeout_s=60)

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.nvme import NvmeStruct, resident
from jaxckpt.state.train_state import TrainState

ROWS, COLUMNS = 4096, 4096
SMALL = 7


def values(index):
    """The matrix at `index`: no two rows alike, no two columns alike."""
    rows, columns = (np.arange(n, dtype=np.uint32)[i] for n, i in zip((ROWS, COLUMNS), index, strict=True))
    return (rows[:, None] * np.uint32(2654435761) + columns[None, :] * np.uint32(40503)).view(np.float32)


def own_bytes():
    """(bytes that this process has read from files, resident bytes)."""
    with open("/proc/self/io") as io, open("/proc/self/statm") as statm:
        return int(io.readline().split()[1]), int(statm.readline().split()[1]) * resource.getpagesize()


class Peak(threading.Thread):
    """The largest resident size while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.bytes = own_bytes()[1]
        self.ended = False

    def run(self):
        while not self.ended:
            self.bytes = max(self.bytes, own_bytes()[1])
            time.sleep(0.002)


axes = {"data": 1, "fsdp": 1, "tensor": 1, **json.loads(AXES)}
mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)
matrix = NamedSharding(mesh, P(*json.loads(SPEC)), memory_kind="device" if KIND == "nvme" else KIND)
kind = NvmeStruct if KIND == "nvme" else jax.ShapeDtypeStruct
small = NamedSharding(mesh, P("fsdp") if 8 % axes["fsdp"] == 0 else P())
whole = NamedSharding(mesh, P())
plan = TrainState(
    jax.ShapeDtypeStruct((), np.int32, sharding=whole),
    {"kernel": kind((ROWS, COLUMNS), np.dtype(np.float32), sharding=matrix)},
    None,
    {"count": jax.ShapeDtypeStruct((8, SMALL), np.float32, sharding=small)},
    {},
)
group = Group(timeout_s=60)
count = np.arange(8 * SMALL, dtype=np.float32).reshape(8, SMALL)

with ExitStack() as stack:
    snapshots = stack.enter_context(Snapshots(RUN_DIR, timeout_s=60))
    snapshots.open(group)
    store = None
    if KIND == "nvme":
        store = NvmeStore([f"{RUN_DIR}/nvme"], {"params/kernel": plan.params["kernel"]}, run_id="layouts")
        stack.enter_context(store)
    if ACTION == "save":
        kernel = jax.make_array_from_callback((ROWS, COLUMNS), matrix, values)
        if store is not None:
            kernel = store.write_arrays({"params/kernel": kernel})["params/kernel"]
        state = TrainState(
            jax.make_array_from_callback((), whole, lambda i: np.int32(5)),
            {"kernel": kernel},
            None,
            {"count": jax.make_array_from_callback(count.shape, small, lambda i: count[i])},
            {},
        )
        snapshots.save(Snapshot(state, {}, {"format": FORMAT, "step": 5, "leaves": leaf_table(plan)}))
        snapshots.wait()
        answer = {"is_right": True}
    else:
        read, _ = own_bytes()
        peak = Peak()
        peak.start()
        try:
            state = snapshots.restore(5, plan, store=store).state
        except DamagedSnapshot as e:
            print(json.dumps({"damage": str(e)}), flush=True)
            sys.exit(0)
        jax.block_until_ready(resident(state))
        peak.ended = True
        read = own_bytes()[0] - read
        kernel = state.params["kernel"]
        if store is None:
            parts = [(shard.index, np.asarray(shard.data)) for shard in kernel.addressable_shards]
        else:
            parts = [(kernel.box(place), kernel.read(place)) for place in kernel.files]
        is_right = all(np.array_equal(part.view(np.uint32), values(box).view(np.uint32)) for box, part in parts)
        is_right &= all(
            np.array_equal(np.asarray(s.data), count[s.index]) for s in state.opt_state["count"].addressable_shards
        )
        is_right &= int(np.asarray(state.step.addressable_shards[0].data)) == 5
        is_right &= state.params["kernel"].sharding == matrix
        answer = {
            "is_right": bool(is_right),
            "read": read,
            "distinct": sum({str(box): part.nbytes for box, part in parts}.values()),
            "held": max(part.nbytes for _, part in parts) if store else sum(part.nbytes for _, part in parts),
            "peak": peak.bytes - peak.before,
        }
print(json.dumps(answer), flush=True)
