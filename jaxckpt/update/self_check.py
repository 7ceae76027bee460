"""Is the update in buckets the update of plain optax, to the last bit? Tried at the start on a tiny tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxckpt.errors import listed
from jaxckpt.state import tree
from jaxckpt.update.buckets import Bucket
from jaxckpt.update.split import Split, split_update

STEPS = 3  # Adam's first update hides what a gradient was multiplied by, and bias corrections near 1 come later.
LEAVES = 24
"""of the tiny tree: two programs of that size compile in about a second"""
WIDTHS = (4, 16, 64)
"""each dimension is cut to these until the optimizer takes it"""

Leaves = dict[str, Any]


@dataclass(frozen=True)
class SelfCheck:
    is_bitwise: bool
    differing: tuple[str, ...]
    """paths 'weights/...' and 'opt_state/...' of the leaves that differ"""
    kind: str
    """of the split: 'leaf' or 'global+leaf'"""
    n_buckets: int
    """that were tried, of `n_all`; those left out are like one that was tried, or larger"""
    n_all: int
    problem: str = ""
    """why nothing could be tried"""

    def text(self) -> str:
        """For the log: the result in one line, and a line for each leaf that differs."""
        if self.problem:
            return f"the update in buckets was not compared with plain optax: {self.problem}"
        what = f"the update in {self.n_all} bucket{'s' * (self.n_all != 1)} ({self.kind}; {self.n_buckets} tried on a tiny tree)"
        if self.is_bitwise:
            return f"{what} is bitwise that of plain optax"
        return (
            f"{what} differs from plain optax in the last bits, though it is always the same in itself, on every tier:\n"
            f"{listed(list(self.differing))}"
        )


def self_check(
    tx: optax.GradientTransformation, weights_plan: Any, buckets: Sequence[Bucket], *, is_apart: bool = False
) -> SelfCheck:
    """Compares `STEPS` updates of plain optax and of `buckets`, each in one jit with donated state, byte by byte.

    On a tree of the structure of `weights_plan` with small leaves, on one local device: one bucket of each form,
    those of fewest leaves first, up to `LEAVES` leaves. With `is_apart` each bucket is updated in a jit of its own.
    """
    chosen = _representatives(buckets, tree.flatten(weights_plan))
    problems: list[str] = []
    for width in WIDTHS:
        # None keeps the containers, so that an optimizer that goes by paths still finds them; one that was given
        # a tree of its own (a mask) wants all leaves.
        for kept in ({path for bucket in chosen for path in bucket}, None):
            tiny = _shrunk(weights_plan, width, kept)
            groups = chosen if kept else [bucket.weights for bucket in buckets]
            try:
                split = split_update(tx, tiny)
                differing = _differing(tx, split, tiny, groups, is_apart)
            except Exception as problem:
                problems.append(f"{type(problem).__name__}: {problem}".partition("\n")[0])
                continue
            return SelfCheck(not differing, tuple(differing), split.kind, len(groups), len(buckets))
    reason = f"the optimizer does not take weights with dimensions of at most {WIDTHS[-1]} ({problems[-1]})"
    return SelfCheck(False, (), "", 0, len(buckets), reason)


def _representatives(buckets: Sequence[Bucket], weights: Leaves) -> list[tuple[str, ...]]:
    """The weights of one bucket of each form, by shapes, dtypes and the state that each weight owns."""
    forms: dict[Any, tuple[str, ...]] = {}
    for bucket in sorted(buckets, key=lambda b: len(b.weights)):
        states = {path: [] for path in bucket.weights}
        for state in bucket.opt_state:
            for path in states:
                if state.endswith(f"/{path}"):
                    states[path].append(state.removesuffix(path))
        form = [(weights[p].ndim, str(weights[p].dtype), tuple(states[p])) for p in bucket.weights]
        forms.setdefault(tuple(sorted(form)), bucket.weights)
    chosen: list[tuple[str, ...]] = []
    for group in forms.values():
        if not chosen or sum(map(len, chosen)) + len(group) <= LEAVES:
            chosen.append(group)
    return chosen


def _shrunk(weights: Any, width: int, kept: set[str] | None) -> Any:
    small = lambda x: jax.ShapeDtypeStruct(tuple(min(n, width) for n in x.shape), x.dtype)
    return tree.map_with_path(lambda path, x: small(x) if kept is None or path in kept else None, weights)


def _differing(
    tx: optax.GradientTransformation, split: Split, tiny: Any, groups: Sequence[Sequence[str]], is_apart: bool
) -> list[str]:
    with jax.default_device(jax.local_devices()[0]):
        whole = _trained(_whole_step(tx), tx, tiny)
        parts = _trained(step_in_parts(split, groups, is_apart=is_apart), tx, tiny)
    return [path for path, x in whole.items() if _bytes(x) != _bytes(parts[path])]


def _whole_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(weights: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def step_in_parts(split: Split, groups: Sequence[Sequence[str]], *, is_apart: bool) -> Callable[..., Any]:
    """(weights, state, gradients) -> (weights, state), donated, in one jit or in one for the global phase and for each
    group."""

    def one(update: Any, cuts: Any, shared: Leaves, grads: Leaves, state: Leaves, weights: Leaves) -> Any:
        updates, state = update(cuts, shared, grads, state, weights)
        return optax.apply_updates(weights, updates), state

    own = lambda group: [path for path, weight in split.owner.items() if weight in group]
    compile_ = lambda f: jax.jit(f, donate_argnums=(3, 4)) if is_apart else f
    global_phase = jax.jit(split.global_phase) if is_apart else split.global_phase
    parts = [(group, own(group), compile_(lambda *args, u=split.bucket(group): one(u, *args))) for group in groups]

    def step(weights: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        w, s, g = tree.flatten(weights), tree.flatten(state), tree.flatten(grads)
        pick = lambda leaves, paths: {path: leaves[path] for path in paths}
        shared = pick(s, [path for path, weight in split.owner.items() if weight is None])
        cuts, new_state = global_phase(pick(g, split.global_grads), shared, pick(w, split.global_weights))
        new_weights: Leaves = {}
        for group, states, update in parts:
            changed, own_state = update(cuts, shared, pick(g, group), pick(s, states), pick(w, group))
            new_weights |= changed
            new_state |= own_state
        return tree.unflatten(weights, new_weights), tree.unflatten(state, new_state)

    return step if is_apart else jax.jit(step, donate_argnums=(0, 1))


def _trained(step: Callable[..., Any], tx: optax.GradientTransformation, tiny: Any) -> Leaves:
    """The leaves of weights and state after `STEPS` steps."""
    rng = np.random.default_rng(0)
    # Not exact in binary and of mixed size, so that rounding shows.
    draw = lambda scale: jax.tree.map(lambda x: jnp.asarray(rng.normal(0, scale, x.shape), x.dtype), tiny)
    weights = draw(0.1)
    state = jax.jit(tx.init)(weights)
    for _ in range(STEPS):
        weights, state = step(weights, state, draw(0.03))
    return {
        **{f"weights/{path}": x for path, x in tree.flatten(weights).items()},
        **{f"opt_state/{path}": x for path, x in tree.flatten(state).items()},
    }


def _bytes(x: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
