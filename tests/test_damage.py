"""Whatever happens to the files of a snapshot is found, by `verify` and by a restore, and none of it loads in silence."""

import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.snapshot.verify import verify
from jaxckpt.state.plan import make_plan, shardings
from jaxckpt.state.train_state import TrainState
from tiny import differing, mesh_of

# Orbax leaves the other reads of a load that fails behind.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

FLIPS = 200
STEP = 3


def make_state():
    """Leaves of every kind of storage: cut into shards, whole, packed, empty, a random key."""

    def init():
        rng = np.random.default_rng(0)
        leaf = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        params = {"kernel": leaf(256, 512), "wide": leaf(300, 301), "bias": leaf(17), "empty": leaf(0, 2)}
        return TrainState(jnp.int32(STEP), params, None, {"mu": params, "key": jax.random.key(1)}, {})

    plan = make_plan(jax.eval_shape(init), mesh_of(fsdp=4), rules=[("kernel", P("fsdp")), ("wide", P())])
    return jax.jit(init, out_shardings=shardings(plan))(), plan


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(snapshots with the committed step 3, its state and plan)."""
    state, plan = make_state()
    with Snapshots(tmp_path_factory.mktemp("good"), timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        meta = {"format": FORMAT, "step": STEP, "leaves": leaf_table(plan)}
        snapshots.save(Snapshot(state, {"next_example": 1}, meta), metrics={"loss": 1.25})
        snapshots.wait()
        yield snapshots, state, plan


def files(root):
    """Every file of the step, its mark too."""
    directory = steps.step_path(root, STEP)
    found = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    return [*sorted(found), f"{directory}.ok"]


def is_found(snapshots, plan):
    """(by verify, by restore); a restore that gives anything must give what was saved."""
    by_verify = bool(verify(snapshots.root, STEP))
    try:
        snapshots.restore(STEP, plan)
    except DamagedSnapshot:
        return by_verify, True
    return by_verify, False


def test_an_undamaged_snapshot_is_found_good_by_both(good):
    snapshots, state, plan = good
    assert is_found(snapshots, plan) == (False, False)
    assert not differing(snapshots.restore(STEP, plan).state, state)


def test_every_flipped_bit_is_found_wherever_it_lies(good):
    snapshots, _, plan = good
    rng = random.Random(0)
    every = files(snapshots.root)
    # Each file at least once, the rest by size, so that the arrays get most of them.
    chosen = every + rng.choices(every, [os.path.getsize(f) for f in every], k=max(0, FLIPS - len(every)))
    missed = []
    for path in chosen:
        size = os.path.getsize(path)
        if size == 0:
            continue
        place, bit = rng.randrange(size), rng.randrange(8)
        with open(path, "r+b") as file:
            for _ in range(2):  # flip, look, flip back
                file.seek(place)
                byte = file.read(1)[0] ^ (1 << bit)
                file.seek(place)
                file.write(bytes([byte]))
                file.flush()
                if _ == 0 and is_found(snapshots, plan) != (True, True):
                    missed.append((os.path.relpath(path, snapshots.root), place, bit))
    assert not missed
    assert is_found(snapshots, plan) == (False, False), "all was flipped back"


@pytest.fixture
def copy(good, tmp_path):
    """The same snapshot in a directory of its own, to be spoilt."""
    snapshots, state, plan = good
    shutil.copytree(snapshots.run_dir, tmp_path / "run")
    with Snapshots(tmp_path / "run", timeout_s=60) as opened:
        opened.open(Group(timeout_s=10))
        yield opened, state, plan


def test_every_deleted_file_is_found(copy, tmp_path):
    snapshots, _, plan = copy
    directory = steps.step_path(snapshots.root, STEP)
    for path in files(snapshots.root)[:-1]:
        os.rename(path, tmp_path / "away")
        assert is_found(snapshots, plan) == (True, True), os.path.relpath(path, directory)
        os.rename(tmp_path / "away", path)


def test_every_file_that_was_cut_or_has_grown_is_found(copy):
    snapshots, _, plan = copy
    for path in files(snapshots.root)[:-1]:
        with open(path, "rb") as file:
            content = file.read()
        for other in (content[: len(content) // 2], content[:-1], content + b"\0"):
            if other == content:
                continue
            with open(path, "wb") as file:
                file.write(other)
            assert is_found(snapshots, plan) == (True, True), (path, len(content), len(other))
        with open(path, "wb") as file:
            file.write(content)


def test_exchanged_shards_and_leaves_are_found(copy):
    snapshots, _, plan = copy
    state = steps.step_path(snapshots.root, STEP) / "state"
    pairs = [
        ("params.kernel/c/0/0", "params.kernel/c/1/0"),
        ("params.kernel/c/2/0", "opt_state.mu.kernel/c/3/0"),
    ]
    for a, b in pairs:
        for _ in range(2):
            os.rename(state / a, state / "x")
            os.rename(state / b, state / a)
            os.rename(state / "x", state / b)
            if _ == 0:
                assert is_found(snapshots, plan) == (True, True), (a, b)
    assert is_found(snapshots, plan) == (False, False)


def test_a_file_of_another_snapshot_of_the_same_size_is_found(copy, tmp_path):
    snapshots, state, plan = copy
    other = jax.jit(lambda s: jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, s))(state)
    with Snapshots(tmp_path / "other", timeout_s=60) as second:
        second.open(Group(timeout_s=10))
        second.save(Snapshot(other, {"next_example": 1}, {"format": FORMAT, "step": STEP, "leaves": leaf_table(plan)}))
        second.wait()
        strange = steps.step_path(second.root, STEP) / "state/params.kernel/c/1/0"
    ours = steps.step_path(snapshots.root, STEP) / "state/params.kernel/c/1/0"
    assert ours.stat().length == strange.stat().length
    shutil.copy(strange, ours)
    assert is_found(snapshots, plan) == (True, True)
