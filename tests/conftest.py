"""Eight CPU devices for every test, and one cache of compiled programs for all of them."""

import atexit
import shutil
import tempfile

import jax
import pytest

from gcs import gcs, gcs_server  # noqa: F401 (fixtures)
from jaxckpt.distributed.start import use_cpu_devices

use_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests train the same small model: one compiles it, the others load it.
_compiled = tempfile.mkdtemp(prefix="compiled-")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=6, help="how often tests/chaos kills its run")
