"""One process of a group that draws global batches: prints the hash of each, whole, and where the data stands then.

python feeds.py PROCESSES NUMBER PORT DEVICES AXES SPEC COUNT STATE TEXTS
AXES: {"data": 4}; SPEC: partition spec of the batch, such as ["data", "seq"]; STATE: a data position or null;
STORES: a directory of stores, or "iterated" for examples of an iterator.
"""

# ruff: noqa: E402 (the processes must have joined before anything asks JAX for devices)
import hashlib
import json
import sys

from jaxckpt.distributed.start import join, use_cpu_devices

PROCESSES, NUMBER, PORT, DEVICES, AXES, SPEC, COUNT, STATE, STORES = sys.argv[1:]
use_cpu_devices(int(DEVICES))
if int(PROCESSES) > 1:
    join(f"127.0.0.1:{PORT}", int(PROCESSES), int(NUMBER), timeout_s=60)

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from feeding import open_iterated, open_stream
from jaxckpt.errors import DataError

axes, spec = json.loads(AXES), json.loads(SPEC)
names = tuple(axes)
devices = np.array(jax.devices())
if "mixed" in spec:  # rows 0 and 2 of four on the first process, 1 and 3 on the second
    devices, names, spec = devices[np.r_[0 : len(devices) : 2, 1 : len(devices) : 2]], ("data",), ["data"]
mesh = jax.sharding.Mesh(devices.reshape(tuple(axes.values())), names, axis_types=(AxisType.Auto,) * len(names))
sharding = NamedSharding(mesh, P(*spec))
stream = open_iterated(sharding) if STORES == "iterated" else open_stream(STORES, sharding)
try:
    if state := json.loads(STATE):
        stream.restore(state)
except DataError as e:
    print(json.dumps({"refused": str(e)}), flush=True)
    sys.exit(0)
digests = []
for _ in range(int(COUNT)):
    digest = hashlib.sha256()
    for name, array in sorted(next(stream).items()):
        whole = multihost_utils.process_allgather(array, tiled=True) if int(PROCESSES) > 1 else np.asarray(array)
        digest.update(name.encode() + np.ascontiguousarray(whole).tobytes())
    digests.append(digest.hexdigest())
position = stream.state()
stream.close()
print(json.dumps({"digests": digests, "state": position}), flush=True)
