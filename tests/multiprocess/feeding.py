"""The data that the processes of `feeds.py` draw from, and the test that they are compared in."""

import grain
import jax
import numpy as np

from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.randomized import Randomized
from jaxckpt.data.stores import make_store_datasets
from jaxckpt.data.stream import BatchStream
from jaxckpt.distributed.sync import Group

ROWS = 8
SEQ_LEN = 31  # rows of 32 tokens, which two devices can share


def masked(example, rng):
    """A tenth of the tokens replaced by 255, which ones the example's own generator decides."""
    is_hidden = rng.random(example["tokens"].shape) < 0.1
    return {**example, "tokens": np.where(is_hidden, 255, example["tokens"]).astype(np.int32)}


def open_stream(stores, sharding):
    """Eight rows a batch of a packed mixture that changes its weights and skips two steps, with random masking."""
    sets = make_store_datasets(
        {"long": f"{stores}/long", "short": f"{stores}/short"},
        seq_len=SEQ_LEN,
        seed=3,
        rows="packed",
        weights={"long": 1, "short": 1},
        schedule=[(4, {"long": 1, "short": 3})],
    )
    data = Randomized(sets.train, masked, seed=3)
    return BatchStream(data, global_batch=ROWS, sharding=sharding, identity=sets.identity, skip=[(6, 7)])


def open_iterated(sharding):
    """Eight examples a batch, each process's own, in an order that only its iterator knows."""
    data = grain.MapDataset.range(100).map(lambda i: {"number": np.int32(i)})
    own = data[jax.process_index() :: jax.process_count()].repeat().to_iter_dataset()
    shuffled = grain.experimental.WindowShuffleIterDataset(own, window_size=9, seed=1)
    return IteratedStream(shuffled, global_batch=ROWS, sharding=sharding, group=Group(timeout_s=60), skip=[(3, 3)])
