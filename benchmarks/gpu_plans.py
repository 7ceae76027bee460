"""What XLA's GPU compiler plans for fine-tunes of 7B and 13B at full depth, on a machine without a GPU. Takes long.

    export JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH=.:tests/gpu_plan
    python benchmarks/gpu_plans.py                          # every row; minutes each
    python benchmarks/gpu_plans.py --only 7b --layers 4

Needs the extra gpu-plan. Rows: all on the device, the whole tree fetched by `device_put` before the update, ours with
moments and master weights in pinned host memory, and ours with the parameters there too, exact clipping on and off.
Prints a table in Markdown for RESULTS.md.
"""

import argparse
import time
from dataclasses import replace

import jax

from jaxckpt.errors import JaxckptError
from jaxckpt.models import llama
from jaxckpt.planning.gpu import compile_for
from jaxckpt.planning.targets import GIB, target_named
from jaxckpt.state.plan import Placement, shardings
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.choose import compiler_options
from subjects import subject

_SHAPE = {"vocab_size": 32000, "remat": "full", "scan_layers": False}
MODELS = {
    "7b": llama.LlamaConfig(num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, d_ff=11008, **_SHAPE),
    "13b": llama.LlamaConfig(num_layers=40, d_model=5120, num_heads=40, num_kv_heads=40, d_ff=13824, **_SHAPE),
}
STATE_AWAY = Placement(master="pinned_host", opt_state="pinned_host")
ALL_AWAY = Placement(params="pinned_host", master="pinned_host", opt_state="pinned_host")
# (model, what, placement, clipped, whole tree)
ROWS = (
    ("7b", "device", Placement(), None, False),
    ("7b", "whole tree", Placement(), None, True),
    ("7b", "ours: moments and master", STATE_AWAY, None, False),
    ("7b", "ours: moments and master, exact clip", STATE_AWAY, 1.0, False),
    ("7b", "ours: parameters too", ALL_AWAY, None, False),
    ("7b", "ours: parameters too, exact clip", ALL_AWAY, 1.0, False),
    ("13b", "device", Placement(), None, False),
    ("13b", "ours: parameters too", ALL_AWAY, None, False),
    ("13b", "ours: parameters too, exact clip", ALL_AWAY, 1.0, False),
)


def whole_tree(found):
    """The traced step of `found` (all on the device) with moments and master weights fetched before and put back after."""
    plan, inner = found.plan, found.programs["step"].traced
    to_host = lambda group: jax.tree.map(
        lambda x: x.sharding.with_memory_kind("pinned_host" if x.ndim else "device"), group
    )
    own = shardings(plan)
    rest = TrainState(own.step, own.params, to_host(plan.master), to_host(plan.opt_state), own.model_state)
    step_of = jax.core.jaxpr_as_fun if hasattr(jax.core, "jaxpr_as_fun") else jax.extend.core.jaxpr_as_fun

    def step(state, batch):
        results = step_of(inner.jaxpr)(*jax.tree.leaves((jax.device_put(state, own), batch)))
        new, metrics = jax.tree.unflatten(jax.tree.structure(inner.out_info), results)
        return jax.device_put(new, rest), metrics

    at_rest = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), plan, rest)
    jitted = jax.jit(step, in_shardings=(rest, shardings(found.batch)), out_shardings=(rest, None), donate_argnums=0)
    return jitted.trace(at_rest, found.batch)


def row(model, what, placement, clip, is_whole_tree, *, target, memory_bytes, rows, layers):
    config = replace(MODELS[model], num_layers=layers or MODELS[model].num_layers)
    started = time.monotonic()
    found = subject(config, devices=1, rows=rows, seq_len=2048, placement=placement, max_grad_norm=clip)
    traced = {name: part.traced for name, part in found.programs.items()}
    if is_whole_tree:
        traced = {"step": whole_tree(found)}
    options = compiler_options(found.plan, "gpu")
    gib = lambda n: f"{n / GIB:.2f}"
    try:
        plans = [compile_for(target, t, memory_bytes=memory_bytes, options=options) for t in traced.values()]
    except JaxckptError as e:
        return [model, what, str(rows), "refused: " + str(e)[:60], "", "", "", "", f"{time.monotonic() - started:.0f}"]
    copies = sum(p.host.total(way)[0] for p in plans for way in ("h2d", "d2h"))
    moved = sum(p.host.total(way)[1] for p in plans for way in ("h2d", "d2h"))
    beside = sum(c.times * c.nbytes for p in plans for c in p.host.copies if c.beside_compute)
    return [
        model,
        what,
        str(rows),
        " / ".join(gib(p.peak_bytes) for p in plans),
        gib(max(p.host_peak_bytes for p in plans)),
        gib(max(p.host_temp_bytes for p in plans)),
        str(copies),
        f"{beside / moved:.0%}" if moved else "-",
        f"{time.monotonic() - started:.0f}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="rtx4090")
    parser.add_argument("--memory-gib", type=float, default=24.0, help="of the device, for the compiler")
    parser.add_argument("--rows", type=int, default=1, help="of 2048 tokens in a batch")
    parser.add_argument("--layers", type=int, help="instead of the full depth")
    parser.add_argument("--only", default="", help="rows whose model and name contain this text")
    arguments = parser.parse_args()
    settings = {
        "target": target_named(arguments.target),
        "memory_bytes": int(arguments.memory_gib * GIB),
        "rows": arguments.rows,
        "layers": arguments.layers,
    }
    print(
        f"jax {jax.__version__}, {arguments.target} with {arguments.memory_gib:g} GiB, batch {arguments.rows} x 2048\n"
    )
    print("| model | state | rows | device GiB | host GiB | host temp | copies | beside compute | compile s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for entry in ROWS:
        if arguments.only in f"{entry[0]} {entry[1]}":
            print("| " + " | ".join(row(*entry, **settings)) + " |", flush=True)


if __name__ == "__main__":
    main()
