"""A model as a list of layers: what is needed to run them one by one, each with its weights fetched for the moment."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

X = Any
"""what flows from layer to layer: a pytree of floating-point arrays, of any shapes; its gradient flows back"""
Context = Any
"""what every layer gets and no gradient flows into (position angles, segment ids): a pytree that may hold None"""


@dataclass(frozen=True)
class Layers:
    """The parts of a Flax NNX model whose layers stand in an nnx.List, as plain functions. It is a loss, too.

    Parameters placed off the device are fetched a layer at a time, forward and again backward, which needs the model in
    parts. `embed` and `head` see the model without its layers (asking for one is an error); a weight that both use, such
    as a tied embedding, gets the sum of both gradients. A layer sees itself, `x` and the context alone: it may draw from
    its own random streams, and hold no state but these and its weights. `head` returns what a loss returns, (sum over
    targets, number of targets).
    """

    embed: Callable[[Any, Any], tuple[X, Context]]
    """(model, batch) -> x of the first layer, context"""
    layer: Callable[[Any, X, Context], X]
    """(one layer, x, context) -> x of the next"""
    head: Callable[[Any, X, Any], tuple[jax.Array, jax.Array]]
    """(model, x of the last layer, batch) -> (sum of losses, number of targets)"""
    path: str = "layers"
    """where the nnx.List of layers lies in the model, '/' between attributes"""

    def __call__(self, model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The loss of the whole model: the parts one after the other, for training on the device and for evaluation."""
        x, context = self.embed(model, batch)
        x = rounded(x)
        for layer in reduce(getattr, self.path.split("/"), model):
            x = rounded(self.layer(layer, x, context))
        return self.head(model, x, batch)


def rounded(x: X) -> X:
    """The bfloat16 arrays of `x` as bfloat16 holds them, also to whoever reads them within the same compiled program.

    XLA leaves out the conversions between a float32 sum in bfloat16 and the next float32 product, and so a layer would read
    other bits than it finds where x has been in memory: where the layer is computed again, or is a program of its own.
    """
    bits = jnp.finfo(jnp.bfloat16)
    cut = lambda x: jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant).astype(x.dtype)
    # Not float16: `reduce_precision` would make zeros of its smallest numbers.
    return jax.tree.map(lambda x: cut(x) if x.dtype == jnp.bfloat16 else x, x)
