"""The AdamW update of state that lives in host memory, on the CPU: against memory bandwidth, torch and DeepSpeed.

    python benchmarks/offload_cpu.py                    # torch, and deepspeed where it is installed with its CPU Adam
    python benchmarks/offload_cpu.py --params 200e6

An update must read weight, gradient and both moments and write all but the gradient: 28 bytes a parameter. The bound is
the time a STREAM triad (a = b + 3 c, 12 bytes an element) takes for as many bytes. Every contestant is a process of its
own that holds its arrays, is warm, and makes one step when its turn comes, while the others sleep; the order changes
every round, and ratios are taken within a round. CPU seconds count all threads of a contestant: they tell the cost
where other programs take the cores away. Every contestant starts from the same numbers.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LEAVES, COLUMNS = 8, 1024
BYTES, TRIAD_BYTES = 28, 12
LR, WEIGHT_DECAY = 1e-3, 1e-2
ONE_PASS = "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion=true"


def leaves(params: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(weights, gradients), float32."""
    rng = np.random.default_rng(0)
    draw = lambda scale: rng.standard_normal((params // LEAVES // COLUMNS, COLUMNS), np.float32) * np.float32(scale)
    return [draw(0.1) for _ in range(LEAVES)], [draw(0.01) for _ in range(LEAVES)]


def make_triad(params: int) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    # Written into the memory of the result before last, as an update in place writes.
    triad = jax.jit(lambda b, c, _: b + 3 * c, donate_argnums=2, keep_unused=True)
    b, c, out = jnp.ones(params), jnp.ones(params), jnp.zeros(params)

    def step() -> Any:
        nonlocal out
        out = jax.block_until_ready(triad(b, c, out))
        return out[:1]

    return step


def make_optax(params: int, *, is_streamed: bool) -> Callable[[], Any]:
    """optax on the whole tree, or through buckets with the moments in pinned_host; each in one donating jit."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxckpt.state.plan import Placement, make_plan, shardings
    from jaxckpt.state.train_state import TrainState
    from jaxckpt.update.buckets import make_buckets
    from jaxckpt.update.chain import make_streamed_update
    from jaxckpt.update.gradients import Gradients
    from jaxckpt.update.split import split_update

    tx = optax.adamw(LR, weight_decay=WEIGHT_DECAY)
    weights, grads = ({str(i): jnp.asarray(x) for i, x in enumerate(group)} for group in leaves(params))
    state = TrainState(jnp.int32(0), weights, None, jax.jit(tx.init)(weights), {})
    placement = Placement(opt_state="pinned_host" if is_streamed else "device")
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = make_plan(jax.eval_shape(lambda: state), mesh, placement=placement)
    state = jax.device_put(state, shardings(plan))
    if is_streamed:
        split = split_update(tx, plan.params)
        buckets = make_buckets(split, plan.params, plan.opt_state, bucket_bytes=placement.bucket_bytes)
        streamed = make_streamed_update(split, buckets, plan, is_skipping=False)
        found = lambda grads: Gradients(grads, {}, jnp.bool_(True), grads, jnp.float32(1), {})
        update = lambda state, grads: streamed(state, found(grads))
    else:

        def update(state: Any, grads: Any) -> Any:
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            return TrainState(state.step, optax.apply_updates(state.params, updates), None, opt_state, {})

    jitted = jax.jit(update, donate_argnums=0, out_shardings=shardings(plan))

    def step() -> Any:
        nonlocal state
        state = jax.block_until_ready(jitted(state, grads))
        return state.params["0"]

    return step


def make_torch(params: int, *, name: str) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    weights, grads = leaves(params)
    parameters = [torch.nn.Parameter(torch.from_numpy(w)) for w in weights]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.from_numpy(grad)
    if name == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(parameters, lr=LR, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> Any:
        optimizer.step()
        return parameters[0].detach()

    return step


CONTESTANTS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "triad, as many bytes": make_triad,
    "optax, whole tree": lambda n: make_optax(n, is_streamed=False),
    "jaxckpt, pinned_host": lambda n: make_optax(n, is_streamed=True),
    "jaxckpt, pinned_host, multi-output fusion": lambda n: make_optax(n, is_streamed=True),
    "torch AdamW, fused": lambda n: make_torch(n, name="torch"),
    "DeepSpeedCPUAdam": lambda n: make_torch(n, name="deepspeed"),
}


def work(name: str, params: int) -> None:
    """Makes three steps, tells a digest of a weight, then one step for every line on the standard input."""
    step = CONTESTANTS[name](params)
    for _ in range(3):
        result = step()
    print("ready", float(np.abs(np.asarray(result, np.float64)).sum()), flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        step()
        print(time.perf_counter() - start, time.process_time() - cpu, flush=True)


def start(name: str, params: int) -> subprocess.Popen[str]:
    environment = dict(os.environ, JAX_PLATFORMS="cpu", DS_ACCELERATOR="cpu")
    if "multi-output" in name:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {ONE_PASS}"
    command = [sys.executable, __file__, "--worker", name, "--params", str(params)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def answer(worker: subprocess.Popen[str], first: str = "") -> list[str]:
    """The last line that a worker says, if it begins with `first`; others print while they are built."""
    assert worker.stdout
    for line in worker.stdout:
        if line.startswith(first):
            return line.split()
    raise SystemExit("a contestant ended before its turn; its error stands above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=64e6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", choices=CONTESTANTS)
    args = parser.parse_args()
    params = int(args.params) // LEAVES // COLUMNS * LEAVES * COLUMNS
    if args.worker:
        return work(args.worker, params)
    missing = {"torch": "torch AdamW, fused", "deepspeed": "DeepSpeedCPUAdam"}
    missing = {name for module, name in missing.items() if importlib.util.find_spec(module) is None}
    workers = {}
    for name in CONTESTANTS.keys() - missing:
        workers[name] = start(name, params)
        print(f"{name}: sum of |w| of one leaf after 3 steps {answer(workers[name], 'ready')[1]}", flush=True)
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in CONTESTANTS if name in workers}
    for i in range(args.rounds):
        names = [*seconds][i % len(seconds) :] + [*seconds][: i % len(seconds)]
        for name in names[:: (-1) ** i]:
            print(file=workers[name].stdin, flush=True)
            scale = BYTES / TRIAD_BYTES if name.startswith("triad") else 1
            seconds[name].append(tuple(float(x) * scale for x in answer(workers[name])))
    for worker in workers.values():
        worker.communicate()
    report(seconds, params)


def report(seconds: dict[str, list[tuple[float, ...]]], params: int) -> None:
    wall, cpu = ({name: [x[i] for x in xs] for name, xs in seconds.items()} for i in (0, 1))
    bound, optax = "triad, as many bytes", "optax, whole tree"

    def ratios(kind: dict[str, list[float]], name: str, other: str) -> str:
        each = sorted(x / y for x, y in zip(kind[name], kind[other], strict=True))
        quarter = len(each) // 4
        return f"{statistics.median(each):.2f} ({each[quarter]:.2f} to {each[-1 - quarter]:.2f})"

    print(f"\n{params:,} parameters, {len(wall[bound])} rounds, load average {os.getloadavg()[0]:.1f}")
    print("medians of ratios within a round (middle half)\n")
    print("| | ms, median | ms, best | time over the bound | time over optax | CPU seconds over optax |")
    print("|---|---|---|---|---|---|")
    for name, xs in wall.items():
        cells = [ratios(wall, name, bound), ratios(wall, name, optax), ratios(cpu, name, optax)]
        print(f"| {name} | {statistics.median(xs) * 1e3:.0f} | {min(xs) * 1e3:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
