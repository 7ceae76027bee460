"""Versions and flags that can change the bits of a computation."""

import importlib.metadata
import os
import platform
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Of this process, as JSON."""
    names = ("jaxckpt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "grain", "numpy")
    device = jax.local_devices()[0]
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_processes": jax.process_count(),
        "num_devices": jax.device_count(),
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
