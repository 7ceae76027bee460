"""How many operations a traced step makes, counted from its jaxpr: of matrix products and convolutions, over all devices."""

import math
from collections.abc import Iterator
from typing import Any

import jax


def count_flops(jaxpr: Any) -> int:
    """Multiplications and additions of the products in a (closed) jaxpr; what a scan repeats counts as often.

    Of a `cond` the dearest branch counts, of a `while` one pass. All else (norms, the optimizer) is bound by memory and
    left out.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(eqn) for eqn in jaxpr.eqns)


def _of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // kernel[features]
    inner = [count_flops(j) for j in _jaxprs(eqn.params)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (eqn.params["length"] if name == "scan" else 1)


def _jaxprs(params: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value
