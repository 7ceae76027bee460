"""Runs of this package to compile for GPUs that are not there: a Llama in bfloat16 with AdamW, state wherever it is put."""

import jax
import numpy as np
from jax.sharding import AxisType

from jaxckpt.models import llama
from jaxckpt.planning.gpu import compile_for
from jaxckpt.planning.report import state_groups
from jaxckpt.planning.subject import subject_of
from jaxckpt.run import Run
from jaxckpt.state.plan import Placement
from jaxckpt.update.choose import compiler_options
from jaxckpt.update.optimizers import make_optimizer, make_schedule

SMALL = llama.LlamaConfig(
    num_layers=3, d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096, vocab_size=4096, remat="full", scan_layers=False
)


class Examples:
    """As many examples as a batch has, of one length; planning looks at their shapes alone."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return {"tokens": np.zeros(self.length, np.int32)}


def subject(model, *, devices, rows, seq_len, placement=Placement(), max_grad_norm=None):
    """The traced run over `devices` on the axis fsdp, with batches of `rows` x `seq_len` tokens."""
    mesh = jax.make_mesh(
        (1, devices, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:devices]
    )
    schedule = make_schedule("constant", lr=1e-4, warmup_steps=0, decay_steps=100)
    with Run(
        model=lambda rngs: llama.Llama(model, rngs=rngs),
        loss=llama.loss,
        layers=None if model.scan_layers else llama.LAYERS,
        optimizer=make_optimizer("adamw", schedule, weight_decay_exclude=None, weight_decay=0.1),
        data=Examples(rows, seq_len + 1),
        global_batch=rows,
        mesh=mesh,
        rules=llama.SHARDING_RULES,
        compute_dtype="bfloat16",
        max_grad_norm=max_grad_norm,
        placement=placement,
    ) as run:
        return subject_of(run)


def compiled(target, model, *, devices, memory_bytes=None, **settings):
    """({program: GpuPlan}, {group of state: bytes a device}) of such a run."""
    found = subject(model, devices=devices, **settings)
    sizes = {}
    for group in state_groups(found.plan):
        sizes[group.group] = sizes.get(group.group, 0) + group.bytes_per_device
    options = compiler_options(found.plan, "gpu")
    plans = {
        name: compile_for(target, part.traced, devices=devices, memory_bytes=memory_bytes, options=options)
        for name, part in found.programs.items()
    }
    return plans, sizes
