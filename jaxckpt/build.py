"""From a configuration to a Run: the only place where the two meet."""

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxckpt import config as cf
from jaxckpt.data.randomized import Randomized
from jaxckpt.data.stores import make_store_datasets
from jaxckpt.data.tokens import load_text, load_tokenizer, make_token_datasets
from jaxckpt.distributed.start import join, use_cpu_devices
from jaxckpt.distributed.sync import Group
from jaxckpt.errors import ConfigError
from jaxckpt.models import llama
from jaxckpt.models.layers import Layers
from jaxckpt.observe.phases import Phases
from jaxckpt.planning import guards
from jaxckpt.planning.budget import Budget, Choice, refine
from jaxckpt.planning.choosing import choose, device_parts, process_bytes
from jaxckpt.planning.gpu import read_plan
from jaxckpt.planning.limits import budget_of
from jaxckpt.planning.subject import outline_of, subject_of
from jaxckpt.run import Run
from jaxckpt.snapshot import resume as resuming
from jaxckpt.snapshot.origin import Origin
from jaxckpt.snapshot.restore import read_meta
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.memory import leaf_bytes
from jaxckpt.state.mesh import make_mesh
from jaxckpt.state.nvme import tier_of
from jaxckpt.state.plan import Placement
from jaxckpt.update.choose import compiler_options
from jaxckpt.update.moved import host_buffers
from jaxckpt.update.optimizers import make_optimizer, make_schedule

log = logging.getLogger("jaxckpt")

FIELDS_OF_EVERY_OPTIMIZER = frozenset(cf.Optimizer.model_fields) | {"name"}


def build(config: cf.RunConfig, *, allow_changed: Sequence[str] = (), phases: Phases | None = None) -> Run:
    """The run that `config` describes, ready to train; its newest snapshot's config has been compared.

    Starts JAX and, with `distributed` set, joins the other processes. Raises a JaxckptError for whatever cannot be used.
    """
    phases = phases or Phases()
    with phases.phase("backend"):
        _start_jax(config)
    snapshots = Snapshots(config.run_dir, **config.snapshots.model_dump())
    snapshots.open(Group(timeout_s=config.distributed.timeout_s))
    try:
        stored = _stored_config(config, snapshots)
        config = cf.resolve(config, stored)
        if stored is not None:
            cf.check_resumable(stored, cf.to_dict(config), allow_changed)
        _cache_compilations(os.fspath(snapshots.run_dir / "compilation_cache"))
        return _build(config, snapshots, allow_changed, phases)
    except BaseException:
        snapshots.close()
        raise


def build_unopened(config: cf.RunConfig, *, is_compiling: bool | None = None) -> Run:
    """The run that `config` describes, to plan it: its run directory is neither read nor written, and nothing is saved.

    `is_compiling`: whether a budget's choice is compiled to see that it fits; by default on accelerators.
    """
    _start_jax(config)
    return _build(cf.resolve(config, None), None, (), Phases(), is_compiling=is_compiling)


def import_target(key: str, target: str) -> Any:
    """The object that 'pkg.mod:thing' names; modules of the working directory are found too."""
    module_name, _, name = target.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        thing: Any = importlib.import_module(module_name)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"{key}: {target!r} cannot be imported: {e}. Expected pkg.mod:thing, importable from the working directory "
            f"({Path.cwd()}) or installed."
        ) from e
    return thing


def call_target(key: str, target: str, *args: Any, **kwargs: Any) -> Any:
    """What the thing that 'pkg.mod:thing' names returns; ConfigError where it cannot take these arguments."""
    thing = import_target(key, target)
    try:
        inspect.signature(thing).bind(*args, **kwargs)
    except TypeError as e:
        given = [type(x).__name__ for x in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
        raise ConfigError(
            f"{key}: {target} cannot be called with ({', '.join(given)}): {e}. Change it, or {key.rpartition('.')[0]}.args."
        ) from e
    except ValueError:
        pass  # some builtins do not tell what they take
    return thing(*args, **kwargs)


def _start_jax(config: cf.RunConfig) -> None:
    if config.mesh.cpu_devices is not None:
        use_cpu_devices(config.mesh.cpu_devices)
    group = config.distributed
    if group.coordinator_address is not None:
        assert group.num_processes is not None and group.process_id is not None  # the config's own check
        limits = {"timeout_s": group.timeout_s, "heartbeat_timeout_s": group.heartbeat_timeout_s}
        join(group.coordinator_address, group.num_processes, group.process_id, **limits)
    limit, _ = guards.host_memory_limit()
    if limit is not None:  # XLA's own limit on pinned host memory is 64 GiB, and is read once
        os.environ.setdefault(guards.POOL, str(limit >> 30))
    jax.devices()


def _check_host_memory(run: Run) -> None:
    """Warns, or raises PlanError, where this process may not have the host memory that the state and gradients of a run want."""
    pinned = sum(
        leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) * len(x.sharding.addressable_devices)
        for x in jax.tree.leaves(run.plan)
        if tier_of(x) == "pinned_host"
    )
    pinned += host_buffers(run._program._step_fn).total * len(run.plan.step.sharding.addressable_devices)
    if pinned:
        guards.set_pool(pinned, os.environ, is_started=True)
        # What a CPU calls pinned is memory like any other.
        for warning in guards.check_limits(0 if jax.default_backend() == "cpu" else pinned, pinned):
            log.warning("%s", warning)


def _cache_compilations(directory: str) -> None:
    """Keeps compiled programs, and a GPU's autotuned choices with them, for the next life of this run."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.default_backend() == "cpu":
        # The caches inside XLA are a GPU's; with them jax 0.10 puts the directory's path into the key, and a run that
        # was moved would compile again.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _stored_config(config: cf.RunConfig, snapshots: Snapshots) -> Mapping[str, Any] | None:
    """The configuration of the snapshot that will be continued; None where the run begins anew."""
    step = resuming.choose(snapshots, config.resume)
    if step is not None:
        return snapshots.read_meta(step)["config"]
    if config.restore_from is not None and not config.restore_paths:
        return read_meta(*Origin(config.restore_from).locate(snapshots.group))["config"]
    return None


def _build(
    config: cf.RunConfig,
    snapshots: Snapshots | None,
    allow_changed: Sequence[str],
    phases: Phases,
    *,
    is_compiling: bool | None = None,
) -> Run:
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    with phases.phase("data"):
        data = _data(config)
    model = _model(config, data.vocab_size, tensor=mesh.shape["tensor"])
    schedule = _schedule(config)
    dtype = config.model.compute_dtype
    dtype = None if dtype == "float32" else dtype
    optimizer = _optimizer(config.optimizer, schedule)
    rules = tuple((k, _spec(v)) for k, v in config.mesh.rules.items()) + tuple(model.rules)
    make_run = partial(
        Run,
        model=model.make,
        loss=model.loss,
        layers=model.layers,
        optimizer=optimizer,
        data=data.train,
        global_batch=config.data.batch_size,
        seed=config.seed,
        mesh=mesh,
        rules=rules,
        compute_dtype=dtype,
        accumulation_steps=config.optimizer.accumulation_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        nonfinite=config.optimizer.nonfinite,
        lr=schedule,
        held_out=data.held_out,
        eval_every=config.eval.every,
        eval_batches=config.eval.batches,
        resume=config.resume,
        restore_from=config.restore_from,
        restore_paths=config.restore_paths,
        data_identity=data.identity,
        skip=config.data.skip,
        num_threads=config.data.num_threads,
        config=cf.to_dict(config),
        allow_changed=allow_changed,
        timeout_s=config.distributed.timeout_s,
        phases=phases,
    )
    placement = _placement(config.placement)
    if (budget := budget_of(config)) is not None:
        if is_compiling is None:
            is_compiling = jax.default_backend() != "cpu"
        placement = _within_budget(config, make_run, budget, placement, is_compiling=is_compiling)
    run = make_run(placement=placement, snapshots=snapshots)
    if snapshots is not None:
        _check_host_memory(run)
    return run


@dataclass(frozen=True)
class _Data:
    train: Any
    held_out: Any
    identity: Mapping[str, Any] | None = None
    vocab_size: int | None = None


def _data(config: cf.RunConfig) -> _Data:
    data = config.data
    if isinstance(data, cf.ImportData):
        train = call_target("data.target", data.target, **data.args)
        held_out = call_target("data.held_out", data.held_out, **data.args) if data.held_out else None
        return _Data(train, held_out)
    if isinstance(data, cf.StoreData):
        return _store_data(data, config.seed)
    tokenizer = load_tokenizer(data.tokenizer)
    sets = make_token_datasets(
        load_text(data.files), tokenizer, seq_len=data.seq_len, holdout=data.holdout, seed=config.seed
    )
    return _Data(sets.train, sets.held_out if len(sets.held_out) else None, sets.identity, tokenizer.vocab_size)


def _store_data(data: cf.StoreData, seed: int) -> _Data:
    sets = make_store_datasets(
        data.stores,
        seq_len=data.seq_len,
        seed=seed,
        rows=data.rows,
        long_documents=data.long_documents,
        weights=data.weights,
        schedule=[(step - 1, weights) for step, weights in data.weights_schedule],
        held_out=data.held_out,
    )
    train, identity = sets.train, sets.identity
    if data.transform is not None:
        transform = import_target("data.transform", data.transform)
        train = Randomized(train, partial(transform, **data.transform_args), seed=seed)
        identity = {**identity, "transform": [data.transform, data.transform_args]}
    return _Data(train, sets.held_out, identity, sets.vocab_size)


@dataclass(frozen=True)
class _Model:
    make: Callable[[nnx.Rngs], nnx.Module]
    loss: Any
    rules: Sequence[tuple[str, P]] = ()
    layers: Layers | None = None


def _model(config: cf.RunConfig, tokens: int | None, *, tensor: int) -> _Model:
    """`tokens` is the size of the data's vocabulary, where it is known."""
    section = config.model
    if isinstance(section, cf.ImportModel):
        make = partial(call_target, "model.target", section.target, **section.args)
        layers = import_target("model.layers", section.layers) if section.layers else None
        return _Model(lambda rngs: make(rngs=rngs), import_target("model.loss", section.loss), (), layers)
    vocab_size = section.vocab_size or tokens
    if vocab_size is None or (tokens is not None and vocab_size < tokens):
        raise ConfigError(
            f"model.vocab_size: {vocab_size} is less than the {tokens} tokens of the data's tokenizer; raise it, or leave it "
            "out to take the tokenizer's"
        )
    fields = section.model_dump(exclude={"name", "compute_dtype", "vocab_size", "rope_scaling", "num_kv_heads"})
    scaling = llama.RopeScaling(**section.rope_scaling.model_dump()) if section.rope_scaling else None
    shape = llama.LlamaConfig(
        vocab_size=vocab_size, num_kv_heads=section.num_kv_heads or section.num_heads, rope_scaling=scaling, **fields
    )
    problems = llama.check_tensor_axis(shape, tensor)
    if problems:
        raise ConfigError("\n".join([f"mesh.tensor={tensor} cannot divide this model:", *(f"  {p}" for p in problems)]))

    def make_llama(rngs: nnx.Rngs) -> nnx.Module:
        return llama.Llama(shape, rngs=rngs)

    return _Model(make_llama, llama.loss, llama.SHARDING_RULES, None if shape.scan_layers else llama.LAYERS)


def _schedule(config: cf.RunConfig) -> optax.Schedule | None:
    section = config.optimizer
    if section.lr is None:
        return None
    return make_schedule(
        section.schedule.name,
        lr=section.lr,
        warmup_steps=section.schedule.warmup_steps,
        decay_steps=section.schedule.decay_steps or config.steps,
        decay_fraction=section.schedule.decay_fraction,
        final_ratio=section.schedule.final_ratio,
    )


def _optimizer(section: Any, schedule: optax.Schedule | None) -> optax.GradientTransformation:
    if isinstance(section, cf.ImportOptimizer):
        first = () if schedule is None else (schedule,)
        return call_target("optimizer.target", section.target, *first, **section.args)
    assert schedule is not None  # only an imported optimizer may leave lr out
    args = section.model_dump(exclude=set(FIELDS_OF_EVERY_OPTIMIZER))
    return make_optimizer(section.name, schedule, weight_decay_exclude=section.weight_decay_exclude, **args)


def _placement(section: cf.Placement) -> Placement:
    return Placement(
        params=section.params,
        master=section.master,
        opt_state=section.opt_state,
        grads=section.grads,
        paths=tuple(section.paths.items()),
        nvme_dir=tuple(section.nvme_dir or ()),
        nvme_cache_bytes=section.nvme_cache_bytes or 0,
        bucket_bytes=section.bucket_bytes,
    )


def _within_budget(
    config: cf.RunConfig,
    make_run: Callable[..., Run],
    budget: Budget,
    placement: Placement,
    *,
    is_compiling: bool,
) -> Placement:
    """`placement` with the tiers that the budget of `config` chooses.

    `is_compiling`: the compiler has the last word on what the step takes of a device; what is compiled for that is found
    again when the run compiles its step.
    """
    # All processes must choose the same, and one may be a little larger than another.
    group = Group(timeout_s=config.distributed.timeout_s)
    host_bytes = max(group.gather("choose the placement", process_bytes()))
    make_run = partial(make_run, resume="latest")  # to look at alone
    with make_run() as on_device:
        outline = outline_of(on_device)

    def choose_for(working_bytes: int) -> Choice:
        return choose(config, *outline, budget, host_bytes=host_bytes, working_bytes=working_bytes)

    def peak_of(chosen: Placement) -> int:
        with make_run(placement=chosen) as run:
            subject = subject_of(run)
        options = compiler_options(subject.plan, jax.default_backend()) or None
        compiled = {name: part.traced.lower().compile(options) for name, part in subject.programs.items()}
        plans = {
            name: read_plan(x, target=jax.default_backend(), devices=jax.device_count()) for name, x in compiled.items()
        }
        return sum(device_parts(subject, plans).values())

    if budget.device is None or not is_compiling:
        choice = choose_for(0)
        device_bytes, left_out = (
            choice.device_bytes,
            " (activations not counted: see `python -m jaxckpt plan --target`)",
        )
    else:
        (choice, device_bytes), left_out = refine(choose_for, peak_of, budget.device), ""
    log.info(
        "placement by the budget: %.1f MiB of each device%s, %.1f MiB of host memory, %.1f MiB on disks",
        device_bytes / 2**20,
        left_out,
        choice.host_bytes / 2**20,
        choice.nvme_bytes / 2**20,
    )
    return replace(choice.placement, nvme_cache_bytes=placement.nvme_cache_bytes if choice.placement.nvme_dir else 0)


def _spec(dims: Sequence[Any]) -> P:
    return P(*(tuple(d) if isinstance(d, list) else d for d in dims))
