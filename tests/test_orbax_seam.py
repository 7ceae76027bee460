"""The seam between Orbax and the fast way to the disk: it is used, it is exact, and where it cannot be, Orbax serves."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import direct, orbax_io
from jaxckpt.snapshot.orbax_seam import mover
from test_direct import random_bits
from tiny import mesh_of

ROOT = Path(__file__).parents[1]
MESH = mesh_of(data=4, fsdp=2)
SPECS = [P(), P("data"), P(None, "fsdp"), P("fsdp", "data"), P(("data", "fsdp"))]
DTYPES = [name for name in sorted(direct.DTYPES) if name not in ("int64", "uint64", "float64", "complex128")]


def save(directory, state, **options):
    orbax_io.save_async(directory, state=state, data={}, meta={}, timeout_s=60, **options).result(timeout=60)


def put(a, spec=P(), kind="device", mesh=MESH):
    return jax.device_put(a, NamedSharding(mesh, spec, memory_kind=kind))


def like(x, spec, kind="device", mesh=MESH):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))


def bits(x):
    return np.asarray(x).tobytes()


def moved():
    return mover().counters.files_written, mover().counters.files_read


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_every_dtype_comes_back_bitwise_from_every_sharding_and_memory_kind_and_plain_orbax_agrees(tmp_path, kind):
    state = {d: put(random_bits((16, 24), d), SPECS[i % len(SPECS)], kind) for i, d in enumerate(DTYPES)}
    assert mover().is_trusted(str(tmp_path))
    before = moved()
    save(tmp_path / "s", state)
    for shift, other in [(0, kind), (1, kind), (2, "device")]:
        target = {d: like(state[d], SPECS[(i + shift) % len(SPECS)], other) for i, d in enumerate(DTYPES)}
        loaded = orbax_io.load_state(tmp_path / "s", target, timeout_s=60)
        for path, x in loaded.items():
            assert x.sharding == target[path].sharding and x.dtype == state[path].dtype
            assert bits(x) == bits(state[path]), path
    written, read = (after - b for after, b in zip(moved(), before, strict=True))
    assert written >= 4 * len(state) and read >= 4 * len(state)
    plain = ocp.load_checkpointables(tmp_path / "s", {"state": orbax_io.tree.nest(target)})["state"]
    assert {p: bits(x) for p, x in orbax_io.tree.flatten(plain).items()} == {p: bits(x) for p, x in state.items()}
    assert moved()[1] == before[1] + read  # plain Orbax is left alone


def test_what_the_fast_way_cannot_do_goes_orbaxs_way(tmp_path):
    state = {
        "int4": put(random_bits((16, 8), "uint8").astype(jnp.int4), P("data")),
        "w": put(np.ones((8, 8), np.float32)),
    }
    assert mover().is_trusted(str(tmp_path))
    before = moved()
    save(tmp_path / "s", state)
    assert moved()[0] - before[0] in (1, 8)  # of w only, by one replica or by all
    loaded = orbax_io.load_state(tmp_path / "s", {p: like(x, P("fsdp")) for p, x in state.items()}, timeout_s=60)
    assert all(bits(loaded[p]) == bits(state[p]) for p in state)
    cast = orbax_io.load_state(tmp_path / "s", {"w": like(state["w"].astype(jnp.bfloat16), P())}, timeout_s=60)
    assert cast["w"].dtype == jnp.bfloat16 and np.array_equal(cast["w"], state["w"])


def test_checkpoints_of_others_are_left_alone(tmp_path):
    save(tmp_path / "ours", {"w": put(np.ones((8, 8), np.float32))})
    before = moved()
    ocp.save(tmp_path / "theirs", {"w": put(np.ones((8, 8), np.float32))})
    assert moved() == before
    assert "crc32c" not in [path.name for path in (tmp_path / "theirs").rglob("*")]
    with pytest.raises(FileNotFoundError):  # still OCDBT, as Orbax likes it
        (tmp_path / "theirs" / "checkpointables" / "w" / "zarr.json").read_text()


def test_a_flipped_bit_stops_the_restore_and_names_the_file(tmp_path):
    state = {"a/w": put(random_bits((64, 64), "float32"), P("data")), "a/b": put(np.ones((64,), np.float32))}
    save(tmp_path / "s", state)
    file = tmp_path / "s" / "state" / "a.w" / "c" / "1" / "0"
    data = bytearray(file.read_bytes())
    data[1000] ^= 4
    file.write_bytes(data)
    target = {p: like(x, P("fsdp")) for p, x in state.items()}
    with pytest.raises(DamagedSnapshot, match=r"a\.w/c/1/0: bytes 0 to \d+ .*crc32c"):
        orbax_io.load_state(tmp_path / "s", target, timeout_s=60)
    assert np.array_equal(
        orbax_io.load_state(tmp_path / "s", {"a/b": target["a/b"]}, timeout_s=60)["a/b"], state["a/b"]
    )
    shutil.rmtree(tmp_path / "s" / "state" / "a.b")
    with pytest.raises(DamagedSnapshot, match=r"a\.b"):
        orbax_io.load_state(tmp_path / "s", {"a/b": target["a/b"]}, timeout_s=60)


def test_a_step_may_work_in_place_on_restored_arrays(tmp_path):
    # They lie in memory that the reader allocated: it must live as long as XLA uses it, and be given back once.
    w = random_bits((512, 2048), "int32")
    save(tmp_path / "s", {"w": put(w, P("data")), "m": put(w, P("fsdp"), "pinned_host")})
    target = {"w": like(w, P("data")), "m": like(w, P("fsdp"), "pinned_host")}
    step = jax.jit(lambda s: {"w": s["w"] * 3 + 1, "m": s["m"]}, donate_argnums=0,
                   out_shardings={p: x.sharding for p, x in target.items()})  # fmt: skip
    expected = w * 27 + 13
    for _ in range(3):
        state = orbax_io.load_state(tmp_path / "s", target, timeout_s=60)
        for _ in range(3):
            state = step(state)
        assert np.array_equal(state["w"], expected) and np.array_equal(state["m"], w)


def test_the_memory_of_restored_arrays_is_given_back(tmp_path):
    # 33 MiB in one piece: the C library keeps smaller pieces back for each thread, and gives larger ones back at once.
    x = jax.device_put(np.ones((2112, 4096), np.float32), NamedSharding(Mesh(jax.devices()[:1], ("data",)), P()))
    save(tmp_path / "s", {"w": x})
    used = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    sizes = []
    for _ in range(6):
        target = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        loaded = orbax_io.load_state(tmp_path / "s", {"w": target}, timeout_s=60)
        del loaded
        sizes.append(used())
    assert sizes[-1] - sizes[0] < x.nbytes, [n >> 20 for n in sizes]


def test_no_thread_and_no_memory_stays_after_a_save_or_a_load(tmp_path):
    state = {"w": put(np.ones((256, 4096), np.float32), P("data"))}
    save(tmp_path / "s", state)
    orbax_io.load_state(tmp_path / "s", {"w": like(state["w"], P("fsdp"))}, timeout_s=60)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("jaxckpt-io")]


def test_a_state_may_be_donated_after_a_staged_save_of_which_only_the_last_part_is_not_on_disk(tmp_path):
    state = {f"w{i}": put(np.full((512, 512), i, np.float32), P("data")) for i in range(12)}
    total = sum(x.nbytes for x in state.values())
    before = mover().counters.bytes_written
    response = orbax_io.save_async(
        tmp_path / "s", state=state, data={}, meta={}, timeout_s=60, staging_bytes=total // 4
    )
    on_disk = mover().counters.bytes_written - before
    for x in state.values():
        x.delete()
    response.result(timeout=60)
    assert on_disk >= total * 3 // 4
    loaded = orbax_io.load_state(tmp_path / "s", {p: like(x, P()) for p, x in state.items()}, timeout_s=60)
    assert all((np.asarray(x) == i).all() for i, x in enumerate(loaded.values()))


@pytest.mark.parametrize("limit, is_bounded", [(5 << 20, True), (None, False)])
def test_no_more_than_restore_bytes_are_taken_up_before_they_are_read(tmp_path, limit, is_bounded):
    state = {f"w{i}": put(np.full((512, 1024), i, np.float32), P(("data", "fsdp"))) for i in range(16)}
    save(tmp_path / "s", state)
    start, ahead, ended = mover().counters.bytes_read, [0], threading.Event()

    def taken():  # each piece of memory once: parts and the array that is made of them are the same
        shards = [shard.data for x in jax.live_arrays() for shard in x.addressable_shards]
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())

    before = taken()

    def watch():
        while not ended.wait(0.0005):
            now = taken() - before
            ahead[0] = max(ahead[0], now - (mover().counters.bytes_read - start))

    watcher = threading.Thread(target=watch)
    watcher.start()
    target = {p: like(x, P(("data", "fsdp"))) for p, x in state.items()}
    loaded = orbax_io.load_state(tmp_path / "s", target, timeout_s=60, restore_bytes=limit)
    ended.set()
    watcher.join()
    assert all((np.asarray(x) == i).all() for i, x in enumerate(loaded.values()))
    assert (0 < ahead[0] <= 5 << 20) == is_bounded, ahead[0] >> 20


def in_a_process(tmp_path, *lines):
    """Runs Python lines after a preamble that can save and load; what it printed as JSON, and its warnings."""
    code = PREAMBLE + "\n".join(lines)
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


PREAMBLE = """
import json, resource, sys, types
import jax, numpy as np
from jaxckpt.distributed.start import use_cpu_devices
use_cpu_devices(4)
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint._src.serialization import jax_array_handlers, serialization
sharding = NamedSharding(jax.make_mesh((4,), ("d",)), P("d"))
w = np.arange(400_000, dtype=np.float32).reshape(400, 1000)
def there_and_back(name="s", **mesh):
    from jaxckpt.snapshot import orbax_io
    from jaxckpt.snapshot.orbax_seam import mover
    root = sys.argv[1] + "/" + name
    x = jax.device_put(w, sharding)
    orbax_io.save_async(root, state={"w": x}, data={}, meta={}, timeout_s=60).result(timeout=60)
    target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}
    same = bool(np.array_equal(orbax_io.load_state(root, target, timeout_s=60)["w"], w))
    return [same, mover().counters.files_written, mover().counters.files_read]
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("", None),
        (
            "original = serialization.async_deserialize\n"
            "async def other(user_sharding, tensorstore_spec, global_shape=None, dtype=None, **kwargs):\n"
            "    return await original(user_sharding, tensorstore_spec, global_shape, dtype, **kwargs)\n"
            "serialization.async_deserialize = other",
            "async_deserialize takes",
        ),
        (
            "elsewhere = types.ModuleType('elsewhere'); elsewhere.__dict__.update(serialization.__dict__)\n"
            "jax_array_handlers.serialization = elsewhere\n"
            "del serialization.async_serialize_from_host",
            "async_serialize_from_host",
        ),
        (
            "from jaxckpt.snapshot.orbax_seam import mover\n"
            "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))\n"
            "mover().is_trusted(sys.argv[1])\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))",
            "self-test",
        ),
    ],
    ids=["as it is", "another signature", "a function is gone", "the self-test fails"],
)
def test_orbax_moves_the_bytes_with_one_warning_where_the_seam_is_not_as_we_know_it(tmp_path, change, reason):
    (same, written, read), warnings = in_a_process(tmp_path, change, "print(json.dumps(there_and_back()))")
    assert same
    lines = [line for line in warnings.splitlines() if "slower" in line]
    if reason is None:
        assert written >= 4 and read >= 4 and not lines
    else:
        assert (written, read) == (0, 0) and len(lines) == 1 and reason in lines[0]
    # What was written, whoever moved it, is the same, and the fast way reads it.
    target = {"w": jax.ShapeDtypeStruct((400, 1000), jnp.float32, sharding=NamedSharding(MESH, P(None, "data")))}
    assert mover().is_trusted(str(tmp_path))  # the self-test reads too
    before = moved()
    loaded = orbax_io.load_state(tmp_path / "s", target, timeout_s=60)["w"]
    assert np.array_equal(loaded, np.arange(400_000, dtype=np.float32).reshape(400, 1000))
    assert moved()[1] - before[1] == 4  # each file once for all columns
    assert not [p for p in os.listdir(tmp_path) if p != "s"]


def test_a_failed_restore_prints_nothing_besides_its_error(tmp_path):
    failure, warnings = in_a_process(
        tmp_path,
        "import gc, shutil",
        "there_and_back()",
        "from jaxckpt.snapshot import orbax_io",
        "shutil.rmtree(sys.argv[1] + '/s/state/w')",
        "try: orbax_io.load_state(sys.argv[1] + '/s', {'w': jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)},"
        " timeout_s=60)",
        "except Exception as e: print(json.dumps(type(e).__name__))",
        "gc.collect()",
    )
    assert failure == "DamagedSnapshot" and not warnings, warnings


MEMBER = """
import json, sys
from jaxckpt.distributed.start import join, use_cpu_devices
root, number, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
use_cpu_devices(2)
join(f"127.0.0.1:{port}", 2, number, timeout_s=60)
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxckpt.snapshot import orbax_io
from jaxckpt.snapshot.orbax_seam import mover
mesh = jax.make_mesh((4,), ("d",))
w = np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024)
make = lambda *spec: jax.make_array_from_callback(w.shape, NamedSharding(mesh, P(*spec)), lambda i: w[i])
state = {"rows": make("d"), "all": make(), "packed": np.arange(100, dtype=np.uint8)}
orbax_io.save_async(root, state=state, data={}, meta={}, timeout_s=60).result(timeout=60)
written = mover().counters.bytes_written
out = {}
for name, spec in [("same", P("d")), ("transposed", P(None, "d")), ("all", P())]:
    before = mover().counters.bytes_read
    target = {"rows": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, spec))}
    loaded = orbax_io.load_state(root, target, timeout_s=60)["rows"]
    assert all(np.array_equal(s.data, w[s.index]) for s in loaded.addressable_shards)
    out[name] = (mover().counters.bytes_read - before) / w.nbytes
print(json.dumps([written / w.nbytes, out]))
"""


def test_each_of_two_processes_writes_its_own_shards_and_reads_only_what_it_holds(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(tmp_path / "s"), str(i), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [p.communicate(timeout=120) for p in members]
    assert [p.returncode for p in members] == [0, 0], outputs
    for out, _ in outputs:
        written, read = json.loads(out.splitlines()[-1])
        assert 0.9 < written < 1.2  # half of each array, the replicated one is shared out too
        assert read["same"] < 0.52 and read["transposed"] < 0.55 and 1 <= read["all"] < 1.02, read
    here = NamedSharding(MESH, P())
    target = {"rows": jax.ShapeDtypeStruct((1024, 1024), jnp.int32, sharding=here)}
    loaded = orbax_io.load_state(tmp_path / "s", {**target, "all": target["rows"]}, timeout_s=60)
    for x in loaded.values():
        assert np.array_equal(x, np.arange(1 << 20).reshape(1024, 1024))
