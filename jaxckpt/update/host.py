"""How state comes out of pinned host memory while a step is traced: not before what it waits for.

XLA would start every copy to the device before the forward pass (a whole-tree `device_put` left 2386 of 2402 MiB there
in the plan for a GPU), so barriers let the fetch of a bucket wait for the bucket `WINDOW` places before it. The copies
back are bound to nothing, so that they may overlap the fetches that follow. Donated host buffers are written in place.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt.state.plan import shardings

WINDOW = 1
"""buckets that may be on the device besides the one that is updated"""

Leaves = dict[str, jax.Array]


def tie(leaves: Leaves, after: Any) -> Leaves:
    """The same leaves, which exist only once all of `after` is computed.

    Scalars stay outside: each would be another value in every bucket then, with a single user, and XLA divides by such a
    one in another way, which changes the bits (see `dataflow.run`).
    """
    names = [name for name, x in leaves.items() if x.ndim]
    tied, _ = jax.lax.optimization_barrier(([leaves[name] for name in names], after))
    return {**leaves, **dict(zip(names, tied, strict=True))}


def fetched(leaves: Leaves, plan: Mapping[str, Any], after: Any) -> Leaves:
    """The leaves on the device; those that come from the host start on their way when `after` is there."""
    away = {path: x for path, x in leaves.items() if plan[path].sharding.memory_kind != "device"}
    if not away:
        return leaves
    there = {path: shardings(plan[path], "device") for path in away}
    return {**leaves, **jax.device_put(tie(away, after), there)}
