"""A thousand leaves of 2 KiB beside one leaf of as many bytes: seconds to save and to restore, in turns, in one process.

python benchmarks/small_leaves.py [--rounds 5]
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from jaxckpt.distributed.start import use_cpu_devices

DEVICES, LEAVES = 8, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    use_cpu_devices(DEVICES)
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxckpt import make_mesh
    from jaxckpt.distributed.sync import Group
    from jaxckpt.snapshot.leaves import leaf_table
    from jaxckpt.snapshot.manifest import FORMAT
    from jaxckpt.snapshot.restore import Snapshot
    from jaxckpt.snapshot.snapshot import Snapshots
    from jaxckpt.state.train_state import TrainState

    mesh = make_mesh()
    cut, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    rng = np.random.default_rng(0)
    states = {}
    for name, shapes in {"one leaf": [(LEAVES * 64, 8)], "1000 leaves": [(64, 8)] * LEAVES}.items():
        params = {f"leaf{i}": jax.device_put(rng.normal(size=s).astype(np.float32), cut) for i, s in enumerate(shapes)}
        states[name] = TrainState(jax.device_put(np.int32(1), whole), params, None, {}, {})
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, state in states.items():
            directory = Path(tempfile.mkdtemp(prefix="small_leaves-"))
            plan = jax.tree.map(like, state)
            with Snapshots(directory) as snapshots:
                snapshots.open(Group(timeout_s=60))
                start = time.perf_counter()
                snapshots.save(Snapshot(state, {}, {"format": FORMAT, "step": 1, "leaves": leaf_table(plan)}))
                snapshots.wait()
                saved = time.perf_counter()
                jax.block_until_ready(snapshots.restore(1, plan).state)
                restored = time.perf_counter()
            shutil.rmtree(directory)
            if number:  # the first compiles
                taken.setdefault((name, "save"), []).append(saved - start)
                taken.setdefault((name, "restore"), []).append(restored - saved)
    for action in ("save", "restore"):
        many, one = taken["1000 leaves", action], taken["one leaf", action]
        ratios = [a / b for a, b in zip(many, one, strict=True)]
        print(
            f"{action}: 1000 leaves {statistics.median(many):.3f} s, one leaf {statistics.median(one):.3f} s, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
