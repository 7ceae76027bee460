"""The update of one bucket in a jit of its own, for state that comes from local disks by way of pinned host memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from jaxckpt.nvme.array import on_disk
from jaxckpt.nvme.store import is_all_finite
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import fingerprint
from jaxckpt.state.nvme import NvmeStruct
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.gradients import kept
from jaxckpt.update.split import Split

Leaves = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Begun:
    """What the first programs of a step leave for the buckets, and for the new state."""

    sums: Leaves
    """the gradient of the sum of losses by weight, see `mean_gradient`; or the mean gradient that the update takes. On the
    device, or in pinned host memory, where it stays: the next step writes its own there"""
    decided: Any
    """what every bucket needs: the scalars that cross from the global phase, whether the gradient is finite, and its
    denominator and norm"""
    step: jax.Array
    model_state: Any
    shared: Leaves
    """the new leaves of the optimizer's state that belong to no single weight"""
    metrics: dict[str, jax.Array]


class DiskBucket:
    """The update of one bucket, as a function of lists without names, so that buckets alike are compiled once.

    What it computes is what the bucket computes in the step for pinned host memory, to the same bits.
    """

    def __init__(
        self, split: Split, bucket: Bucket, *, plan: TrainState, finish: Callable[..., Any] | None, is_skipping: bool
    ) -> None:
        """`finish(sum, denominator, norm)` makes of `Begun.sums` the gradients that the update takes."""
        has_master = plan.master is not None
        params, state = tree.flatten(plan.params), tree.flatten(plan.opt_state)
        weights = tree.flatten(plan.master) if has_master else params
        group = "master" if has_master else "params"
        self.weights, self._opt_state = bucket.weights, bucket.opt_state
        self.old = {f"{group}/{p}": weights[p] for p in bucket.weights}
        self.old |= {f"opt_state/{p}": state[p] for p in bucket.opt_state}
        """the plan of what the update reads and writes, by path in the whole state; the weights come first"""
        self.derived = {f"params/{p}": params[p] for p in bucket.weights} if has_master else {}
        """the plan of the params that are the master weights in another dtype"""
        self.on_disk = tuple(on_disk(self.old))
        self.derived_on_disk = tuple(on_disk(self.derived))
        self.shared = tuple(path for path, weight in split.owner.items() if weight is None)
        self._update, self._finish, self._is_skipping = split.bucket(bucket.weights), finish, is_skipping

    def trace(self, begun: Begun) -> jax.stages.Traced:
        """The jitted update for arguments as the first programs leave them (abstract)."""
        derived, old = [struct_of(x) for x in self.derived.values()], [struct_of(x) for x in self.old.values()]
        sums = [begun.sums[p] for p in self.weights]
        arguments = (derived, begun.decided, [begun.shared[p] for p in self.shared], sums, old)
        are_away = tuple(x.sharding.memory_kind != "device" for x in sums)
        jitted = jax.jit(
            partial(self._compute, are_away),
            in_shardings=shardings(arguments),
            out_shardings=(shardings(old), shardings(derived)),
            donate_argnums=(0, 4),
            keep_unused=True,  # the old derived params are given for their memory alone
        )
        return jitted.trace(*arguments)

    def _compute(
        self,
        are_away: Sequence[bool],
        derived: list[Any],
        decided: Any,
        shared: list[Any],
        sums: list[Any],
        old: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """(new leaves, new derived params)"""
        cuts, finite, denominator, norm = decided
        there = [shardings(x, "device") for x in self.old.values()]
        old = jax.device_put(old, there)
        # The weights come first, and a gradient lies on the device as its weight does.
        sums = [jax.device_put(g, s) if away else g for g, s, away in zip(sums, there, are_away, strict=False)]
        # XLA would multiply by the reciprocal of a scalar that one leaf alone is divided by; in the step that has all
        # leaves the scalars have more users, and so a barrier must be one here.
        old[0], _ = jax.lax.optimization_barrier((old[0], (denominator, norm)))
        n = len(self.weights)
        own = dict(zip(self.weights, old[:n], strict=True))
        own_state = dict(zip(self._opt_state, old[n:], strict=True))
        grads = [self._finish(g, denominator, norm) for g in sums] if self._finish else sums
        own_grads = {p: g.astype(own[p].dtype) for p, g in zip(self.weights, grads, strict=True)}
        updates, changed = self._update(cuts, dict(zip(self.shared, shared, strict=True)), own_grads, own_state, own)
        new: list[Any] = [optax.apply_updates(own[p], updates[p]) for p in self.weights]
        new += [changed[p] for p in self._opt_state]
        if self._is_skipping:
            new = kept(finite, new, old)
        derived = [x.astype(like.dtype) for x, like in zip(new, self.derived.values(), strict=False)]
        return _put(new, self.old), _put(derived, self.derived)

    def trace_marks(self, whole: jax.sharding.NamedSharding) -> jax.stages.Traced:
        """The jitted fingerprint and finiteness of each leaf that goes to disk.

        Of what was stored, and so in a jit of its own: beside the update XLA may compute a value once more for them, and
        round it in another way.
        """
        leaves = [self.old[p] for p in self.on_disk]

        def mark(stored: list[Any]) -> list[Any]:
            there = jax.device_put(stored, [shardings(x, "device") for x in leaves])
            return [(fingerprint(x), is_all_finite(x)) for x in there]

        structs = [struct_of(x) for x in leaves]
        return jax.jit(mark, in_shardings=(shardings(structs),), out_shardings=whole).trace(structs)


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """A leaf as its bucket's jit gets and returns it: what lies on disk comes by way of pinned host memory."""
    sharding = x.sharding.with_memory_kind("pinned_host") if isinstance(x, NvmeStruct) else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _put(leaves: list[Any], plan: Mapping[str, Any]) -> list[Any]:
    return [jax.device_put(x, struct_of(like).sharding) for x, like in zip(leaves, plan.values(), strict=True)]
