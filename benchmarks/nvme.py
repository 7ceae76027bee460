"""A training step's update with its moments on a local disk, against its own reads and writes alone, and against RAM.

    python benchmarks/nvme.py --gb 2 --pairs 5 [--directory DIR] [--bucket-mib 128]

adamw over weights of 4096 x 1024 in buckets, on one CPU device, in one process. In every round, one after the other: the
step with its state on disk; the same pipeline with nothing to compute between a bucket's read and its write; the step in
RAM (one jit a bucket, state donated). The last rounds compare all bytes with those in RAM. The first round compiles
and is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxckpt.nvme.pipeline import Moved, Pipeline
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.state.mesh import make_mesh
from jaxckpt.state.nvme import NvmeStruct

SHAPE = (4096, 1024)  # 16 MiB of float32: 32 MiB of moments a weight
TX = optax.adamw(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="of moments")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=128, help="of moments")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant; a temporary one otherwise")
    arguments = parser.parse_args()
    per_bucket = max(2, arguments.bucket_mib // 32)
    buckets = max(2, round(arguments.gb * 1e9 / (per_bucket * 2 * 4 * np.prod(SHAPE))))
    with tempfile.TemporaryDirectory(prefix="nvme-", dir=arguments.directory) as directory:
        report(Bench(directory, buckets, per_bucket, arguments.slots).rounds(arguments.pairs))


class Bench:
    def __init__(self, directory: str, buckets: int, per_bucket: int, slots: int) -> None:
        self.sharding = NamedSharding(make_mesh(), PartitionSpec(), memory_kind="device")
        self.host = self.sharding.with_memory_kind("pinned_host")
        struct = NvmeStruct(SHAPE, np.dtype("float32"), self.sharding)
        names = [[f"{m}/{b}/{k}" for m in ("mu", "nu") for k in range(per_bucket)] for b in range(buckets)]
        self.names, self.per_bucket = names, per_bucket
        self.store = NvmeStore([directory], {n: struct for some in names for n in some}, run_id="bench")
        self.store.open()
        zero, mark = jax.jit(lambda: jnp.zeros(SHAPE), out_shardings=self.sharding)(), jnp.zeros(2, jnp.uint32)
        for some in names:
            for name in some:
                fill = lambda box, out: out.fill(0)
                self.store.write(name, fill, fingerprint=mark, is_finite=jnp.bool_(True))
        self.pipeline = Pipeline(self.store, names, slots=slots)
        make = lambda i: [jax.random.normal(jax.random.key(i * 100 + k), SHAPE) * 0.02 for k in range(per_bucket)]
        self.grads = [jax.block_until_ready(make(b + 1000)) for b in range(buckets)]
        self.on_disk = [make(b) for b in range(buckets)]  # the weights of the run on disk, and those of the run in RAM
        self.in_ram = [make(b) for b in range(buckets)]
        self.moments = [[zero + 0 for _ in some] for some in names]
        self.count = 0
        self.update = jax.jit(_update, donate_argnums=(1, 3))
        self.streamed = jax.jit(self._streamed, donate_argnums=(1, 3), keep_unused=True)

    def _streamed(self, count: jax.Array, weights: Any, grads: Any, moments: Any) -> Any:
        weights, moments = _update(count, weights, grads, jax.device_put(moments, self.sharding))
        return weights, jax.device_put(moments, self.host)

    def step_on_disk(self) -> Moved:
        with self.pipeline.step() as flow:
            for b, names in enumerate(self.names):
                moments = list(flow.take(b).values())
                self.on_disk[b], moments = self.streamed(self.count, self.on_disk[b], self.grads[b], moments)
                flow.put(b, dict(zip(names, moments, strict=True)))
                del moments
            _, moved = flow.finish()
        jax.block_until_ready(self.on_disk)
        return moved

    def move_only(self) -> Moved:
        """Reads all and writes it back as it is."""
        with self.pipeline.step() as flow:
            for b in range(len(self.names)):
                flow.put(b, flow.take(b))
            return flow.finish()[1]

    def step_in_ram(self) -> None:
        for b in range(len(self.names)):
            self.in_ram[b], self.moments[b] = self.update(self.count, self.in_ram[b], self.grads[b], self.moments[b])
        jax.block_until_ready((self.in_ram, self.moments))

    def rounds(self, pairs: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {"disk": [], "io": [], "ram": []}
        moved: list[Moved] = []
        for i in range(pairs + 1):
            actions: dict[str, Callable[[], Any]] = {
                "disk": lambda: moved.append(self.step_on_disk()),
                "io": self.move_only,
                "ram": self.step_in_ram,
            }
            order = ["disk", "io", "ram"] if i % 2 else ["io", "disk", "ram"]
            for name in order:
                started = time.perf_counter()
                actions[name]()
                if i:
                    seconds[name].append(time.perf_counter() - started)
            self.count += 1
        same = all(
            np.array_equal(np.asarray(self.store.current(name)).view(np.uint32), np.asarray(x).view(np.uint32))
            for some, moments in zip(self.names, self.moments, strict=True)
            for name, x in zip(some, moments, strict=True)
        ) and all(
            np.array_equal(a, b)
            for x, y in zip(self.on_disk, self.in_ram, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        self.pipeline.close()
        self.store.close()
        return {"seconds": seconds, "moved": moved[1:], "same": same}


def _update(count: jax.Array, weights: Any, grads: Any, moments: Any) -> Any:
    n = len(weights)
    state: Any = TX.init(weights)
    adam, *rest = state
    adam = adam._replace(count=jnp.asarray(count, jnp.int32), mu=moments[:n], nu=moments[n:])
    update: Any = TX.update
    updates, (adam, *_) = update(grads, (adam, *rest), weights)
    new: Any = optax.apply_updates(weights, updates)
    return new, [*adam.mu, *adam.nu]


def report(found: dict[str, Any]) -> None:
    seconds, moved = found["seconds"], found["moved"]
    ratios = [d / i for d, i in zip(seconds["disk"], seconds["io"], strict=True)]
    last = moved[-1]
    print(
        f"jax {jax.__version__}: {last.bytes_written / 1e9:.2f} GB written and {last.bytes_read / 1e9:.2f} GB read a step"
    )
    for name, what in {
        "disk": "step, state on disk",
        "io": "its reads and writes alone",
        "ram": "step, all in RAM",
    }.items():
        print(f"  {what:28} median {statistics.median(seconds[name]):6.2f} s   {[round(s, 2) for s in seconds[name]]}")
    rate = statistics.median((m.bytes_read + m.bytes_written) / s for m, s in zip(moved, seconds["disk"], strict=True))
    exposed = statistics.median(m.exposed_s / m.busy_s for m in moved)
    print(f"  step over its own I/O        median {statistics.median(ratios):6.2f}     {[round(r, 2) for r in ratios]}")
    print(
        f"  {rate / 1e9:.2f} GB/s read and written together; {exposed:.0%} of the I/O exposed (no forward pass hides any)"
    )
    print(f"  every byte of weights and moments is that of the step in RAM: {found['same']}")


if __name__ == "__main__":
    main()
