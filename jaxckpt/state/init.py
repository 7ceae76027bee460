"""The state at step 0, made where the plan wants it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from jaxckpt.state import tree
from jaxckpt.state.memory import leaf_bytes
from jaxckpt.state.nvme import NvmeStruct, tier_of
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState

PART_BYTES = 1 << 30


def initialise(
    init: Callable[[], TrainState],
    plan: TrainState,
    *,
    to_disk: Callable[[Mapping[str, jax.Array]], Mapping[str, Any]],
    part_bytes: int = PART_BYTES,
) -> TrainState:
    """The state that `init` makes, laid out as `plan`; returns when it is there.

    What lives off the device passes over it in parts of `part_bytes` on each device, because all of it may not fit.
    `to_disk` takes {path: array} of leaves of the tier nvme and gives back what the state holds for them.
    """
    flat = tree.flatten(plan)
    if all(tier_of(x) == "device" for x in flat.values()):
        return jax.block_until_ready(jax.jit(init, out_shardings=shardings(plan))())
    closed = jax.make_jaxpr(lambda: list(tree.flatten(init()).values()))()
    made: dict[str, Any] = {}
    for part in _parts(flat, part_bytes):
        arrays = jax.block_until_ready(_make(closed, tuple(flat), part)())
        on_disk = {path: x for path, x in arrays.items() if isinstance(part[path], NvmeStruct)}
        made.update({**arrays, **to_disk(on_disk)} if on_disk else arrays)
    return tree.unflatten(plan, made)


def _parts(plan: Mapping[str, Any], part_bytes: int) -> Iterator[dict[str, Any]]:
    """What stays on the device at once, the rest in parts of so many bytes, or of one leaf."""
    yield {path: x for path, x in plan.items() if tier_of(x) == "device"}
    part: dict[str, Any] = {}
    size = 0
    for path, x in plan.items():
        if tier_of(x) == "device":
            continue
        nbytes = leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype)
        if part and size + nbytes > part_bytes:
            yield part
            part, size = {}, 0
        part[path] = x
        size += nbytes
    yield part


def _make(closed: Any, paths: tuple[str, ...], part: Mapping[str, Any]) -> Callable[[], dict[str, jax.Array]]:
    """The jitted function that computes these leaves of `closed`, whose outputs are all of `paths`, and no others."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [path in part for path in paths])
    compute = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))
    return jax.jit(
        lambda: dict(zip(part, compute(), strict=True)), out_shardings={p: x.sharding for p, x in part.items()}
    )
