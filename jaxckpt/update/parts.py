"""A model taken apart into the functions of `Layers`, each of its own weights: what runs a layer at a time needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from jaxckpt.errors import PlanError, listed
from jaxckpt.models.layers import Layers, rounded
from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import Model, TrainState
from jaxckpt.update.dataflow import Program
from jaxckpt.update.gradients import checked_loss

Leaves = dict[str, jax.Array]


@dataclass(frozen=True)
class Parts:
    """Which weights each part of the model reads, by their paths; and how the parts are run."""

    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    """weights outside the layers that the head reads"""
    embed: tuple[str, ...]
    """all others, those that the head reads too among them"""
    count_dtype: Any
    """of the number of targets that the head returns"""
    bind: Callable[[Any, jax.Array], "Bound"]
    """(model state, key) -> the parts for one forward and backward pass, see `Model.bind`; call it under the trace"""


@dataclass(frozen=True)
class Bound:
    """The parts with the random streams of one pass. `weights` are arrays on the device by path."""

    names: tuple[tuple[str, ...], ...]
    """the weights of each layer"""
    embed: Callable[[Leaves, Any], tuple[Any, Any, Any]]
    """(weights, batch) -> x, context, the streams as the embedding left them"""
    layer: Callable[[int, Leaves, Any, Any], Any]
    """(number, weights, x, context) -> x"""
    head: Callable[[Leaves, Any, Any, Any], tuple[jax.Array, jax.Array]]
    """(weights, x, batch, streams) -> (sum of losses, number of targets)"""


def make_parts(
    model: Model,
    layers: Layers,
    plan: TrainState,
    batch: Any,
    gathered: frozenset[str],
    *,
    is_training: bool = True,
) -> Parts:
    """The parts of `model`, for states laid out as `plan` and one microbatch like `batch` (ShapeDtypeStructs).

    Parameters whose path is in `gathered` are made whole before the model sees them, see `make_forward`. Raises PlanError
    with all that keeps the model from running a layer at a time.
    """
    mesh = plan.step.sharding.mesh
    device = tree.flatten(shardings(plan.params, "device"))
    whole = {path: replicated(mesh) if path in gathered else sharding for path, sharding in device.items()}

    def bind(model_state: Any, key: jax.Array) -> Bound:
        module = model.bind(plan.params, model_state, key)
        if not is_training:
            module.eval()
        pieces = [_Piece(layer, f"{layers.path}/{i}") for i, layer in enumerate(_take_layers(module, layers.path))]
        rest = _Piece(module, "")
        _check_apart([*pieces, rest], plan)

        def call(piece: _Piece, weights: Leaves, f: Callable[[Any], Any], streams: Any = None) -> Any:
            weights = {path: jax.lax.with_sharding_constraint(x, whole[path]) for path, x in weights.items()}
            # A variable made anew in the pass must look like the one that `take_apart` made.
            with nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return piece.run(weights, f, streams)

        def embed(weights: Leaves, batch: Any) -> tuple[Any, Any, Any]:
            (x, context), streams = call(rest, weights, lambda m: layers.embed(m, batch))
            _check_floating(x, f"x of {layers.path}/0")
            return rounded(x), context, streams

        def layer(i: int, weights: Leaves, x: Any, context: Any) -> Any:
            x, _ = call(pieces[i], weights, lambda m: layers.layer(m, x, context))
            _check_floating(x, f"what {layers.path}/{i} returns")
            return rounded(x)

        def head(weights: Leaves, x: Any, batch: Any, streams: Any) -> tuple[jax.Array, jax.Array]:
            loss = lambda module, batch: layers.head(module, x, batch)
            return call(rest, weights, lambda m: checked_loss(loss, m, batch), streams)[0]

        return Bound(tuple(tuple(piece.names("params")) for piece in pieces), embed, layer, head)

    return _parts(bind, plan, batch)


def _parts(bind: Callable[[Any, jax.Array], Bound], plan: TrainState, batch: Any) -> Parts:
    """Which weights embed and head read, from their jaxprs; every layer is run once on the way, as shapes."""
    params, model_state, batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (tree.flatten(plan.params), plan.model_state, batch)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    names: list[tuple[tuple[str, ...], ...]] = []
    jax.eval_shape(lambda *args: names.append(bind(*args).names), model_state, key)
    inside = [{name: params.pop(name) for name in own} for own in names[0]]
    outside = params

    def enter(weights: Leaves, model_state: Any, batch: Any, key: jax.Array) -> Any:
        x, context, streams = bind(model_state, key).embed(weights, batch)
        return x, streams, context

    def run(weights: list[Leaves], x: Any, context: Any, model_state: Any, key: jax.Array) -> Any:
        bound = bind(model_state, key)
        for i, own in enumerate(weights):
            x = bound.layer(i, own, x, context)
        return x

    def leave(weights: Leaves, x: Any, streams: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        return bind(model_state, key).head(weights, x, batch, streams)

    entered, (x, streams, context) = jax.make_jaxpr(enter, return_shape=True)(outside, model_state, batch, key)
    _check_context(entered, list(outside), context)
    x = jax.eval_shape(run, inside, x, context, model_state, key)
    left, (_, count) = jax.make_jaxpr(leave, return_shape=True)(outside, x, streams, model_state, batch, key)
    used_by_embed, used_by_head = _used(entered, list(outside)), _used(left, list(outside))
    only_head = used_by_head - used_by_embed
    return Parts(
        names[0],
        tuple(name for name in outside if name in used_by_head),
        tuple(name for name in outside if name not in only_head),
        count.dtype,
        bind,
    )


class _Piece:
    """One module of the bound model, apart from the others: its structure, its weights' names, its streams."""

    def __init__(self, module: nnx.Module, prefix: str) -> None:
        self.prefix = f"{prefix}/" if prefix else ""
        self.graphdef, params, streams, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
        self.params, self.streams = nnx.to_pure_dict(params), nnx.to_pure_dict(streams)
        self.state = nnx.to_pure_dict(state)

    def names(self, group: str) -> list[str]:
        return [f"{self.prefix}{path}" for path in tree.flatten(getattr(self, group))]

    def run(self, weights: Leaves, f: Callable[[Any], Any], streams: Any) -> tuple[Any, Any]:
        """(what `f` makes of the live module, the streams after it). `weights` may lack what the result does not need."""
        value = lambda path, x: weights[path] if path in weights else jnp.zeros(x.shape, x.dtype)
        values = tree.map_with_path(lambda path, x: value(self.prefix + path, x), self.params)
        module = nnx.merge(self.graphdef, values, self.streams if streams is None else streams, self.state)
        result = f(module)
        after = nnx.to_pure_dict(nnx.state(module, nnx.RngState))
        state = Model(self.graphdef, None, {}).unbind(module)
        before = tree.flatten(self.state)
        changed = [f"{self.prefix}{path}" for path, x in tree.flatten(state).items() if x is not before.get(path)]
        if changed:
            raise PlanError(
                "a model that is run a layer at a time, forward and again backward, cannot change state in the pass (batch "
                f"statistics); it changes:\n{listed(changed)}\nUse a layer without such state, or place params on the device."
            )
        return result, after


class _Absent:
    """Stands where the list of layers stood, and says so to whoever wants a layer of it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _refuse(self, *_: Any) -> NoReturn:
        raise PlanError(
            f"embed and head of `Layers` run without the model's layers, and one of them reads '{self._path}'. Move what "
            "needs a layer's weights into `layer`, or place params on the device."
        )

    __getitem__ = __iter__ = __len__ = __call__ = __bool__ = _refuse


def _take_layers(module: nnx.Module, path: str) -> list[Any]:
    """The layers, which are taken out of the module."""
    *parents, name = path.split("/")
    try:
        parent = reduce(getattr, parents, module)
        found = getattr(parent, name)
    except AttributeError:
        raise PlanError(
            f"the model {type(module).__name__} has no '{path}': `Layers.path` must say where its nnx.List of layers lies. A "
            "model without one (such as a Linen module) needs params on the device."
        ) from None
    if not isinstance(found, nnx.List | list | tuple) or not all(isinstance(x, nnx.Module) for x in found):
        raise PlanError(
            f"'{path}' of the model is a {type(found).__name__}, and its layers must stand in an nnx.List, one module each, to "
            "be fetched one by one. Layers stacked for a scan cannot: set scan_layers to False (model.scan_layers) for a "
            "Llama, or place params on the device."
        )
    setattr(parent, name, nnx.static(_Absent(path)))
    return list(found)


def _check_apart(pieces: list[_Piece], plan: TrainState) -> None:
    """Every variable belongs to one part: each part's own list must be what the whole model's paths say."""
    groups = {"params": plan.params, "state": plan.model_state}
    problems = []
    for group, whole in groups.items():
        known = set(tree.flatten(whole))
        problems += [name for piece in pieces for name in piece.names(group) if name not in known]
    seen: dict[int, str] = {}
    for piece in pieces:
        for path, x in tree.flatten(piece.streams).items():
            first = seen.setdefault(id(x), piece.prefix)
            problems += [f"{piece.prefix}{path}"] if first != piece.prefix else []
    if problems:
        raise PlanError(
            "a layer that is fetched by itself cannot share weights, state or random streams with the rest of the model; "
            f"shared are:\n{listed(problems)}\nGive each layer its own, or place params on the device."
        )


def _check_floating(x: Any, what: str) -> None:
    odd = [f"{p or 'x'}: {a.dtype}" for p, a in _flat(x) if not jnp.issubdtype(a.dtype, jnp.inexact)]
    if odd:
        raise PlanError(
            f"{what} must be floating-point; found:\n{listed(odd)}\nPut these into the context of `Layers`."
        )


def _check_context(entered: Any, weights: list[str], context: Any) -> None:
    program = Program(entered)
    names = [f"context/{path}" for path, _ in _flat(context)]
    problems = []
    for name, output in zip(names, program.outputs[len(program.outputs) - len(names) :], strict=True):
        _, needed = program.part([output], frozenset())
        problems += [f"{name} needs {weights[i]}" for i in sorted(needed) if i < len(weights)]
    if problems:
        raise PlanError(
            "no gradient flows into the context of `Layers`, so it cannot come from weights:\n"
            f"{listed(problems)}\nLet it flow through x, or place params on the device."
        )


def _used(closed: Any, weights: list[str]) -> set[str]:
    program = Program(closed)
    _, needed = program.part(program.outputs, frozenset())
    return {weights[i] for i in needed if i < len(weights)}


def _flat(x: Any) -> Iterator[tuple[str, Any]]:
    yield from ((tree.path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(x))
