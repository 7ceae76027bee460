"""The devices that a plan can be made for, as their vendors describe them.

A target is what XLA's GPU compiler must know of a device that is not there. Sources, by the names in the comments:
  CUDA guide: NVIDIA CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
  H200: NVIDIA H200 data sheet; Hopper tuning guide for shared memory and L2
  A100: NVIDIA A100 data sheet and "NVIDIA A100 Tensor Core GPU Architecture" (whitepaper)
  Ada: "NVIDIA Ada GPU Architecture" (whitepaper), appendix on the RTX 4090; L4: NVIDIA L4 data sheet
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from jaxckpt.errors import PlanError

GIB = 1 << 30
_DEFAULT_FRACTION = 0.75
"""of the device's memory, which JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise (JAX: GPU memory allocation)"""


@dataclass(frozen=True)
class Target:
    """One device. Rates are the published peaks, of one direction, in bytes or operations a second."""

    name: str
    title: str
    capability: tuple[int, int]
    cores: int
    """streaming multiprocessors"""
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: float
    pcie_bandwidth: float
    bf16_flops: float
    """dense, with float32 sums"""
    has_ecc: bool

    def usable_bytes(self, environ: Mapping[str, str] = os.environ) -> int:
        """What JAX's allocator will take of the device's memory, under the process's environment."""
        # As jaxlib/xla_client.py reads them; the second is the older name.
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        name = next((n for n in names if environ.get(n)), None)
        try:
            fraction = float(environ[name]) if name else _DEFAULT_FRACTION
        except ValueError:
            raise PlanError(f"{name}: {environ[name or '']!r} is no number; expected one as in 0.92") from None
        if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform" and not name:
            fraction = 1.0  # it takes what is asked for, when it is asked for
        return int(self.memory_bytes * min(fraction, 1.0))


# CUDA guide: shared memory of a core is 228 KiB (9.0), 164 KiB (8.0), 100 KiB (8.9), of which a block takes all but 1 KiB;
# 2048, 2048 and 1536 threads a core; 64 float32 units a core in 8.0, 128 in 8.9 and 9.0.
_HOPPER = {"capability": (9, 0), "fpus_per_core": 128, "threads_per_core": 2048, "shared_memory_per_core": 228 << 10}
_AMPERE = {"capability": (8, 0), "fpus_per_core": 64, "threads_per_core": 2048, "shared_memory_per_core": 164 << 10}
_ADA = {"capability": (8, 9), "fpus_per_core": 128, "threads_per_core": 1536, "shared_memory_per_core": 100 << 10}
# PCIe: the data sheets name both directions together, 128 GB/s for Gen5 x16 and 64 GB/s for Gen4 x16.
_GEN5, _GEN4 = 64e9, 32e9

TARGETS = {
    t.name: t
    for t in (
        # H200: 132 cores, 50 MB of L2, 141 GB at 4.8 TB/s, 1979 TFLOP/s of bfloat16 with sparsity, half of it dense.
        Target(
            "h200", "NVIDIA H200 141GB", **_HOPPER, cores=132, l2_bytes=50 << 20, clock_ghz=1.98,
            memory_bytes=141 * 10**9, memory_bandwidth=4.8e12, pcie_bandwidth=_GEN5, bf16_flops=989e12, has_ecc=True,
        ),
        # A100 (SXM): 108 cores at 1410 MHz, 40 MB of L2, 312 TFLOP/s dense; 80 GB at 2039 GB/s, 40 GB at 1555 GB/s.
        Target(
            "a100-80", "NVIDIA A100 80GB", **_AMPERE, cores=108, l2_bytes=40 << 20, clock_ghz=1.41,
            memory_bytes=80 * GIB, memory_bandwidth=2.039e12, pcie_bandwidth=_GEN4, bf16_flops=312e12, has_ecc=True,
        ),
        Target(
            "a100-40", "NVIDIA A100 40GB", **_AMPERE, cores=108, l2_bytes=40 << 20, clock_ghz=1.41,
            memory_bytes=40 * GIB, memory_bandwidth=1.555e12, pcie_bandwidth=_GEN4, bf16_flops=312e12, has_ecc=True,
        ),
        # Ada: 128 cores at 2520 MHz, 72 MB of L2, 24 GB at 1008 GB/s, 165.2 TFLOP/s of bfloat16 with float32 sums.
        Target(
            "rtx4090", "NVIDIA GeForce RTX 4090", **_ADA, cores=128, l2_bytes=72 << 20, clock_ghz=2.52,
            memory_bytes=24 * GIB, memory_bandwidth=1.008e12, pcie_bandwidth=_GEN4, bf16_flops=165.2e12, has_ecc=False,
        ),
        # L4: 7424 units in 58 cores at 2040 MHz, 48 MB of L2, 24 GB at 300 GB/s, 242 TFLOP/s with sparsity, half dense.
        Target(
            "l4", "NVIDIA L4", **_ADA, cores=58, l2_bytes=48 << 20, clock_ghz=2.04,
            memory_bytes=24 * GIB, memory_bandwidth=0.3e12, pcie_bandwidth=_GEN4, bf16_flops=121e12, has_ecc=True,
        ),
    )
}  # fmt: skip


def target_named(name: str) -> Target:
    """The target called `name`. Raises PlanError with the names there are."""
    if name not in TARGETS:
        raise PlanError(f"--target {name}: there is no such target; there are {', '.join(TARGETS)} and cpu")
    return TARGETS[name]


def describe_for_xla(target: Target, *, memory_bytes: int | None = None) -> str:
    """The target as a text proto of XLA's GpuTargetConfigProto; `memory_bytes` instead of the device's own.

    The compiler schedules differently for a device on which the program would not fit, so a plan for less memory than
    the device has (a share of it, a budget) is made with that number.
    """
    major, minor = target.capability
    block = target.shared_memory_per_core - 1024
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {target.shared_memory_per_core} shared_memory_per_block_optin: {block}
  threads_per_core_limit: {target.threads_per_core} core_count: {target.cores} fpus_per_core: {target.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  memory_bandwidth: {int(target.memory_bandwidth)} pcie_bandwidth: {int(target.pcie_bandwidth)}
  l2_cache_size: {target.l2_bytes} clock_rate_ghz: {target.clock_ghz} device_memory_size: {memory_bytes or target.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  ecc_enabled: {str(target.has_ecc).lower()} device_vendor: "NVIDIA Corporation" name: "{target.title}"
  platform_version: "Compute Capability {major}.{minor}{"a" if accelerated else ""}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{target.title}"
"""
