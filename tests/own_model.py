"""A user's own model, loss, data and optimizer, named from a configuration."""

import grain
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, width, rngs=rngs)
        self.out = nnx.Linear(width, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.sum(), losses.size


def explodes_at_step_5(model, batch):
    """Not finite for the batch that holds example 70 of 16 a step."""
    total, count = loss(model, batch)
    return jnp.where((batch["number"] == 70).any(), jnp.inf, 1.0) * total, count


def examples(count: int) -> grain.MapDataset:
    def example(i):
        x = np.random.default_rng(i).normal(size=8).astype(np.float32)
        return {"x": x, "y": np.int32(x.argmax() // 2), "number": np.int32(i)}

    return grain.MapDataset.range(count).map(example)


def unrepeatable(count: int) -> grain.MapDataset:
    return grain.MapDataset.range(count).map(
        lambda i: {"x": np.random.normal(size=8).astype(np.float32), "y": np.int32(i % 4)}
    )


def generator(count: int):
    return ({"x": np.zeros(8, np.float32), "y": np.int32(i % 4)} for i in range(count))


def optimizer(learning_rate, *, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum)
