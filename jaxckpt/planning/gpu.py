"""Compiles with XLA's GPU compiler where there is no GPU, and reads the memory plan and the schedule of the result.

XLA needs no device to compile, only a description of one. The program is traced on CPU devices, which know the memory
kinds that descriptions of devices lack, and lowered for CUDA; a client that only compiles does the rest. JAX has no
public function for that last part: `_compile` holds all that is private.
"""

import math
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

import jax
import numpy as np

from jaxckpt.errors import PlanError
from jaxckpt.planning import hlo
from jaxckpt.planning.targets import Target, describe_for_xla


@dataclass(frozen=True)
class GpuPlan:
    """What the compiler has planned for each device; all sizes in bytes a device, copies a step."""

    target: str
    devices: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """of outputs that take the place of arguments"""
    temp_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_alias_bytes: int
    host_temp_bytes: int
    host: hlo.HostUse

    @property
    def peak_bytes(self) -> int:
        """Device memory while the program runs. XLA's own `peak_memory` counts the host's as well."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Pinned host memory while the program runs."""
        return self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes + self.host_temp_bytes

    def problems(self) -> list[str]:
        """What a training step must not do, a line each; empty where all is well."""
        found = []
        if self.host.host_compute:
            found.append(
                f"XLA would compute on the host, which is very slow: {_some(self.host.host_compute)}. Fetch a whole leaf with "
                "jax.device_put before anything is done with it"
            )
        if self.host.host_collectives:
            found.append(f"XLA would gather over host memory: {_some(self.host.host_collectives)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON holds; the copies summed up."""
        fields = {k: v for k, v in asdict(self).items() if k != "host"}
        copies = {}
        for way in ("h2d", "d2h"):
            count, nbytes = self.host.total(way)
            copies[way] = {
                "copies": count,
                "bytes": nbytes,
                "beside_compute_bytes": sum(
                    c.times * c.nbytes for c in self.host.copies if c.direction == way and c.beside_compute
                ),
                "overlapped_bytes": sum(
                    c.times * c.nbytes for c in self.host.copies if c.direction == way and c.is_overlapped
                ),
            }
        sizes = {"peak_bytes": self.peak_bytes, "host_peak_bytes": self.host_peak_bytes}
        return {**fields, **sizes, **copies, "problems": self.problems()}


def compile_for(
    target: Target,
    step: Any,
    args: tuple[Any, ...] = (),
    *,
    devices: int = 1,
    memory_bytes: int | None = None,
    options: dict[str, Any] | None = None,
) -> GpuPlan:
    """The plan for `step` (jitted, with `args` of structs that carry shardings; or already traced) on `devices` of `target`.

    The mesh of its shardings has that many CPU devices (`use_cpu_devices`). Allocates nothing on any device; takes 1 s
    for small programs and minutes for a model of 40 layers. Raises PlanError where the compiler is not installed, or
    refuses the program: a program that needs far more than `memory_bytes` (the device's own by default) may be refused.
    """
    traced = step if hasattr(step, "jaxpr") else step.trace(*args)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    try:
        executable = _compile(target, module, devices, memory_bytes, options or {})
    except jax.errors.JaxRuntimeError as e:
        raise PlanError(
            f"XLA's GPU compiler refuses this step for {devices} x {target.title}: {_first_lines(e)}"
        ) from e
    return read_plan(executable, target=target.name, devices=devices)


def read_plan(executable: Any, *, target: str, devices: int) -> GpuPlan:
    """The plan of a compiled program: XLA's executable, or what `jax.jit(...).lower(...).compile()` returns on a GPU."""
    executable = executable.runtime_executable() if hasattr(executable, "runtime_executable") else executable
    stats = executable.get_compiled_memory_stats()
    text = executable.hlo_modules()[0].to_string()
    return GpuPlan(
        target=target,
        devices=devices,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        host_output_bytes=stats.host_output_size_in_bytes,
        host_alias_bytes=stats.host_alias_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        host=hlo.host_use(text),
    )


def install_command() -> str:
    """The pip command that installs XLA's GPU compiler for this jaxlib, without the libraries that only a GPU needs."""
    version = metadata.version("jaxlib")
    names = " ".join(f"{name}=={version}" for name in _WHEELS)
    return f"pip install --no-deps {names}"


def is_available() -> bool:
    """Whether XLA's GPU compiler is installed, in the version of this jaxlib."""
    return _missing() is None


_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def _missing() -> str | None:
    wanted = metadata.version("jaxlib")
    for family in ("cuda13", "cuda12"):
        names = (f"jax-{family}-plugin", f"jax-{family}-pjrt")
        versions = {name: _version(name) for name in names}
        if None in versions.values():
            continue
        if set(versions.values()) == {wanted}:
            return None
        return f"found {versions}, and jaxlib is {wanted}"
    return "it is not installed"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compile(target: Target, module: Any, devices: int, memory_bytes: int | None, options: dict[str, Any]) -> Any:
    # Private to JAX, and the same in jaxlib 0.10.2 to 0.12.0.1; tests/gpu_plan holds it.
    compiler: Any = import_module("jax._src.compiler")
    device_list: Any = import_module("jax._src.lib").xla_client.DeviceList
    found = _devices(describe_for_xla(target, memory_bytes=memory_bytes), devices)
    assignment = np.arange(devices).reshape(1, devices)
    compile_options = compiler.get_compile_options(
        1, devices, device_assignment=assignment, env_options_overrides=options
    )
    return compiler.backend_compile_and_load(found[0].client, module, device_list(tuple(found)), compile_options, [])


@lru_cache(maxsize=8)
def _devices(description: str, count: int) -> Any:
    if reason := _missing():
        raise PlanError(f"planning for a GPU needs XLA's GPU compiler: {reason}. Install it: {install_command()}")
    from jax.experimental import topologies

    # The plugin would look for the CUDA libraries, which compiling does not need.
    before = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        jax.devices()  # registers the plugins; the process keeps the platforms that it has been told
        return topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{count}").devices
    except (NotImplementedError, RuntimeError) as e:
        raise PlanError(f"XLA's GPU compiler does not start: {_first_lines(e)}. Install it: {install_command()}") from e
    finally:
        if before is None:
            del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
        else:
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = before


def _first_lines(e: Exception) -> str:
    return " ".join(str(e).split())[:600]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def mesh_devices(tree: Any) -> int:
    """The number of devices of the mesh that the structs of `tree` lie on."""
    return max(math.prod(x.sharding.mesh.shape.values()) for x in jax.tree.leaves(tree))
