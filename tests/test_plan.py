"""Where each leaf lives is decided once: rules, then the model's annotations, then FSDP, then replicated."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.state.memory import group_sizes, memory_table
from jaxckpt.state.mesh import batch_sharding, make_mesh
from jaxckpt.state.nvme import NvmeStruct, tier_of
from jaxckpt.state.plan import Placement, make_plan, shardings, unannotated
from jaxckpt.state.train_state import TrainState, take_apart
from jaxckpt.update.optimizers import make_optimizer
from tiny import Mlp, mesh_of

MESH = mesh_of(data=2, fsdp=2, tensor=2)
BIG = (64, 128)


class Annotated(nnx.Module):
    """One weight annotated in each of Flax's spellings, one that only the default rule reaches, one too small for it."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.a = nnx.Linear(*BIG, kernel_init=nnx.with_partitioning(init, (None, "tensor")), use_bias=False, rngs=rngs)
        self.b = nnx.Linear(
            *BIG, kernel_init=nnx.with_metadata(init, out_sharding=("tensor", None)), use_bias=False, rngs=rngs
        )
        self.c = nnx.Linear(*BIG, use_bias=True, rngs=rngs)


def state_of(params, tx=None):
    """An abstract training state over parameters given by shape."""
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), params, is_leaf=lambda x: isinstance(x, tuple)
    )
    opt_state = jax.eval_shape((tx or optax.sgd(1.0)).init, params)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, None, opt_state, {})


def specs(plan):
    """{path: spec} without trailing Nones."""
    out = {}
    for path, x in tree.flatten(plan).items():
        spec = list(x.sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        out[path] = tuple(spec)
    return out


def plan_of(build, tx, mesh=MESH, **args):
    model, abstract, _ = take_apart(build, tx, seed=0)
    return make_plan(abstract, mesh, annotations=model.annotations, **args), model


def test_a_rule_beats_an_annotation_beats_fsdp_beats_replication():
    plan, model = plan_of(Annotated, optax.sgd(1.0), rules=[("a/kernel", P("fsdp"))])
    assert model.annotations == {"a/kernel": P(None, "tensor"), "b/kernel": P("tensor", None)}
    found = specs(plan)
    assert found["params/a/kernel"] == ("fsdp",)
    assert found["params/b/kernel"] == ("tensor",)
    assert found["params/c/kernel"] == (None, "fsdp"), "the largest dimension that fsdp divides"
    assert found["params/c/bias"] == () == found["step"]


def test_the_first_matching_rule_wins_and_a_rule_may_replicate():
    plan = make_plan(state_of({"w": BIG}), MESH, rules=[("w", P()), (".*", P("fsdp"))])
    assert specs(plan)["params/w"] == ()


def test_fsdp_takes_the_largest_dimension_that_divides_and_leaves_small_leaves_whole():
    found = specs(
        make_plan(state_of({"odd": (127, 64), "none": (101, 103), "small": (64, 64), "three": (8, 30, 64)}), MESH)
    )
    assert found["params/odd"] == (None, "fsdp")
    assert found["params/none"] == () == found["params/small"]
    assert found["params/three"] == (None, None, "fsdp")


def test_without_an_fsdp_axis_everything_unannotated_is_replicated():
    assert set(specs(make_plan(state_of({"w": BIG}), mesh_of(data=8))).values()) == {()}


def test_only_the_parameters_without_rule_and_annotation_are_unannotated():
    plan, model = plan_of(Annotated, optax.sgd(1.0), rules=[("c/bias", P())])
    assert unannotated(plan, [("c/bias", P())], model.annotations) == {"c/kernel"}


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor"])
def test_the_optimizer_state_follows_its_parameter(name):
    args = {"adafactor": {"weight_decay": 0, "min_dim_size_to_factor": 8}, "muon": {"adam_lr_scale": 1.0}}.get(name, {})
    tx = make_optimizer(name, lambda count: 1e-3, weight_decay_exclude="bias", **args)
    params = {"layers": {"w": (2, 64, 128)}, "embed": BIG, "norm": {"bias": (128,)}}
    rules = [("layers/w", P(None, "tensor", "fsdp")), ("embed", P("tensor", "fsdp")), ("bias", P("fsdp"))]
    plan = make_plan(state_of(params, tx), MESH, rules=rules)
    shapes = {"layers/w": (2, 64, 128), "embed": BIG, "norm/bias": (128,)}
    wanted = {"layers/w": (None, "tensor", "fsdp"), "embed": ("tensor", "fsdp"), "norm/bias": ("fsdp",)}
    followers = 0
    for path, x in tree.flatten(plan.opt_state).items():
        owner = next((p for p in shapes if path.endswith("/" + p)), None)
        if owner and x.shape == shapes[owner]:
            assert specs(plan)[f"opt_state/{path}"] == wanted[owner], path
            followers += 1
        elif x.ndim == 0:
            assert x.sharding.spec == P(), path
    # adafactor keeps whole second moments only for what it does not factor: the bias.
    assert followers == {"adamw": 6, "lion": 3, "muon": 5, "adafactor": 1}[name]


def test_a_factored_moment_is_laid_out_by_its_own_shape():
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    plan = make_plan(state_of({"w": (4, 2048, 4096)}, tx), MESH, rules=[("w", P("tensor", None, "fsdp"))])
    rows = {p: x for p, x in tree.flatten(plan.opt_state).items() if p.endswith(("v_row/w", "v_col/w"))}
    assert len(rows) == 2
    for path, x in rows.items():
        assert len(x.sharding.spec) <= len(x.shape), path
        assert x.sharding.shard_shape(x.shape) == (4, x.shape[1] // 2), path


def test_a_parameter_whose_name_ends_another_is_not_taken_for_its_owner():
    plan = make_plan(
        state_of({"w": BIG, "deep": {"w": BIG}}, optax.adam(1.0)),
        MESH,
        rules=[("deep/w", P("tensor")), ("^w", P("fsdp"))],
    )
    found = specs(plan)
    assert found["opt_state/0/mu/deep/w"] == ("tensor",)
    assert found["opt_state/0/mu/w"] == ("fsdp",)


def test_placement_moves_whole_groups_but_no_scalar_and_not_the_parameters():
    model, abstract, _ = take_apart(
        lambda r: Mlp(r, has_norm=True), optax.adamw(1e-3), seed=0, compute_dtype="bfloat16"
    )
    plan = make_plan(abstract, MESH, placement=Placement(opt_state="pinned_host", master="pinned_host"))
    for path, x in tree.flatten(plan).items():
        off = path.startswith(("opt_state/", "master/")) and x.ndim
        assert x.sharding.memory_kind == ("pinned_host" if off else "device"), path
    kinds = {(g.group, g.tier) for g in group_sizes(plan)}
    assert {
        ("master", "pinned_host"),
        ("opt_state", "pinned_host"),
        ("opt_state", "device"),
        ("params", "device"),
    } <= kinds
    everything_on_device = jax.tree.leaves(shardings(plan, "device"))
    assert {s.memory_kind for s in everything_on_device} == {"device"}


def test_placement_keeps_the_partition_spec():
    state = state_of({"w": BIG}, optax.adam(1.0))
    off = make_plan(state, MESH, placement=Placement(opt_state="pinned_host"))
    assert specs(off) == specs(make_plan(state, MESH))


def test_the_memory_table_counts_bytes_in_all_and_on_each_device():
    plan = make_plan(state_of({"w": BIG}, optax.adam(1.0)), MESH)
    sizes = {g.group: g for g in group_sizes(plan)}
    assert (sizes["params"].total_bytes, sizes["params"].bytes_per_device) == (64 * 128 * 4, 64 * 128 * 2)
    assert sizes["opt_state"].total_bytes == 2 * 64 * 128 * 4 + 4
    assert memory_table(plan).row_count == 3


def test_every_problem_of_a_layout_is_reported_at_once():
    params = {"unknown": BIG, "uneven": (64, 129), "flat": (64,), "fine": BIG}
    rules = [("unknown", P("model")), ("uneven", P(None, "tensor")), ("flat", P(None, "fsdp")), ("fine", P("fsdp"))]
    with pytest.raises(PlanError) as error:
        make_plan(state_of(params), MESH, rules=rules)
    text = str(error.value)
    assert "params/unknown: rule 'unknown' names the mesh axis 'model'" in text
    assert "params/uneven has shape (64, 129)" in text and "tensor=2" in text and "does not divide" in text
    assert "params/flat has 1 dimension(s)" in text
    assert "params/fine" not in text


def test_an_annotation_that_does_not_fit_is_refused_with_its_source():
    model, abstract, _ = take_apart(Annotated, optax.sgd(1.0), seed=0)
    with pytest.raises(PlanError, match="params/a/kernel.*the model's own annotation.*'tensor'"):
        make_plan(
            abstract,
            jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)),
            annotations={"a/kernel": P("tensor")},
        )


def test_several_axes_on_one_dimension_multiply():
    plan = make_plan(state_of({"w": BIG}), MESH, rules=[("w", P(("data", "fsdp")))])
    assert plan.params["w"].sharding.shard_shape(BIG) == (16, 128)
    with pytest.raises(PlanError, match="in 4 .data=2 x fsdp=2."):
        make_plan(state_of({"w": (6, 2000)}), MESH, rules=[("w", P(("data", "fsdp")))])


def test_a_placement_takes_what_the_configuration_takes_and_tells_what_is_odd(tmp_path):
    placement = Placement(paths={"/nu/": "nvme"}, nvme_dir=tmp_path)
    assert placement == Placement(paths=(("/nu/", "nvme"),), nvme_dir=(str(tmp_path),))
    assert Placement(nvme_dir=[tmp_path, "/b"]).nvme_dir == (str(tmp_path), "/b")
    odd = [
        ({"bucket_bytes": "1MiB", "nvme_dir": 5}, ["bucket_bytes: .* found '1MiB'", "nvme_dir: .* found 5"]),
        ({"bucket_bytes": 0, "nvme_dir": ""}, ["bucket_bytes: .* 1 at least, found 0", r"nvme_dir: .* found \(''"]),
        ({"nvme_cache_bytes": 5, "paths": ("nu",)}, ["nvme_cache_bytes: .* no nvme_dir", "paths: expected pairs"]),
        ({"nvme_dir": "gs://bucket/x"}, ["nvme_dir: expected directories on local disks"]),
    ]
    for settings, told in odd:
        with pytest.raises(PlanError, match="(?s)" + ".*".join(told)):
            Placement(**settings)


def test_everything_that_is_wrong_with_a_placement_is_told_at_once():
    wrong = Placement(
        params="nvme",
        master="disk",  # type: ignore[arg-type]
        grads="nvme",  # type: ignore[arg-type]
        paths=(("nowhere", "device"), ("model_state", "pinned_host"), ("w$", "tape")),  # type: ignore[arg-type]
    )
    state = replace(state_of({"w": BIG}), model_state={"mean": jax.ShapeDtypeStruct(BIG, jnp.float32)})
    with pytest.raises(PlanError) as refused:
        make_plan(state, MESH, placement=wrong)
    for line in (
        "placement.params: the tier nvme needs placement.nvme_dir",
        "placement.master: 'disk' is no tier; there are device, pinned_host, nvme",
        "placement.grads: 'nvme' is no tier; there are device, pinned_host",
        "placement.paths: 'nowhere' is found in no path of the state",
        "placement.paths: 'model_state' is found in model_state/mean, and that group stays on the device",
        "'tape' is no tier",
    ):
        assert line in str(refused.value)


def test_a_leaf_takes_the_tier_of_its_path_before_that_of_its_group():
    placement = Placement(opt_state="pinned_host", paths=(("/nu/", "nvme"), ("inner", "device")), nvme_dir=("/d",))
    plan, _ = plan_of(lambda rngs: Mlp(rngs, width=2**14), optax.adam(1e-3), placement=placement)
    plan = tree.flatten(plan)
    found = {path: tier_of(x) for path, x in plan.items() if path.startswith("opt_state")}
    assert found == {
        "opt_state/0/count": "device",
        "opt_state/0/mu/inner/bias": "device",
        "opt_state/0/mu/inner/kernel": "device",
        "opt_state/0/mu/outer/bias": "pinned_host",
        "opt_state/0/mu/outer/kernel": "pinned_host",
        "opt_state/0/nu/inner/bias": "pinned_host",  # small: no file of its own
        "opt_state/0/nu/inner/kernel": "nvme",
        "opt_state/0/nu/outer/bias": "pinned_host",
        "opt_state/0/nu/outer/kernel": "pinned_host",
    }
    assert isinstance(plan["opt_state/0/nu/inner/kernel"], NvmeStruct)
    assert plan["opt_state/0/nu/inner/kernel"].sharding.spec == plan["params/inner/kernel"].sharding.spec


@pytest.mark.parametrize("key", ["a.b", "a/b"])
def test_a_parameter_name_that_the_disk_could_not_tell_apart_is_refused(key):
    with pytest.raises(PlanError, match="neither"):
        make_plan(state_of({key: BIG}), MESH)


def test_a_mesh_takes_the_devices_left_over_and_says_what_is_wrong_otherwise():
    assert dict(make_mesh(data=2, fsdp=-1).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert batch_sharding(make_mesh()).spec == P(("data", "fsdp"))
    for sizes, text in [
        ({"data": 3}, "needs a multiple of 3 devices and there are 8"),
        ({"data": 2, "fsdp": 2}, "needs 4 devices and there are 8"),
        ({"data": -1, "fsdp": -1}, "at most one"),
        ({"data": 0}, "positive"),
    ]:
        with pytest.raises(PlanError, match=text):
            make_mesh(**sizes)
