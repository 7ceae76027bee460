"""State on local disks: the bits of state in memory, a previous generation that survives, and errors that say what to do."""

import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import OffloadError, PlanError, UnusableDiskError
from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.directories import sweep_former, take
from jaxckpt.nvme.pipeline import Pipeline
from jaxckpt.nvme.store import NvmeStore, is_all_finite
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import fingerprint
from jaxckpt.state.init import initialise
from jaxckpt.state.mesh import batch_sharding, replicated
from jaxckpt.state.np_fingerprint import np_fingerprint
from jaxckpt.state.nvme import NvmeStruct
from jaxckpt.state.plan import Placement, make_plan
from jaxckpt.state.train_state import take_apart
from jaxckpt.update.nvme_step import make_nvme_step
from jaxckpt.update.step import make_train_step
from tiny import differing, mesh_of, on_mesh

MESH = mesh_of(data=2, fsdp=2)
# ------------------------------------------------------------------------------------------- a whole training step


class Wide(nnx.Module):
    """Two weights of 512 KiB, which are worth a file, and small ones, which are not."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in [(64, 2048), (2048, 64)]])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def squared_error(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).sum(), jnp.int32(batch["x"].shape[0])


def batch_of(i, *, is_bad=False):
    x, y = np.random.default_rng(i).normal(size=(2, 16, 64)).astype(np.float32)
    return {"x": np.full_like(x, np.inf) if is_bad else x, "y": y}


def make(tx, tier, tmp_path, mesh, *, loss=squared_error, compute_dtype=None, bucket_bytes=1 << 20, cache=0, **args):
    """(step as a Program has it, state, store or None)."""
    placement = Placement(
        master=tier, opt_state=tier, nvme_dir=(str(tmp_path),), bucket_bytes=bucket_bytes, nvme_cache_bytes=cache
    )
    model, abstract, init = take_apart(Wide, tx, seed=0, compute_dtype=compute_dtype)
    plan = make_plan(abstract, mesh, rules=[("kernel", P("fsdp")), ("bias", P())], placement=placement)
    rows = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch_of(0))
    args |= {"seed": 0, "compute_dtype": compute_dtype, "placement": placement}
    if tier != "nvme":
        step = make_train_step(model, loss, tx, plan, batch, **args)
        return step.trace(plan, batch), initialise(init, plan, to_disk=dict), None
    store = NvmeStore([str(tmp_path)], on_disk(tree.flatten(plan)), run_id="run")
    step = make_nvme_step(model, loss, tx, plan, batch, store, **args)
    store.open()
    return step.trace(plan, batch), initialise(init, plan, to_disk=store.write_arrays), store


def trained(tx, tier, tmp_path, *, mesh=MESH, bad_step=None, **args):
    traced, state, store = make(tx, tier, tmp_path, mesh, **args)
    step = traced.lower().compile()
    metrics = None
    for i in range(3):
        state, metrics = step(state, on_mesh(batch_of(i, is_bad=i == bad_step), mesh))
    assert bool(store) == bool(on_disk(tree.flatten(state)))
    for path, x in on_disk(tree.flatten(state)).items():
        assert np.array_equal(x.fingerprint, np_fingerprint(np.asarray(x))), path
        assert bool(x.is_finite)
    found = jax.tree.map(np.asarray, (state, metrics))
    if store is not None:
        store.close()
    return found


def own_momentum(decay):
    """Somebody's own optimizer: its state is cheap enough to be computed twice, and in other bits where XLA may."""

    def update(updates, state, params=None):
        state = jax.tree.map(lambda m, g: decay * m + 0.3 * g, state, updates)
        return jax.tree.map(lambda m: -0.01 * m, state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


CASES = {
    "clipped and accumulated": (
        optax.adamw(1e-2, weight_decay=0.1),
        {"max_grad_norm": 0.1, "accumulation_steps": 2, "is_marking": True},
    ),
    "master weights and a skipped step": (
        optax.adamw(1e-2),
        {"compute_dtype": "bfloat16", "nonfinite": "skip", "bad_step": 1, "cache": 2 << 20},
    ),
    "a norm inside, on one device": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        {"max_grad_norm": 0.5, "lr": optax.constant_schedule(1e-2), "mesh": mesh_of(), "bucket_bytes": 64 << 20},
    ),
    "somebody's own": (own_momentum(0.9), {}),
}


@pytest.mark.parametrize(("tx", "args"), CASES.values(), ids=CASES)
def test_state_on_disk_gives_the_bits_of_optax_with_all_state_on_the_device(tmp_path, tx, args):
    on_device = trained(tx, "device", tmp_path, **{k: v for k, v in args.items() if k not in ("cache", "is_marking")})
    assert not differing(on_device, trained(tx, "nvme", tmp_path, **args))
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["lock"], "closed, the store leaves nothing"


def test_the_traced_step_tells_what_it_is_and_what_it_closes_over(tmp_path):
    secret = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    bias = jax.device_put(secret, replicated(MESH))

    def biased(model, batch):
        return squared_error(model, {**batch, "y": batch["y"] + bias})

    texts, consts = [], []
    for loss, decay in [(squared_error, 0.5), (squared_error, 0.5), (squared_error, 0.6), (biased, 0.5)]:
        traced, _, store = make(own_momentum(decay), "nvme", tmp_path, MESH, loss=loss)
        assert store is not None
        store.close()
        texts.append(str(traced.jaxpr))
        consts.append([np.asarray(x) for x in traced.jaxpr.consts])
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert [len(c) for c in consts[:3]] == [0, 0, 0]
    assert any(np.array_equal(c, secret) for c in consts[3])


def test_a_leaf_on_disk_that_is_needed_before_its_bucket_is_refused_by_name(tmp_path):
    def update(updates, state, params=None):
        scale = optax.tree.norm(params)
        return jax.tree.map(lambda g: g * scale, updates), state

    tx = optax.chain(optax.trace(0.9), optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    with pytest.raises(PlanError, match=r"(?s)master/layers/0/kernel.*pinned_host"):
        make(tx, "nvme", tmp_path, MESH, compute_dtype="bfloat16")


# -------------------------------------------------------------------------------------- the store and the pipeline

LEAVES = {
    "opt_state/mu/w": NvmeStruct((512, 256), np.dtype("float32"), NamedSharding(MESH, P("fsdp"))),
    "opt_state/nu/w": NvmeStruct((512, 256), np.dtype("float32"), NamedSharding(MESH, P(None, "fsdp"))),
    "master/b": NvmeStruct((256, 1024), jnp.dtype("bfloat16"), NamedSharding(MESH, P())),
}
BUCKETS = [("opt_state/mu/w", "opt_state/nu/w"), (), ("master/b",)]


def values(path):
    x = LEAVES[path]
    return (np.arange(x.size).reshape(x.shape) % 251).astype(x.dtype)


def make_doubling(paths):
    """A jitted bucket: x -> 2 x + 1 of every leaf, and its marks."""
    host = {p: LEAVES[p].sharding.with_memory_kind("pinned_host") for p in paths}
    device = {p: LEAVES[p].sharding for p in paths}

    def double(leaves):
        return jax.device_put(jax.tree.map(lambda x: 2 * x + 1, jax.device_put(leaves, device)), host)

    def mark(leaves):
        return {p: (fingerprint(x), is_all_finite(x)) for p, x in jax.device_put(leaves, device).items()}

    double = jax.jit(double, in_shardings=(host,), out_shardings=host, donate_argnums=0)
    mark = jax.jit(mark, in_shardings=(host,), out_shardings=replicated(MESH))

    def update(leaves):
        new = double(leaves)
        return new, mark(new)

    return update


UPDATES = [make_doubling(paths) for paths in BUCKETS]


def step(pipeline, *, before=lambda i: None, is_marking=True, looked_at=None):
    looked_at = [] if looked_at is None else looked_at
    with pipeline.step() as flow:
        for i in range(pipeline.visits):
            found = flow.take(i)
            copies = {path: x + 0 for path, x in found.items()}
            del found
            flow.release(i, copies)
            looked_at.append(copies)
        for i, update in enumerate(UPDATES, pipeline.visits):
            new, marks = update(flow.take(i))
            before(i)
            flow.put(i, new, marks if is_marking else None)
            del new
        return flow.finish()


@contextmanager
def streaming(*dirs, steps=0, snapshot_copies=1, **args):
    """(store, pipeline) of LEAVES, some steps after `values`."""
    store = NvmeStore([str(d) for d in dirs], LEAVES, run_id="run", snapshot_copies=snapshot_copies)
    with store:
        store.write_arrays({p: jax.device_put(values(p), x.sharding) for p, x in LEAVES.items()})
        pipeline = Pipeline(store, BUCKETS, **args)
        try:
            for _ in range(steps):
                step(pipeline)
            yield store, pipeline
        finally:
            pipeline.close()


def expected(path, steps):
    x = jnp.asarray(values(path))
    for _ in range(steps):
        x = 2 * x + 1
    return np.asarray(x)


def check(store, steps):
    for path in LEAVES:
        found = store.current(path)
        assert np.asarray(found).tobytes() == expected(path, steps).tobytes(), path
        assert np.array_equal(found.fingerprint, np_fingerprint(expected(path, steps)))


def files(store):
    return [Path(f) for path in LEAVES for f in store.current(path).files.values()]


@pytest.mark.parametrize("slots", [1, 3])
def test_every_slot_is_used_again_only_when_it_was_written(tmp_path, slots):
    with streaming(tmp_path / "a", tmp_path / "b", slots=slots) as (store, pipeline):
        for n in range(1, 5):
            arrays, moved = step(pipeline, is_marking=n % 2 == 0)
            check(store, n)
            sizes = sum(f.stat().st_size for f in files(store))
            assert moved.bytes_written == sizes <= moved.bytes_read < 1.01 * sizes
            assert min(moved.exposed_s, moved.busy_s, moved.bytes_per_s) > 0
            assert arrays.keys() == LEAVES.keys()


def test_the_rooms_of_a_step_are_counted_before_it(tmp_path):
    on_devices = {p: NamedSharding(x.sharding.mesh, x.sharding.spec) for p, x in LEAVES.items()}
    bytes_of = {
        path: np.prod(on_devices[path].shard_shape(x.shape)) * x.dtype.itemsize * len(MESH.devices.flat)
        for path, x in LEAVES.items()
    }
    first, second = (sum(bytes_of[path] for path in BUCKETS[i]) for i in (0, 2))
    for slots, cached in [(1, 0), (2, 0), (9, 0), (1, first), (1, second - 1)]:
        with streaming(tmp_path / f"{slots}{cached}", slots=slots, cache_bytes=cached, steps=2) as (store, pipeline):
            expected = first + second - (first if cached == first else 0)
            assert (pipeline.buffer_bytes, pipeline.cached_bytes) == (expected, first if cached == first else 0)
            free = [room for rooms in store.rooms._free.values() for room in rooms]
            assert sum(room.nbytes for room in free) == expected, "all of them are there, and no more"


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("cache_bytes", [0, 2 << 20])
def test_what_is_looked_at_before_is_read_as_often_and_stays_as_it_was(tmp_path, slots, cache_bytes):
    visits = [("master/b",), (), ("opt_state/mu/w", "master/b"), ("master/b",)]
    settings = {"visits": visits, "slots": slots, "cache_bytes": cache_bytes}
    with streaming(tmp_path, **settings) as (store, pipeline):
        size = lambda path: sum(f.stat().st_size for f in files(store) if path.replace("/", ".") in f.parts)
        assert [i - len(visits) for i in pipeline.cached] == ([0] if cache_bytes else []), (
            "the bucket of 2 x 512 KiB, on two devices each"
        )
        for n in range(3):
            looked_at = []
            _, moved = step(pipeline, looked_at=looked_at)
            assert [tuple(found) for found in looked_at] == visits
            for path, x in ((path, x) for found in looked_at for path, x in found.items()):
                assert np.array_equal(np.asarray(x), expected(path, n)), path
            check(store, n + 1)
            assert moved.bytes_written == sum(map(size, LEAVES))
            # The first step has nothing in its cache.
            often = {"master/b": 4, "opt_state/mu/w": 2, "opt_state/nu/w": 1}
            read = sum(count * size(p) for p, count in often.items() if not (cache_bytes and n and p != "master/b"))
            assert read <= moved.bytes_read < 1.02 * read
            assert n == 0 or 0.98 * moved.bytes_read < pipeline.bytes_read <= moved.bytes_read
        free = [room for rooms in store.rooms._free.values() for room in rooms]
        assert sum(room.nbytes for room in free) <= pipeline.buffer_bytes


def test_what_is_written_unread_takes_room_and_no_reading(tmp_path):
    with streaming(tmp_path, unread=frozenset({"master/b"})) as (store, pipeline):
        with pipeline.step() as flow:
            for i, update in enumerate(UPDATES):
                taken = flow.take(i)
                if i == 2:
                    (old,) = taken.values()
                    new = {"master/b": jax.device_put(jnp.full(old.shape, 3, old.dtype), old.sharding)}
                    flow.put(i, new)
                else:
                    flow.put(i, *update(taken))
                del taken
            _, moved = flow.finish()
        others = sum(f.stat().st_size for f in files(store) if "master.b" not in f.parts)
        assert others <= moved.bytes_read < 1.02 * others
        assert np.all(np.asarray(store.current("master/b")) == 3)


def test_stripes_share_the_bytes(tmp_path):
    dirs = [tmp_path / name for name in "ab"]
    with streaming(*dirs, steps=1) as (store, _):
        found = [sum(f.stat().st_size for f in files(store) if d in f.parents) for d in dirs]
        assert max(found) - min(found) <= max(f.stat().st_size for f in files(store))
        for parts in [store.current("opt_state/mu/w").files.values()]:
            assert len({Path(f).parents[3] for f in parts}) == 2, "one leaf is read from all of them"


def test_what_is_cached_is_not_read_and_yet_written(tmp_path):
    with streaming(tmp_path, cache_bytes=2 * 2 * 512 * 256 * 4) as (store, pipeline):
        assert pipeline.cached == {0}
        step(pipeline)
        _, moved = step(pipeline)
        check(store, 2)
        read = sum(os.path.getsize(f) for f in store.current("master/b").files.values())
        assert read <= moved.bytes_read < 1.02 * read
        assert moved.bytes_written == sum(f.stat().st_size for f in files(store))
        with pytest.raises(KeyError):
            step(pipeline, before=lambda i: {}[i] if i == 2 else None)
        step(pipeline)
        check(store, 3)  # and not once more for the step that failed when the cached bucket was done


def test_the_files_of_a_snapshot_stay_as_they_are_while_the_steps_go_on(tmp_path):
    with streaming(tmp_path, steps=2) as (store, pipeline):
        links = {}
        for path in LEAVES:
            for place, file in store.current(path).files.items():
                links[path, place] = tmp_path / f"{path.replace('/', '.')}-{place}"
                os.link(file, links[path, place])
        before = {key: link.read_bytes() for key, link in links.items()}
        inodes = []
        for n in range(3, 6):
            step(pipeline)
            check(store, n)
            inodes.append({os.stat(f).st_ino for f in files(store)})
        assert {key: link.read_bytes() for key, link in links.items()} == before
        assert all(link.stat().st_nlink == 1 for link in links.values())
        assert inodes[0] == inodes[2] != inodes[1], "only what was linked is made anew"
        owned = {p for p in LEAVES for _ in store.current(p).owned}
        assert owned == set(LEAVES) and len(store.current("master/b").owned) == 1


def test_what_a_later_step_has_written_over_is_refused(tmp_path):
    with streaming(tmp_path, steps=1) as (store, pipeline):
        old = store.current("master/b")
        assert np.asarray(old).tobytes() == expected("master/b", 1).tobytes()
        step(pipeline)
        with pytest.raises(OffloadError, match="master/b: generation 2 .*newest"):
            np.asarray(old)
        last = store.current("master/b")
    with pytest.raises(OffloadError, match="store is closed"):
        np.asarray(last)


# ------------------------------------------------------------------------------------------------- what goes wrong


def flip(file):
    with open(file, "r+b") as f:
        f.seek(70000)
        byte = f.read(1)[0]
        f.seek(70000)
        f.write(bytes([byte ^ 4]))


def tear(file):
    """The second half is of another time, as after a crash of the machine."""
    half = file.stat().st_size // 2
    other = file.with_name(file.name[:-1] + "ab"[file.name[-1] == "a"])
    with open(file, "r+b") as f, open(other, "rb") as g:
        f.seek(half)
        g.seek(half)
        f.write(g.read()[: -(2 << 10)])


def cut(file):
    os.truncate(file, file.stat().st_size - 100)


@pytest.mark.parametrize("damage", [flip, tear, cut])
@pytest.mark.parametrize("path", ["opt_state/nu/w", "master/b"])
def test_damage_ends_the_step_with_the_file_and_the_bytes_and_nothing_else_is_lost(tmp_path, damage, path):
    with streaming(tmp_path, steps=2) as (store, pipeline):
        file = Path(sorted(store.current(path).files.values())[-1])
        whole = file.read_bytes()
        damage(file)
        with pytest.raises(OffloadError, match=rf"{file}: bytes \d+ to \d+ .*newest snapshot"):
            step(pipeline)
        file.write_bytes(whole)
        check(store, 2)
        step(pipeline)
        check(store, 3)


def test_a_vanished_directory_is_told(tmp_path):
    with streaming(tmp_path, steps=1) as (_, pipeline):
        shutil.rmtree(tmp_path)
        with pytest.raises(OffloadError, match=f"{tmp_path}.*missing|{tmp_path}.* gone"):
            step(pipeline)


def test_an_error_of_the_update_itself_ends_the_step_and_leaves_no_thread_at_work(tmp_path):
    with streaming(tmp_path, steps=1) as (store, pipeline):
        for bucket in (0, 1, 2):
            with pytest.raises(ZeroDivisionError):
                step(pipeline, before=lambda i, bucket=bucket: 1 // (i != bucket))
            check(store, 1)
        step(pipeline)
        check(store, 2)


def test_an_error_in_a_thread_ends_the_step_at_once(tmp_path, monkeypatch):
    with streaming(tmp_path, visits=[("master/b",)], steps=1, wait_s=20) as (store, pipeline):
        give, calls = store.rooms.give, itertools.count()
        with monkeypatch.context() as patched:
            # The first rooms are those of the visit, which no reader or writer gives back.
            patched.setattr(store.rooms, "give", lambda rooms: give(rooms) if next(calls) else 1 // 0)
            with pytest.raises(ZeroDivisionError):
                step(pipeline)
        step(pipeline)
        check(store, 2)


def test_a_disk_that_is_too_slow_is_named_with_the_seconds(tmp_path):
    with streaming(tmp_path, steps=1) as (_, pipeline):
        pipeline.wait_s = 1e-6
        with pytest.raises(
            OffloadError, match=rf"waited 1e-06 s to read opt_state/mu/w; now moving {tmp_path}.* for .* s\."
        ):
            step(pipeline)


def test_too_little_room_is_told_before_anything_is_written(tmp_path):
    store = NvmeStore([str(tmp_path)], LEAVES, run_id="run", snapshot_copies=10**9)
    with pytest.raises(OffloadError, match=r"GiB are needed \(2 generations .* and 1000000000 .*GiB are free"):
        store.open()
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["lock"]


def test_a_limit_that_is_reached_while_training_ends_the_step_and_not_the_state(tmp_path):
    with streaming(tmp_path, steps=2) as (store, pipeline):
        for f in files(store):
            os.link(f, f.with_suffix(".link"))
        step(pipeline)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, hard))
        try:
            with pytest.raises(OffloadError, match=rf"errno {errno.EFBIG}\).*full, or a quota.*free there"):
                step(pipeline)  # the linked files must be made anew
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check(store, 3)


def test_a_directory_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").touch()
    for directory, found in [("/sys/jaxckpt", "not permitted"), (str(tmp_path / "file"), "Not a directory|exists")]:
        with pytest.raises(UnusableDiskError, match=f"^{directory}.*({found}).*Name others in nvme_dir") as told:
            NvmeStore([directory], LEAVES, run_id="run").open()
        assert told.value.exit_code == 2


def test_a_store_is_one_process_s_own_and_begins_empty(tmp_path):
    with streaming(tmp_path, steps=1):
        with pytest.raises(OffloadError, match=f"in use by another process .number {os.getpid()}"):
            NvmeStore([str(tmp_path)], LEAVES, run_id="run").open()
        with NvmeStore([str(tmp_path)], LEAVES, run_id="other") as other:
            (left,) = [p for p in tmp_path.iterdir() if p.name.startswith("other")]
            (left / "held").mkdir()
            (left / "held" / "copy").write_text("of a snapshot that a killed process was copying")
            assert list(left.rglob("*.a"))
            with pytest.raises(OffloadError, match="nothing was written"):
                other.current("master/b")
        with NvmeStore([str(tmp_path)], LEAVES, run_id="other"):
            assert not list(left.rglob("copy"))
    with pytest.raises(PlanError, match="different directories"):
        NvmeStore([str(tmp_path), f"{tmp_path}/."], LEAVES, run_id="run")


def test_what_killed_runs_have_left_is_removed_and_what_lives_is_not(tmp_path):
    def left_in(directory, run="0123456789abcdef.p7"):
        file = directory / run / "work" / "large"
        file.parent.mkdir(parents=True)
        file.write_text("of a killed process")
        (directory / run / "lock").touch()
        return file

    now, former, elsewhere = (tmp_path / name for name in ("now", "former", "gone"))
    dead, alive, foreign = left_in(now), left_in(now, "fedcba9876543210.p0"), left_in(now, "photographs.p1")
    with take(str(alive.parents[1])), streaming(now):
        assert not dead.exists() and alive.exists() and foreign.exists()
    group, record = Group(timeout_s=10), tmp_path / "nvme.json"
    named = lambda: json.loads(record.read_text())
    sweep_former(record, [], group)
    assert not record.exists(), "a run that was never on disks leaves no list"
    sweep_former(record, [str(former), str(elsewhere)], group)
    file = left_in(former)
    sweep_former(record, [str(former), str(now)], group)
    assert file.exists() and named() == [str(former), str(now), str(elsewhere)], "which is not there, and may come back"
    sweep_former(record, [str(now)], group)
    assert not file.exists() and named() == [str(now), str(elsewhere)]
    record.write_text('["cut sho')
    sweep_former(record, [str(now)], group)
    assert named() == [str(now)]


ON_OTHER_FILE_SYSTEMS = """
import logging, sys
from jaxckpt.distributed.start import use_cpu_devices
use_cpu_devices(8)
sys.path.insert(0, sys.argv[1])
import test_nvme as t
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with t.streaming("/mnt/ramfs", steps=2) as (store, _):
    t.check(store, 2)
print("trained")
try:
    t.NvmeStore(["/mnt/tmpfs"], t.LEAVES, run_id="run").open()
except t.OffloadError as e:
    print(e)
"""


def test_without_o_direct_it_goes_on_and_says_so_and_a_small_disk_is_refused(tmp_path):
    (tmp_path / "run.py").write_text(ON_OTHER_FILE_SYSTEMS)
    script = (
        "mount -t tmpfs none /mnt && mkdir /mnt/ramfs /mnt/tmpfs && mount -t ramfs none /mnt/ramfs && "
        f"mount -t tmpfs -o size=3m none /mnt/tmpfs && exec {sys.executable} {tmp_path}/run.py {Path(__file__).parent}"
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("O_DIRECT") == 1 and "/mnt/ramfs" in done.stdout and "trained" in done.stdout
    assert "/mnt/tmpfs" in done.stdout.splitlines()[-2] and "too little room" in done.stdout
