"""How a step of many programs compiles and calls them."""

from typing import Any

import jax
import numpy as np


class Compiler:
    """Compiles traced programs, those that are alike once: buckets, layers."""

    def __init__(self, options: Any = None) -> None:
        self._options = options
        self._made: dict[Any, Any] = {}

    def __call__(self, traced: jax.stages.Traced) -> Any:
        key = kind_of(traced)
        if key not in self._made:
            self._made[key] = traced.lower().compile(self._options)
        return self._made[key]

    @property
    def programs(self) -> list[Any]:
        """All that were compiled."""
        return list(self._made.values())


def kind_of(traced: jax.stages.Traced) -> Any:
    """What tells two programs apart: operations, constants, and where everything lies."""
    constants = tuple((np.shape(x), np.asarray(x).tobytes()) for x in traced.jaxpr.consts)
    placed = str((jax.tree.map(str, traced.args_info), traced.out_info))
    return str(traced.jaxpr), constants, placed


def in_turn(results: Any) -> Any:
    """The results of one of the programs of a step; on the CPUs of several processes not before they are there.

    There the programs under way share a pool of threads and wait in it for the other processes, which may have begun with
    another one of them. A GPU runs them one after the other.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.block_until_ready(results)
    return results
