"""The commands beside training: what they say of real snapshots, how they refuse, and that no damage escapes them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P
from rich.console import Console
from typer.testing import CliRunner

from gcs import BUCKET
from jaxckpt.cli import app
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.observe.progress import BytesProgress
from jaxckpt.snapshot import gcs as objects
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.diff import diff
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.locate import Located
from jaxckpt.snapshot.lock import RunLock
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.snapshot.verify import verify
from jaxckpt.state.plan import make_plan, shardings
from jaxckpt.state.train_state import TrainState
from tiny import mesh_of

RULES = [("w|h", P("fsdp"))]
CONFIG = {"run_dir": "here", "steps": 9, "model": {"name": "mlp", "d_model": 8}, "seed": 0}
LARGE = ("params/w", "params/h", "opt_state/mu/w")


def leaves_of(step):
    """Two kinds of large leaves (float32, and bfloat16 packed two a word), small ones, a typed key and an empty one."""
    rng = np.random.default_rng(step)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "w": normal(512, 256),
        "h": normal(512, 512).astype(jnp.bfloat16),
        "b": normal(7),
        "mu": normal(512, 256),
        "key": jax.random.key(step),
        "empty": np.zeros((0, 3), np.float32),
    }


def save(run_dir, step, leaves=None, *, axes=None, keep=9, config=CONFIG, metrics=None):
    """Saves one step of a run with jaxckpt's own Snapshots, on the mesh of `axes`."""
    x = {**leaves_of(step), **(leaves or {})}
    params = {"w": x["w"], "h": x["h"], "b": x["b"]}
    state = TrainState(jnp.int32(step), params, None, {"key": x["key"], "mu": {"w": x["mu"]}}, {"empty": x["empty"]})
    plan = make_plan(
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state)), mesh_of(**(axes or {"fsdp": 4})), rules=RULES
    )
    state = jax.tree.map(jax.device_put, state, shardings(plan))
    meta = {
        "format": FORMAT,
        "step": step,
        "leaves": leaf_table(plan),
        "config": config,
        "mesh": dict(axes or {"fsdp": 4}),
    }
    with Snapshots(run_dir, keep=keep, timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        snapshots.save(Snapshot(state, {"next_example": 3 * step}, meta), metrics=metrics)
        snapshots.wait()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of three steps; only to be read."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    for step in (10, 20, 30):
        save(run_dir, step, metrics={"loss": 1 / step, "eval_loss": None})
    return run_dir


@pytest.fixture
def run(made, tmp_path):
    """A copy of that run that may be changed."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def tool(*arguments, expect=0, answer=None):
    """stdout of a command that exits with `expect`; its stderr where that is 2."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=answer)
    assert result.exit_code == expect and isinstance(result.exception, SystemExit | None), (
        result.stdout,
        result.stderr,
        result.exception,
    )
    assert "Traceback" not in result.stdout + result.stderr
    return result.stderr if expect == 2 else result.stdout


def json_of(*arguments, expect=0):
    return json.loads(tool(*arguments, "--json", expect=expect))


def root_of(run_dir):
    return epath.Path(run_dir) / "snapshots"


def directory_of(run_dir, step=30):
    return Path(run_dir) / "snapshots" / f"step_{step:010d}"


def files_of(run_dir, step=30):
    """Every file that a step consists of, its mark too."""
    directory = directory_of(run_dir, step)
    return [*sorted(p for p in directory.rglob("*") if p.is_file()), directory.with_name(directory.name + ".ok")]


# ---------------------------------------------------------------------------------------------- ls and inspect


def test_ls_lists_every_step_and_what_was_set_aside(run):
    root = root_of(run)
    steps.pin(root, 10, "best")
    steps.quarantine(root, 20)
    (root / "step_0000000030.ok").write_text("{}")
    ten, thirty, aside = json_of("ls", run)
    assert (ten["step"], ten["status"], ten["pins"], ten["metrics"]["loss"]) == (10, "ok", ["best"], 0.1)
    assert ten["bytes"] == sum(
        f.stat().st_size for f in files_of(run, 10) if f.suffix != ".ok" and f.name != "manifest.json"
    )
    assert thirty["step"] == 30 and thirty["status"].startswith("damaged: ") and thirty["bytes"] is None
    assert (aside["name"], aside["status"], aside["step"]) == ("damaged_step_0000000020", "damaged", 20)
    text = tool("ls", run)
    assert len(text.splitlines()) == 4 and "best" in text and "loss 0.1" in text


def test_ls_of_a_run_that_saved_nothing_yet(tmp_path):
    (tmp_path / "snapshots").mkdir()
    assert json_of("ls", tmp_path) == [] and "no snapshots" in tool("ls", tmp_path)


def test_inspect_tells_everything_that_was_saved(made):
    found = json_of("inspect", made)
    assert (found["step"], found["steps"], found["data"]) == (30, [10, 20, 30], {"next_example": 90})
    assert found["meta"]["config"] == CONFIG and found["meta"]["mesh"] == {"fsdp": 4}
    w = found["leaves"]["params/w"]
    assert (w["shape"], w["dtype"], w["spec"], w["tier"], w["bytes"], w["packed"]) == (
        [512, 256], "float32", ["fsdp"], "device", 512 * 256 * 4, False
    )  # fmt: skip
    assert found["leaves"]["params/b"]["packed"] and found["leaves"]["opt_state/key"]["bytes"] == 8
    assert found["groups"]["params"] == {
        "leaves": 3,
        "elements": 512 * 256 + 512 * 512 + 7,
        "bytes": 512 * 256 * 4 + 512 * 512 * 2 + 7 * 4,
    }
    text = tool("inspect", made, "--step", 20)
    assert all(
        s in text
        for s in ("step 20", "params/w", "bfloat16[512, 512]", "(fsdp)", "next_example: 60", "config.model.d_model: 8")
    )


# ---------------------------------------------------------------------------------------------- which snapshot


def test_every_way_to_name_a_snapshot_finds_it(run):
    tool("pin", f"{run}@20", "best")
    named = {
        30: [(run,), (run / "snapshots",), (directory_of(run),), (f"{run}@30",)],
        20: [
            (run, "--step", 20),
            (f"{run}@20",),
            (f"{run}@best",),
            (directory_of(run, 20),),
            (run / "snapshots", "--step", 20),
        ],
    }
    for step, ways in named.items():
        for way in ways:
            assert json_of("inspect", *way)["step"] == step, way


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "{run}@40"), r"no snapshot of step 40 .*10, 20, 30"),
        (("inspect", "{run}@nobody"), "no pin 'nobody'"),
        (("inspect", "{run}@20", "--step", "30"), "give one of the two"),
        (("inspect", "{run}/snapshots/step_0000000010", "--step", "30"), "directory of one step"),
        (("inspect", "{run}/snapshots/step_0000000010@30"), "directory of one step"),
        (("verify", "{run}/nothing"), "no snapshot found in"),
        (("verify", "{run}@10", "--all"), "without a step"),
        (("verify", "--all", "{run}/nothing"), "does not exist"),
        (("ls", "{run}/nothing"), "does not exist"),
        (("ls", "s3://bucket/run"), "s3:// cannot be used"),
        (("diff", "{run}", "{run}/nothing"), "no snapshot found in"),
        (("pin", "{run}", "a/b"), "expected a name of letters"),
        (("pin", "{run}", "nobody", "--remove"), "no pin 'nobody'"),
        (("rm", "{run}@40"), "no snapshot of step 40"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_what_cannot_be_done_is_said_without_a_traceback(made, arguments, says):
    assert re.search(says, tool(*(a.format(run=made) for a in arguments), expect=2))


# ---------------------------------------------------------------------------------------------- verify


def test_a_good_snapshot_is_good_and_every_byte_of_its_arrays_is_read(made):
    seen = []
    assert verify(root_of(made), 30, on_bytes=seen.append) == []
    arrays = 2 * 512 * 256 * 4 + 512 * 512 * 2
    assert arrays < sum(seen) < arrays + 4096
    assert json_of("verify", made, "--all") == [{"step": s, "is_good": True, "problems": []} for s in (10, 20, 30)]
    assert tool("verify", made).strip().endswith(": good")


def test_a_flipped_bit_in_any_file_is_found_and_named(run):
    rng = np.random.default_rng(0)
    for file in files_of(run):
        if not (good := file.read_bytes()):  # a marker of Orbax's own
            continue
        for bit in map(int, rng.integers(8 * len(good), size=4)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bytes(bad))
            problems = verify(root_of(run), 30)
            assert any(file.relative_to(directory_of(run).parent).name in p for p in problems), (file, bit, problems)
            if "/c/" in str(file):
                assert any(is_at(p, file, bit // 8) for p in problems), (file, bit, problems)
            if leaf := next((p for p in LARGE if f"/{p.replace('/', '.')}/c/" in str(file)), None):
                assert any(p.startswith(f"leaf '{leaf}'") for p in problems), problems
        file.write_bytes(good)
    assert verify(root_of(run), 30) == []


def is_at(problem, file, byte):
    """Whether a problem names the file and a byte range that holds the byte."""
    found = re.search(rf"{'/'.join(file.parts[-3:])}: bytes? (\d+)(?:-(\d+))?:", problem)
    return found and int(found[1]) <= byte < int(found[2] or int(found[1]) + 1)


def cut(file):
    file.write_bytes(file.read_bytes()[:-3])


def lengthen(file):
    file.write_bytes(file.read_bytes() + bytes(3))


def test_a_cut_longer_or_missing_file_is_found_and_named(run):
    for file in files_of(run):
        good = file.read_bytes()
        for damage in (cut, lengthen, Path.unlink):
            if damage is cut and not good:
                continue
            damage(file)
            if file.suffix == ".ok" and damage is Path.unlink:  # then it is no snapshot any more
                assert steps.committed_steps(root_of(run)) == [10, 20]
            else:
                problems = verify(root_of(run), 30)
                assert any(file.name in p for p in problems), (file, damage, problems)
            file.write_bytes(good)
    assert verify(root_of(run), 30) == []


def swap(a, b):
    first, second = a.read_bytes(), b.read_bytes()
    assert len(first) == len(second) and first != second
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize("leaf", LARGE)
def test_exchanged_shard_files_are_found_by_the_fingerprint(run, leaf):
    state = directory_of(run) / "state"
    swap(*sorted((state / leaf.replace("/", ".") / "c").rglob("0"))[1:3])
    (problem,) = verify(root_of(run), 30)
    assert problem.startswith(f"leaf '{leaf}': has fingerprint ") and "exchanged" in problem


def test_files_of_another_step_are_found(run):
    twin, state = directory_of(run, 20) / "state", directory_of(run) / "state"
    swap(twin / "packed/c/0", state / "packed/c/0")
    problems = verify(root_of(run), 30)
    assert {p.split("'")[1] for p in problems} == {"step", "params/b", "opt_state/key"}, problems
    swap(twin / "params.w/c/1/0", state / "params.w/c/1/0")
    assert any(p.startswith("leaf 'params/w': has fingerprint") for p in verify(root_of(run), 20))


def test_an_exchanged_directory_mark_or_manifest_is_found(run):
    ten, thirty = directory_of(run, 10), directory_of(run)
    swap_names = lambda a, b: (a.rename(a.with_suffix(".x")), b.rename(a), a.with_suffix(".x").rename(b))
    for a, b in [
        (ten, thirty),
        (ten.with_name(ten.name + ".ok"), thirty.with_name(thirty.name + ".ok")),
        (ten / "manifest.json", thirty / "manifest.json"),
    ]:
        swap_names(a, b)
        assert verify(root_of(run), 30) and verify(root_of(run), 10)
        swap_names(a, b)
    assert not verify(root_of(run), 30)


def test_an_extra_file_is_found(run):
    for extra in ("extra", "state/params.w/c/9/0", "state/params.w/c/extra"):
        path = directory_of(run) / extra
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        assert any(extra in p for p in verify(root_of(run), 30))
        path.unlink()


def test_damage_in_the_packed_leaves_names_the_leaves(run):
    manifest = json.loads((directory_of(run) / "manifest.json").read_text())
    offset, size = manifest["packed"]["params/b"]
    with (directory_of(run) / "state/packed/c/0").open("r+b") as f:
        f.seek(offset + size - 1)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    problems = verify(root_of(run), 30)
    assert any(p.startswith("leaf 'params/b'") for p in problems) and any("packed/c/0: bytes 0-" in p for p in problems)


def test_verify_exits_with_1_and_goes_on_to_the_other_steps(run):
    cut(directory_of(run, 20) / "state/params.w/c/0/0")
    assert [x["is_good"] for x in json_of("verify", run, "--all", expect=1)] == [True, False, True]
    assert "damaged" in tool("verify", f"{run}@20", expect=1)
    tool("verify", run)


def test_a_step_that_is_deleted_while_it_is_checked_is_not_called_damaged(run):
    root, one_at_a_time = root_of(run), threading.Lock()

    def delete_it(_):
        with one_at_a_time:  # who comes second goes on when the step is gone
            if 20 in steps.committed_steps(root):
                steps.delete(root, 20)

    with pytest.raises(SnapshotError, match="was deleted while it was checked") as e:
        verify(root, 20, on_bytes=delete_it, threads=1)
    assert not isinstance(e.value, DamagedSnapshot)


def test_all_steps_are_good_while_a_run_writes_and_deletes(tmp_path):
    save(tmp_path, 1, keep=1)
    writer = threading.Thread(target=lambda: [save(tmp_path, step, keep=1) for step in range(2, 8)])
    writer.start()
    rounds = 0
    while writer.is_alive():
        assert all(x["is_good"] for x in json_of("verify", tmp_path, "--all"))
        rounds += 1
    writer.join()
    assert rounds >= 2 and json_of("verify", tmp_path, "--all") == [{"step": 7, "is_good": True, "problems": []}]


# ---------------------------------------------------------------------------------------------- diff


def test_equal_states_of_other_layouts_and_runs_are_equal(made, tmp_path):
    other = tmp_path / "other"
    config = {**CONFIG, "run_dir": "there", "steps": 90}
    save(other, 30, axes={"data": 2, "fsdp": 2}, config=config)
    found = json_of("diff", made, other)
    assert found["is_equal"] and found["num_equal"] == 7
    assert found["elsewhere"] == {"steps": [9, 90], "mesh.fsdp": [4, 2], "mesh.data": [None, 2]}
    assert "The snapshots are equal." in tool("diff", made, other, "--quick")


def test_the_smallest_differences_are_found_and_measured(made, tmp_path):
    leaves = leaves_of(30)
    w = leaves["w"].copy()
    w[3, 5] = np.nextafter(w[3, 5], np.inf)
    w[400, 0] += 2
    h = leaves["h"].copy()
    h[0, 0], h[1, 1], h[2, 2] = np.nan, np.inf, -h[2, 2]
    other = tmp_path / "other"
    save(other, 30, {"w": w, "h": h, "key": jax.random.key(7)}, axes={"fsdp": 8})
    found = json_of("diff", made, other, expect=1)
    assert not found["is_equal"] and set(found["leaves"]) == {"params/w", "params/h", "opt_state/key"}
    of_w, of_h = found["leaves"]["params/w"], found["leaves"]["params/h"]
    assert (of_w["differing"], of_w["elements"], of_w["first"], of_w["nans"]) == (2, 512 * 256, [3, 5], 0)
    difference = np.abs(w.astype(np.float64) - leaves["w"])
    assert of_w["max_abs"] == difference.max()
    assert of_w["max_rel"] == (difference / np.maximum(np.abs(w), np.abs(leaves["w"])).astype(np.float64)).max()
    assert (of_h["differing"], of_h["nans"], of_h["max_abs"], of_h["max_rel"]) == (3, 1, "inf", 2.0)
    assert "params/w" in tool("diff", made, other, expect=1)


def test_a_negative_zero_differs_by_nothing_and_the_same_nan_is_equal(tmp_path):
    w = leaves_of(1)["w"]
    w[0, 0], w[1, 1] = 0.0, np.nan
    v = w.copy()
    v[0, 0] = -0.0
    save(tmp_path / "a", 1, {"w": w, "mu": w})
    save(tmp_path / "b", 1, {"w": v, "mu": w})
    found = json_of("diff", tmp_path / "a", tmp_path / "b", expect=1)["leaves"]
    assert found == {
        "params/w": {"elements": w.size, "differing": 1, "max_abs": 0.0, "max_rel": 0.0, "nans": 0, "first": [0, 0]}
    }


def test_differences_of_configuration_structure_and_data_count(made, tmp_path):
    other = tmp_path / "other"
    config = {**CONFIG, "model": {"name": "mlp", "d_model": 9}}
    save(other, 30, {"b": np.zeros(8, np.float32)}, config=config)
    found = json_of("diff", made, other, expect=1)
    assert found["config"] == {"model.d_model": [8, 9]}
    assert found["structure"] == {"params/b": ["float32[7]", "float32[8]"]} and not found["leaves"]
    found = json_of("diff", f"{made}@10", f"{made}@20", expect=1)
    assert found["data"] == {"next_example": [30, 60]} and len(found["leaves"]) == 6


def test_damage_is_not_taken_for_a_difference(made, run):
    swap(*sorted((directory_of(run) / "state/params.w/c").rglob("0"))[1:3])
    assert "one of the two is damaged" in tool("diff", made, run, expect=2)
    file = directory_of(run) / "state/params.h/c/0/0"
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 1
    file.write_bytes(bytes(raw))
    assert "crc32c" in tool("diff", made, run, expect=2)


def test_quick_reads_only_leaves_of_other_fingerprints(made, run):
    seen = []
    assert diff(Located(root_of(made), 30), Located(root_of(run), 30), quick=True, on_bytes=seen.append).is_equal
    assert seen == []


# ---------------------------------------------------------------------------------------------- pin and rm


def test_a_pin_keeps_a_step_from_rm_and_from_retention(run):
    assert json_of("pin", f"{run}@10", "best") == {"pins": {"best": 10}}
    assert "pinned as best" in tool("rm", f"{run}@10", "--yes", "--force", expect=2)
    save(run, 40, keep=1)
    assert steps.committed_steps(root_of(run)) == [10, 40]
    assert json_of("pin", run, "best", "--remove") == {"pins": {}}
    tool("rm", f"{run}@10", "--yes")
    assert steps.committed_steps(root_of(run)) == [40]


def test_rm_asks_and_spares_the_newest(run):
    assert "newest" in tool("rm", run, "--yes", expect=2)
    for answer in ("n\n", ""):
        assert "nothing was done" in tool("rm", run, "--step", 20, answer=answer, expect=2)
    assert steps.committed_steps(root_of(run)) == [10, 20, 30]
    tool("rm", run, "--step", 20, answer="y\n")
    assert json_of("rm", run, "--force", "--yes") == {"deleted": 30, "steps": [10]}
    assert not directory_of(run).exists() and not directory_of(run, 20).exists()


def test_rm_does_not_disturb_a_run_that_trains(run):
    lock = RunLock(epath.Path(run))
    assert "is in use by" in tool("rm", f"{run}@10", "--yes", expect=2)
    tool("pin", f"{run}@10", "best")
    lock.release()
    tool("pin", run, "best", "--remove")
    tool("rm", f"{run}@10", "--yes")


# ---------------------------------------------------------------------------------------------- gs://


def test_every_command_works_on_gs(gcs, made):
    run = f"gs://{BUCKET}/tools/run"
    for step in (20, 30):
        save(run, step, metrics={"loss": 1.0})
    assert [(x["step"], x["status"]) for x in json_of("ls", run)] == [(20, "ok"), (30, "ok")]
    assert json_of("inspect", f"{run}@20")["leaves"] == json_of("inspect", f"{made}@20")["leaves"]
    assert [x["is_good"] for x in json_of("verify", run, "--all")] == [True, True]
    assert json_of("diff", run, made)["is_equal"] and not json_of("diff", run, f"{made}@20", expect=1)["is_equal"]
    json_of("pin", f"{run}@20", "best")
    assert "pinned as best" in tool("rm", f"{run}@best", "--yes", expect=2)
    json_of("pin", run, "best", "--remove")
    assert json_of("rm", f"{run}@20", "--yes")["steps"] == [30]
    assert not gcs.names("tools/run/snapshots/step_0000000020")


def test_damage_on_gs_is_found_and_named(gcs):
    run = f"gs://{BUCKET}/tools/damaged"
    save(run, 30)
    state = f"{run}/snapshots/step_0000000030/state"
    assert json_of("verify", run)[0]["is_good"]
    flipped = bytearray(objects.read(f"{state}/params.w/c/1/0"))
    flipped[777] ^= 8
    objects.write(f"{state}/params.w/c/1/0", bytes(flipped))
    objects.delete(f"{state}/params.h/c/2/0")
    (result,) = json_of("verify", run, expect=1)
    assert any("leaf 'params/w': state/params.w/c/1/0: bytes 0-" in p for p in result["problems"]), result
    assert any("state/params.h/c/2/0: missing" in p for p in result["problems"]), result
    assert steps.quarantine(epath.Path(run) / "snapshots", 30) == json_of("ls", run)[0]["name"]


# ---------------------------------------------------------------------------------------------- without devices

COMMANDS = [
    "ls {run}",
    "inspect {run}",
    "verify {run} --all",
    "diff {run}@10 {run}",
    "pin {run} x",
    "rm {run} --step 10 --yes",
]


def test_no_command_initialises_a_backend_or_changes_the_platform(run):
    """The platform does not exist, so JAX raises as soon as anything asks it for a device."""
    script = f"""
import os, sys
from typer.testing import CliRunner
from jaxckpt.cli import app
for command in {[c.format(run=run).split() for c in COMMANDS]}:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == (command[0] == "diff"), (command, result.output, result.exception)
assert os.environ["JAX_PLATFORMS"] == "nowhere"
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends and jax.config.jax_platforms == "nowhere"
try:
    jax.devices()
except RuntimeError:
    sys.exit(7)
"""
    env = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 7, result.stdout + result.stderr


def test_verify_and_diff_take_a_few_mebibytes_whatever_the_size_of_a_chunk(tmp_path):
    w = np.random.default_rng(0).integers(0, 1 << 32, size=(24 << 10, 1 << 10), dtype=np.uint32).view(np.float32)
    save(tmp_path / "a", 1, {"w": w, "mu": w}, axes={"fsdp": 1})  # two files of 96 MiB
    save(tmp_path / "b", 1, {"w": w, "mu": w}, axes={"fsdp": 2})
    script = f"""
from jaxckpt.snapshot.diff import diff
from jaxckpt.snapshot.locate import locate
from jaxckpt.snapshot.verify import verify
peak = lambda: int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) / 1024
before = peak()
assert verify(*locate({str(tmp_path / "a")!r}), threads=2) == []
verified = peak()
assert diff(locate({str(tmp_path / "a")!r}), locate({str(tmp_path / "b")!r}), threads=2).is_equal
print(verified - before, peak() - verified)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    grown = [float(x) for x in result.stdout.split()]
    # Blocks of 4 MiB, for verify with a fingerprint's temporaries, for diff of both sides; each for 2 threads.
    assert len(grown) == 2 and grown[0] < 40 and grown[1] < 60, (grown, result.stderr)


def test_progress_is_plain_lines_without_a_terminal_and_a_bar_on_one():
    plain, bar = (Console(file=io.StringIO(), force_terminal=is_terminal, width=100) for is_terminal in (False, True))
    for console in (plain, bar):
        with BytesProgress(console, "step 3", total=4 << 20, plain_interval_s=0.0) as progress:
            progress.add(1 << 20)
            progress.add(2 << 20)
    assert plain.file.getvalue() == "step 3: 1 of 4 MiB\nstep 3: 3 of 4 MiB\n"
    assert "\x1b[" in bar.file.getvalue() and "of 4 MiB" not in bar.file.getvalue()


def test_ls_and_inspect_do_not_even_import_jax(made):
    for command in ("ls", "inspect"):
        script = f"import sys\nfrom jaxckpt.cli import app\ntry:\n    app([{command!r}, {str(made)!r}])\nfinally:\n    assert 'jax' not in sys.modules"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0 and "Assert" not in result.stderr, result.stderr


def test_the_command_line_is_a_process_that_exits_as_promised(made, run):
    cut(directory_of(run) / "state/params.w/c/0/0")
    for arguments, code in [(("verify", made), 0), (("verify", run), 1), (("ls", run / "nothing"), 2)]:
        command = [sys.executable, "-m", "jaxckpt", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
        assert bool(result.stdout) == (code < 2) and bool(result.stderr) == (code == 2)
