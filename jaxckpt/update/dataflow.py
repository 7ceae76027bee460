"""A jaxpr as operations on numbered values, of which any part can be run: calls are opened, conditionals keep branches."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# These only group operations; what they say of differentiation is of no use after it.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    value: Any
    dtype: Any


Operand = int | Constant
"""the number of a value, or a constant"""


@dataclass(frozen=True, eq=False, slots=True)
class Branch:
    """One way of a conditional; it uses the values outside by their own numbers."""

    operations: tuple["Operation", ...]
    results: tuple[Operand, ...]
    numbers: range
    """of its operations, those inside conditionals included"""


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    number: int
    """in an order in which everything can be computed; those of a branch come just before their conditional"""
    equation: Any
    operands: tuple[Operand, ...]
    """of a conditional the index of the branch alone"""
    results: tuple[int, ...]
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """An operation of a part that is run; of a conditional only the results `wanted`, with what each branch runs."""

    operation: Operation
    wanted: tuple[int, ...] = ()
    branches: tuple[tuple["Step", ...], ...] = ()


class Program:
    """What a jaxpr computes. Values 0 to n-1 are its n arguments."""

    def __init__(self, closed: Any):
        self.avals: list[Any] = []
        self.origin: dict[int, Operation] = {}
        self._n_operations = 0
        arguments = tuple(self._new(v) for v in closed.jaxpr.invars)
        self.n_inputs = len(arguments)
        operations, self.outputs = self._read(closed, arguments)
        self.operations = tuple(operations)

    def part(self, targets: Iterable[Operand], available: frozenset[int]) -> tuple[tuple[Step, ...], frozenset[int]]:
        """(the steps that compute `targets` from arguments and `available` values, the values that they start from)."""
        wanted = {x for x in targets if isinstance(x, int)}
        steps, free = self._part(wanted, available, wanted, range(self._n_operations))
        return steps, frozenset(free)

    def _part(
        self, targets: set[int], available: frozenset[int], outside: set[int], inside: range
    ) -> tuple[tuple[Step, ...], set[int]]:
        """What the operations with numbers `inside` do for it; all that is not made there is free."""
        free: set[int] = set()
        queue: list[tuple[int, Operation]] = []
        wanted: dict[int, set[int]] = {}
        steps: list[Step] = []

        def want(values: Iterable[Operand]) -> None:
            for value in values:
                if isinstance(value, Constant):
                    continue
                operation = self.origin.get(value)
                if operation is None or value in available or operation.number not in inside:
                    free.add(value)
                    continue
                if operation.number not in wanted:
                    wanted[operation.number] = set()
                    heapq.heappush(queue, (-operation.number, operation))
                wanted[operation.number].add(value)

        want(targets)
        # Users come after what they use, so that all results wanted of an operation are known when its turn comes.
        while queue:
            _, operation = heapq.heappop(queue)
            want(operation.operands)
            if not operation.branches:
                steps.append(Step(operation))
                continue
            results = wanted[operation.number]
            places = tuple(k for k, value in enumerate(operation.results) if value in results)
            ways = []
            for branch in operation.branches:
                inner = {x for k in places if isinstance(x := branch.results[k], int)}
                # A value inside the branch that is wanted outside it too is computed there, once.
                way, needed = self._part(inner, available | outside, outside, branch.numbers)
                want(needed)
                ways.append(way)
            steps.append(Step(operation, places, tuple(ways)))
        return tuple(reversed(steps)), free

    def _new(self, variable: Any) -> int:
        self.avals.append(variable.aval)
        return len(self.avals) - 1

    def _read(self, closed: Any, arguments: Sequence[Operand]) -> tuple[list[Operation], tuple[Operand, ...]]:
        jaxpr = closed.jaxpr
        numbers: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        numbers.update((v, Constant(c, c.dtype)) for v, c in zip(jaxpr.constvars, closed.consts, strict=True))

        def operand(v: Any) -> Operand:
            if not isinstance(v, core.Literal):
                return numbers[v]
            aval: Any = v.aval
            return Constant(v.val, aval.dtype)

        operations: list[Operation] = []
        for equation in jaxpr.eqns:
            operands = tuple(operand(v) for v in equation.invars)
            if (inner := _opened(equation)) is not None:
                inside, results = self._read(inner, operands)
                operations += inside
                numbers.update(zip(equation.outvars, results, strict=True))
                continue
            branches = ()
            if equation.primitive.name == "cond":
                branches = tuple(self._branch(b, operands[1:]) for b in equation.params["branches"])
                operands = operands[:1]
            results = tuple(self._new(v) for v in equation.outvars)
            operation = Operation(self._n_operations, equation, operands, results, branches)
            self._n_operations += 1
            operations.append(operation)
            self.origin.update((value, operation) for value in results)
            numbers.update(zip(equation.outvars, results, strict=True))
        return operations, tuple(operand(v) for v in jaxpr.outvars)

    def _branch(self, closed: Any, arguments: Sequence[Operand]) -> Branch:
        first = self._n_operations
        operations, results = self._read(closed, arguments)
        return Branch(tuple(operations), results, range(first, self._n_operations))


def count_uses(steps: Sequence[Step]) -> Counter[int]:
    """How many operations of `steps` use each value, those of branches and the results of branches included."""
    uses: Counter[int] = Counter()
    for step in steps:
        uses.update({x for x in step.operation.operands if isinstance(x, int)})
        for way, branch in zip(step.branches, step.operation.branches, strict=True):
            uses += count_uses(way)
            uses.update(x for k in step.wanted if isinstance(x := branch.results[k], int))
    return uses


def run(
    steps: Sequence[Step],
    values: dict[int, Any],
    targets: Iterable[Operand],
    *,
    shared: frozenset[int] = frozenset(),
    companions: Sequence[int] = (),
) -> list[Any]:
    """The `targets`, computed by `steps` from `values`, which is left alone.

    `shared` are scalars that the whole program uses more than once. XLA multiplies by the reciprocal of a scalar that
    has one user where it divides by one that has more, as by Adam's bias correction, which changes the last bit. So
    where `steps` use one once, a barrier that it passes with the first of `companions` in use is a second user.
    """
    values = dict(values)
    uses = Counter(x for step in steps for x in set(step.operation.operands) if isinstance(x, int))
    lonely = [values[x] for x in sorted(shared) if uses[x] == 1]
    companion = next((x for x in companions if uses[x]), None)
    if lonely and companion is not None:
        values[companion], _ = jax.lax.optimization_barrier((values[companion], lonely))
    for step in steps:
        operation, equation = step.operation, step.operation.equation
        with equation.ctx.manager:
            if operation.branches:
                results = _choose(step, values, shared, companions)
                values.update(zip((operation.results[k] for k in step.wanted), results, strict=True))
                continue
            operands = [_value(x, values, raw=True) for x in operation.operands]
            results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
        if not equation.primitive.multiple_results:
            results = [results]
        values.update(zip(operation.results, results, strict=True))
    return [_value(x, values) for x in targets]


def _choose(step: Step, values: dict[int, Any], shared: frozenset[int], companions: Sequence[int]) -> list[Any]:
    def way(steps: Sequence[Step], targets: list[Operand]) -> Any:
        return lambda: run(steps, values, targets, shared=shared, companions=companions)

    branches = zip(step.branches, step.operation.branches, strict=True)
    ways = [way(steps, [branch.results[k] for k in step.wanted]) for steps, branch in branches]
    return jax.lax.switch(_value(step.operation.operands[0], values), ways)


def _value(x: Operand, values: dict[int, Any], *, raw: bool = False) -> Any:
    if not isinstance(x, Constant):
        return values[x]
    # A literal of a jaxpr may be a Python number: a primitive takes it as it is, a caller wants an array.
    return x.value if raw or isinstance(x.value, jax.Array) else jnp.asarray(x.value, x.dtype)


def _opened(equation: Any) -> Any:
    """What a call calls; None for any other operation, and for a call that also lays out or compiles in its own way."""
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if equation.primitive.name not in CALLS or params.get("compiler_options_kvs"):
        return None
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    return params.get("jaxpr", params.get("call_jaxpr"))
