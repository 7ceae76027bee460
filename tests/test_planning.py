"""The plan before the run: what is read from XLA's schedule, what is chosen under a budget, what is told."""

import os
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import PlanError
from jaxckpt.planning import gpu, hlo
from jaxckpt.planning.budget import Budget, Needs, choose_placement, patterns, refine
from jaxckpt.planning.nearest import placement_settings, saving_settings, snapshots_that_fit
from jaxckpt.planning.report import Saving, Use, disk_uses, host_use, state_groups
from jaxckpt.planning.targets import GIB, TARGETS, describe_for_xla, target_named
from jaxckpt.snapshot.leaves import leaf_table
from jaxckpt.snapshot.manifest import FORMAT
from jaxckpt.snapshot.restore import Snapshot
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state import tree
from jaxckpt.state.memory import GroupSize, leaf_bytes
from jaxckpt.state.plan import Placement
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.moved import Buffers

# What jaxlib 0.12.0.1 made of small programs for an H200, without its metadata.
OVERLAPPING = """HloModule jit_f, is_scheduled=true

%fused_multiply (param_0: f32[1024,1024]) -> f32[1024,1024] {
  %param_0 = f32[1024,1024]{1,0} parameter(0)
  %constant_6_1 = f32[] constant(2)
  %mul.2.1 = f32[1024,1024]{1,0} broadcast(%constant_6_1), dimensions={}
  ROOT %mul.3.1 = f32[1024,1024]{1,0} multiply(%param_0, %mul.2.1)
}

ENTRY %main.2 (x.1: f32[1024,1024], h.1: f32[1024,1024], h.2: f32[1024,512]) -> (f32[1024,1024], f32[1024,1024]) {
  %h.1 = f32[1024,1024]{1,0:S(5)} parameter(1)
  %h.2 = f32[1024,512]{1,0:S(5)} parameter(2)
  %copy-start.2 = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0:S(5)}, u32[]) copy-start(%h.1)
  %copy-done.2 = f32[1024,1024]{1,0} copy-done(%copy-start.2)
  %copy-start.3 = (f32[1024,512]{1,0}, f32[1024,512]{1,0:S(5)}, u32[]) copy-start(%h.2)
  %loop_multiply_fusion = f32[1024,1024]{1,0} fusion(%copy-done.2), kind=kLoop, calls=%fused_multiply
  %copy-done.3 = f32[1024,512]{1,0} copy-done(%copy-start.3)
  %copy-start.1.0 = (f32[1024,1024]{1,0:S(5)}, f32[1024,1024]{1,0}, u32[]) copy-start(%loop_multiply_fusion)
  %copy-start.4 = (f32[1024,512]{1,0}, f32[1024,512]{1,0:S(5)}, u32[]) copy-start(%h.2)
  %copy-done.4 = f32[1024,512]{1,0} copy-done(%copy-start.4)
  %copy-done.1.0 = f32[1024,1024]{1,0:S(5)} copy-done(%copy-start.1.0)
  ROOT %tuple = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0:S(5)}) tuple(%loop_multiply_fusion, %copy-done.1.0)
}
"""
HOST_COMPUTE = """HloModule jit_f, is_scheduled=true

%wrapped_slice_computation (param_0.1: f32[8,1024]) -> f32[1,1024] {
  %param_0.1 = f32[8,1024]{1,0:S(5)} parameter(0)
  ROOT %slice.2 = f32[1,1024]{1,0:S(5)} slice(%param_0.1), slice={[3:4], [0:1024]}, frontend_attributes={_xla_compute_type="host"}
}

ENTRY %main.2 (h2.1: f32[8,1024]) -> f32[1,1024] {
  %h2.1 = f32[8,1024]{1,0:S(5)} parameter(0)
  ROOT %wrapped_slice = f32[1,1024]{1,0:S(5)} fusion(%h2.1), kind=kLoop, calls=%wrapped_slice_computation, frontend_attributes={_xla_compute_type="host"}
}
"""
IN_A_LOOP = """HloModule jit_g, is_scheduled=true

%region_0.2 (arg_tuple.1: (s32[], f32[1024,1024], f32[8,1024,1024])) -> (s32[], f32[1024,1024], f32[8,1024,1024]) {
  %constant_0_0 = s32[] constant(0)
  %arg_tuple.1 = (s32[], f32[1024,1024]{1,0}, f32[8,1024,1024]{2,1,0:S(5)}) parameter(0)
  %get-tuple-element.6 = s32[] get-tuple-element(%arg_tuple.1), index=0
  %get-tuple-element.15 = f32[8,1024,1024]{2,1,0:S(5)} get-tuple-element(%arg_tuple.1), index=2
  %dynamic-slice-start.1 = ((f32[8,1024,1024]{2,1,0:S(5)}, s32[], s32[], s32[]), f32[1,1024,1024]{2,1,0}, u32[]) fusion-start(%get-tuple-element.15, %get-tuple-element.6, %constant_0_0, %constant_0_0), kind=kLoop, calls=%wrapped_dynamic-slice_computation
  %get-tuple-element.7 = f32[1024,1024]{1,0} get-tuple-element(%arg_tuple.1), index=1
  %loop_add_fusion = s32[] fusion(%get-tuple-element.6), kind=kLoop, calls=%fused_add
  %dynamic-slice-done.1 = f32[1,1024,1024]{2,1,0} fusion-done(%dynamic-slice-start.1)
  %bitcast.1 = f32[1024,1024]{1,0} bitcast(%dynamic-slice-done.1)
  %gemm_fusion_dot_general.1 = f32[1024,1024]{1,0} fusion(%get-tuple-element.7, %bitcast.1), kind=kCustom, calls=%gemm
  ROOT %tuple.4 = (s32[], f32[1024,1024]{1,0}, f32[8,1024,1024]{2,1,0:S(5)}) tuple(%loop_add_fusion, %gemm_fusion_dot_general.1, %get-tuple-element.15)
}

%region_1.3 (arg_tuple.3: (s32[], f32[1024,1024], f32[8,1024,1024])) -> pred[] {
  %arg_tuple.3 = (s32[], f32[1024,1024]{1,0}, f32[8,1024,1024]{2,1,0:S(5)}) parameter(0)
  %get-tuple-element.9.0 = s32[] get-tuple-element(%arg_tuple.3), index=0
  ROOT %loop_compare_fusion = pred[] fusion(%get-tuple-element.9.0), kind=kLoop, calls=%fused_compare
}

ENTRY %main.4 (x.1: f32[1024,1024], h.1: f32[8,1024,1024]) -> f32[1024,1024] {
  %constant_7_0 = s32[] constant(0)
  %h.1 = f32[8,1024,1024]{2,1,0:S(5)} parameter(1)
  %x.1 = f32[1024,1024]{1,0} parameter(0)
  %tuple = (s32[], f32[1024,1024]{1,0}, f32[8,1024,1024]{2,1,0:S(5)}) tuple(%constant_7_0, %x.1, %h.1)
  %while.5 = (s32[], f32[1024,1024]{1,0}, f32[8,1024,1024]{2,1,0:S(5)}) while(%tuple), condition=%region_1.3, body=%region_0.2, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %while.7.0 = f32[1024,1024]{1,0} get-tuple-element(%while.5), index=1
}
"""
MIB = 1 << 20


def test_copies_are_counted_by_direction_with_what_runs_beside_them():
    use = hlo.host_use(OVERLAPPING)
    assert use.total("h2d") == (3, 4 * MIB + 2 * MIB + 2 * MIB)
    assert use.total("d2h") == (1, 4 * MIB)
    beside = {c.name: (c.beside_compute, c.is_overlapped) for c in use.copies}
    assert beside == {
        "copy-start.2": (False, False),  # the device waits for it
        "copy-start.3": (True, True),  # beside the multiplication
        "copy-start.1.0": (False, True),  # beside the fetch of copy-start.4, and so its other way round
        "copy-start.4": (False, False),
    }
    assert (use.exposed_bytes("h2d"), use.exposed_bytes("d2h")) == (4 * MIB + 2 * MIB, 4 * MIB)
    assert use.host_compute == () and use.host_collectives == ()


def test_a_copy_in_a_loop_counts_as_often_as_the_loop_runs_and_a_counter_hides_nothing():
    use = hlo.host_use(IN_A_LOOP)
    assert use.total("h2d") == (8, 8 * 4 * MIB) and use.total("d2h") == (0, 0)
    assert not use.copies[0].beside_compute


def test_computing_on_the_host_is_found():
    assert hlo.host_use(HOST_COMPUTE).host_compute == ("wrapped_slice (fusion)",)
    call = OVERLAPPING.replace(
        "fusion(%copy-done.2), kind=kLoop", 'custom-call(%copy-done.2), custom_call_target="HostExecute"'
    )
    assert hlo.host_use(call).host_compute == ("loop_multiply_fusion (custom-call)",)


def test_a_collective_on_host_memory_is_found():
    gathered = HOST_COMPUTE.replace("fusion(%h2.1)", "all-gather(%h2.1)").replace('_xla_compute_type="host"', "")
    assert hlo.host_use(gathered).host_collectives == ("wrapped_slice (all-gather)",)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ("f32[8,3]{1,0}", 96),
        ("(bf16[8]{0}, pred[3]{0}, u32[])", 23),
        ("f8e4m3fn[16]{0}", 16),
        ("s4[3]{0:E(4)}", 2),
        ("f32[]", 4),
    ],
)
def test_bytes_of_shapes(shape, nbytes):
    assert hlo.shape_bytes(shape) == nbytes


def test_a_target_is_described_with_the_memory_that_is_asked_for():
    assert f"device_memory_size: {24 * GIB}" in describe_for_xla(TARGETS["l4"])
    assert f"device_memory_size: {5 * GIB}" in describe_for_xla(TARGETS["l4"], memory_bytes=5 * GIB)
    with pytest.raises(PlanError, match="no such target; there are h200, a100-80, a100-40, rtx4090, l4 and cpu"):
        target_named("h20")


def test_jax_takes_a_share_of_the_memory():
    l4 = TARGETS["l4"]
    assert l4.usable_bytes({}) == 18 * GIB
    assert l4.usable_bytes({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}) == 12 * GIB
    assert l4.usable_bytes({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}) == 24 * GIB
    with pytest.raises(PlanError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION: 'half'"):
        l4.usable_bytes({"XLA_PYTHON_CLIENT_MEM_FRACTION": "half"})


def test_without_the_compiler_the_pip_command_is_named():
    if not gpu.is_available():
        with pytest.raises(PlanError, match=r"pip install --no-deps jax-cuda13-plugin==[\d.]+ jax-cuda13-pjrt==[\d.]+"):
            gpu._devices(describe_for_xla(TARGETS["l4"]), 1)
    assert gpu.install_command().startswith("pip install --no-deps jax-cuda13-plugin==")


# ------------------------------------------------------------------------------------------------ budget

MESH = Mesh(np.array(jax.devices()[:2]), ("fsdp",))


def state_of(sizes, *, has_master=True, split=True):
    """A plan of one weight for each of `sizes` (elements), all on the device; what is split lies half on each of two."""
    sharding = NamedSharding(MESH, P("fsdp") if split else P(), memory_kind="device")
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(MESH, P(), memory_kind="device"))
    leaf = lambda n, dtype: jax.ShapeDtypeStruct((n,), dtype, sharding=sharding)
    tree_of = lambda dtype: {f"w{i}": leaf(n, dtype) for i, n in enumerate(sizes)}
    weights = tree_of(jnp.bfloat16 if has_master else jnp.float32)
    moments = {"count": scalar, "mu": tree_of(jnp.float32), "nu": tree_of(jnp.float32)}
    return TrainState(scalar, weights, tree_of(jnp.float32) if has_master else None, moments, {})


def totals(plan, placement):
    """{tier: bytes of the state a device}, asked of the placement itself."""
    sums = {"device": 0, "pinned_host": 0, "nvme": 0}
    for path, x in tree.flatten(plan).items():
        sums[placement.tier(path, x)] += leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype)
    return sums


BIG = 1 << 18  # elements; a leaf of more than 256 KiB may go to a disk
states = st.builds(
    state_of,
    st.lists(st.integers(1, 8).map(lambda n: n * BIG // 2), min_size=1, max_size=5),
    has_master=st.booleans(),
    split=st.booleans(),
)
limits = st.one_of(st.none(), st.integers(0, 40 * BIG))
NEEDS = Needs(working_bytes=1000, host_bytes=5000)


def choose(plan, budget, needs=NEEDS):
    return choose_placement(plan, budget, needs=needs, bucket_bytes=1 << 16, nvme_dir=("/disk",))


@settings(deadline=None, max_examples=80)
@given(states, limits, limits, st.one_of(limits, st.just(0)))
def test_a_choice_fits_its_budget_and_a_refusal_names_the_least_that_would(plan, device, host, nvme):
    budget = Budget(device, host, nvme)
    try:
        choice = choose(plan, budget)
    except PlanError as e:
        for name, number in re.findall(r"budget\.(\w+) of ([\d,]+) bytes", str(e)):
            least = int(number.replace(",", ""))
            assert least > getattr(budget, name)
            choose(plan, replace(budget, **{name: least}))
            with pytest.raises(PlanError):
                choose(plan, replace(budget, **{name: least - 1}))
        return
    found = totals(plan, choice.placement)
    assert found["device"] + NEEDS.working_bytes <= choice.device_bytes <= (device if device is not None else 1 << 40)
    assert 2 * found["pinned_host"] + NEEDS.host_bytes <= choice.host_bytes <= (host if host is not None else 1 << 40)
    assert choice.nvme_bytes <= (nvme if nvme is not None else 1 << 40)
    assert found["nvme"] == 0 or choice.nvme_bytes >= 2 * found["nvme"]


def device_need(plan, away):
    """What the step takes of a device while the leaves with these paths are elsewhere, summed up anew."""
    size = {p: leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for p, x in tree.flatten(plan).items()}
    of_weight = lambda name: sum(size[p] for p in away if p.split("/")[-1] == name)
    total = sum(size[p] for p in away)
    # The bucket at hand, which is one large weight maybe, and the next one, each as it was and as it will be.
    buckets = 2 * (min(max(1 << 16, *map(of_weight, plan.params)), total) + min(1 << 16, total)) if away else 0
    stays = sum(n for p, n in size.items() if p not in away)
    if any(p.startswith("params") for p in away):
        return stays + NEEDS.working_bytes + buckets
    gradients = sum(n for p, n in size.items() if p.startswith("params"))
    return stays + gradients + max(NEEDS.working_bytes, buckets)


@settings(deadline=None, max_examples=60)
@given(states, st.integers(0, 40 * BIG))
@example(state_of([BIG // 2, BIG // 2], has_master=False, split=False), 3277808)
def test_nothing_leaves_the_device_that_could_stay_in_this_order(plan, device):
    flat = tree.flatten(plan)
    steps = [[p] for group in ("opt_state", "master") for p in flat if p.startswith(group) and flat[p].ndim]
    steps.append([p for p in flat if p.startswith("params")])
    beginnings = [[p for piece in steps[:n] for p in piece] for n in range(len(steps) + 1)]
    expected = next((away for away in beginnings if device_need(plan, away) <= device), None)
    try:
        choice = choose(plan, Budget(device=device))
    except PlanError:
        assert expected is None
        return
    assert [p for p in flat if choice.placement.tier(p, flat[p]) != "device"] == [p for p in flat if p in expected]
    assert choice.device_bytes == device_need(plan, expected)


def test_moments_leave_first_then_master_weights_then_parameters_and_the_disk_takes_in_that_order():
    plan = state_of([4 * BIG] * 12)
    seen, budget = [], Budget()
    while True:
        try:
            choice = choose(plan, budget, Needs())
        except PlanError:
            break
        seen.append((choice.placement.opt_state, choice.placement.master, choice.placement.params))
        budget = Budget(device=choice.device_bytes - 1)
    # Where most of a group has left, its tier is pinned_host, and patterns keep the rest on the device.
    order = [
        ("device",) * 3,
        ("pinned_host", "device", "device"),
        ("pinned_host", "pinned_host", "device"),
        ("pinned_host",) * 3,
    ]
    assert list(dict.fromkeys(seen)) == order
    host = choose(plan, Budget(device=budget.device + 1), Needs()).host_bytes
    with pytest.raises(PlanError, match=r"budget\.host is [\d,]+ bytes"):
        choose(plan, Budget(device=budget.device + 1, host=host - 1), Needs())
    part = choose(plan, Budget(device=budget.device + 1, host=host * 2 // 3, nvme=None), Needs()).placement
    assert part.tier("opt_state/mu/w0", plan.opt_state["mu"]["w0"]) == "nvme" and part.params == "pinned_host"
    assert part.nvme_dir == ("/disk",)


def test_a_whole_branch_is_one_pattern_and_patterns_find_nothing_else():
    paths = [f"opt_state/0/{m}/{layer}/{w}" for m in ("mu", "nu") for layer in range(12) for w in ("a", "a.b")]
    for count in (1, 3, 24, 30, 48):
        found = patterns(paths[:count], paths[count:])
        assert {p for p in paths if any(re.search(f, p) for f in found)} == set(paths[:count])
    assert patterns(paths[:24], paths[24:]) == ["^opt_state/0/mu/"]


def test_the_compiler_has_the_last_word_on_the_device():
    plan = state_of([4 * BIG] * 4)
    limit = choose(plan, Budget()).device_bytes
    compiled = lambda placement: totals(plan, placement)["device"] + 20 * BIG  # more than arithmetic knows of
    again = lambda working: choose(plan, Budget(device=limit), Needs(working_bytes=working))
    choice, peak = refine(again, compiled, limit)
    assert peak == compiled(choice.placement) <= limit < compiled(again(0).placement)
    with pytest.raises(PlanError, match="no placement of this state fits"):
        refine(again, lambda _: 3 * limit, limit)


def test_a_save_copies_state_in_host_memory_aside_but_no_derived_parameters_and_nothing_on_disks():
    groups = [
        GroupSize("params", "pinned_host", 1, 2, 2),
        GroupSize("master", "pinned_host", 1, 4, 4),
        GroupSize("opt_state", "nvme", 1, 8, 8),
    ]
    use = lambda saving: host_use(groups, Buffers(disks=4), saving, local_devices=1, process_bytes=0).parts
    assert use(Saving(None, None, 1)) == {
        "state": 6,
        "buffers for disks": 4,
        "staging of a save": 4,
        "more while it resumes": 8,
    }
    assert use(Saving(1, 1, 1))["staging of a save"] == 1


def test_a_snapshot_takes_as_much_of_a_disk_as_was_planned(tmp_path):
    plan = state_of([4 * BIG, 3 * BIG, 1000])
    state = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), plan)
    [use] = disk_uses(state_groups(plan), Saving(None, None, 0), local_devices=2, snapshot_room=None, nvme_room=None)
    with Snapshots(tmp_path / "run", timeout_s=60) as snapshots:
        snapshots.open(Group(timeout_s=10))
        snapshots.save(Snapshot(state, {}, {"format": FORMAT, "step": 1, "leaves": leaf_table(plan)}))
        snapshots.wait()
        files = [os.path.join(d, name) for d, _, names in os.walk(snapshots.root) for name in names]
        taken = sum(os.stat(file).st_blocks * 512 for file in files)
    # Beside the elements: four bytes of checksum and sixteen of index for each chunk of 256 KiB or more, and some thirty
    # small files of JSON, which take a block each.
    assert use.total <= taken < 1.001 * use.total + 256 * 1024, f"{taken} bytes, planned {use.total}"


# ------------------------------------------------------------------------------------------------ ways out


def test_a_budget_counts_what_a_save_takes_of_the_host_and_that_disks_take_nothing():
    plan = state_of([BIG] * 16)
    stored = 3 * 16 * BIG * 4 + 8  # master weights, moments and two counts, without the narrow parameters
    on_host = lambda **needs: choose(plan, Budget(host=None), Needs(**needs)).host_bytes
    more = lambda **needs: on_host(**needs) - on_host()
    assert more(staging_bytes=None) == more(restore_bytes=None) == stored
    assert more(staging_bytes=5000, restore_bytes=4000) == 5000, "not at the same time"
    some = choose(plan, Budget(device=64 * BIG, host=300 * BIG, nvme=None), Needs(staging_bytes=None))
    found = totals(plan, some.placement)
    buffers = 4 * 2 * BIG * 2  # four slots of a leaf's half, for two devices
    assert found["nvme"] and some.host_bytes == 2 * found["pinned_host"] + stored - 2 * found["nvme"] + buffers


def test_only_what_is_another_setting_is_suggested():
    given = Placement(master="pinned_host", bucket_bytes=5, nvme_dir=("/a",))
    assert placement_settings(given, given) == []
    assert placement_settings(Placement(bucket_bytes=5), given) == ["placement.master=device"]
    assert placement_settings(replace(given, opt_state="nvme", paths=(("^a$", "device"),)), given) == [
        "placement.opt_state=nvme",
        "placement.paths={'^a$': device}",
    ]


def test_saving_settings_fill_the_room_that_the_rest_leaves_and_not_less_than_a_save_needs():
    host = Use(
        "host", {"state": 100 * GIB, "staging of a save": 60 * GIB, "more while it resumes": 20 * GIB}, 150 * GIB
    )
    both = ["snapshots.staging_bytes=50GiB", "snapshots.restore_bytes=50GiB"]
    assert saving_settings(host, 80 * GIB, 50 * GIB) == both and saving_settings(host, 80 * GIB, 51 * GIB) == []
    saving_less = replace(host, parts={"state": 100 * GIB, "staging of a save": 60 * GIB})
    assert saving_settings(saving_less, 4 * GIB, 1) == both[:1]


def test_as_many_snapshots_are_suggested_as_there_is_room_for():
    use = lambda room: Use("snapshots", {"5 kept": 50, "one being written": 10}, room)
    assert [snapshots_that_fit(use(n), 5) for n in (59, 50, 41, 20, 19)] == [
        *(["snapshots.keep=4"], ["snapshots.keep=4"], ["snapshots.keep=3"], ["snapshots.keep=1"], []),
    ]
