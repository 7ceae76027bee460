"""Whether a batch is a function of its number."""

import pickle
import random
from typing import Any

import jax
import numpy as np

from jaxckpt.data.batches import PyTree, paths_of
from jaxckpt.data.stream import BatchStream
from jaxckpt.errors import DataError


def check_reproducible(stream: BatchStream, batch: int) -> str | None:
    """Builds the batch `batch` twice and compares the bits; DataError if they differ.

    Returns a warning if they are equal although a global random generator was drawn from, else None.
    """
    before = _global_generators()
    first = stream.batch_at(batch)
    moved = [name for name, value in _global_generators().items() if value != before[name]]
    second = stream.batch_at(batch)
    way_out = (
        "Derive a generator from the number of the example, np.random.default_rng((seed, i)), "
        "or use random_map of grain.MapDataset, which hands one in."
    )
    if differing := _differing(first, second):
        cause = " and ".join(f"it uses {name}" for name in moved) or "an unknown source of randomness or state"
        raise DataError(
            f"the batch of step {batch + 1} is not a function of its number: built twice, "
            f"it differs in {', '.join(differing)}. Likely cause: {cause}. A resumed run would see other data. "
            f"{way_out}"
        )
    if moved:
        return (
            f"the data uses {' and '.join(moved)}. The batch of step {batch + 1} came out the same twice, "
            f"but another order of reading can change what it gives. {way_out}"
        )
    return None


def _global_generators() -> dict[str, Any]:
    return {
        "numpy's global random generator (np.random.*)": pickle.dumps(np.random.get_state(legacy=False)),
        "Python's random module": random.getstate(),
    }


def _differing(first: PyTree, second: PyTree) -> list[str]:
    """Paths of the fields whose bits differ (NaN equals itself)."""
    structure = jax.tree.structure(first)
    if structure != jax.tree.structure(second):
        return [f"its structure ({structure} and {jax.tree.structure(second)})"]
    pairs = zip(paths_of(structure), jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return [f"'{path}'" for path, a, b in pairs if (a.shape, a.dtype, a.tobytes()) != (b.shape, b.dtype, b.tobytes())]
