"""The training state: what a step consumes and returns, and what a snapshot holds."""

import difflib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import PlanError
from jaxckpt.state import tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: Any
    """int32[], updates done"""
    params: Any
    """what the forward pass reads; in the compute dtype where there are master weights"""
    master: Any
    """float32 weights that the optimizer updates, of the structure of `params`; None where `params` are updated directly"""
    opt_state: Any
    """the optax state of the weights that are updated"""
    model_state: Any
    """variables of the model that are not trained (batch statistics); random streams are no state, see `Model.bind`"""


@dataclass(frozen=True)
class Model:
    """A Flax NNX model taken apart: its static structure, and how to put it together again inside a step."""

    graphdef: Any
    streams: Any
    """the abstract random streams of the model: keys and counters"""
    annotations: dict[str, P]
    """partition specs that the model itself gives its parameters, by parameter path"""

    def bind(self, params: Any, model_state: Any, key: jax.Array) -> nnx.Module:
        """The live module. Every random stream starts afresh from `key` and the stream's own path, so what a step
        draws depends on nothing that an earlier step did."""
        streams = tree.map_with_path(lambda path, x: _fresh_stream(path, x, key), self.streams)
        return nnx.merge(self.graphdef, params, streams, model_state)

    def unbind(self, module: nnx.Module) -> Any:
        """The model state after a forward pass. Raises PlanError where the pass changed the module in a way that the
        training state does not hold, and that a resumed run would therefore not see."""
        nnx.pop(module, nnx.Intermediate)  # what `sow` collected is output, not state
        graphdef, _, _, model_state = _split(module)
        if graphdef != self.graphdef:
            raise PlanError(
                "the model changed its own structure in the forward pass, and a resumed run would not see that:\n"
                f"{_differing_lines(self.graphdef, graphdef)}\n"
                "Keep what changes in an nnx.Variable made in __init__, instead of a plain attribute."
            )
        return nnx.to_pure_dict(model_state)


def take_apart(
    build: Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    *,
    seed: int,
    compute_dtype: Any = None,
) -> tuple[Model, TrainState, Callable[[], TrainState]]:
    """(model, abstract state, init) without allocating anything; jit `init` with the plan's shardings.

    Where `compute_dtype` is narrower than a float32 parameter, `params` hold the cast copy and `master` the original.
    """
    static: dict[str, Any] = {}

    def build_state() -> tuple[TrainState, Any]:
        # Eager sharding would want a mesh here; the plan shards later, and needs only the annotations.
        with nnx.use_eager_sharding(False):
            module = build(nnx.Rngs(seed))
        if not isinstance(module, nnx.Module):
            raise PlanError(
                f"the model must be a flax.nnx.Module (wrap a Linen one in flax.nnx.bridge.ToNNX); found {type(module).__name__}"
            )
        module.train()
        graphdef, params, streams, model_state = _split(module)
        static.update(graphdef=graphdef, specs=nnx.to_pure_dict(nnx.get_partition_spec(params)))
        weights = nnx.to_pure_dict(params)
        if not jax.tree.leaves(weights):
            raise PlanError("the model has no parameters (nnx.Param); a Linen model needs nnx.bridge.lazy_init first")
        params, master = narrow(weights, compute_dtype)
        state = TrainState(jnp.zeros((), jnp.int32), params, master, tx.init(weights), nnx.to_pure_dict(model_state))
        return state, nnx.to_pure_dict(streams)

    abstract, streams = jax.eval_shape(build_state)
    annotations = {path: spec for path, spec in tree.flatten(static["specs"]).items() if any(spec)}
    return Model(static["graphdef"], streams, annotations), abstract, lambda: build_state()[0]


def narrow(weights: Any, compute_dtype: Any) -> tuple[Any, Any]:
    """(params, master): the weights in the compute dtype and the weights themselves, or (weights, None) if they agree."""
    if compute_dtype is None:
        return weights, None
    dtype = jnp.dtype(compute_dtype)
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    params = jax.tree.map(cast, weights)
    same = all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(weights), strict=True))
    return (weights, None) if same else (params, weights)


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of one update: a function of (seed, step) alone, so it is no state."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"train step")), step)


def _split(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    graphdef, params, streams, model_state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return graphdef, params, streams, model_state


def _fresh_stream(path: str, x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, x.dtype)  # the stream's counter
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.split(key, x.shape) if x.shape else key


def _differing_lines(before: Any, after: Any) -> str:
    by_attribute = lambda graphdef: repr(graphdef).replace("), ('", "),\n('").splitlines()
    diff = difflib.unified_diff(by_attribute(before), by_attribute(after), n=0, lineterm="")
    changed = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(f"  {line}" for line in changed[:40])
