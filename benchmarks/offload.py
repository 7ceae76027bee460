"""Whole training steps whose state is off the device, beside DeepSpeed ZeRO-Offload and ZeRO-Infinity on the same CPU.

    python benchmarks/offload.py --directory DIR [--only nvme]      # deepspeed's three where it is installed

Twelve weights of 4096 x 4096, 201 million parameters in bfloat16, AdamW with float32 master weights: 12 bytes a
parameter of state, in host memory or on a disk under DIR, read and written once a step. DeepSpeed reads its gradients
back from the disk, too. The model only adds the means of the weights' columns up, so that its gradient costs little and
the update is what is measured. Every contestant is a process of its own that makes one step
when its turn comes; the order changes every round, and ratios are taken within a round. A row has the seconds of the
whole step and of the update alone: DeepSpeed's `engine.step()`, and what jaxckpt's step with its state on disk takes
beyond its gradient, which is timed by itself; in host memory gradient and update are one program. The first two steps of
each are not counted.

DeepSpeed needs its operators built (`async_io` wants libaio's headers) and DS_ACCELERATOR=cpu.
"""

import argparse
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from offload_cpu import answer

WIDTH, LAYERS, ROWS = 4096, 12, 4
LR = 1e-4
Step = Callable[[], tuple[float, float]]
"""makes one training step: (its seconds, seconds of the update alone)"""


def make_jaxckpt(tier: str, directory: str) -> Step:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jaxckpt.nvme.array import on_disk
    from jaxckpt.nvme.store import NvmeStore
    from jaxckpt.state import tree
    from jaxckpt.state.init import initialise
    from jaxckpt.state.mesh import batch_sharding, make_mesh
    from jaxckpt.state.plan import Placement, make_plan
    from jaxckpt.state.train_state import take_apart
    from jaxckpt.update.choose import make_any_step
    from jaxckpt.update.gradients import make_gradient_phase

    class Tower(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            draw = nnx.initializers.normal(0.02)
            self.weights = nnx.List([nnx.Param(draw(rngs.params(), (WIDTH, WIDTH))) for _ in range(LAYERS)])

    def loss(model: Tower, batch: Any) -> Any:
        x = batch["x"]
        for weight in model.weights:
            x = jnp.tanh(x + weight[...].mean(axis=0))
        return jnp.square(x.astype(jnp.float32)).mean(axis=-1).sum(), jnp.int32(x.shape[0])

    tx, placement = optax.adamw(LR), Placement(master=tier, opt_state=tier, nvme_dir=(directory,))
    mesh = make_mesh()
    model, abstract, init = take_apart(Tower, tx, seed=0, compute_dtype="bfloat16")
    plan = make_plan(abstract, mesh, rules=[], placement=placement)
    host = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
    batch = {"x": jax.device_put(jnp.asarray(host, jnp.bfloat16), batch_sharding(mesh))}
    store = NvmeStore([directory], on_disk(tree.flatten(plan)), run_id="offload") if tier == "nvme" else None
    if store is not None:
        store.open()
    step = make_any_step(
        model, loss, tx, plan, batch, layers=None, store=store, placement=placement, compute_dtype="bfloat16", seed=0
    )
    update = step.trace(plan, batch).lower().compile()
    gradients = jax.jit(make_gradient_phase(model, loss, plan, batch, seed=0))
    state = initialise(init, plan, to_disk=store.write_arrays if store is not None else dict)

    def one() -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        if tier == "nvme":
            jax.block_until_ready(gradients(state.params, state.model_state, state.step, batch).sums)
        middle = time.perf_counter()
        state, metrics = update(state, batch)
        jax.block_until_ready((state.params, metrics))
        whole = time.perf_counter() - middle
        return whole, whole - (middle - started) if tier == "nvme" else math.nan

    return one


def make_deepspeed(device: str, stage: int, directory: str) -> Step:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(29500 + stage + (device == "nvme"))
    import deepspeed
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    deepspeed.init_distributed("gloo", verbose=False)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = lambda: torch.nn.Parameter(0.02 * torch.randn(WIDTH, WIDTH))
            self.weights = torch.nn.ParameterList([draw() for _ in range(LAYERS)])

        def forward(self, x: Any) -> Any:
            for weight in self.weights:
                x = torch.tanh(x + weight.mean(dim=0))
            return x.float().pow(2).mean()

    offload: dict[str, Any] = {"device": device, "pin_memory": False, "buffer_count": LAYERS}  # the default of 4 fails
    if device == "nvme":
        offload |= {"nvme_path": directory, "pipeline_read": True, "pipeline_write": True}
    sizes = {"sub_group_size": WIDTH * WIDTH, "reduce_bucket_size": WIDTH * WIDTH}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, "offload_optimizer": offload, "overlap_comm": False, **sizes},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "bf16": {"enabled": True},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "thread_count": 2, "overlap_events": True},
    }
    model = Tower()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)).bfloat16()

    def one() -> tuple[float, float]:
        started = time.perf_counter()
        engine.backward(engine(x))
        middle = time.perf_counter()
        engine.step()
        now = time.perf_counter()
        return now - started, now - middle

    return one


CONTESTANTS: dict[str, Callable[[str], Step]] = {
    "jaxckpt, pinned_host": lambda there: make_jaxckpt("pinned_host", there),
    "jaxckpt, nvme": lambda there: make_jaxckpt("nvme", there),
    "DeepSpeed ZeRO-Offload, stage 2": lambda there: make_deepspeed("cpu", 2, there),
    "DeepSpeed ZeRO-Offload, stage 3": lambda there: make_deepspeed("cpu", 3, there),
    "DeepSpeed ZeRO-Infinity, nvme": lambda there: make_deepspeed("nvme", 3, there),
}


def work(name: str, directory: str) -> None:
    """Two steps, then one for every line on the standard input."""
    step = CONTESTANTS[name](directory)
    step(), step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print("took", *step(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant; a temporary one otherwise")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("host", "nvme"), help="the contestants whose state is there")
    parser.add_argument("--worker", choices=CONTESTANTS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, str(args.directory))
    wanted = [name for name in CONTESTANTS if args.only is None or ("nvme" in name) == (args.only == "nvme")]
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: its rows are left out")
        wanted = [name for name in wanted if not name.startswith("DeepSpeed")]
    with tempfile.TemporaryDirectory(prefix="offload-", dir=args.directory) as directory:
        report(measure(wanted, args.rounds, Path(directory)))


def measure(names: list[str], rounds: int, directory: Path) -> dict[str, list[tuple[float, ...]]]:
    environment = dict(os.environ, JAX_PLATFORMS="cpu", DS_ACCELERATOR="cpu")
    workers: dict[str, subprocess.Popen[str]] = {}
    for i, name in enumerate(names):
        (directory / str(i)).mkdir()
        command = [sys.executable, __file__, "--worker", name, "--directory", str(directory / str(i))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[name] = subprocess.Popen(command, env=environment, **pipes)
        answer(workers[name], "ready")
        print(f"{name}: ready", flush=True)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for i in range(rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn[:: (-1) ** i]:
            print(file=workers[name].stdin, flush=True)
            found[name].append(tuple(map(float, answer(workers[name], "took")[1:])))
    for worker in workers.values():
        worker.communicate()
    return found


def report(found: dict[str, list[tuple[float, ...]]]) -> None:
    params = LAYERS * WIDTH * WIDTH
    print(f"\n{params:,} parameters, {12 * params / 1e9:.2f} GB of state, load average {os.getloadavg()[0]:.1f}\n")
    print("| | step, s | update alone, s | step over ours | update alone over ours |")
    print("|---|---|---|---|---|")
    for name, times in found.items():
        ours = found.get("jaxckpt, nvme" if "nvme" in name else "jaxckpt, pinned_host", times)
        cells = [f"{statistics.median(x[i] for x in times):.2f}" for i in (0, 1)]
        for i in (0, 1):
            ratios = sorted(x[i] / y[i] for x, y in zip(times, ours, strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
