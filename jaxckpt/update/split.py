"""An optax update taken apart: one global phase over the gradients, then any group of weights by itself.

Which optimizers allow it is read from the jaxpr of `tx.update`. Each value depends on the gradient, the weight or the
optimizer state of certain weights. A scalar that belongs to no single weight and needs no state of theirs (a gradient
norm, a bias correction) is computed in the global phase and crosses to the groups; all else stays with its own weight.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import optax

from jaxckpt.errors import PlanError, listed
from jaxckpt.state import tree
from jaxckpt.update.dataflow import Operand, Operation, Program, count_uses, run

Cuts = tuple[jax.Array, ...]
"""the scalars that cross from the global phase to the groups, in an order that only their Split knows"""
Leaves = dict[str, Any]
Bucket = Callable[[Cuts, Leaves, Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]


@dataclass(frozen=True)
class Split:
    """How an update comes apart; see `split_update`. All leaves are named by their paths in their own tree."""

    kind: Literal["leaf", "global+leaf"]
    owner: Mapping[str, str | None]
    """optimizer-state path -> the weight it belongs to, in tree order; None: global (counts, hyperparameters, keys)"""
    weights: tuple[str, ...]
    """weight paths in tree order"""
    global_grads: frozenset[str]
    """weights whose gradient the global phase reads"""
    global_weights: frozenset[str]
    """weights whose value the global phase reads"""
    _program: Program = field(repr=False)
    _cuts: tuple[int, ...] = field(repr=False)
    _often_used: frozenset[int] = field(repr=False)
    """of the cuts, those that the whole update uses more than once"""

    def global_phase(self, grads: Leaves, opt_state: Leaves, weights: Leaves) -> tuple[Cuts, Leaves]:
        """(scalars that cross to the buckets, the new global leaves) of one update; traceable.

        `opt_state` holds at least the global leaves, `grads` and `weights` at least `global_grads` and `global_weights`.
        """
        outputs = self._outputs()
        names = [path for path, weight in self.owner.items() if weight is None]
        targets: list[Operand] = [*self._cuts, *(outputs["opt_state", path] for path in names)]
        steps, needed = self._program.part(targets, frozenset())
        results = run(steps, self._values(needed, grads, opt_state, weights), targets)
        n = len(self._cuts)
        return tuple(results[:n]), dict(zip(names, results[n:], strict=True))

    def bucket(self, paths: Sequence[str]) -> Bucket:
        """The part of `tx.update` for the weights `paths`: (cuts, old global leaves, grads, opt_state, weights) ->
        (updates, new optimizer state), traceable. The dicts hold the leaves of these weights alone; `updates` are still
        to be applied by `optax.apply_updates`.
        """
        outputs = self._outputs()
        mine = set(paths)
        if unknown := mine - set(self.weights):
            raise ValueError(f"no weights of this optimizer: {sorted(unknown)}")
        states = [path for path, weight in self.owner.items() if weight in mine]
        names = [("updates", path) for path in paths] + [("opt_state", path) for path in states]
        targets = [outputs[name] for name in names]
        steps, needed = self._program.part(targets, frozenset(self._cuts))
        companions = self._companions(needed)

        def update(
            cuts: Cuts, global_leaves: Leaves, grads: Leaves, opt_state: Leaves, weights: Leaves
        ) -> tuple[Leaves, Leaves]:
            values = self._values(needed, grads, {**global_leaves, **opt_state}, weights)
            values.update(zip(self._cuts, cuts, strict=True))
            results = run(steps, values, targets, shared=self._often_used, companions=companions)
            results = dict(zip(names, results, strict=True))
            return {p: results["updates", p] for p in paths}, {p: results["opt_state", p] for p in states}

        return update

    def _companions(self, needed: frozenset[int]) -> list[int]:
        """The arguments among `needed` that belong to a weight, rather state than weights than gradients, small first.

        State and weights come from memory as they are. A gradient may be fused with what computes it, which a barrier
        would keep apart.
        """
        names, avals = self._inputs(), self._program.avals
        order = ("opt_state", "weights", "grads")
        own = [
            i for i in needed if i < len(names) and self.owner.get(names[i][1], "") is not None and i not in self._cuts
        ]
        return sorted(own, key=lambda i: (order.index(names[i][0]), avals[i].size, i))

    def _inputs(self) -> list[tuple[str, str]]:
        return _names(self.weights, self.owner)

    def _outputs(self) -> dict[tuple[str, str], Operand]:
        names = [("updates", p) for p in self.weights] + [("opt_state", p) for p in self.owner]
        return dict(zip(names, self._program.outputs, strict=True))

    def _values(self, needed: frozenset[int], grads: Leaves, opt_state: Leaves, weights: Leaves) -> dict[int, Any]:
        groups = {"grads": grads, "opt_state": opt_state, "weights": weights}
        names = self._inputs()
        n = self._program.n_inputs
        return {i: groups[names[i][0]][names[i][1]] for i in needed if i < n}


def split_update(tx: optax.GradientTransformation, weights: Any) -> Split:
    """Takes `tx.update(gradients, state, weights)` apart for a tree of `weights` (arrays or structs); allocates nothing.

    Raises PlanError where that cannot be done, naming every output that needs more than its own weight, and the way
    out. What an optimizer only prints or calls back, without an effect on an output, is left out.
    """
    program, paths, states = _trace(tx, weights)
    names = _names(paths, states)
    n = len(paths)
    # Whose state a leaf is shows in whose gradient or weight its new value takes in.
    flow = _Flow(program, names, paths, dict.fromkeys(states))
    owner = {}
    for path, output in zip(states, program.outputs[n:], strict=True):
        whose = flow.leaves_of(output)
        owner[path] = whose[0] if len(whose) == 1 else None
    flow = _Flow(program, names, paths, owner)
    _check(flow, program, paths, owner)
    mine = [output for output, whose in zip(program.outputs, [*paths, *owner.values()], strict=True) if whose]
    cuts = tuple(sorted(flow.cuts | {x for x in mine if isinstance(x, int) and flow.is_shared_scalar(x)}))
    global_outputs = [x for x, path in zip(program.outputs[n:], states, strict=True) if owner[path] is None]
    _, needed = program.part([*cuts, *global_outputs], frozenset())
    read = {group: frozenset(names[i][1] for i in needed if names[i][0] == group) for group in ("grads", "weights")}
    uses = count_uses(program.part(program.outputs, frozenset())[0])
    often_used = frozenset(cut for cut in cuts if uses[cut] > 1)
    kind = "global+leaf" if read["grads"] or read["weights"] else "leaf"
    return Split(kind, owner, paths, read["grads"], read["weights"], program, cuts, often_used)


def _names(weights: Sequence[str], states: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, str]]:
    """(group, path) of every argument of the traced update."""
    return [
        *(("grads", path) for path in weights),
        *(("opt_state", path) for path in states),
        *(("weights", path) for path in weights),
    ]


def _trace(tx: optax.GradientTransformation, weights: Any) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    """(the update as a program, weight paths, state paths); raises PlanError where the state changes its form."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    state = jax.eval_shape(tx.init, abstract)
    weight_leaves, state_leaves = tree.flatten(abstract), tree.flatten(state)
    n, m = len(weight_leaves), len(state_leaves)
    form: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        unflatten = lambda like, xs: jax.tree.unflatten(jax.tree.structure(like), xs)
        grads, old, values = leaves[:n], leaves[n : n + m], leaves[n + m :]
        updates, new = tx.update(unflatten(abstract, grads), unflatten(state, old), unflatten(abstract, values))
        flat_updates, flat_state = tree.flatten(updates), tree.flatten(new)
        form.extend([flat_updates, flat_state])
        return [*flat_updates.values(), *flat_state.values()]

    closed = jax.make_jaxpr(flat)(*weight_leaves.values(), *state_leaves.values(), *weight_leaves.values())
    problems = [*_differences("updates", weight_leaves, form[0], False), *_differences("", state_leaves, form[1], True)]
    if problems:
        raise PlanError(
            "the optimizer does not return what it was given, so that its state cannot be updated in place:\n"
            f"{listed(problems)}\nMake `update` return leaves of the same path, shape and dtype."
        )
    return Program(closed), tuple(weight_leaves), tuple(state_leaves)


def _differences(group: str, given: Leaves, returned: Leaves, with_dtype: bool) -> Iterator[str]:
    for path in [*given, *(p for p in returned if p not in given)]:
        describe = lambda x: (
            "nothing" if x is None else f"{x.dtype}{list(x.shape)}" if with_dtype else str(list(x.shape))
        )
        before, after = describe(given.get(path)), describe(returned.get(path))
        if before != after:
            yield f"{group or 'opt_state'}/{path}: given {before}, returned {after}"


class _Flow:
    """Of which weights each value takes in gradients, weights and state: bit sets of 3n bits for n weights, and one
    bit more for what global state goes into."""

    def __init__(
        self, program: Program, names: list[tuple[str, str]], paths: tuple[str, ...], owner: Mapping[str, str | None]
    ):
        self.paths, self.n, self.avals = paths, len(paths), program.avals
        self.taint = [0] * len(program.avals)
        self.cuts: set[int] = set()
        """scalars of the global phase that the update of single weights uses"""
        bands = {"grads": 0, "weights": self.n, "opt_state": 2 * self.n}
        place = {path: i for i, path in enumerate(paths)}
        for i, (group, path) in enumerate(names):
            whose = owner[path] if group == "opt_state" else path
            self.taint[i] = 1 << (3 * self.n if whose is None else bands[group] + place[whose])
        self._follow(program.operations)

    def leaves(self, taint: int) -> int:
        return (taint | taint >> self.n | taint >> 2 * self.n) & ((1 << self.n) - 1)

    def leaves_of(self, x: Operand, but: str | None = None) -> list[str]:
        """Paths of the weights that `x` takes in, scalars of the global phase left out."""
        bits = 0 if not isinstance(x, int) or self.is_shared_scalar(x) else self.leaves(self.taint[x])
        return [path for i, path in enumerate(self.paths) if bits >> i & 1 and path != but]

    def kinds_of(self, x: int) -> str:
        band = lambda i: self.taint[x] >> (i * self.n) & ((1 << self.n) - 1)
        *first, last = (name for i, name in enumerate(("gradients", "weights", "optimizer state")) if band(i))
        return " and ".join([", ".join(first), last] if first else [last])

    def is_shared_scalar(self, x: Operand) -> bool:
        """Over several weights, or over none but not constant, and without their state: a value of the global phase."""
        return isinstance(x, int) and self._is_shared(self.taint[x], self.avals[x].ndim)

    def _is_shared(self, taint: int, ndim: int) -> bool:
        leaves, state = self.leaves(taint), taint >> 2 * self.n & ((1 << self.n) - 1)
        if ndim or state:
            return False
        return leaves & (leaves - 1) != 0 or (not leaves and taint != 0)

    def _follow(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if not operation.branches:
                self._join(operation.operands, operation.results)
                continue
            for branch in operation.branches:
                self._follow(branch.operations)
            for k, result in enumerate(operation.results):
                self._join((*operation.operands, *(branch.results[k] for branch in operation.branches)), (result,))

    def _join(self, operands: Sequence[Operand], results: tuple[int, ...]) -> None:
        taint, own = 0, 0
        shared = []
        for x in operands:
            if isinstance(x, int):
                taint |= self.taint[x]
                if self.is_shared_scalar(x):
                    shared.append(x)
                else:
                    own |= self.taint[x]
        # A scalar stays in the global phase as long as it can; where anything else uses it, it crosses.
        if not all(self._is_shared(taint, self.avals[r].ndim) for r in results):
            self.cuts.update(shared)
            taint = own
        for result in results:
            self.taint[result] = taint


def _check(flow: _Flow, program: Program, paths: tuple[str, ...], owner: Mapping[str, str | None]) -> None:
    outputs = [
        *((f"updates/{path}", path) for path in paths),
        *((f"opt_state/{path}", whose) for path, whose in owner.items()),
    ]
    refused = {
        (name, whose): (flow.kinds_of(x), others)
        for (name, whose), x in zip(outputs, program.outputs, strict=True)
        if isinstance(x, int) and (others := flow.leaves_of(x, but=whose))
    }
    if not refused:
        return
    # What no weight owns comes first: it is often the cause of the rest, and a long list is cut.
    problems = [
        f"{name} needs {kinds} of {len(others)} {'weights' if whose is None else 'other weights'} "
        f"({', '.join(others[:2])}{', ...' if len(others) > 2 else ''})"
        for (name, whose), (kinds, others) in sorted(refused.items(), key=lambda item: item[0][1] is not None)
    ]
    uses_state = any("optimizer state" in kinds for kinds, _ in refused.values())
    raise PlanError(
        "this optimizer cannot be updated one part of the weights at a time, which state off the device needs:\n"
        f"{listed(problems)}\n{_way_out([name for name, _ in refused], uses_state, owner)}"
    )


def _way_out(names: list[str], uses_state: bool, owner: Mapping[str, str | None]) -> str:
    keep = "keep its state on the device (placement.opt_state: device)."
    if uses_state and any("acc_grads" in path.split("/") for path in owner):
        return (
            "A norm or another sum over the gradients that optax.MultiSteps has collected cannot be had before all are "
            f"there: accumulate with accumulation_steps instead of MultiSteps, or {keep}"
        )
    if uses_state and all(name.startswith("updates/") for name in names):
        return (
            "A norm or another sum over all updates is taken after the optimizer's own state has gone in, as "
            "clip_by_global_norm after scale_by_adam does: put it first in the chain, or clip the gradients by "
            f"max_grad_norm, or {keep}"
        )
    what = (
        "estimates something from the state of all weights" if uses_state else "mixes the elements of several weights"
    )
    return f"It {what}, so that no part can be updated before all are there: {keep}"
