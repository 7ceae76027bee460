"""Exactly resumable training for JAX and Flax, with state that can live off the device."""

from typing import TYPE_CHECKING, Any

from jaxckpt.errors import JaxckptError as JaxckptError

if TYPE_CHECKING:
    from jaxckpt.distributed.start import use_cpu_devices as use_cpu_devices
    from jaxckpt.models.layers import Layers as Layers
    from jaxckpt.models.layers import rounded as rounded
    from jaxckpt.observe.metrics import read_metrics as read_metrics
    from jaxckpt.observe.report import Report as Report
    from jaxckpt.run import Run as Run
    from jaxckpt.snapshot.snapshot import Snapshots as Snapshots
    from jaxckpt.state.mesh import make_mesh as make_mesh
    from jaxckpt.state.plan import Placement as Placement
    from jaxckpt.state.tree import flatten as flatten

_HOMES = {
    "Run": "jaxckpt.run",
    "Report": "jaxckpt.observe.report",
    "Snapshots": "jaxckpt.snapshot.snapshot",
    "Placement": "jaxckpt.state.plan",
    "Layers": "jaxckpt.models.layers",
    "rounded": "jaxckpt.models.layers",
    "make_mesh": "jaxckpt.state.mesh",
    "flatten": "jaxckpt.state.tree",
    "read_metrics": "jaxckpt.observe.metrics",
    "use_cpu_devices": "jaxckpt.distributed.start",
}


def __getattr__(name: str) -> Any:
    # Importing jax takes seconds, and `python -m jaxckpt config` or a refused configuration must not wait for it.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxckpt' has no attribute {name!r}")
