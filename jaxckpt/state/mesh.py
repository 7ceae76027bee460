"""The device mesh: axes `data` (replicas), `fsdp` (sharded parameters), `tensor` (sharded heads and widths)."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import PlanError

BATCH_AXES = ("data", "fsdp")


def make_mesh(*, data: int = 1, fsdp: int = -1, tensor: int = 1) -> Mesh:
    """A mesh over all devices of all processes; at most one size is -1 and takes the devices left over."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    known = math.prod(n for n in sizes.values() if n != -1)
    devices = jax.device_count()
    text = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
    if list(sizes.values()).count(-1) > 1 or any(n < 1 and n != -1 for n in sizes.values()):
        raise PlanError(f"mesh {text}: sizes must be positive, and at most one of them -1 (the devices left over).")
    if known == 0 or devices % known or (-1 not in sizes.values() and known != devices):
        raise PlanError(
            f"mesh {text} needs {'a multiple of ' if -1 in sizes.values() else ''}{known} devices and there are {devices} "
            f"({jax.default_backend()}, {jax.process_count()} process(es)). Change mesh.data, mesh.fsdp or mesh.tensor, "
            "or set one of them to -1."
        )
    shape = {axis: n if n != -1 else devices // known for axis, n in sizes.items()}
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes, everything else replicated."""
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape) or (mesh.axis_names[0],)
    return NamedSharding(mesh, P(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())
