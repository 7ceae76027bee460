"""The smallest models, loss and data that exercise a whole training step; shared by several test files."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from jaxckpt.state.mesh import batch_sharding
from jaxckpt.state.plan import Placement, make_plan, shardings, unannotated
from jaxckpt.state.train_state import take_apart
from jaxckpt.update.step import make_train_step

# b batch, t position, i input width, o output width
IN, OUT, LENGTH = 8, 4, 3


class Mlp(nnx.Module):
    """Two layers, with dropout and batch statistics if wanted."""

    def __init__(self, rngs, *, width=16, dropout=0.0, has_norm=False):
        self.inner = nnx.Linear(IN, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if has_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.outer = nnx.Linear(width, OUT, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.inner(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.outer(self.dropout(x))


def squared_error(model, batch):
    """Sum over the positions with mask 1, and their number."""
    error = jnp.square(model(batch["x"]) - batch["y"]).sum(-1)
    return (error * batch["mask"]).sum(), batch["mask"].sum()


def example(i):
    rng = np.random.default_rng((5, int(i)))
    x = rng.normal(size=(LENGTH, IN)).astype(np.float32)
    mask = (np.arange(LENGTH) < 1 + rng.integers(LENGTH)).astype(np.int32)
    return {"x": x, "y": np.tanh(x[:, :OUT]), "mask": mask}


class Examples:
    """Random access to n examples; example i is a function of i, or `make(i)`."""

    def __init__(self, n=64, make=example):
        self.n, self.make = n, make

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(i)


def batch_of(first, rows):
    """The examples [first, first + rows) as one numpy batch."""
    return jax.tree.map(lambda *xs: np.stack(xs), *[example(first + i) for i in range(rows)])


def mesh_of(**axes):
    """A mesh of the first devices, as many as the axes ask for."""
    axes = {"data": 1, "fsdp": 1, "tensor": 1, **axes}
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3, devices=devices)


def make_step(
    build, tx, *, mesh=None, rows=8, seed=0, rules=(), placement=None, compute_dtype=None, loss=squared_error, **args
):
    """(jitted step, freshly initialised state, plan, model)."""
    mesh = mesh if mesh is not None else mesh_of()
    placement = placement or Placement()
    model, abstract, init = take_apart(build, tx, seed=seed, compute_dtype=compute_dtype)
    plan = make_plan(abstract, mesh, rules=rules, annotations=model.annotations, placement=placement)
    rows_sharding = batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_sharding), batch_of(0, rows))
    step = make_train_step(
        model,
        loss,
        tx,
        plan,
        batch,
        seed=seed,
        compute_dtype=compute_dtype,
        gathered=unannotated(plan, rules, model.annotations),
        placement=placement,
        **args,
    )
    return step, jax.jit(init, out_shardings=shardings(plan))(), plan, model


def on_mesh(batch, mesh):
    return jax.device_put(batch, batch_sharding(mesh))


def to_numpy(tree):
    """Every leaf as a numpy array; random keys as their words."""
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.asarray(words(x)), tree)


def differing(a, b):
    """Paths of the leaves of two trees whose bits differ."""
    a, b = (jax.tree_util.tree_leaves_with_path(to_numpy(t)) for t in (a, b))
    assert [p for p, _ in a] == [p for p, _ in b]
    same = lambda x, y: x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return [jax.tree_util.keystr(p) for (p, x), (_, y) in zip(a, b, strict=True) if not same(x, y)]
