"""Eight CPU devices for every test, and silence only where a dependency speaks without need."""

import jax
from gcs import gcs, gcs_server  # noqa: F401 (fixtures)

from jaxckpt.distributed.start import use_cpu_devices

use_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
