"""The loss on data that is not trained on, without any change to training."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxckpt.data.stream import BatchStream
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.layered_eval import DiskEvalStep


class Evaluation:
    """Every `every` steps, over the same batches of `held_out` each time: `batches`, or as many as it has."""

    def __init__(
        self, held_out: Any, eval_fn: Any, *, every: int, batches: int, global_batch: int, sharding: NamedSharding
    ) -> None:
        self._eval_fn, self._every = eval_fn, every
        self._stream = BatchStream(held_out, global_batch=global_batch, sharding=sharding, identity={})
        self._batches = max(1, min(batches, len(held_out) // global_batch))

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def loss(self, state: TrainState) -> float:
        """The mean over the targets of all batches."""
        self._stream.rewind()
        sums = [self._eval_fn(state.params, state.model_state, next(self._stream)) for _ in range(self._batches)]
        self._stream.close()
        totals, counts = zip(*jax.device_get(sums), strict=True)
        return math.fsum(float(t) for t in totals) / (math.fsum(float(c) for c in counts) or 1.0)

    def close(self) -> None:
        self._stream.close()
        if isinstance(self._eval_fn, DiskEvalStep):
            self._eval_fn.close()
