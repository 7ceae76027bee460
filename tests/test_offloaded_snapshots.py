"""Snapshots of state that lies in pinned host memory and on local disks: exact, without tearing, and free to move."""

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import nullcontext as nothing
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, OffloadError, SaveError
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot.inspect import inspect
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.snapshot.steps import step_path
from jaxckpt.snapshot.verify import verify
from jaxckpt.state import fingerprint, tree
from jaxckpt.state.nvme import NvmeStruct, tier_of
from jaxckpt.state.plan import Placement, make_plan
from jaxckpt.state.train_state import TrainState, narrow
from runs import final_leaves
from tiny import differing, mesh_of

RULES = [("w", P("fsdp", "tensor"))]
HOST = Placement(master="pinned_host", opt_state="pinned_host")


def disk(tmp_path, *names, **groups):
    """All of the optimizer's state on disk, in these directories."""
    dirs = [str(tmp_path / name) for name in names or ["nvme"]]
    for one in dirs:
        os.makedirs(one, exist_ok=True)
    return Placement(opt_state="nvme", nvme_dir=tuple(dirs), **groups)


def init(step=0, compute_dtype=None):
    """A state with leaves of several kinds, other ones for each step."""
    rng = np.random.default_rng(step)
    leaves = lambda: {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in {"w": (512, 512), "v": (1024, 256), "b": (64,)}.items()
    }
    weights, mu = leaves(), leaves()
    nu = {name: np.square(x).astype(jnp.bfloat16) for name, x in mu.items()}
    params, master = narrow(weights, compute_dtype)
    return TrainState(np.int32(step), params, master, {"count": np.int32(step), "mu": mu, "nu": nu}, {})


def planned(placement=None, compute_dtype=None, **axes):
    return make_plan(init(0, compute_dtype), mesh_of(**axes), rules=RULES, placement=placement or Placement())


def state_of(step, plan, store=None):
    """The state of a step laid out as `plan`; its leaves on disk are written to `store`."""
    flat = tree.flatten(init(step, None if plan.master is None else "bfloat16"))
    placed = {path: jax.device_put(flat[path], x.sharding) for path, x in tree.flatten(plan).items()}
    if store is not None:
        placed.update(store.write_arrays({path: placed[path] for path in store.paths}))
    return tree.unflatten(plan, placed)


def store_of(plan, placement):
    leaves = {path: x for path, x in tree.flatten(plan).items() if isinstance(x, NvmeStruct)}
    assert leaves
    return NvmeStore(placement.nvme_dir, leaves, run_id="test")


def snapshot_of(state, plan):
    step = int(state.step)
    return Snapshot(state, {"next": step}, {"format": FORMAT, "step": step, "leaves": leaf_table(plan)})


@pytest.fixture
def snapshots(tmp_path):
    with Snapshots(tmp_path / "run", timeout_s=60) as opened:
        opened.open(Group(timeout_s=10))
        yield opened


def save(snapshots, state, plan):
    snapshots.save(snapshot_of(state, plan))
    snapshots.wait()


def same(state, expected):
    return same_arrays({path: np.asarray(x) for path, x in tree.flatten(state).items()}, expected)


def same_arrays(found, expected):
    bits = lambda arrays: {path: (x.dtype, x.shape, x.tobytes()) for path, x in arrays.items()}
    return bits(found) == bits(expected)


def manifest_of(snapshots, step):
    return json.loads((step_path(snapshots.root, step) / "manifest.json").read_text())


# Pinned host memory


@pytest.mark.parametrize("staging_bytes", [None, 1 << 20])
@pytest.mark.parametrize("spec", [P(("data", "fsdp")), P("fsdp")], ids=["sharded", "two replicas"])
def test_a_step_overwrites_host_memory_in_place_while_the_snapshot_of_it_is_written(tmp_path, spec, staging_bytes):
    there = NamedSharding(mesh_of(data=2, fsdp=4), spec, memory_kind="pinned_host")
    here = there.with_memory_kind("device")
    first = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    add = jax.jit(
        lambda x: jax.device_put(jax.device_put(x, here) + 1, there),
        **{"in_shardings": there, "out_shardings": there, "donate_argnums": 0},
    )
    m = jax.block_until_ready(add(add(jax.device_put(first, there))))  # in memory of JAX's own
    places = lambda x: [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    before = places(m)
    step = jax.device_put(jnp.int32(2), NamedSharding(there.mesh, P()))
    state = TrainState(step, {}, None, {"m": m}, {})
    plan = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Snapshots(tmp_path / "run", timeout_s=60, staging_bytes=staging_bytes) as snapshots:
        snapshots.open(Group(timeout_s=10))
        snapshots.save(snapshot_of(state, plan))
        for _ in range(3):
            m = add(m)
        jax.block_until_ready(m)
        assert places(m) == before, "a view was kept, so that the step made a copy; a GPU refuses to donate such memory"
        snapshots.wait()
        found = snapshots.restore(2, plan).state.opt_state["m"]
    assert np.array_equal(found, first + 2) and np.array_equal(m, first + 5)
    assert found.sharding == there


def test_leaves_in_host_memory_are_fingerprinted_without_a_device_and_alike(snapshots):
    plan, host = planned(fsdp=2, tensor=2), planned(HOST, fsdp=4)
    save(snapshots, state_of(1, plan), plan)
    state = state_of(1, host)
    (snapshots.root / "step_0000000001").rename(snapshots.root / "other")
    fingerprint._compiled.cache_clear()
    save(snapshots, state, host)
    found = snapshots.restore(1, host).state
    assert fingerprint._compiled.cache_info().misses == 2, "the params w and v, which are on the device"
    assert not differing(found, state) and found.opt_state["mu"]["w"].sharding == host.opt_state["mu"]["w"].sharding
    one, other = json.loads((snapshots.root / "other" / "manifest.json").read_text()), manifest_of(snapshots, 1)
    assert one["fingerprints"] == other["fingerprints"] and len(one["fingerprints"]) > 8


@pytest.mark.parametrize("tier", ["pinned_host", "nvme"])
def test_exchanged_shards_of_a_leaf_off_the_device_are_damage(snapshots, tmp_path, tier):
    placement = HOST if tier == "pinned_host" else disk(tmp_path)
    plan = planned(placement, fsdp=2)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_of(plan, placement)) if tier == "nvme" else None
        save(snapshots, state_of(1, plan, store), plan)
        shards = snapshots.root / "step_0000000001" / "state" / "opt_state.mu.w" / "c"
        (shards / "0").rename(shards / "x")
        (shards / "1").rename(shards / "0")
        (shards / "x").rename(shards / "1")
        with pytest.raises(DamagedSnapshot, match=r"leaf 'opt_state/mu/w': other bits than were saved"):
            snapshots.restore(1, plan, store=store)


@pytest.mark.parametrize(("tier", "params"), [("pinned_host", "device"), ("nvme", "device"), ("nvme", "nvme")])
def test_the_narrow_params_are_derived_from_master_weights_off_the_device(snapshots, tmp_path, tier, params):
    placement = HOST if tier == "pinned_host" else disk(tmp_path, master="nvme", params=params)
    plan = planned(placement, "bfloat16", fsdp=2)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_of(plan, placement)) if tier == "nvme" else None
        state = state_of(1, plan, store)
        save(snapshots, state, plan)
        expected = {path: np.asarray(x) for path, x in tree.flatten(state).items()}
        found = snapshots.restore(1, plan, compute_dtype="bfloat16", store=store).state
        assert same(found, expected)
        assert found.params["w"].dtype == jnp.bfloat16
        kinds = jax.tree.map(tier_of, found)
        assert kinds == jax.tree.map(tier_of, plan) and (kinds.master["w"], kinds.params["w"]) == (tier, params)
        assert verify(snapshots.root, 1) == [] and not list((tmp_path / "run").rglob("params.w*master*"))


# Local disks


LAYOUTS = {
    "device": (lambda tmp: None, {"fsdp": 2, "tensor": 2}),
    "pinned_host": (lambda tmp: HOST, {"fsdp": 4}),
    "nvme": (disk, {"data": 2, "fsdp": 2}),
    "two disks": (lambda tmp: disk(tmp, "one", "other"), {"fsdp": 4, "tensor": 2}),
}


def test_a_snapshot_of_any_tier_is_restored_to_any_other_tier_and_mesh_bit_for_bit(snapshots, tmp_path):
    expected = {path: np.asarray(x) for path, x in tree.flatten(init(1)).items()}
    for name, (place, axes) in LAYOUTS.items():
        placement = place(tmp_path)
        plan = planned(placement, **axes)
        with store_of(plan, placement) if placement and placement.nvme_dir else nothing() as store:
            save(snapshots, state_of(1, plan, store), plan)
            assert verify(snapshots.root, 1) == []
        tier = inspect(snapshots.root, 1)["leaves"]["opt_state/mu/w"]["tier"]
        assert tier == ("nvme" if placement and placement.nvme_dir else name)
        assert same_arrays(final_leaves(tmp_path / "run"), expected), f"plain Orbax reads other bits of {name}"
        for target, (place, axes) in LAYOUTS.items():
            placement = place(tmp_path)
            plan = planned(placement, **axes)
            with store_of(plan, placement) if placement and placement.nvme_dir else nothing() as store:
                found = snapshots.restore(1, plan, store=store).state
                assert same(found, expected), f"{name} to {target}"
                assert jax.tree.map(tier_of, found) == jax.tree.map(tier_of, plan)
        (snapshots.root / "step_0000000001.ok").unlink()
        (snapshots.root / "step_0000000001").rename(tmp_path / f"from {name}")


def test_what_is_linked_looks_as_what_is_written(snapshots, tmp_path):
    """zarr.json and Orbax's lists are those of a snapshot from the devices of the same mesh."""
    placement = disk(tmp_path)
    for plan, where in ((planned(fsdp=2), None), (planned(placement, fsdp=2), placement)):
        with store_of(plan, placement) if where else nothing() as store:
            save(snapshots, state_of(1, plan, store), plan)
        (snapshots.root / "step_0000000001.ok").unlink()
        (snapshots.root / "step_0000000001").rename(tmp_path / ("linked" if where else "written"))
    read = lambda name, file: json.loads((tmp_path / name / "state" / file).read_text())
    for file in ("opt_state.mu.w/zarr.json", "opt_state.nu.v/zarr.json", "_METADATA", "_sharding"):
        assert read("linked", file) == read("written", file), file
    arrays = lambda name: sorted(read(name, "array_metadatas/process_0")["array_metadatas"], key=str)
    assert arrays("linked") == arrays("written")
    files = lambda root: {file.relative_to(root) for file in root.rglob("*") if file.is_file()}
    assert files(tmp_path / "linked") == files(tmp_path / "written")


def test_a_snapshot_is_links_and_stays_byte_identical_while_three_more_steps_run(snapshots, tmp_path):
    placement = disk(tmp_path)
    plan = planned(placement, fsdp=2)
    with store_of(plan, placement) as store:
        state = state_of(1, plan, store)
        expected = {path: np.asarray(x) for path, x in tree.flatten(state).items()}
        written = store.counters.bytes_written
        snapshots.save(snapshot_of(state, plan))
        assert store.counters.bytes_written == written
        held = dict(state.opt_state["mu"]["w"].files)
        for step in (2, 3):
            state_of(step, plan, store)
        snapshots.wait()
        state_of(4, plan, store)
        directory = snapshots.root / "step_0000000001"
        linked = Path(directory / "state" / "opt_state.mu.w" / "c").rglob("*")
        inodes = {path.stat().st_ino for path in linked if path.is_file()}
        assert len(inodes) == 2 and not inodes & {os.stat(file).st_ino for file in held.values()}, (
            "new files took their place"
        )
        assert not any((tmp_path / "nvme").rglob("held/*")), "what is in the snapshot is not held any longer"
        with pytest.raises(OffloadError, match="overwritten by a later step"):
            np.asarray(state.opt_state["mu"]["w"])
        found = snapshots.restore(1, planned(fsdp=4)).state
    assert same(found, expected)
    assert verify(snapshots.root, 1) == []


@pytest.fixture(params=["another file system", "one without hard links"])
def elsewhere(request, tmp_path, monkeypatch):
    """A directory to which no file of `tmp_path` can be linked."""
    if request.param == "another file system":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
            assert os.stat(other).st_dev != os.stat(tmp_path).st_dev
            yield Path(other)
    else:
        # What vfat says. To mount one takes root and a kernel that has it, and no file system that is always there refuses.
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
        yield tmp_path / "other"


def test_elsewhere_the_files_are_copied_at_a_bounded_rate_and_held_meanwhile(tmp_path, elsewhere, caplog):
    placement = disk(tmp_path)
    plan = planned(placement)
    with Snapshots(elsewhere / "run", timeout_s=60, copy_bytes_per_s=4 << 20) as snapshots:
        snapshots.open(Group(timeout_s=10))
        with store_of(plan, placement) as store:
            for step in (1, 4):
                state = state_of(step, plan, store)
                started = time.monotonic()
                snapshots.save(snapshot_of(state, plan))
                files = [file for file in (tmp_path / "nvme").rglob("*") if file.is_file()]
                assert sum("held" in file.parts or file.suffix == ".kept" for file in files) == 4, "moments of w and v"
                for later in (step + 1, step + 2):
                    state_of(later, plan, store)
        snapshots.wait()
        assert time.monotonic() - started > 0.3, "3 MiB at 4 MiB/s, less the first block"
        assert not any((tmp_path / "nvme").rglob("held/*"))
        for step in (1, 4):
            expected = {path: np.asarray(x) for path, x in tree.flatten(init(step)).items()}
            assert same(snapshots.restore(step, planned()).state, expected)
            assert verify(snapshots.root, step) == []
    told = [r.message for r in caplog.records if "makes no hard links" in r.message]
    assert len(told) == (elsewhere.parent == tmp_path), "once, and only where it is so"


def test_a_save_that_fails_lets_the_files_go_and_the_next_one_counts(tmp_path):
    placement = disk(tmp_path)
    plan = planned(placement, fsdp=2)
    with (
        Snapshots(tmp_path / "run", timeout_s=60, on_failure="continue") as snapshots,
        store_of(plan, placement) as store,
    ):
        snapshots.open(Group(timeout_s=10))
        state = state_of(1, plan, store)
        file = next(iter(state.opt_state["mu"]["w"].files.values()))
        os.truncate(file, 1000)
        snapshots.save(snapshot_of(state, plan))
        with pytest.raises(SaveError, match="1000 bytes, expected"):
            snapshots.wait()
        assert snapshots.steps() == [] and not any((tmp_path / "nvme").rglob("held/*"))
        os.truncate(file, state.opt_state["mu"]["w"].layout.file_bytes)
        save(snapshots, state_of(2, plan, store), plan)
        assert snapshots.steps() == [2]


class Images:
    """Copies of a directory as a kill would leave it, one before each call that makes, links, renames or removes a name in
    it, while it is `on`. An audit hook stays for ever, so that it must do nothing when off."""

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.is_on, self.calls = False, []
        self._lock = threading.Lock()
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if not self.is_on or event not in ("os.link", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        names = [str(x) for x in arguments if isinstance(x, str | os.PathLike)]
        if not any(name.startswith(str(self.source)) for name in names) or threading.get_ident() == self._copying:
            return
        with self._lock:
            self._copying = threading.get_ident()
            shutil.copytree(self.source, self.target / str(len(self.calls)))
            self.calls.append((event, *(os.path.relpath(name, self.source) for name in names)))
            self._copying = None

    _copying = None


def test_a_kill_before_any_call_of_a_save_leaves_the_last_snapshot_or_the_new_one_whole(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    leaf = lambda step: np.random.default_rng(step).standard_normal((512, 160), np.float32)
    values = lambda step: TrainState(np.int32(step), {"x": leaf(step)[:4]}, None, {"m": leaf(step)}, {})
    plan_in = lambda where: make_plan(values(0), mesh_of(fsdp=2), placement=disk(where))
    plan = plan_in(source)

    def state_of(step, plan, store):
        placed = jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), values(step), plan)
        placed.opt_state.update(m=store.write_arrays({"opt_state/m": placed.opt_state["m"]})["opt_state/m"])
        return placed

    images = Images(source, tmp_path / "images")
    with Snapshots(source / "run", keep=1, timeout_s=60) as snapshots, store_of(plan, disk(source)) as store:
        snapshots.open(Group(timeout_s=10))
        save(snapshots, state_of(1, plan, store), plan)
        state = state_of(2, plan, store)
        images.is_on = True
        save(snapshots, state, plan)
        images.is_on = False
    linked = [call for call in images.calls if call[0] == "os.link"]
    assert len(linked) == 4, "two shards are held, and then placed"
    newest = []
    for i, call in enumerate(images.calls):
        image = tmp_path / "images" / str(i)
        with Snapshots(image / "run", timeout_s=60) as snapshots, store_of(plan, disk(image)) as store:
            snapshots.open(Group(timeout_s=10))
            newest.append(snapshots.steps()[-1])
            found = snapshots.restore(newest[-1], plan, store=store).state
            expected = {path: np.asarray(x) for path, x in tree.flatten(values(newest[-1])).items()}
            assert same(found, expected), call
            assert not any((image / "nvme").rglob("held/*")), call
    assert newest == sorted(newest) and set(newest) == {1, 2}


def test_files_are_uploaded_to_gs_and_come_back_to_disk(gcs, tmp_path):
    placement = disk(tmp_path)
    plan = planned(placement, fsdp=2)
    with Snapshots("gs://bucket/offloaded/run", timeout_s=60) as snapshots, store_of(plan, placement) as store:
        snapshots.open(Group(timeout_s=10))
        save(snapshots, state_of(1, plan, store), plan)
        expected = {path: np.asarray(x) for path, x in tree.flatten(init(1)).items()}
        for target in (plan, planned(fsdp=4)):
            assert same(snapshots.restore(1, target, store=store).state, expected)
        assert verify(snapshots.root, 1) == []
