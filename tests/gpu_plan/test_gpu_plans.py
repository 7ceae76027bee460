"""What XLA's GPU compiler plans for our steps, on machines without a GPU: these need the extra gpu-plan.

    JAX_PLATFORMS=cpu python -m pytest tests/gpu_plan

Compiling takes most of the time; each program is compiled once and asked everything.
"""

import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.planning.gpu import compile_for, is_available
from jaxckpt.planning.targets import GIB, TARGETS
from jaxckpt.state.plan import Placement
from subjects import SMALL, compiled

H200, RTX4090 = TARGETS["h200"], TARGETS["rtx4090"]
CASES = {
    "8 x H200": {"target": H200, "devices": 8, "rows": 16},
    # With fewer tokens the two buckets that are there at a time are no longer less than what the activations took.
    "1 x 24 GB": {"target": RTX4090, "devices": 1, "rows": 8, "memory_bytes": 24 * GIB},
}
STREAMED = Placement(opt_state="pinned_host", bucket_bytes=8 << 20)


@cache
def planned(case, placement):
    settings = dict(CASES[case])
    return compiled(settings.pop("target"), SMALL, seq_len=512, placement=placement, **settings)


def test_the_compiler_is_installed():
    assert is_available(), "pip install '.[gpu-plan]', with constraints.txt"


@pytest.mark.parametrize("case", CASES)
def test_at_least_95_percent_of_the_moments_are_off_the_device(case):
    device, streamed = (planned(case, placement)[0]["step"] for placement in (Placement(), STREAMED))
    sizes = planned(case, STREAMED)[1]
    saved = device.peak_bytes - streamed.peak_bytes
    assert saved >= 0.95 * sizes["opt_state"], (device.to_dict(), streamed.to_dict())


@pytest.mark.parametrize("case", CASES)
def test_moments_on_the_host_are_written_in_place_and_move_once_each_way(case):
    plans, sizes = planned(case, STREAMED)
    plan = plans["step"]
    assert plan.host_temp_bytes == 0 and plan.host_alias_bytes == plan.host_argument_bytes == plan.host_output_bytes
    assert plan.host_argument_bytes >= 0.99 * sizes["opt_state"]
    assert plan.host.total("h2d")[1] == plan.host.total("d2h")[1] == plan.host_argument_bytes
    assert plan.problems() == []
    assert any(copy.is_overlapped for copy in plan.host.copies if copy.direction == "h2d")
    assert plan.host.exposed_bytes("d2h") <= (0 if case == "1 x 24 GB" else 0.5) * plan.host_output_bytes


def test_a_sum_on_the_host_is_told_and_the_process_stays_on_cpu():
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((4, 1024), jnp.float32, sharding=host)
    plan = compile_for(RTX4090, jax.jit(lambda x: x[2:3], in_shardings=host, out_shardings=host), (x,))
    assert "XLA would compute on the host" in plan.problems()[0]
    assert {d.platform for d in jax.devices()} == {"cpu"} and jax.default_backend() == "cpu"
    assert np.array_equal(jax.jit(lambda a: a + 1)(jnp.arange(3)), [1, 2, 3])


def test_the_installed_compiler_does_not_disturb_jax_on_cpu():
    code = "import warnings; warnings.simplefilter('error'); import jax; print(jax.devices()[0].platform, jax.numpy.ones(3).sum())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu 3.0\n", "")


def test_parameters_on_the_host_stream_through_both_programs_of_an_exact_clip():
    placement = Placement(params="pinned_host", master="pinned_host", opt_state="pinned_host", bucket_bytes=8 << 20)
    plans, sizes = compiled(
        RTX4090, SMALL, devices=1, rows=2, seq_len=512, placement=placement, max_grad_norm=1.0, memory_bytes=24 * GIB
    )
    assert set(plans) == {"gradients", "update"}
    assert sum(c.nbytes for c in plans["gradients"].host.copies if c.is_overlapped) > 0
    for plan in plans.values():
        assert plan.host_temp_bytes == 0 and plan.problems() == []
        assert plan.host_alias_bytes == plan.host_output_bytes
    everything = sum(sizes.values())
    assert max(p.peak_bytes for p in plans.values()) < 0.5 * everything
    assert plans["update"].host_argument_bytes >= 0.99 * everything
