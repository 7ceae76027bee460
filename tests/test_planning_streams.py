"""The plan of a step in several programs: its gradients in host memory, and what all of its buckets move."""

import dataclasses

import jax
import pytest

from jaxckpt.errors import PlanError
from jaxckpt.planning.budget import Budget, Needs
from jaxckpt.planning.choosing import device_parts
from jaxckpt.planning.gpu import GpuPlan
from jaxckpt.planning.hlo import HostCopy, HostUse
from jaxckpt.planning.report import A_BUCKET, Saving, Traffic, host_use, state_groups, traffic_of
from jaxckpt.planning.subject import Subject
from jaxckpt.state import tree
from jaxckpt.state.memory import GroupSize, leaf_bytes
from jaxckpt.state.nvme import tier_of
from jaxckpt.state.plan import Placement
from jaxckpt.update.moved import Buffers, DiskBytes, disk_bytes, host_buffers
from test_layered_nvme import HOST, make, on_disks
from test_plan_command import CONFIG
from test_plan_command import plan as plan_of
from test_planning import BIG, choose, state_of, totals

GROUPS = [
    GroupSize("params", "pinned_host", 1, 2, 2),
    GroupSize("master", "nvme", 1, 4, 4),
    GroupSize("opt_state", "nvme", 1, 8, 8),
]
"""of 14 bytes: what one parameter takes"""


def program(*copies, arguments=0, outputs=0, aliased=0, temps=0):
    """The plan of a compiled program with copies of (direction, bytes, whether something computes beside it)."""
    made = tuple(HostCopy("copy", way, n, 1, beside, beside) for way, n, beside in copies)
    host = HostUse(made, (), ())
    return GpuPlan("h200", 1, 0, 0, 0, 0, arguments, outputs, aliased, temps, host)


def bytes_of(leaves):
    return sum(leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype) for x in leaves)


def test_the_gradients_between_two_programs_are_in_host_memory_and_nowhere_else():
    def buffers(placement, **args):
        step, _, plan, _, store = make(placement, **args)
        if store is not None:
            store.close()
        return host_buffers(step).gradients, bytes_of(x for x in jax.tree.leaves(plan.params) if x.ndim)

    found, params = buffers(HOST, fsdp=2)
    assert found == params > 0, "as narrow as the parameters, and split as they are"
    assert buffers(HOST, accumulation_steps=2)[0] == 2 * buffers(HOST)[1], "a sum is in float32"
    assert buffers(Placement(params="pinned_host", master="pinned_host", opt_state="pinned_host"))[0] == 0


def test_the_buffers_of_a_step_from_disks_count_and_the_buckets_move_all_that_lives_elsewhere(tmp_path):
    step, _, plan, _, store = make(on_disks(tmp_path, bucket_bytes=1 << 16), fsdp=2, depth=2)
    assert store is not None
    store.close()
    assert len(step.updates) > 3
    gradients = host_buffers(step).gradients
    assert gradients == bytes_of(jax.tree.leaves(plan.params))
    # Bucket by bucket: gradients and old state to the device; new state, and the params that are derived from it, back.
    params = tree.flatten(plan.params)
    away = lambda leaves: bytes_of(x for x in leaves if tier_of(x) != "device")
    h2d = sum(away(u.old.values()) + bytes_of(params[p] for p in u.weights) for u in step.updates)
    d2h = sum(away(u.old.values()) + away(u.derived.values()) for u in step.updates)
    compiled = {"gradients": program(), A_BUCKET: program(("h2d", 1, False), ("d2h", 1, True))}
    once = {"gradients": 1, A_BUCKET: 1}
    disk = disk_bytes(step)
    assert (
        disk.read == disk.written == sum(on_disk.nbytes for u in step.updates for on_disk in map(u.old.get, u.on_disk))
    )
    found = traffic_of(state_groups(plan), compiled, once, gradient_bytes=gradients, disk=disk, microbatches=1)
    assert (found.disk_read, found.disk_write) == (disk.read, disk.written)
    assert (found.h2d, found.d2h, found.exposed_h2d, found.exposed_d2h) == (h2d, d2h, h2d, 0)


@pytest.mark.parametrize(
    ("microbatches", "gradient_bytes", "h2d", "d2h"),
    [
        (1, 2, 2 * 2 + 2 + 12, 2 + 14),  # two passes; the gradient and the state of the update
        (2, 4, 2 * 2 * 2 + 2 * 4 + 4 + 12, 2 * 4 + 14),  # each microbatch fetches the sum so far, and puts it back
    ],
)
def test_what_a_step_moves_where_nothing_was_compiled(microbatches, gradient_bytes, h2d, d2h):
    sizes = {"gradient_bytes": gradient_bytes, "disk": DiskBytes(24, 36), "microbatches": microbatches}
    assert traffic_of(GROUPS, {}, {}, **sizes) == Traffic(h2d, d2h, h2d, d2h, 24, 36)
    marked = traffic_of(GROUPS, {}, {}, **sizes, is_marking=True)
    assert marked == Traffic(h2d + 12, d2h, h2d + 12, d2h, 24, 36), "fingerprints read what goes to the disks"


def test_the_largest_bucket_stands_for_all_and_no_byte_counts_twice():
    compiled = {
        "gradients": program(("h2d", 3, True), ("h2d", 1, False), ("d2h", 2, True)),
        "global phase": program(("h2d", 5, False)),
        A_BUCKET: program(("h2d", 3, True), ("h2d", 4, False), ("d2h", 7, True)),  # half of all buckets
    }
    times = {"gradients": 2, "global phase": 1, A_BUCKET: 1}
    sizes = {"disk": DiskBytes(12, 12), "microbatches": 2}
    found = traffic_of(GROUPS, compiled, times, gradient_bytes=2, is_marking=True, **sizes)
    # 2 x 4 by the gradients, 5, the update's 2 + 12, and 12 once more for fingerprints; exposed of it 2, 5, 4/7 of 14, 12.
    assert found == Traffic(8 + 5 + 14 + 12, 2 * 2 + 14, 2 + 5 + 8 + 12, 0, 12, 12)
    one = traffic_of(GROUPS, {"step": compiled["gradients"]}, {"step": 1}, gradient_bytes=0, **sizes)
    assert one == Traffic(4, 2, 1, 0, 12, 12)


def test_host_memory_holds_gradients_beside_the_state_with_a_compiler_and_without():
    def parts(programs):
        sizes = {"local_devices": 2, "process_bytes": 0, "programs": programs}
        return host_use(GROUPS, Buffers(gradients=3, disks=4), Saving(0, 0, 1), **sizes).parts

    expected = {"state": 4, "gradients": 6, "buffers for disks": 8}
    assert parts({}) == expected
    # Parameters and gradients are given to the one program, slots for disks alone to the other.
    small = program(arguments=4, outputs=4, aliased=4)
    assert parts({"gradients": program(arguments=5, outputs=3, aliased=3), A_BUCKET: small}) == expected
    more = program(arguments=2, outputs=3, aliased=0, temps=4)
    assert parts({"gradients": more, A_BUCKET: small}) == {**expected, "state": 2 * (2 + 3 + 4)}


def test_with_parameters_away_and_anything_on_a_disk_a_budget_counts_the_gradients():
    plan = state_of([4 * BIG] * 12)
    device = choose(plan, Budget(), Needs()).device_bytes // 3  # no room for parameters
    in_memory = choose(plan, Budget(device), Needs())
    assert in_memory.placement.params == "pinned_host" and in_memory.placement.grads == "device"
    on_disk = choose(plan, Budget(device, host=in_memory.host_bytes * 2 // 3, nvme=None), Needs())
    found = totals(plan, on_disk.placement)
    assert found["nvme"] and on_disk.placement.grads == "pinned_host"
    gradients = 12 * 4 * BIG * 2  # of both devices, in bfloat16
    of_weight = dict.fromkeys(plan.params, 0)
    for path, x in tree.flatten(plan).items():
        if on_disk.placement.tier(path, x) == "nvme":
            of_weight[path.rpartition("/")[2]] += bytes_of([x])
    buffers = 4 * 2 * max(of_weight.values())  # four slots of the largest bucket
    assert on_disk.host_bytes == 2 * found["pinned_host"] + gradients + buffers
    summed = choose(plan, Budget(device, host=in_memory.host_bytes * 2 // 3, nvme=None), Needs(sums_gradients=True))
    assert summed == on_disk, "they are there anyway"


@pytest.mark.parametrize(("layers", "in_memory"), [(6, 0), (1, 5)])
def test_a_budget_puts_parameters_on_disks_last_and_counts_their_largest_layer(layers, in_memory):
    plan = state_of([4 * BIG] * 12)
    names = [[f"w{i}" for i in range(12) if i * layers // 12 == layer] for layer in range(layers)]
    of_layers = lambda group: {"layers": {str(i): {w: group[w] for w in own} for i, own in enumerate(names)}}
    moments = {**plan.opt_state, **{k: of_layers(plan.opt_state[k]) for k in ("mu", "nu")}}
    plan = dataclasses.replace(plan, params=of_layers(plan.params), master=of_layers(plan.master), opt_state=moments)
    device = choose(plan, Budget(), Needs()).device_bytes // 3
    weight = 4 * BIG  # bytes of one in bfloat16 on each of two devices, half of it
    # Gradients, and four slots of one weight with all that is updated with it: 7 times as much. More than 7 weights of one
    # layer on disks would take more room while they are read than they take in memory.
    least = 2 * (12 + in_memory + 4 * 7) * weight
    found = choose(plan, Budget(device, host=least, nvme=None), Needs())
    tiers = [found.placement.tier(path, x) for path, x in tree.flatten(plan).items() if x.ndim]
    assert found.host_bytes == least and tiers.count("pinned_host") == in_memory
    assert tiers.count("nvme") == 4 * 12 - in_memory
    more = choose(plan, Budget(device, host=least + 2 * weight, nvme=None), Needs()).placement
    assert [more.tier(path, x) for path, x in tree.flatten(plan).items()].count("pinned_host") == in_memory + 1
    with pytest.raises(PlanError, match=rf"budget.host of {least:,} bytes"):
        choose(plan, Budget(device, host=least - 1, nvme=None), Needs())


def test_what_flows_between_the_programs_of_the_layers_is_on_the_device_with_each_of_them():
    plan = state_of([BIG])
    programs = {"layer": program(), A_BUCKET: program()}
    subject = Subject(plan, {"tokens": plan.params["w0"]}, Placement(), {})
    without = device_parts(subject, programs)["state elsewhere"]
    kept = device_parts(dataclasses.replace(subject, activation_bytes=100), programs)
    assert kept["state and activations elsewhere"] == without + 100 > 100


def test_on_the_cpu_a_program_runs_beside_all_that_it_is_not_given(tmp_path):
    (tmp_path / "text.txt").write_text("Four score and seven years ago. " * 40)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run", text=tmp_path / "text.txt"))
    away = [f"placement.{group}=pinned_host" for group in ("params", "master", "opt_state")]
    found = plan_of(file, "--target", "cpu", "model.num_layers=1", *away)
    state = sum(g["bytes_per_device"] for g in found["groups"])
    gradients, _ = found["programs"].values()
    params = sum(g["bytes_per_device"] for g in found["groups"] if g["group"] == "params")
    own = gradients["peak_bytes"] - params  # the gradients' buffers and what the program makes
    # It is given some scalars, too, less than 64 bytes, that are no state.
    assert found["memory"]["host"]["parts"]["devices"] >= 8 * (state + own - 64)
