"""The arguments of `Run`, checked at once and in the user's words, before JAX meets them."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxckpt.errors import ConfigError, PlanError
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.plan import Placement


def check_arguments(given: Mapping[str, Any], *, allowed_keys: frozenset[str] | None) -> None:
    """Raises ConfigError with every problem of `Run`'s arguments, a line each.

    `allowed_keys` are the names that `allow_changed` may hold; None where a configuration has checked them.
    """
    problems = [text for name, check in _CHECKS.items() if (text := check(name, given[name]))]
    if given["eval_every"] is not None and given["held_out"] is None:
        problems.append(f"eval_every={given['eval_every']!r} needs held_out data; give held_out, or eval_every=None")
    if given["restore_paths"] and given["restore_from"] is None:
        problems.append("restore_paths needs restore_from, the run to take them from")
    allowed = given["allow_changed"]
    if isinstance(allowed, str):
        problems.append(f"allow_changed must be a list of names; found the text {allowed!r}")
    elif allowed_keys is not None and (unknown := sorted(set(allowed) - allowed_keys)):
        problems.append(f"allow_changed names {unknown}; there are {sorted(allowed_keys)}")
    if problems:
        raise ConfigError("\n".join(["the arguments of Run cannot be used:", *(f"  {p}" for p in problems)]))


def check_microbatches(mesh: Mesh, global_batch: int, accumulation_steps: int) -> None:
    """Raises PlanError where the devices cannot share each microbatch evenly."""
    shards = math.prod(mesh.shape[a] for a in ("data", "fsdp") if a in mesh.shape)
    if global_batch % (shards * accumulation_steps):
        raise PlanError(
            f"a batch of {global_batch} cannot be cut into {accumulation_steps} microbatches over {shards} devices "
            f"(mesh axes data and fsdp); it must be a multiple of {shards * accumulation_steps}"
        )


def _if(is_good: Any, what: str) -> Any:
    """A check that says what was expected where `is_good(value)` is not true."""
    return lambda name, value: None if is_good(value) else f"{name} must be {what}; found {value!r}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_dtype(value: Any) -> bool:
    try:
        return value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def _check_model(name: str, value: Any) -> str | None:
    if callable(value) and not isinstance(value, nnx.Module):
        return None
    return (
        f"{name} must be a function of nnx.Rngs that makes the module, such as lambda rngs: MyModel(rngs=rngs); found a "
        f"{type(value).__name__}. A module made outside would hold its weights twice and could not be sharded"
    )


def _check_optimizer(name: str, value: Any) -> str | None:
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        return None
    return f"{name} must be an optax.GradientTransformation; found a {type(value).__name__}"


def _check_patterns(name: str, value: Any) -> str | None:
    if isinstance(value, str) or not all(isinstance(p, str) and p for p in value):
        return f"{name} must be a list of regexes on leaf paths, such as ['^params/']; found {value!r}"
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as e:
            return f"{name}: {pattern!r} is not a regular expression: {e}"
    return None


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_CHECKS: dict[str, Any] = {
    "model": _check_model,
    "loss": _if(callable, "a function loss(model, batch) -> (sum over targets, number of targets)"),
    "optimizer": _check_optimizer,
    "global_batch": _if(_is_count, "a positive integer, the examples of a step"),
    "seed": _if(lambda v: _is_int(v) and v >= 0, "an integer of at least 0"),
    "mesh": _if(lambda v: v is None or isinstance(v, Mesh), "a jax.sharding.Mesh, such as jc.make_mesh()"),
    "rules": _if(
        lambda v: isinstance(v, list | tuple) and all(isinstance(r, tuple) and len(r) == 2 for r in v),
        "a list of (regex, PartitionSpec)",
    ),
    "placement": _if(lambda v: isinstance(v, Placement), "a jc.Placement"),
    "compute_dtype": _if(_is_dtype, "a floating-point dtype such as 'bfloat16', or None"),
    "accumulation_steps": _if(_is_count, "a positive integer"),
    "max_grad_norm": _if(lambda v: v is None or _is_positive(v), "a positive number, or None"),
    "nonfinite": _if(lambda v: v in ("stop", "skip"), "'stop' or 'skip'"),
    "lr": _if(lambda v: v is None or callable(v), "an optax schedule (a function of the update's number), or None"),
    "eval_every": _if(lambda v: v is None or _is_count(v), "a positive integer, or None"),
    "eval_batches": _if(_is_count, "a positive integer"),
    "snapshots": _if(
        lambda v: v is None or isinstance(v, Snapshots), "a jc.Snapshots, such as jc.Snapshots('runs/mine')"
    ),
    "resume": _if(
        lambda v: v in ("latest", "required", "never") or (_is_int(v) and v >= 0),
        "'latest', 'required', 'never' or the number of a step",
    ),
    "restore_from": _if(
        lambda v: v is None or (isinstance(v, str) and v), "RUN_DIR, RUN_DIR@STEP, RUN_DIR@PIN, or None"
    ),
    "restore_paths": _check_patterns,
    "timeout_s": _if(_is_positive, "a positive number of seconds"),
}
