"""Saving and restoring against the disk itself, and against others that save.

    python benchmarks/snapshot_io.py --gib 2 --rounds 5 [--directory DIR] [--only jaxckpt,safetensors]

In every round each contestant, in another order every time, saves 128 MiB float32 arrays from a fresh process and
restores them in another one, caches dropped before it (where that is permitted). Just before it fio (libaio, O_DIRECT,
8 MiB, depth 8, a fresh file, fsync) and dd (O_DIRECT, 16 MiB, fsync) move as many bytes: the ratios are to these. jaxckpt
computes its checksums and fingerprints when it saves and checks both when it restores; the others have none. A first
round, which fills the compilation cache, is not counted. Times end when everything is on the disk, or in the arrays.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHAPE = (8192, 4096)  # 128 MiB of float32
DEVICES = 8
STEP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant; a temporary one otherwise")
    parser.add_argument("--only", help="names of contestants, separated by commas")
    parser.add_argument("--child", nargs=3, metavar=("NAME", "save|load", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, action, directory = arguments.child
        print(json.dumps(CHILDREN[name](action, Path(directory), int(arguments.gib * 8))))
        return
    names = arguments.only.split(",") if arguments.only else list(CHILDREN)
    if importlib.util.find_spec("torch") is None:
        names = [name for name in names if not name.startswith("torch")]
        print("torch is not installed: its checkpoints are left out")
    with tempfile.TemporaryDirectory(prefix="snapshot_io-", dir=arguments.directory) as directory:
        rounds = run_rounds(Path(directory), names, arguments.gib, arguments.rounds)
    print_report(names, arguments.gib, rounds)


def run_rounds(directory: Path, names: list[str], gib: float, count: int) -> list[dict[str, dict[str, Any]]]:
    rounds = []
    for i in range(count + 1):
        turn = names[i % len(names) :] + names[: i % len(names)]
        # One array is enough to compile for all.
        measured = {name: contest(directory, name, gib if i else 1 / 8) for name in turn}
        if i:
            rounds.append(measured)
        print(f"round {i}{'' if i else ', not counted'}: load average {os.getloadavg()[0]:.1f}", flush=True)
    return rounds


def contest(directory: Path, name: str, gib: float) -> dict[str, Any]:
    """Seconds and bytes of one contestant, beside GiB/s of the disk just before it."""
    raw, saved = directory / "raw", directory / name
    out = {"disk": measure_disk(raw, gib)}
    for action in ("save", "load"):
        os.sync()
        if action == "load":
            drop_caches()
        command = [sys.executable, __file__, "--gib", str(gib), "--child", name, action, str(saved)]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **cache}
        )
        if done.returncode:
            raise SystemExit(f"{name} could not {action}:\n{done.stderr[-3000:]}")
        out[action] = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(saved)
    return out


def measure_disk(file: Path, gib: float) -> dict[str, float]:
    """GiB/s of fio and dd, writing a fresh file and reading it; without fio, of dd alone."""
    mib, out = int(gib * 1024), {}
    if shutil.which("fio"):
        for action in ("write", "read"):
            command = (
                f"fio --name=raw --filename={file} --size={mib}M --rw={action} --bs=8M --direct=1 --ioengine=libaio"
            )
            command += " --iodepth=8 --fallocate=posix --output-format=json" + " --end_fsync=1" * (action == "write")
            text = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
            out[f"fio {action}"] = json.loads(text[text.index("{") :])["jobs"][0][action]["bw_bytes"] / 2**30
        file.unlink()
    for action, command in [
        ("write", f"dd if=/dev/zero of={file} bs=16M count={mib // 16} oflag=direct conv=fsync"),
        ("read", f"dd if={file} of=/dev/null bs=16M iflag=direct"),
    ]:
        os.sync()
        start = time.perf_counter()
        subprocess.run(command.split(), capture_output=True, check=True)
        out[f"dd {action}"] = gib / (time.perf_counter() - start)
    file.unlink()
    return out


def drop_caches() -> None:
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("caches cannot be dropped here: restores may come from memory", flush=True)


class Meter:
    """Time, CPU seconds and additional resident memory from its creation to `stop`."""

    def __init__(self) -> None:
        self._before = self._largest = _resident()
        self._running = True
        threading.Thread(target=self._watch, daemon=True).start()
        self._cpu, self._start = time.process_time(), time.perf_counter()
        self.block_s: float | None = None

    def returned(self) -> None:
        self.block_s = time.perf_counter() - self._start

    def stop(self, held_bytes: int = 0) -> dict[str, float]:
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        self._running = False
        extra = max(self._largest, _resident()) - self._before - held_bytes
        return {"s": seconds, "cpu_s": cpu, "extra_bytes": extra, "block_s": self.block_s or seconds}

    def _watch(self) -> None:
        while self._running:
            self._largest = max(self._largest, _resident())
            time.sleep(0.005)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _numbers(count: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    return {f"a{i:02d}": rng.standard_normal(SHAPE, dtype=np.float32) for i in range(count)}


def _jax_state(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays sharded over all devices, the same without values)"""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    sharding = NamedSharding(jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,)), P("fsdp"))
    target = {f"a{i:02d}": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding) for i in range(count)}
    return {}, target


def _filled(target: dict[str, Any]) -> dict[str, Any]:
    import jax

    arrays = {name: jax.device_put(a, target[name].sharding) for name, a in _numbers(len(target)).items()}
    return jax.block_until_ready(arrays)


def _of_jaxckpt(action: str, directory: Path, count: int) -> dict[str, float]:
    _, target = _jax_state(count)
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxckpt.distributed.sync import Group
    from jaxckpt.snapshot.leaves import leaf_table
    from jaxckpt.snapshot.manifest import FORMAT
    from jaxckpt.snapshot.restore import Snapshot
    from jaxckpt.snapshot.snapshot import Snapshots
    from jaxckpt.state import fingerprint
    from jaxckpt.state.train_state import TrainState

    whole = NamedSharding(next(iter(target.values())).sharding.mesh, P())
    plan = TrainState(jax.ShapeDtypeStruct((), np.int32, sharding=whole), target, None, {}, {})
    with Snapshots(directory) as snapshots:
        snapshots.open(Group(timeout_s=600))
        if action == "save":
            state = TrainState(jax.device_put(np.int32(STEP), whole), _filled(target), None, {}, {})
            fingerprint.prepare(list(target.values()))  # as a run does behind its first step
            meter = Meter()
            snapshots.save(Snapshot(state, {}, {"format": FORMAT, "step": STEP, "leaves": leaf_table(plan)}))
            meter.returned()
            snapshots.wait()
            return meter.stop()
        meter = Meter()
        state = jax.block_until_ready(snapshots.restore(STEP, plan).state)
        return meter.stop(sum(x.nbytes for x in state.params.values()))


def _of_orbax_v1(action: str, directory: Path, count: int) -> dict[str, float]:
    _, target = _jax_state(count)
    import jax
    from orbax.checkpoint import v1 as ocp

    if action == "save":
        state = _filled(target)
        meter = Meter()
        response = ocp.save_async(directory, state)
        meter.returned()
        response.result()
        return meter.stop()
    meter = Meter()
    state = jax.block_until_ready(ocp.load(directory, target))
    return meter.stop(sum(x.nbytes for x in state.values()))


def _of_orbax_v0(action: str, directory: Path, count: int) -> dict[str, float]:
    _, target = _jax_state(count)
    import jax
    import orbax.checkpoint as ocp

    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        if action == "save":
            state = _filled(target)
            meter = Meter()
            checkpointer.save(directory, args=ocp.args.StandardSave(state))
            meter.returned()
            checkpointer.wait_until_finished()
            return meter.stop()
        meter = Meter()
        state = jax.block_until_ready(checkpointer.restore(directory, args=ocp.args.StandardRestore(target)))
        return meter.stop(sum(x.nbytes for x in state.values()))


def _of_safetensors(action: str, directory: Path, count: int) -> dict[str, float]:
    _, target = _jax_state(count)
    import jax
    import numpy as np
    from safetensors.numpy import load_file, save_file

    file = directory / "state.safetensors"
    if action == "save":
        state = _filled(target)
        directory.mkdir()
        meter = Meter()
        save_file({name: np.asarray(x) for name, x in state.items()}, file)
        with open(file, "rb") as f:
            os.fsync(f.fileno())
        return meter.stop()
    meter = Meter()
    state = {name: jax.device_put(a, target[name].sharding) for name, a in load_file(file).items()}
    jax.block_until_ready(state)
    return meter.stop(sum(x.nbytes for x in state.values()))


def _of_torch(action: str, directory: Path, count: int, *, is_async: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if action == "save":
        state = {name: torch.from_numpy(a) for name, a in _numbers(count).items()}
        meter = Meter()
        if is_async:
            future: Any = dcp.async_save(state, checkpoint_id=directory)
            meter.returned()
            future.result()
        else:
            dcp.save(state, checkpoint_id=directory)
        result = meter.stop()
    else:
        state = {f"a{i:02d}": torch.empty(SHAPE) for i in range(count)}
        meter = Meter()
        dcp.load(state, checkpoint_id=directory)
        result = meter.stop(sum(x.nbytes for x in state.values()))
    dist.destroy_process_group()
    return result


CHILDREN: dict[str, Callable[[str, Path, int], dict[str, float]]] = {
    "jaxckpt": _of_jaxckpt,
    "orbax-v1": _of_orbax_v1,
    "orbax-v0": _of_orbax_v0,
    "safetensors": _of_safetensors,
    "torch-dcp": lambda *a: _of_torch(*a, is_async=False),
    "torch-dcp-async": lambda *a: _of_torch(*a, is_async=True),
}


def print_report(names: list[str], gib: float, rounds: list[dict[str, dict[str, Any]]]) -> None:
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "orbax-checkpoint", "safetensors")]
    print(
        f"\n{date.today()}, Python {sys.version.split()[0]}, {', '.join(versions)}, {gib:g} GiB, {len(rounds)} rounds\n"
    )
    yardsticks = [y for y in ("fio", "dd") if f"{y} write" in rounds[0][names[0]]["disk"]]
    if "fio" not in yardsticks:
        print("fio is not installed: the disk is measured by dd alone.\n")
    print(f"| disk, GiB/s | {' | '.join(f'{y} {a}' for y in yardsticks for a in ('write', 'read'))} |")
    print("|---" * (1 + 2 * len(yardsticks)) + "|")
    print(f"| | {' | '.join(spread([r[n]['disk'][f'{y} {a}'] for r in rounds for n in names]) for y in yardsticks for a in ('write', 'read'))} |")  # fmt: skip
    for action, disk in (("save", "write"), ("load", "read")):
        block = "blocks, s | " if action == "save" else ""
        print(f"\n| {action} | {block}GiB/s | {' | '.join(f'to {y}' for y in yardsticks)} | CPU s/GiB | extra memory |")
        print("|---" * (4 + len(yardsticks) + bool(block)) + "|")
        for name in names:
            of = [(r[name][action], r[name]["disk"]) for r in rounds]
            cells = [spread([m["block_s"] for m, _ in of])] if block else []
            cells += [spread([gib / m["s"] for m, _ in of])]
            cells += [spread([gib / m["s"] / d[f"{y} {disk}"] for m, d in of]) for y in yardsticks]
            cells += [spread([m["cpu_s"] / gib for m, _ in of])]
            cells += [f"{statistics.median(m['extra_bytes'] for m, _ in of) / gib / 2**30:.1%} of the state"]
            print(f"| {name} | {' | '.join(cells)} |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
