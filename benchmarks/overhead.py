"""Training speed of jaxckpt against a loop written by hand, at the shape of configs/tiny.yaml.

    python benchmarks/overhead.py            # 8 simulated CPU devices, then 1

All contestants live in one process, are compiled before the first measurement and take turns of a few steps, in
another order every time, so that whatever else the machine does meets all of them. A round is as many turns as lie
between two snapshots; ratios are of the sums of a round. CPU seconds count all threads of the process: they tell the
cost where other programs take the cores away. The second copy of the loop by hand shows what the ratio of two equal
things looks like here.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SAVE_EVERY = 20  # steps
TURN = 5  # steps; a snapshot falls on the first of them, so that the others can hide the writing
WARM_UP = SAVE_EVERY + TURN - 1  # steps, past the first snapshot, whose checks are done once in a run
NEVER = 1 << 30


@dataclass
class Setup:
    """What both sides are given."""

    model: Callable[..., Any]
    tx: Any
    lr: Any
    data: Any
    config: Any
    mesh: Any


@dataclass
class Contestant:
    name: str
    advance: Callable[[int], None]
    """runs this many steps, and returns when the device is done with them"""
    losses: list[float]
    """of steps 1, 2, ..., float32 values"""


def make_setup(devices: int) -> Setup:
    import optax

    import jaxckpt as jc
    from jaxckpt.config import load_config
    from jaxckpt.data.tokens import load_text, load_tokenizer, make_token_datasets
    from jaxckpt.models import llama
    from jaxckpt.update.optimizers import make_optimizer, make_schedule

    jc.use_cpu_devices(devices)
    mesh_sizes = ["mesh.data=2", "mesh.fsdp=4"] if devices == 8 else ["mesh.data=1", f"mesh.fsdp={devices}"]
    config = load_config(ROOT / "configs/tiny.yaml", [*mesh_sizes, f"mesh.cpu_devices={devices}"])
    data: Any = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    files = [ROOT / name for name in data.files]
    sets = make_token_datasets(
        load_text(files), tokenizer, seq_len=data.seq_len, holdout=data.holdout, seed=config.seed
    )
    m: Any = config.model
    shape = llama.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=m.num_layers,
        d_model=m.d_model,
        num_heads=m.num_heads,
        num_kv_heads=m.num_kv_heads,
        d_ff=m.d_ff,
    )
    o: Any = config.optimizer
    lr = make_schedule("cosine", lr=o.lr, warmup_steps=o.schedule.warmup_steps, decay_steps=config.steps)
    tx = make_optimizer(
        "adamw",
        lr,
        weight_decay_exclude=o.weight_decay_exclude,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
    )
    assert isinstance(tx, optax.GradientTransformation)
    mesh = jc.make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp)
    return Setup(lambda rngs: llama.Llama(shape, rngs=rngs), tx, lr, sets.train, config, mesh)


def by_hand(setup: Setup, name: str, layout: Any) -> Contestant:
    """A loop as one writes it without a framework; `layout` holds the shardings of (params, opt_state)."""
    losses: list[float] = []
    steps = _loop_by_hand(setup, layout, losses)

    def advance(count: int) -> None:
        import jax

        jax.block_until_ready([next(steps) for _ in range(count)][-1])

    return Contestant(name, advance, losses)


def _loop_by_hand(setup: Setup, layout: Any, losses: list[float]) -> Iterator[Any]:
    import grain
    import jax
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxckpt.models import llama

    config, mesh = setup.config, setup.mesh
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    tx = optax.chain(optax.clip_by_global_norm(config.optimizer.max_grad_norm), setup.tx)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: setup.model(nnx.Rngs(config.seed))))

    def init() -> Any:
        params = nnx.to_pure_dict(nnx.state(setup.model(nnx.Rngs(config.seed)), nnx.Param))
        return params, tx.init(params)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            total, count = llama.loss(nnx.merge(graphdef, params), batch)
            return total / count

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params_layout, opt_layout = layout[0], (optax.EmptyState(), layout[1])
    with jax.set_mesh(mesh):  # the model shards its activations by the mesh in context
        params, opt_state = jax.jit(init, out_shardings=(params_layout, opt_layout))()
        step = jax.jit(
            train_step,
            in_shardings=(params_layout, opt_layout, rows),
            out_shardings=(params_layout, opt_layout, NamedSharding(mesh, P())),
            donate_argnums=(0, 1),
        )
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
    batches = setup.data.batch(config.data.batch_size).map(lambda x: jax.device_put(x, rows)).to_iter_dataset(options)

    pending = None
    for batch in batches:
        with jax.set_mesh(mesh):
            params, opt_state, loss = step(params, opt_state, batch)
        if pending is not None:
            losses.append(float(pending))  # one step late, so that the device never waits for the host
        pending = loss
        yield params, loss


def by_jaxckpt(setup: Setup, name: str, run_dir: Path, every: int) -> tuple[Contestant, Any]:
    """jaxckpt's own loop and all that it does besides: digests, checks for finite numbers, metrics file, snapshots."""
    import jax

    import jaxckpt as jc
    from jaxckpt.models import llama

    config = setup.config
    run = jc.Run(
        model=setup.model,
        loss=llama.loss,
        optimizer=setup.tx,
        data=setup.data,
        global_batch=config.data.batch_size,
        seed=config.seed,
        mesh=setup.mesh,
        rules=llama.SHARDING_RULES,
        max_grad_norm=config.optimizer.max_grad_norm,
        lr=setup.lr,
        snapshots=jc.Snapshots(run_dir, every=every),
    )
    reports = run.train(NEVER)
    losses: list[float] = []

    def advance(count: int) -> None:
        goal = run.step + count
        while run.step < goal:
            losses.append(next(reports).loss)
        jax.block_until_ready(run.state)
        assert run.step == goal and run.snapshots is not None
        run.snapshots.wait()  # what the steps after a save could not hide is paid here

    return Contestant(name, advance, losses), run


def measure(devices: int, rounds: int, directory: Path) -> dict[str, Any]:
    """{rates: {contestant: [by round]}, losses: {contestant: [by step]}, loads: [by round]}"""
    from jaxckpt.state.plan import shardings

    setup = make_setup(devices)
    plain, plain_run = by_jaxckpt(setup, "jaxckpt", directory / "plain", NEVER)
    saving, _ = by_jaxckpt(setup, f"jaxckpt, snapshot every {SAVE_EVERY}", directory / "saving", SAVE_EVERY)
    layout = shardings((plain_run.plan.params, plain_run.plan.opt_state))
    contestants = [by_hand(setup, "by hand", layout), plain, saving, by_hand(setup, "by hand, again", layout)]
    for contestant in contestants:
        contestant.advance(WARM_UP)
    rates: dict[str, list[dict[str, float]]] = {c.name: [] for c in contestants}
    loads = []
    tokens = SAVE_EVERY * setup.config.data.batch_size * setup.config.data.seq_len
    for number in range(rounds):
        wall, cpu = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, 0.0)
        for turn in range(SAVE_EVERY // TURN):
            first = (number + turn) % len(contestants)
            order = contestants[first:] + contestants[:first]
            for contestant in order if number % 2 else order[::-1]:
                start, cpu_start = time.perf_counter(), time.process_time()
                contestant.advance(TURN)
                wall[contestant.name] += time.perf_counter() - start
                cpu[contestant.name] += time.process_time() - cpu_start
        for name, rounds_of in rates.items():
            rounds_of.append({"tokens_per_s": tokens / wall[name], "tokens_per_cpu_s": tokens / cpu[name]})
        loads.append(os.getloadavg()[0])
    saves = len(list((directory / "saving/snapshots").glob("*.ok")))
    assert saves == 3, f"{saves} snapshots are kept, expected 3"
    return {"rates": rates, "losses": {c.name: c.losses for c in contestants}, "loads": loads}


def report(devices: int, result: dict[str, Any]) -> str:
    rates, loads = result["rates"], result["loads"]
    base = rates["by hand"]
    lines = [
        f"### {devices} device{'s' if devices > 1 else ''}, {len(base)} rounds of {SAVE_EVERY} steps, load average "
        f"{min(loads):.1f} to {max(loads):.1f}",
        "",
        "| | tokens/s, median | ratio to the loop by hand: median (min to max) | ratio of tokens per CPU second |",
        "|---|---|---|---|",
    ]
    for name, rounds in rates.items():
        cells = [f"{statistics.median(r['tokens_per_s'] for r in rounds):,.0f}"]
        for rate in ("tokens_per_s", "tokens_per_cpu_s"):
            ratios = [r[rate] / b[rate] for r, b in zip(rounds, base, strict=True)]
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Losses against the loop by hand: {_compare(result['losses'])}."]
    return "\n".join(lines)


def _compare(losses: dict[str, list[float]]) -> str:
    base = losses["by hand"]
    parts = []
    for name, values in losses.items():
        if name == "by hand":
            continue
        pairs = list(zip(base, values, strict=False))
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        worst = max(abs(a - b) / a for a, b in pairs)
        same = (
            f"all {len(pairs)} bitwise equal"
            if equal == len(pairs)
            else f"first {equal} of {len(pairs)} bitwise equal, largest difference {worst:.1e}"
        )
        parts.append(f"{name}: {same}")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the snapshots go: a real disk (default: runs/ here)"
    )
    parser.add_argument("--json", type=Path, default=None, help="the raw numbers of every round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = measure(args.devices[0], args.rounds, args.directory)
        args.json.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # the runs have no end; nothing of them is kept
    versions = ", ".join(
        f"{n} {importlib.metadata.version(n)}" for n in ("jax", "flax", "optax", "orbax-checkpoint", "grain")
    )
    print(f"{date.today()}, Python {sys.version.split()[0]}, {versions}, {os.cpu_count()} cores\n")
    raw = {}
    for devices in args.devices:
        parent = args.directory or ROOT / "runs"
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            out = Path(directory) / "result.json"
            command = [sys.executable, __file__, "--worker", "--devices", str(devices), "--rounds", str(args.rounds)]
            subprocess.run([*command, "--directory", directory, "--json", str(out)], check=True, cwd=ROOT, timeout=3600)
            raw[devices] = json.loads(out.read_text())
        print(report(devices, raw[devices]) + "\n")
    if args.json:
        args.json.write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
