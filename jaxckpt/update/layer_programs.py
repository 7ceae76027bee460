"""Gradients of a model whose weights come from local disks: a program for each of its parts, forward and backward.

What one program does for weights in pinned host memory (`layered`) is cut here where a layer begins and ends, so that the
weights of a layer need not be in memory before its turn comes. Between two programs only what flows from layer to layer
is on the device, and the gradients are in pinned host memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.nvme.array import on_disk
from jaxckpt.state import tree
from jaxckpt.state.memory import leaf_bytes
from jaxckpt.state.mesh import batch_sharding, replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState, step_key
from jaxckpt.update.disk_bucket import struct_of
from jaxckpt.update.gradients import split_microbatches
from jaxckpt.update.host import fetched
from jaxckpt.update.host_gradients import GradientBuffers, Scratch, Weights
from jaxckpt.update.parts import Bound, Leaves, Parts

Added = Callable[[Leaves, Leaves, jax.Array, jax.Array], tuple[Leaves, Leaves]]
"""(gradients, sums so far, whether these are the first, number of targets) -> (sums, their squares summed up, by path)"""


class PartPrograms:
    """The parts of a model as functions of lists without names, to be jitted apart; layers alike have programs alike."""

    def __init__(self, parts: Parts, plan: TrainState, batch: Any, *, key_of: Callable[[Any, Any], jax.Array]) -> None:
        """`batch`: of one forward pass. `key_of(step, number of the microbatch)` -> the key of its random streams."""
        self.parts, self.plan, self.batch = parts, plan, batch
        self.weights = {path: struct_of(x) for path, x in tree.flatten(plan.params).items()}
        """as they come to a program"""
        self._key_of, self._device = key_of, {p: shardings(x, "device") for p, x in self.weights.items()}
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        args = (plan.model_state, plan.step, batch, scalar)
        self.entered = self._placed(jax.eval_shape(self.enter, self.given(parts.embed), *args))
        """x of the first layer, context and random streams, abstract"""
        x, context, _ = self.entered
        xs = [x]
        for i, names in enumerate(parts.layers):
            rest = (plan.model_state, plan.step, scalar, xs[-1], context)
            xs.append(self._placed(jax.eval_shape(self.forward(i), self.given(names), *rest)))
        self.xs = xs
        """x of each layer, and of the head"""

    def given(self, names: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
        return [self.weights[path] for path in names]

    def enter(self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any) -> Any:
        return self._bound(model_state, step, number).embed(self.there(self.parts.embed, weights), batch)

    def forward(self, i: int) -> Callable[..., Any]:
        def forward(weights: list[Any], model_state: Any, step: Any, number: Any, x: Any, context: Any) -> Any:
            own = self.there(self.parts.layers[i], weights)
            return self._bound(model_state, step, number).layer(i, own, x, context)

        return forward

    def leave(
        self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any, x: Any, streams: Any
    ) -> tuple[jax.Array, jax.Array]:
        bound = self._bound(model_state, step, number)
        return bound.head(self.there(self.parts.head, weights), x, batch, streams)

    def backward(self, i: int) -> Callable[..., Any]:
        def backward(
            weights: list[Any], model_state: Any, step: Any, number: Any, x: Any, dx: Any, context: Any
        ) -> tuple[Leaves, Any]:
            """(gradients of the layer's weights, of x)"""
            own, bound = self.there(self.parts.layers[i], weights), self._bound(model_state, step, number)
            _, pull = jax.vjp(lambda weights, x: bound.layer(i, weights, x, context), own, x)
            grads, dx = pull(dx)
            return self.apart(grads), dx

        return backward

    def leave_backward(
        self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any, x: Any, streams: Any
    ) -> tuple[jax.Array, jax.Array, Leaves, Any]:
        """(sum of losses, number of targets, gradients of the weights that the head reads, of x)"""
        bound = self._bound(model_state, step, number)
        run = lambda weights, x: bound.head(weights, x, batch, streams)
        total, pull, count = jax.vjp(run, self.there(self.parts.head, weights), x, has_aux=True)
        grads, dx = pull(jnp.ones_like(total))
        total, count = jax.lax.optimization_barrier((total, count))
        return total, count, self.apart(grads), dx

    def enter_backward(
        self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any, dx: Any, shared: Leaves
    ) -> Leaves:
        """The gradients of the embedding; `shared`: what the head has of them."""
        bound = self._bound(model_state, step, number)
        _, pull = jax.vjp(lambda weights: bound.embed(weights, batch)[0], self.there(self.parts.embed, weights))
        (grads,) = pull(dx)
        return self.apart({p: g + shared[p] if p in shared else g for p, g in grads.items()})

    def apart(self, grads: Leaves) -> Leaves:
        """Sharded like their parameters, and behind a barrier: what comes after does not change their bits."""
        return jax.lax.optimization_barrier(
            {p: jax.lax.with_sharding_constraint(g, self._device[p]) for p, g in grads.items()}
        )

    def there(self, names: Sequence[str], weights: list[Any]) -> Leaves:
        return fetched(dict(zip(names, weights, strict=True)), self.weights, [])

    def _bound(self, model_state: Any, step: Any, number: Any) -> Bound:
        return self.parts.bind(model_state, self._key_of(step, number))

    def _placed(self, found: Any) -> Any:
        """Abstract arrays with shardings: what has the rows of the batch in front is cut like it, all else is whole."""
        mesh = self.plan.step.sharding.mesh
        count, rows = jax.tree.leaves(self.batch)[0].shape[0], batch_sharding(mesh)
        is_divisible = count % math.prod(mesh.shape[axis] for axis in rows.spec[0]) == 0

        def place(x: Any) -> jax.ShapeDtypeStruct:
            is_cut = is_divisible and bool(x.ndim) and x.shape[0] == count and not _is_key(x)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows if is_cut else replicated(mesh))

        return jax.tree.map(place, found)


class LayerGradients(GradientBuffers):
    """Gradients as `HostGradients` has them, by the programs of the parts; used like it, with `weights` turn by turn."""

    def __init__(
        self,
        parts: Parts,
        microbatch: Any,
        added: Added,
        norm: Callable[[Leaves, Any], jax.Array],
        seed: int,
        *buffers: Any,
    ) -> None:
        """`buffers`: the arguments of GradientBuffers. `norm(squares of all gradients, number of targets)`."""
        super().__init__(*buffers)
        key_of = lambda step, number: jax.random.fold_in(step_key(seed, step), number)
        self._programs = PartPrograms(parts, self.plan, microbatch, key_of=key_of)
        self._parts, self._added, self._norm = parts, added, norm
        layers = list(parts.layers)
        order = [parts.embed, *layers, parts.head, *reversed(layers), parts.embed]
        self.visits = visits_of(self.plan, order) * self.microbatches
        """the weights on disk that each program of a step wants, in order"""
        kept = (self._programs.xs, self._programs.entered[1:])
        self.activation_bytes = sum(
            leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(kept) if not _is_key(x)
        )
        """of each device, between two programs at the most"""

    def trace(self) -> dict[str, jax.stages.Traced]:
        """By name; in a name "what/which" the first part says what it is."""
        run, plan, parts = self._programs, self.plan, self._parts
        x, context, streams = run.entered
        total, count, _ = self.sums_plan
        number, of_step = self.number_plan, (plan.model_state, plan.step)
        head = [p for p in parts.head if p not in parts.embed]
        shared = {p: self._struct(p) for p in parts.head if p in parts.embed}
        traced = {
            "embedding": traced_apart(self._enter, (run.given(parts.embed), *of_step, self.batch, number), run.entered),
            "head": traced_apart(
                self._leave,
                (run.given(parts.head), *of_step, self.batch, number, run.xs[-1], streams, (total, count), self._sums(head)),
                ((total, count), self._squares(head), self._sums(head), shared, run.xs[-1]),
                donated=8,
            ),
            "embedding, backward": traced_apart(
                self._enter_backward,
                (run.given(parts.embed), *of_step, self.batch, number, x, shared, count, self._sums(parts.embed)),
                (self._squares(parts.embed), self._sums(parts.embed)),
                donated=8,
            ),
            "norm": traced_apart(self._norm, ({p: total for p in self.grads_plan}, count), total),
        }  # fmt: skip
        for i, names in enumerate(parts.layers):
            given = (run.given(names), *of_step, number, run.xs[i])
            traced[f"layer/{i}"] = traced_apart(run.forward(i), (*given, context), run.xs[i + 1])
            traced[f"layer, backward/{i}"] = traced_apart(
                self._backward(i),
                (*given, run.xs[i + 1], context, count, self._sums(names)),
                (self._squares(names), self._sums(names), run.xs[i]),
                donated=8,
            )
        return traced

    def run(
        self,
        programs: Mapping[str, Any],
        params: Any,
        model_state: Any,
        step: Any,
        batch: Any,
        scratch: Scratch,
        weights: Weights,
    ) -> tuple[Any, dict[str, Any]]:
        """As `HostGradients.run`."""
        numbers, (total, count, _), grads = scratch
        flat, grads, squares = tree.flatten(params), dict(grads), {}
        parts, of_step, turn = self._parts, (model_state, step), 0
        head = [p for p in parts.head if p not in parts.embed]
        sums_of = lambda names: [grads.pop(p) for p in names]

        def call(name: str, names: Sequence[str], *rest: Any) -> Any:
            nonlocal turn
            taken = weights.take(turn)
            result = programs[name]([taken.get(f"params/{p}", flat[p]) for p in names], *rest)
            # Not the sums of gradients: the next microbatch may have used them up before anybody waits for them.
            weights.release(turn, result[0] if isinstance(result, tuple) else result)
            turn += 1
            return result

        def keep(names: Sequence[str], found: list[Any], sums: list[Any]) -> None:
            squares.update(zip(names, found, strict=True))
            grads.update(zip(names, sums, strict=True))

        for number in numbers:
            x, context, streams = call("embedding", parts.embed, *of_step, batch, number)
            xs = []
            for i, names in enumerate(parts.layers):
                xs.append(x)
                x = call(f"layer/{i}", names, *of_step, number, x, context)
            given = (*of_step, batch, number, x, streams, (total, count), sums_of(head))
            (total, count), found, sums, shared, dx = call("head", parts.head, *given)
            keep(head, found, sums)
            for i, names in reversed(list(enumerate(parts.layers))):
                given = (*of_step, number, xs.pop(), dx, context, count, sums_of(names))
                found, sums, dx = call(f"layer, backward/{i}", names, *given)
                keep(names, found, sums)
            given = (*of_step, batch, number, dx, shared, count, sums_of(parts.embed))
            keep(parts.embed, *call("embedding, backward", parts.embed, *given))
        in_order = {path: grads[path] for path in self.grads_plan}
        return (total, count, programs["norm"]({path: squares[path] for path in in_order}, count)), in_order

    # ------------------------------------------------------------------------------------------------ the programs

    def _enter(self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any) -> Any:
        return self._programs.enter(weights, model_state, step, self._rows(batch, number), number)

    def _leave(
        self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any, x: Any, streams: Any, sums: Any,
        old: list[Any],
    ) -> Any:  # fmt: skip
        rows = self._rows(batch, number)
        total, count, grads, dx = self._programs.leave_backward(weights, model_state, step, rows, number, x, streams)
        shared = {p: grads.pop(p) for p in list(grads) if p in self._parts.embed}
        sums = (sums[0] + total, sums[1] + count)
        return sums, *self._add(grads, old, number, sums[1]), shared, dx

    def _backward(self, i: int) -> Callable[..., Any]:
        backward = self._programs.backward(i)

        def run(
            weights: list[Any], model_state: Any, step: Any, number: Any, x: Any, dx: Any, context: Any, count: Any,
            old: list[Any],
        ) -> Any:  # fmt: skip
            grads, dx = backward(weights, model_state, step, number, x, dx, context)
            return *self._add(grads, old, number, count), dx

        return run

    def _enter_backward(
        self, weights: list[Any], model_state: Any, step: Any, batch: Any, number: Any, dx: Any, shared: Leaves,
        count: Any, old: list[Any],
    ) -> Any:  # fmt: skip
        rows = self._rows(batch, number)
        grads = self._programs.enter_backward(weights, model_state, step, rows, number, dx, shared)
        return self._add(grads, old, number, count)

    def _add(self, grads: Leaves, old: list[Any], number: Any, count: Any) -> tuple[list[Any], list[Any]]:
        """(the squares of the gradients' sums, the sums in host memory), in the order of `grads`."""
        sums, squares = self._added(grads, dict(zip(grads, old, strict=True)), number == 0, count)
        away = [jax.device_put(sums[p], self.grads_plan[p].sharding) for p in grads]
        return [squares[p] for p in grads], away

    def _rows(self, batch: Any, number: Any) -> Any:
        """The microbatch."""
        if self.microbatches == 1:
            return batch
        return jax.tree.map(lambda x: x[number], split_microbatches(batch, self.batch, self.microbatches))

    def _sums(self, names: Sequence[str]) -> list[Any]:
        return [self.grads_plan[p] for p in names]

    def _squares(self, names: Sequence[str]) -> list[Any]:
        return [self.sums_plan[0] for _ in names]

    def _struct(self, path: str) -> jax.ShapeDtypeStruct:
        x = self._programs.weights[path]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings(x, "device"))


def visits_of(plan: TrainState, order: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of the weights that programs want in this order, those on disk, by path in the whole state."""
    found = on_disk(tree.flatten(plan.params))
    return [[f"params/{path}" for path in names if path in found] for names in order]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def traced_apart(f: Callable[..., Any], arguments: tuple[Any, ...], results: Any, *, donated: int | None = None) -> Any:
    """`f` jitted and traced for abstract arguments and results, whose shardings say where they lie."""
    donate = () if donated is None else (donated,)
    jitted = jax.jit(
        f,
        in_shardings=shardings(arguments),
        out_shardings=shardings(results),
        donate_argnums=donate,
        keep_unused=bool(donate),  # buffers that are overwritten unread, and must be there to be written
    )
    return jitted.trace(*arguments)
