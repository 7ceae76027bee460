"""Joining the other processes of a run."""

import os

import jax

from jaxckpt.distributed import watch
from jaxckpt.distributed.rollcall import call_roll
from jaxckpt.errors import DistributedError


def use_cpu_devices(count: int) -> None:
    """Simulates `count` devices a process on CPU. Call it before anything touches a JAX backend.

    A collective blocks a thread on each device until all have come, and XLA runs those of different device groups at
    once: with its default of one thread a device they starve each other and the program aborts after 40 s (seen with
    data=2, fsdp=4 on two cores). Four threads a device leave room, and are the same number on every machine.
    """
    os.environ.setdefault("PJRT_NPROC", str(4 * count))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def join(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    *,
    timeout_s: float,
    heartbeat_timeout_s: float = watch.HEARTBEAT_TIMEOUT_S,
) -> None:
    """Connects this process to the run's coordinator, which process 0 hosts, and begins to watch the other processes.

    Returns when all `num_processes` have joined. Raises DistributedError after `timeout_s`, which names who is missing.
    From then on a process that fails, or is silent for `heartbeat_timeout_s`, ends all: see `watch`.
    """
    call_roll(coordinator_address, num_processes, process_id, timeout_s=timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of the CPU backend only
    # Its handler would take SIGTERM away from ours, and it leaves SIGINT alone; `stop_on_signals` and `Agreement` do both.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=max(1, int(timeout_s)),
            # JAX's own limit, which aborts without a name, comes after ours.
            heartbeat_timeout_seconds=max(100, int(3 * heartbeat_timeout_s)),
        )
    except RuntimeError as e:
        raise DistributedError(
            f"process {process_id} of {num_processes} could not join the run at {coordinator_address}: "
            f"{str(e).splitlines()[0]}. All processes were there a moment ago; start the same command again on all of them."
        ) from e
    watch.start(limit_s=heartbeat_timeout_s)
