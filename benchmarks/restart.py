"""From the start of a process to its first new training step, after a kill: jaxckpt, the Hugging Face Trainer, plain Orbax.

    pip install -e '.[hf]' torch accelerate      # for the Trainer; without them the others are still measured
    python benchmarks/restart.py

All train a Llama of the shape of configs/tiny.yaml on one CPU device and resume from their own checkpoint of step 20,
optimizer state included. The clock runs from just before the process is started until the loss of step 21 can be read:
in jaxckpt's metrics file, in the Trainer's log, in the loop's output. The page cache is not dropped. CPU seconds are
what the process had used by then: they tell the cost where other programs take the cores away.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SAVED = 20  # the step of the checkpoint
STEPS = 1000  # never reached
BATCH, SEQ_LEN, VOCAB = 16, 128, 257  # of configs/tiny.yaml with its byte tokenizer
D_MODEL, D_FF, LAYERS, HEADS, KV_HEADS = 128, 384, 4, 4, 2
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Start:
    seconds: float
    cpu_seconds: float
    phases: dict[str, float]
    """what jaxckpt says about its own start-up"""


@dataclass(frozen=True)
class Contestant:
    name: str
    command: Callable[[Path], list[str]]
    """trains in a directory, from the newest checkpoint there or from the start"""
    has_step: Callable[[Path, int], bool]
    """whether this step's loss can be read"""
    is_saved: Callable[[Path], bool]
    has_cache: bool = True
    """whether compiled programs of an earlier start are there"""


def train_command(directory: Path) -> list[str]:
    one_device = ["mesh.data=1", "mesh.fsdp=1", "mesh.cpu_devices=1"]
    overrides = [*one_device, f"steps={STEPS}", f"snapshots.every={SAVED}", "eval.every=null", f"run_dir={directory}"]
    return [sys.executable, "-m", "jaxckpt.train", "--config", "configs/tiny.yaml", *overrides]


def worker_command(kind: str) -> Callable[[Path], list[str]]:
    return lambda directory: [sys.executable, str(Path(__file__)), "--worker", kind, "--directory", str(directory)]


def in_metrics(directory: Path, step: int) -> bool:
    path = directory / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= step


def in_output(directory: Path, step: int) -> bool:
    path = directory / "output.txt"
    return path.exists() and f"step {step} loss".encode() in path.read_bytes()


def contestants() -> list[Contestant]:
    ok = f"snapshots/step_{SAVED:010d}.ok"
    ours = lambda name, has_cache: Contestant(name, train_command, in_metrics, lambda d: (d / ok).exists(), has_cache)
    found = [
        ours("jaxckpt", True),
        ours("jaxckpt, no compilation cache", False),
        Contestant("Orbax by hand", worker_command("orbax"), in_output, lambda d: (d / "steps" / str(SAVED)).is_dir()),
    ]
    missing = [m for m in ("torch", "transformers", "accelerate") if importlib.util.find_spec(m) is None]
    if missing:
        sys.stderr.write(
            f"the Hugging Face Trainer is left out, for want of {', '.join(missing)}: "
            "pip install 'jaxckpt[hf]' torch accelerate\n"
        )
        return found
    saved = lambda d: (d / f"checkpoint-{SAVED}" / "trainer_state.json").exists()
    return [*found, Contestant("Hugging Face Trainer", worker_command("trainer"), in_output, saved)]


def start(contestant: Contestant, directory: Path) -> tuple[subprocess.Popen[bytes], float]:
    output = (directory / "output.txt").open("wb")
    environment = {**os.environ, **OFFLINE}
    begun = time.perf_counter()
    process = subprocess.Popen(
        contestant.command(directory), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    )
    output.close()
    return process, begun


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"a contestant failed:\n{(directory / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.002)


def prepare(contestant: Contestant, directory: Path) -> None:
    """Leaves in `directory` what a run that was killed after step SAVED leaves, and warm caches."""
    directory.mkdir(parents=True)
    process, _ = start(contestant, directory)
    wait_for(lambda: contestant.is_saved(directory), process, directory)
    process.kill()
    process.wait()
    metrics = directory / "metrics.jsonl"
    if metrics.exists():  # the steps after the snapshot are done again, and their lines would be taken for new ones
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:SAVED]))
    for name in ("compilation_cache", "checkpoint-40"):
        if name == "compilation_cache" and contestant.has_cache:
            continue
        shutil.rmtree(directory / name, ignore_errors=True)


def restart(contestant: Contestant, prepared: Path, directory: Path) -> Start:
    shutil.copytree(prepared, directory)
    (directory / "output.txt").unlink()
    assert not contestant.has_step(directory, SAVED + 1), f"{contestant.name}: the copy is ahead of its checkpoint"
    process, begun = start(contestant, directory)
    wait_for(lambda: contestant.has_step(directory, SAVED + 1), process, directory)
    seconds = time.perf_counter() - begun
    times = psutil.Process(process.pid).cpu_times()
    phases = {}
    if contestant.command is train_command:
        output = directory / "output.txt"
        wait_for(lambda: b"from process start" in output.read_bytes(), process, directory)
        text = " ".join(output.read_text().split())  # the console wraps
        assert f"continues after step {SAVED}" in text, text
        line = text[text.index("start-up:") :]
        phases = {name.strip(): float(value) for name, value in re.findall(r"([a-z ]+) ([0-9.]+) s[,;]", line)}
    process.kill()
    process.wait()
    if contestant.has_cache and (directory / "compilation_cache").exists():
        shutil.rmtree(prepared / "compilation_cache")  # with what a resume compiles beyond a first start
        shutil.copytree(directory / "compilation_cache", prepared / "compilation_cache")
    shutil.rmtree(directory)
    return Start(seconds, times.user + times.system, phases)


def measure(rounds: int, parent: Path) -> tuple[dict[str, list[Start]], list[float]]:
    entrants = contestants()
    for i, contestant in enumerate(entrants):
        prepare(contestant, parent / f"prepared-{i}")
        restart(contestant, parent / f"prepared-{i}", parent / "warm-up")
    starts: dict[str, list[Start]] = {c.name: [] for c in entrants}
    loads = []
    for number in range(rounds):
        order = [(number + i) % len(entrants) for i in range(len(entrants))]
        for i in order if number % 2 else order[::-1]:
            starts[entrants[i].name].append(restart(entrants[i], parent / f"prepared-{i}", parent / "now"))
        loads.append(os.getloadavg()[0])
    return starts, loads


def report(starts: dict[str, list[Start]], loads: Sequence[float]) -> str:
    base = starts["jaxckpt"]
    lines = [
        f"### {len(base)} rounds, load average {min(loads):.1f} to {max(loads):.1f}",
        "",
        "| | seconds to the first new step: median (min to max) | over jaxckpt: median (min to max) | CPU seconds: median |",
        "|---|---|---|---|",
    ]
    spread = lambda v, digits: f"{statistics.median(v):.{digits}f} ({min(v):.{digits}f} to {max(v):.{digits}f})"
    for name, values in starts.items():
        ratios = [a.seconds / b.seconds for a, b in zip(values, base, strict=True)]
        cpu = statistics.median(v.cpu_seconds for v in values)
        lines.append(f"| {name} | {spread([v.seconds for v in values], 1)} | {spread(ratios, 2)} | {cpu:.1f} |")
    lines += ["", "Phases that jaxckpt reports, median seconds; they overlap:", ""]
    for name in ("jaxckpt", "jaxckpt, no compilation cache"):
        names = dict.fromkeys(phase for s in starts[name] for phase in s.phases)
        medians = (f"{n} {statistics.median(s.phases[n] for s in starts[name] if n in s.phases):.2f}" for n in names)
        lines.append(f"- {name}: {', '.join(medians)}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ the other two loops


def train_with_trainer(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Print(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                print(f"step {state.global_step} loss {logs['loss']}", flush=True)

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
        use_cache=False,
    )
    tokens = torch.randint(0, VOCAB, (4096, SEQ_LEN))
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        save_steps=SAVED,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(shape),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # pyright: ignore[reportArgumentType]
        callbacks=[Print()],
    )
    trainer.train(resume_from_checkpoint=(directory / f"checkpoint-{SAVED}").exists() or None)


def train_with_orbax(directory: Path) -> None:
    """What one writes by hand: the bytes come back, and nothing else is promised."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    from jaxckpt.models import llama

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(directory / "compilation_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    shape = llama.LlamaConfig(
        vocab_size=VOCAB, num_layers=LAYERS, d_model=D_MODEL, num_heads=HEADS, num_kv_heads=KV_HEADS, d_ff=D_FF
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, STEPS, 3e-4)
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices))
    make = lambda: llama.Llama(shape, rngs=nnx.Rngs(0))
    graphdef = nnx.graphdef(nnx.eval_shape(make))

    @jax.jit
    def init() -> Any:
        params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
        return params, tx.init(params)

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            total, count = llama.loss(nnx.merge(graphdef, params), batch)
            return total / count

        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    with ocp.CheckpointManager(directory / "steps") as manager:
        step = manager.latest_step() or 0
        if step:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), jax.eval_shape(init)
            )
            state = manager.restore(step, args=ocp.args.StandardRestore(target))
        else:
            state = init()
        while step < STEPS:
            tokens = np.random.default_rng((0, step)).integers(0, VOCAB, (BATCH, SEQ_LEN + 1), np.int32)
            state, loss = train_step(state, {"tokens": tokens})
            step += 1
            print(f"step {step} loss {loss:.4f}", flush=True)
            if step % SAVED == 0:
                manager.save(step, args=ocp.args.StandardSave(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where checkpoints go: a real disk (default: runs/ here)")
    parser.add_argument("--json", type=Path, help="the raw numbers of every round")
    parser.add_argument("--worker", choices=["trainer", "orbax"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return {"trainer": train_with_trainer, "orbax": train_with_orbax}[args.worker](args.directory)
    packages = ("jax", "flax", "orbax-checkpoint", "torch", "transformers", "accelerate")
    have = [p for p in packages if importlib.util.find_spec(p.replace("-", ".").replace("orbax.checkpoint", "orbax"))]
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in have)
    print(f"{date.today()}, Python {sys.version.split()[0]}, {versions}, {os.cpu_count()} cores\n", flush=True)
    parent = args.directory or ROOT / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        starts, loads = measure(args.rounds, Path(directory))
    print(report(starts, loads))
    if args.json:
        args.json.write_text(json.dumps({n: [vars(s) for s in v] for n, v in starts.items()}, indent=1))


if __name__ == "__main__":
    main()
