"""The update of state that lives in pinned host memory: a chain of buckets inside one jit.

XLA would start every copy to the device before the forward pass (a whole-tree `device_put` left 2386 of 2402 MiB there
in the plan for a GPU), so barriers let the fetch of a bucket wait for the bucket `WINDOW` places before it. The copies
back are bound to nothing, so that they may overlap the fetches that follow. Donated host buffers are written in place.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxckpt.state import tree
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.gradients import Gradients, kept
from jaxckpt.update.split import Split

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


def make_streamed_update(
    split: Split, buckets: Sequence[Bucket], plan: TrainState, *, is_skipping: bool
) -> Callable[[TrainState, Gradients], TrainState]:
    """(state, gradients) -> the state with new params, master and opt_state, to be traced under jit.

    Every leaf is put where `plan` has it. With `is_skipping` nothing changes unless they are finite.
    """
    params_plan, state_plan = tree.flatten(plan.params), tree.flatten(plan.opt_state)
    weights_plan = params_plan if plan.master is None else tree.flatten(plan.master)
    update_bucket = {bucket: split.bucket(bucket.weights) for bucket in buckets}

    def update(state: TrainState, found: Gradients) -> TrainState:
        w = tree.flatten(state.params if state.master is None else state.master)
        s = tree.flatten(state.opt_state)
        g = {path: x.astype(w[path].dtype) for path, x in tree.flatten(found.grads).items()}
        keep = lambda new, old: kept(found.finite, new, old) if is_skipping else new
        # As the backward pass leaves them: to wait for the divided, float32 ones would have all of those made first. A norm
        # inside the optimizer needs all of those, and only then they have the bits that they have on the device.
        gradients = list(g.values()) if split.global_grads else jax.tree.leaves(found.sums)
        shared = fetched({path: x for path, x in s.items() if split.owner[path] is None}, state_plan, gradients)
        read = fetched({path: w[path] for path in split.global_weights}, weights_plan, gradients)
        cuts, changed = split.global_phase(g, shared, read)
        new_state, new_params, new_master = _put_back(keep(changed, shared), state_plan), {}, {}
        done: list[Any] = []
        for bucket in buckets:
            after = done[-WINDOW] if len(done) >= WINDOW else gradients
            own_w = fetched({path: w[path] for path in bucket.weights}, weights_plan, after)
            own_s = fetched({path: s[path] for path in bucket.opt_state}, state_plan, after)
            own_g = {path: g[path] for path in bucket.weights}
            updates, changed = update_bucket[bucket](cuts, shared, own_g, own_s, own_w)
            weights = keep(optax.apply_updates(own_w, updates), own_w)
            new_state.update(_put_back(keep(changed, own_s), state_plan))
            if plan.master is not None:
                new_master.update(_put_back(weights, weights_plan))
                # Here, so that the float32 weights of a bucket need not wait on the device for the others.
                weights = {path: x.astype(params_plan[path].dtype) for path, x in weights.items()}
            new_params.update(_put_back(weights, params_plan))
            done.append(list(weights.values()))
        return TrainState(
            state.step,
            tree.unflatten(state.params, new_params),
            None if plan.master is None else tree.unflatten(state.master, new_master),
            tree.unflatten(state.opt_state, new_state),
            state.model_state,
        )

    return update


def fetched(leaves: Leaves, plan: Mapping[str, Any], after: Any) -> Leaves:
    """The leaves on the device; those that come from the host start on their way when `after` is there."""
    away = {path: x for path, x in leaves.items() if plan[path].sharding.memory_kind != "device"}
    if not away:
        return leaves
    there = {path: shardings(plan[path], "device") for path in away}
    return {**leaves, **jax.device_put(tie(away, after), there)}


def _put_back(leaves: Leaves, plan: Mapping[str, Any]) -> Leaves:
    return jax.device_put(leaves, {path: plan[path].sharding for path in leaves})
