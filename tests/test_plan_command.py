"""`python -m jaxckpt plan`: what it sums up and refuses; the limits of a process; the plan against what was measured."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import psutil
import pytest
from typer.testing import CliRunner

from jaxckpt.build import build_unopened
from jaxckpt.cli import app
from jaxckpt.config import load_config
from jaxckpt.errors import PlanError
from jaxckpt.planning import guards
from jaxckpt.planning.bandwidth import Rate, Rates, measure_disk, parse_rate
from jaxckpt.planning.compare import check_measured, planned_bytes
from jaxckpt.planning.flops import count_flops
from jaxckpt.planning.limits import free_bytes, nvme_limit, snapshot_limit
from jaxckpt.planning.planner import Wanted, make_plan_report
from jaxckpt.planning.report import Traffic, step_time
from jaxckpt.planning.targets import GIB
from jaxckpt.update.moved import stored


def test_products_are_counted_as_often_as_they_run():
    def step(w, x):
        inner = lambda w: jax.lax.scan(lambda c, wi: (jnp.tanh(c @ wi), None), x, w)[0].sum()
        return jax.grad(inner)(w)

    w, x = jnp.zeros((5, 8, 8)), jnp.zeros((4, 8))
    once = 2 * 4 * 8 * 8
    # Forward, and for each layer the gradient of the weight and of the layer before it.
    assert count_flops(jax.make_jaxpr(step)(w, x)) == 5 * once + 2 * 5 * once
    assert (
        count_flops(jax.make_jaxpr(jax.jit(lambda w: jax.lax.cond(True, lambda a: a @ a, lambda a: a, w)))(w[0]))
        == 2 * 8**3
    )


@pytest.mark.parametrize(
    ("text", "per_s"), [("25GB/s", 25e9), ("2 GiB/s", 2 * 2**30), ("3e9", 3e9), ("400TFLOP/s", 4e14)]
)
def test_rates_are_read_with_their_units(text, per_s):
    assert parse_rate("--h2d", text) == Rate(per_s, "given")


@pytest.mark.parametrize("text", ["fast", "", "0GB/s", "-1", "GB/s"])
def test_what_is_no_rate_is_refused_by_name(text):
    with pytest.raises(PlanError, match="--h2d"):
        parse_rate("--h2d", text)


def test_the_speed_of_a_disk_is_measured_and_nothing_is_left_there(tmp_path):
    read, write = measure_disk(tmp_path)
    assert read.per_s > 1e5 and write.per_s > 1e5 and read.source == "measured"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PlanError, match=r"cannot be measured: .*Give --disk-read and --disk-write"):
        measure_disk(tmp_path / "none")


def test_copies_of_both_directions_wait_for_one_another_and_compute_for_what_is_exposed():
    rates = Rates(h2d=Rate(10, "given"), d2h=Rate(20, "given"), flops=Rate(100, "given"))
    hidden = step_time(800, 2, Traffic(h2d=100, d2h=100), rates)
    assert (hidden.compute_s, hidden.h2d_s, hidden.d2h_s, hidden.step_s) == (4, 10, 5, 15)
    exposed = step_time(3000, 2, Traffic(h2d=100, d2h=100, exposed_h2d=50), rates)
    assert exposed.step_s == 15 + 5
    assert step_time(800, 2, Traffic(disk_read=8), rates).step_s is None  # nobody knows the disk
    assert (
        step_time(
            800, 2, Traffic(disk_read=8, disk_write=8), replace(rates, disk_read=Rate(1, ""), disk_write=Rate(2, ""))
        ).step_s
        == 12
    )


CONFIG = """
run_dir: {run_dir}
steps: 10
model: {{num_layers: 4, scan_layers: false, d_model: 64, num_heads: 2, d_ff: 128, compute_dtype: bfloat16}}
data: {{files: [{text}], seq_len: 16, batch_size: 8, holdout: 0}}
optimizer: {{lr: 1e-3}}
mesh: {{fsdp: 8, cpu_devices: 8}}
snapshots: {{keep: 2}}
placement: {{bucket_bytes: 4KiB}}
eval: {{every: null}}
"""


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "text.txt").write_text("Four score and seven years ago. " * 40)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run", text=tmp_path / "text.txt"))
    return file


def plan(file, *arguments, code=0):
    result = CliRunner().invoke(app, ["plan", "--config", str(file), "--json", *arguments])
    assert result.exit_code in (0, 1) if code is None else result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_plan_counts_every_byte_and_leaves_the_run_directory_alone(config_file, tmp_path):
    found = plan(config_file, "placement.opt_state=pinned_host", "--h2d", "1GB/s", "--d2h", "1GB/s", "--flops", "1e12")
    groups = {(g["group"], g["tier"]): g for g in found["groups"]}
    weights = groups["params", "device"]["total_bytes"] // 2
    assert groups["master", "device"]["total_bytes"] == 4 * weights
    assert groups["opt_state", "pinned_host"]["total_bytes"] == 8 * weights
    moments = groups["opt_state", "pinned_host"]["bytes_per_device"]
    assert found["memory"]["host"]["parts"]["state"] == 8 * moments
    stored = sum(g["total_bytes"] for g in found["groups"] if g["group"] != "params")  # the master weights, once
    assert found["memory"]["snapshots"]["total"] == 3 * stored
    assert found["traffic"]["h2d"] == found["traffic"]["d2h"] == moments
    assert found["step"]["h2d_s"] == moments / 1e9 and found["fits"] and found["nearest"] == []
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_told_with_settings_that_would(config_file):
    everything = plan(config_file)["memory"]["device"]["total"]
    refused = plan(config_file, "--device-memory", str(everything // 2), code=1)
    assert re.match(r"device: .* needed at least, .* there \(--device-memory\): .* too much", refused["problems"][0])
    assert "placement.opt_state=pinned_host" in refused["nearest"]
    assert not any("bucket_bytes" in line for line in refused["nearest"]), "that is as it was given"
    assert plan(config_file, "--device-memory", str(everything // 2), *refused["nearest"])["fits"]


def test_where_only_saves_take_too_much_of_the_host_they_are_told_to_take_less(config_file):
    # Gigabytes, of which nothing is allocated: beside them it does not matter how the memory of this process varies.
    large = ("model.d_model=4096", "model.d_ff=16384", "placement.opt_state=pinned_host", "snapshots.keep=1")
    host = plan(config_file, *large)["memory"]["host"]
    staging = host["parts"]["staging of a save"]
    assert staging > 6 * GIB, "master weights and moments"
    limit = ("--host-memory", str(host["total"] - staging // 2))
    nearest = plan(config_file, *limit, *large, code=1)["nearest"]
    [(name, gib)] = [re.fullmatch(r"snapshots\.(\w+)=(\d+)\w+", line).groups() for line in nearest]
    assert name == "staging_bytes"
    assert plan(config_file, *limit, *large, *nearest)["fits"]
    # What a restore takes is bounded, too, once it would take more than is there.
    limit = ("--host-memory", str(host["total"] - staging + 2 * GIB))
    nearest = plan(config_file, *limit, *large, code=1)["nearest"]
    assert [line.split("=")[0] for line in nearest] == ["snapshots.staging_bytes", "snapshots.restore_bytes"]
    assert plan(config_file, *limit, *large, *nearest)["fits"]


def test_a_budget_in_the_configuration_chooses_and_refuses(config_file):
    everything = plan(config_file)["memory"]["device"]["total"]
    chosen = plan(config_file, f"placement.budget.device={everything // 2}")
    assert chosen["placement"]["opt_state"] == "pinned_host" and chosen["fits"]
    assert chosen["memory"]["device"]["total"] <= everything // 2 == chosen["memory"]["device"]["limit"]
    refused = plan(config_file, f"placement.budget.device={everything // 50}", code=1)
    assert re.search(r"budget\.device of [\d,]+ bytes .* would do", " ".join(refused["problems"]))
    with pytest.raises(PlanError) as told:
        build_unopened(load_config(str(config_file), [f"placement.budget.device={everything // 50}"]))
    assert str(told.value).splitlines() == refused["problems"] and told.value.exit_code == 2


def test_a_run_chooses_by_its_budget_what_its_plan_says(config_file):
    def chosen(*settings):
        config = load_config(str(config_file), settings)
        planned = make_plan_report(config, Wanted()).placement
        with build_unopened(config) as run:
            assert run._placement == planned
        return planned

    everything = plan(config_file)["memory"]["device"]["total"]
    tiers = lambda placement: (placement.params, placement.master, placement.opt_state)
    found = {tiers(chosen(f"placement.budget.device={everything * n // 20}")) for n in (20, 14, 8)}
    assert len(found) == 3
    # Sums of gradients are as wide as the master weights, and what has no room beside them leaves.
    wide = (f"placement.budget.device={everything + 1024}", "data.batch_size=16")
    assert tiers(chosen(*wide)) == ("device",) * 3 and not chosen(*wide).paths
    assert chosen(*wide, "optimizer.accumulation_steps=2").paths


@pytest.mark.parametrize(
    "settings",
    [
        ("opt_state=nvme", "master=pinned_host"),
        ("params=pinned_host", "master=pinned_host", "opt_state=nvme"),
        ("params=pinned_host", "grads=pinned_host"),
        ("params=nvme", "master=nvme", "opt_state=nvme"),
    ],
)
def test_what_a_run_says_that_it_moves_is_what_its_plan_said(config_file, tmp_path, settings):
    placed = [f"placement.{s}" for s in (*settings, f"nvme_dir={tmp_path}")]
    large = ("model.num_layers=1", "model.d_model=512", "model.d_ff=64", "model.compute_dtype=bfloat16")
    summed = ("data.batch_size=16", "optimizer.accumulation_steps=2")
    config = load_config(str(config_file), [*placed, *large, *(summed if "grads=pinned_host" in settings else ())])
    planned = make_plan_report(config, Wanted())
    on_disk = sum(g.bytes_per_device for g in stored(planned.groups) if g.tier == "nvme")
    assert (on_disk > 0) == ("opt_state=nvme" in settings)
    assert ("params", "nvme") in {(g.group, g.tier) for g in planned.groups} or "params=nvme" not in settings
    assert planned.placement.grads == ("device" if settings[0] == "opt_state=nvme" else "pinned_host")
    with build_unopened(config) as run:
        moved = run._tiers.moved()
    # On CPU fingerprints are not made in every step.
    to_device, from_device = planned.traffic.h2d - on_disk, planned.traffic.d2h
    assert (moved["to_device_bytes"], moved["from_device_bytes"]) == (8 * to_device, 8 * from_device)


def test_where_a_step_can_be_compiled_a_run_asks_what_it_takes_before_it_chooses(config_file):
    small = ("model.num_layers=1", "model.compute_dtype=float32", "placement.bucket_bytes=1MiB")  # of one bucket

    def run_with(budget):
        config = load_config(str(config_file), [*small, f"placement.budget.device={budget}"])
        return build_unopened(config, is_compiling=True)

    everything = plan(config_file, "--target", "cpu", *small)["memory"]["host"]["parts"]["devices"] // 8
    with run_with(everything) as run:
        assert run._placement.opt_state == "device"
    # A CPU's program counts host memory as a device's, and so no placement helps.
    with pytest.raises(PlanError, match=rf"the compiled step takes {everything:,} bytes of each device"):
        run_with(everything - 1)


def test_state_on_disks_is_planned_with_the_rooms_of_its_largest_weights(config_file, tmp_path):
    # The embedding alone is larger than a bucket: 259 x 512 elements of master weights and two moments.
    settings = ("placement.opt_state=nvme", "placement.master=nvme", f"placement.nvme_dir={tmp_path / 'nvme'}")
    settings += ("model.d_model=512", "placement.bucket_bytes=64KiB")
    found = plan(config_file, *settings)["memory"]
    embedding = 259 * 512 * 12
    assert embedding <= found["host"]["parts"]["buffers for disks"] < found["nvme"]["total"] // 2
    assert found["device"]["parts"]["buckets"] >= 2 * embedding // 8
    assert found["nvme"]["limit_source"] == "free in placement.nvme_dir"
    whole = plan(config_file, *settings, "placement.nvme_cache_bytes=1GiB")
    assert whole["traffic"]["disk_read"] == 0 < whole["traffic"]["disk_write"], "what is kept is not read"
    cached = whole["memory"]["host"]["parts"]
    assert cached["cache for disks"] == found["nvme"]["total"] // 3 and "buffers for disks" not in cached
    config = load_config(str(config_file), ["placement.budget.nvme=1", *settings[2:]])
    assert nvme_limit(config) == (1, "placement.budget.nvme")


def test_directories_on_one_file_system_have_its_room_once(config_file, tmp_path):
    here, slack = free_bytes(tmp_path), 64 << 20  # others write here, too
    assert here > 16 * slack

    def limits(*directories):
        config = load_config(str(config_file), [f"placement.nvme_dir=[{', '.join(map(str, directories))}]"])
        return nvme_limit(config)[0], snapshot_limit(config, here // 2)[0]

    nvme, snapshots = limits(tmp_path / "a", tmp_path / "b")
    assert abs(nvme - here) < slack and abs(snapshots - here // 2) < slack
    nvme, snapshots = limits(tmp_path / "a", tmp_path / "b", "/proc")  # another file system, on which nothing is free
    assert nvme == 0 and abs(snapshots - here * 2 // 3) < slack


def test_disks_of_which_nothing_can_be_measured_are_planned_all_the_same(config_file, tmp_path):
    settings = ("placement.opt_state=nvme", "model.d_model=512", "placement.bucket_bytes=64KiB")
    for directory, told in [(tmp_path / "none", "not there now"), ("/proc/self", "its speed cannot be measured")]:
        found = plan(config_file, *settings, f"placement.nvme_dir={directory}", code=None)
        assert any(str(directory) in note and told in note for note in found["notes"])
        assert found["traffic"]["disk_read"] > 0 and found["step"]["disk_s"] is None
        assert any("once more for its fingerprints" in note for note in found["notes"])


def test_what_no_plan_can_be_made_of_is_told_by_its_name(config_file, tmp_path):
    refused = lambda *settings: CliRunner().invoke(app, ["plan", "--config", str(config_file), *settings])
    (tmp_path / "file").touch()
    for settings, told in [
        (("--devices", "0"), "--devices"),
        (
            ("optimizer.name=import", "optimizer.target=own_model:optimizer"),
            "optimizer.target: own_model:optimizer cannot be",
        ),
        (("--device-memory", "24GiX"), "--device-memory '24GiX': expected a size as in"),
        (
            ("placement.opt_state=nvme", f"placement.nvme_dir={tmp_path / 'file'}"),
            "placement.nvme_dir: .*file: not a dir",
        ),
    ]:
        result = refused(*settings)
        assert result.exit_code == 2 and re.search(told, " ".join(result.output.split())), result.output


def test_on_this_machine_the_compiled_step_counts(config_file):
    found = plan(config_file, "--target", "cpu", "model.num_layers=1", "model.compute_dtype=float32")
    step = found["programs"]["step"]
    state = sum(g["bytes_per_device"] for g in found["groups"])
    assert step["argument_bytes"] >= state and step["alias_bytes"] >= 0.9 * state
    assert found["memory"]["host"]["parts"]["devices"] == 8 * step["peak_bytes"]
    assert found["memory"]["host"]["limit"] > 1 << 30


# ------------------------------------------------------------------------------------------------ guards, comparison


def system(tmp_path, *, memory_kb=64 << 20, cgroup="0::/job\n", files=None):
    """A copy of what the kernel tells of a process: /proc and /sys/fs/cgroup."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for path, text in {
        proc / "meminfo": f"MemTotal:       {memory_kb} kB\nMemFree: 1 kB\n",
        proc / "self" / "cgroup": cgroup,
        **{cgroups / name: text for name, text in (files or {}).items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": proc, "cgroups": cgroups}


def test_the_least_limit_of_machine_and_cgroups_counts(tmp_path):
    assert guards.host_memory_limit(**system(tmp_path / "a")) == (64 * GIB, "the machine's memory")
    v2 = {"job/memory.max": "max\n", "memory.max": f"{8 * GIB}\n"}
    limit, source = guards.host_memory_limit(**system(tmp_path / "b", files=v2))
    assert limit == 8 * GIB and source.endswith("cgroup/memory.max")
    v1 = {
        "memory/docker/x/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    limit, _ = guards.host_memory_limit(**system(tmp_path / "c", cgroup="3:cpu:/y\n4:memory:/docker/x\n", files=v1))
    assert limit == 4 * GIB
    assert guards.host_memory_limit()[0] > 1 << 28  # of this very machine


def test_more_than_the_process_may_have_is_an_error_and_a_small_ulimit_a_warning(tmp_path):
    where = system(tmp_path, files={"job/memory.max": str(8 * GIB)})
    with pytest.raises(PlanError, match=r"needs 9\.0 GiB in each process, and .*memory\.max allows 8\.0 GiB"):
        guards.check_limits(0, 9 * GIB, **where, locked_limit=-1)
    assert guards.check_limits(2 * GIB, 3 * GIB, **where, locked_limit=-1) == []
    [warning] = guards.check_limits(2 * GIB, 3 * GIB, **where, locked_limit=64 << 20)
    assert warning.startswith("ulimit -l is 64 MiB and 2.0 GiB are to be pinned")


def test_the_pool_of_pinned_memory_is_set_before_the_backend_starts_or_refused():
    environ = {}
    guards.set_pool(40 * GIB, environ)
    assert environ == {}  # XLA's default of 64 GiB is enough
    guards.set_pool(100 * GIB, environ)
    assert environ == {guards.POOL: "115"}
    guards.set_pool(100 * GIB, environ)
    with pytest.raises(PlanError, match=r"115 GiB and this run puts 120\.0 GiB .* set it to 138 or more\."):
        guards.set_pool(120 * GIB, environ)
    with pytest.raises(PlanError, match=r"64 GiB, the default, .* JAX has started already"):
        guards.set_pool(100 * GIB, {}, is_started=True)
    with pytest.raises(PlanError, match="'much' is no number"):
        guards.set_pool(1, {guards.POOL: "much"})


def test_versions_that_compile_a_feature_wrongly_are_refused_for_it():
    guards.check_versions(["activations offloaded under scan"], "0.12.0.1")
    guards.check_versions([], "0.10.2")
    with pytest.raises(PlanError, match=r"jaxlib 0\.11\.2 .*\n.*gradients are wrong without an error"):
        guards.check_versions(["activations offloaded under scan"], "0.11.2")


class Device:
    def __init__(self, peak):
        self.peak = peak

    def memory_stats(self):
        return {"peak_bytes_in_use": self.peak}


def test_the_plan_is_compared_with_the_fullest_device_or_with_the_process():
    found = check_measured(801 << 20, devices=[Device(700 << 20), Device(812 << 20)])
    assert found.line() == "plan: 801.00 MiB of a device, measured 812.00 MiB (+1.4 %)"
    resident = psutil.Process().memory_info().rss
    on_cpu = check_measured(resident // 8, before=0)
    assert on_cpu.planned == resident // 8 * 8 and abs(on_cpu.error) < 0.5 and "of the process" in on_cpu.line()


def test_a_compiled_step_says_what_was_planned():
    x = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    assert planned_bytes(compiled, elsewhere=5) == (1 << 18) + 5
