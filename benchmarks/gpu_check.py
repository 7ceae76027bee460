"""One check of everything that only a GPU can show; scripts/gpu_check.sh prepares a bare machine for it. Writes one JSON.

    python benchmarks/gpu_check.py --out gpu_check.json       # at most 8 minutes on one H200
    python benchmarks/gpu_check.py --dry --out dry.json       # the same parts, tiny, on CPU

Each part runs in a process of its own, so that the peak of its device memory is its own, and ends by itself when its
time is over; what was left out is named. A part that fails is reported and does not stop the others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

LIMIT_S = 7.5 * 60
SIZES = {
    # Llama shapes: about 1.1 and 6.7 thousand million parameters.
    "1b": {"num_layers": 22, "d_model": 2048, "num_heads": 16, "num_kv_heads": 16, "d_ff": 5632, "vocab_size": 32000},
    "7b": {"num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000},
    "dry": {"num_layers": 1, "d_model": 128, "num_heads": 2, "num_kv_heads": 2, "d_ff": 1024, "vocab_size": 512},
}
# (part, size, seconds it may take); what matters most comes first.
PARTS = (
    ("transfers", "1b", 60),
    ("ours", "1b", 100),
    ("device", "1b", 100),
    ("whole-tree", "1b", 100),
    ("resume", "1b", 120),
    ("nvme", "1b", 120),
    ("budget", "1b", 100),
    ("ours", "7b", 200),
    ("device", "7b", 200),
    ("whole-tree", "7b", 200),
)
DRY_PARTS = tuple(
    (part, "dry", 40) for part in ("transfers", "ours", "device", "whole-tree", "resume", "nvme", "budget")
)


class Examples:
    """Tokens that depend on the number of the example alone."""

    def __init__(self, rows, length, vocab_size):
        self.rows, self.length, self.vocab_size = rows, length, vocab_size

    def __len__(self):
        return self.rows * 64

    def __getitem__(self, i):
        import numpy as np

        rng = np.random.default_rng(int(i))
        return {"tokens": rng.integers(0, self.vocab_size, self.length, dtype=np.int32)}


def make_run(size, placement, *, snapshots=None):
    """A Run of the Llama of that size; bfloat16 with float32 master weights, AdamW."""
    from jaxckpt import Run
    from jaxckpt.models import llama
    from jaxckpt.update.optimizers import make_optimizer, make_schedule

    config = llama.LlamaConfig(**SIZES[size], remat="full", scan_layers=False)
    rows, seq_len = (2, 16) if size == "dry" else (4, 2048)
    schedule = make_schedule("constant", lr=1e-4, warmup_steps=0, decay_steps=1000)
    return Run(
        model=lambda rngs: llama.Llama(config, rngs=rngs),
        loss=llama.loss,
        layers=llama.LAYERS,
        optimizer=make_optimizer("adamw", schedule, weight_decay_exclude=None, weight_decay=0.1),
        data=Examples(rows, seq_len + 1, config.vocab_size),
        global_batch=rows,
        rules=llama.SHARDING_RULES,
        compute_dtype=None if size == "dry" else "bfloat16",  # CPUs compile bfloat16 slowly
        placement=placement,
        snapshots=snapshots,
    )


# ------------------------------------------------------------------------------------------------ the parts


def transfers(size, is_dry):
    """GB/s between the device and pinned host memory, each way and both at once; the same buffers again and again."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    host = device.with_memory_kind("pinned_host")
    count = 1 << (18 if is_dry else 28)  # float32: 1 MiB or 1 GiB
    put = lambda to: jax.jit(lambda x: jax.device_put(x, to), out_shardings=to)
    both = jax.jit(lambda x, y: (jax.device_put(x, host), jax.device_put(y, device)), out_shardings=(host, device))
    on_device = put(device)(jnp.ones(count, jnp.float32))
    on_host = put(host)(on_device)
    nbytes = on_device.nbytes
    one = lambda f, *args: nbytes / best(lambda: jax.block_until_ready(f(*args))) / 1e9
    return {
        "buffer_bytes": nbytes,
        "h2d_gb_per_s": one(put(device), on_host),
        "d2h_gb_per_s": one(put(host), on_device),
        "both_gb_per_s_each_way": one(both, on_device, on_host),
        "pinned_is_aligned_to_512": on_host.addressable_shards[0].data.unsafe_buffer_pointer() % 512 == 0,
    }


def step_time(size, is_dry, placement, *, wrap=None):
    """Seconds a step, the device's peak, the compiler's own plan of it, and the bits of the losses."""
    import jax

    from jaxckpt.planning.compare import check_measured, measure, planned_bytes
    from jaxckpt.planning.gpu import read_plan

    steps = 4 if is_dry else 8
    with make_run(size, placement) as run:
        if wrap is not None:
            wrap(run)
        before = measure().nbytes
        seconds, losses = [], []
        clock = time.perf_counter()
        for report in run.train(steps):
            seconds.append(time.perf_counter() - clock)
            clock = time.perf_counter()
            losses.append(report.loss_bits)
        compiled = run.executables
        found = {"steps": steps, "loss_bits": losses, "first_step_s": seconds[0]}
        found["step_s"] = sorted(seconds[2:-1])[len(seconds[2:-1]) // 2]
        found["peak_bytes_in_use"] = measure().nbytes
        found["is_device_peak"] = measure().is_device
        kind = jax.devices()[0].device_kind
        found["plans"] = [read_plan(x, target=kind, devices=1).to_dict() for x in compiled]
        found["comparison"] = check_measured(max(map(planned_bytes, compiled)), before=before).line()
    return found


def device(size, is_dry):
    from jaxckpt import Placement

    return step_time(size, is_dry, Placement())


def ours(size, is_dry):
    from jaxckpt import Placement

    return step_time(size, is_dry, Placement(opt_state="pinned_host", master="pinned_host"))


def whole_tree(size, is_dry):
    """The usual way to offload: the whole state is fetched before the step and put back after it."""
    from jaxckpt import Placement

    return step_time(size, is_dry, Placement(), wrap=fetch_whole_tree)


def fetch_whole_tree(run):
    """Puts moments and master weights of a run into pinned host memory, and `device_put` of all around its step."""
    import jax

    from jaxckpt.state.plan import shardings
    from jaxckpt.state.train_state import TrainState

    program, plan = run._program, run.plan
    to_host = lambda group: jax.tree.map(
        lambda x: x.sharding.with_memory_kind("pinned_host" if x.ndim else "device"), group
    )
    at_rest = shardings(plan)
    at_rest = TrainState(
        at_rest.step, at_rest.params, to_host(plan.master), to_host(plan.opt_state), at_rest.model_state
    )
    inner, batch = program._step_fn, program._batch

    def step(state, batch):
        new, metrics = inner(jax.device_put(state, shardings(plan)), batch)
        return jax.device_put(new, at_rest), metrics

    jitted = jax.jit(step, in_shardings=(at_rest, shardings(batch)), out_shardings=(at_rest, None), donate_argnums=0)
    rest = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), plan, at_rest)
    program._step_fn, program._plan = jitted, rest
    run._beginning = OnHost(run._beginning, at_rest)


class OnHost:
    """The beginning of a run, which leaves the state where `at_rest` says."""

    def __init__(self, beginning, at_rest):
        self.beginning, self.at_rest = beginning, at_rest

    def __getattr__(self, name):
        return getattr(self.beginning, name)

    def begin(self, *args, **kwargs):
        import jax

        begun = self.beginning.begin(*args, **kwargs)
        return replace(begun, state=jax.device_put(begun.state, self.at_rest))


def resume(size, is_dry):
    """Whether a run that stops and goes on makes the same steps to the bit, and what a save costs the steps beside it."""
    from jaxckpt import Placement, Snapshots

    placement = Placement(opt_state="pinned_host", master="pinned_host")
    bits = lambda reports: [(r.step, r.loss_bits, r.grad_norm, r.batch_digest) for r in reports]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as there:
        with make_run(size, placement, snapshots=Snapshots(f"{there}/a", every=1000, keep=1)) as run:
            straight, unsaved_s = timed(run.train(6))
        with make_run(size, placement, snapshots=Snapshots(f"{there}/b", every=3, keep=1)) as run:
            first, saved_s = timed(run.train(5))
        started = time.perf_counter()
        with make_run(size, placement, snapshots=Snapshots(f"{there}/b", every=1000, keep=1)) as run:
            run.open(6)
            resumed_at = run.step
            restore_s = time.perf_counter() - started
            second = bits(run.train(6))
    return {
        "is_exact": bits(first)[:resumed_at] + second == bits(straight),
        "resumed_at": resumed_at,
        "restore_s": restore_s,
        "seconds_of_steps": {"saved beside step 4": saved_s, "not saved": unsaved_s},
        "stall_s": sum(saved_s[1:4]) - sum(unsaved_s[1:4]),
    }


def nvme(size, is_dry):
    """The moments on disks, beside the same steps with the moments in host memory: seconds, and whether the bits agree."""
    from jaxckpt import Placement

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as there:
        disk = step_time(size, is_dry, Placement(opt_state="nvme", nvme_dir=(there,)))
    host = step_time(size, is_dry, Placement(opt_state="pinned_host"))
    same = disk["loss_bits"] == host["loss_bits"]
    return {"nvme": disk, "pinned_host": host, "is_exact": same, "ratio": disk["step_s"] / host["step_s"]}


def budget(size, is_dry):
    """A run whose placement a budget chooses, of two thirds of what it would take of the device: whether it keeps within."""
    from jaxckpt.build import build
    from jaxckpt.config import load_config
    from jaxckpt.planning.compare import measure

    shape = SIZES[size]
    layer = 4 * shape["d_model"] ** 2 + 3 * shape["d_model"] * shape["d_ff"]
    parameters = 2 * shape["vocab_size"] * shape["d_model"] + shape["num_layers"] * layer
    limit = 16 * parameters * 2 // 3  # parameters, gradients, master weights and moments
    sizes = "{" + ", ".join(f"{key}: {value}" for key, value in shape.items()) + "}"
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as there:
        config = Path(there, "run.yaml")
        config.write_text(
            f"run_dir: {there}/run\nsteps: 3\nmodel: {sizes}\n"
            f"data: {{files: [{Path(__file__).parents[1]}/configs/data/sotu], seq_len: {16 if is_dry else 2048}, batch_size: 4}}\n"
            "optimizer: {lr: 1e-4}\nsnapshots: {every: null, every_minutes: 1000}\neval: {every: null}\n"
        )
        settings = [
            f"placement.budget.device={limit}",
            f"placement.bucket_bytes={parameters // 8}",
            "model.remat=full",
            "model.scan_layers=false",
        ]
        settings.append(f"model.compute_dtype={'float32' if is_dry else 'bfloat16'}")
        with build(load_config(str(config), settings)) as run:
            reports = list(run.train(3))
            peak = measure()
    tiers = {group: getattr(run._placement, group) for group in ("params", "master", "opt_state")}
    is_within = peak.nbytes <= limit if peak.is_device else None
    found = {"limit_bytes": limit, "peak_bytes_in_use": peak.nbytes, "is_device_peak": peak.is_device}
    return {**found, "is_within": is_within, "tiers": tiers, "paths": run._placement.paths, "steps": len(reports)}


FUNCTIONS = {
    "transfers": transfers,
    "device": device,
    "whole-tree": whole_tree,
    "ours": ours,
    "resume": resume,
    "nvme": nvme,
    "budget": budget,
}

# ------------------------------------------------------------------------------------------------ all of them


def timed(reports):
    """(the reports, seconds between them); a save hands out two at once, so that only sums over some tell."""
    found, seconds, clock = [], [], time.perf_counter()
    for report in reports:
        found.append(report)
        seconds.append(time.perf_counter() - clock)
        clock = time.perf_counter()
    return found, seconds


def best(run, times=5):
    """Least seconds of several runs; the first, which compiles, does not count."""
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def in_its_own_process(part, size, timeout_s):
    command = [sys.executable, __file__, "--part", part, "--size", size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1][7:]) if lines else {"error": done.stderr[-2000:]}


def here(part, size, is_dry):
    try:
        return FUNCTIONS[part](size, is_dry)
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}


def overlap(results):
    """What share of the transfers is hidden: 1 less (our step - the step on the device) / (the transfers alone)."""
    rates = results.get("transfers 1b") or results.get("transfers dry") or {}
    found = {}
    for size in ("1b", "7b", "dry"):
        ours, plain = results.get(f"ours {size}", {}), results.get(f"device {size}", {})
        if "step_s" not in ours or "step_s" not in plain or "h2d_gb_per_s" not in rates:
            continue  # that part failed, and says so
        moved = {way: sum(plan[way]["bytes"] for plan in ours["plans"]) for way in ("h2d", "d2h")}
        alone = moved["h2d"] / rates["h2d_gb_per_s"] / 1e9 + moved["d2h"] / rates["d2h_gb_per_s"] / 1e9
        if alone:
            found[size] = {"transfers_alone_s": alone, "hidden": 1 - (ours["step_s"] - plain["step_s"]) / alone}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--part", choices=FUNCTIONS)
    parser.add_argument("--size", choices=SIZES)
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # Compiling is nearly all of the time there.
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    else:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    cache = Path(tempfile.gettempdir()) / "gpu_check_compiled"  # several parts run the same program
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.fspath(cache))
    if arguments.part:
        print("RESULT " + json.dumps(here(arguments.part, arguments.size, False)))
        return 0
    started = time.monotonic()
    results, left_out = {}, []
    for part, size, limit_s in DRY_PARTS if arguments.dry else PARTS:
        left_s = LIMIT_S - (time.monotonic() - started)
        if left_s < 30:
            left_out.append(f"{part} {size}")
            continue
        began = time.monotonic()
        name = f"{part} {size}"
        results[name] = (
            here(part, size, True) if arguments.dry else in_its_own_process(part, size, min(limit_s, left_s))
        )
        results[name]["seconds"] = time.monotonic() - began
        print(f"{name}: {results[name].get('error', 'done')} ({results[name]['seconds']:.1f} s)", flush=True)
        whole = {"is_dry": arguments.dry, "seconds": time.monotonic() - started, "left_out": left_out}
        Path(arguments.out).write_text(json.dumps({**whole, "overlap": overlap(results), "parts": results}, indent=1))
    return 1 if any("error" in r for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
