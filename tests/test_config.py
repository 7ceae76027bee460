"""A configuration is checked as a whole, its messages name the key, and a resumed run stays the same run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt import config as config_module
from jaxckpt.config import (
    ABSENT,
    AdamW,
    Difference,
    RunConfig,
    check_resumable,
    describe,
    differences,
    format_table,
    load_config,
    resolve,
    to_dict,
    to_yaml,
)
from jaxckpt.config.tree import all_keys
from jaxckpt.config.values import Remat
from jaxckpt.errors import ConfigError

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
IMPORTS = """
run_dir: runs/a
steps: 10
model: {name: import, target: "pkg.mod:Model", loss: "pkg.mod:loss", args: {width: 3, deep: {a: [1, null]}}}
data: {name: import, target: "pkg.mod:data", batch_size: 4, held_out: "pkg.mod:held_out"}
optimizer: {name: import, target: "optax:noisy_sgd"}
"""


def tiny(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


def problems(*overrides: str, path: Path = TINY) -> list[str]:
    """The lines of the ConfigError, its headline left out."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    headline, *lines = str(caught.value).split("\n  ")
    assert str(path) in headline
    return lines


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_tiny_config_has_the_mesh_and_model_that_the_readme_describes():
    config = tiny()
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.cpu_devices) == (2, 4, 8)
    assert config.model.name == "llama" and config.model.num_kv_heads == 2
    assert config.optimizer.lr == 3e-3 and config.steps == 300


def test_config_imports_nothing_heavy():
    code = "import sys, jaxckpt.config; print({'jax', 'flax', 'optax', 'numpy', 'grain'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_overrides_apply_in_order_and_win_over_the_file():
    config = tiny("steps=5", "optimizer.lr=1e-4", "optimizer.schedule.warmup_steps=0", "steps=7", "data.files=[a, b]")
    assert (config.steps, config.optimizer.lr, to_dict(config)["data"]["files"]) == (7, 1e-4, ["a", "b"])


def test_numbers_in_exponent_notation_are_numbers_in_file_override_and_quotes(write):
    path = write(TINY.read_text().replace("lr: 3e-3", "lr: '1e-3'"))
    assert load_config(path).optimizer.lr == 1e-3
    assert tiny("optimizer.lr=1e-3").optimizer.lr == 1e-3
    steps = tiny("steps=1e3").steps
    assert steps == 1000 and type(steps) is int


@pytest.mark.parametrize("value", ["true", "nan", "inf", "2.5", "many", "[1]", "null", "0"])
def test_what_is_no_positive_integer_is_refused(value):
    (line,) = problems(f"steps={value}")
    assert line.startswith("steps: expected an integer greater than 0, found ")


def test_every_problem_is_reported_at_once_also_conflicts_beside_wrong_keys():
    lines = problems(
        "nonsense",
        "optimizer.lrr=1",
        "steps=many",
        "model.tie_embeddings=1",
        "model.norm_eps=small",
        "model.num_kv_heads=3",
        "optimizer.accumulation_steps=5",
        "data.holdout=0",
    )
    assert lines == [
        "override 'nonsense': expected key=value, such as optimizer.lr=1e-3",
        "steps: expected an integer greater than 0, found 'many'",
        "model.norm_eps: expected a number greater than 0, found 'small'",
        "model.tie_embeddings: expected true or false, found 1",
        "optimizer.lrr: no such key; did you mean optimizer.lr?",
        "data.batch_size: 16 is not divisible by optimizer.accumulation_steps=5",
        "model.num_kv_heads: 3 does not divide model.num_heads=4",
        "eval.every: data.holdout=0 leaves nothing to evaluate on; raise it or set eval.every to null",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lr=1", "lr: no such key; did you mean optimizer.lr?"),
        (
            "optimizer.warmup_steps=3",
            "optimizer.warmup_steps: no such key; did you mean optimizer.schedule.warmup_steps?",
        ),
        (
            "optimizer.schedule.warmup=3",
            "optimizer.schedule.warmup: no such key; did you mean optimizer.schedule.warmup_steps?",
        ),
        ("snapshot.every=3", "snapshot: no such key; did you mean snapshots?"),
        ("data.batchsize=3", "data.batchsize: no such key; did you mean data.batch_size?"),
        ("every=3", "every: no such key; did you mean snapshots.every or eval.every?"),
        ("qwertyuiop=3", "qwertyuiop: no such key"),
        ("model.target='a:b'", "model.target: no such key with model.name=llama; it belongs to import"),
    ],
)
def test_an_unknown_key_is_answered_with_the_key_meant(override, expected):
    assert problems(override) == [expected]


def test_a_missing_key_is_reported_with_its_meaning_and_without_the_variant_in_its_path(write):
    lines = problems(path=write(""))
    keys = [line.partition(":")[0] for line in lines]
    required = {"run_dir", "steps", "model.num_layers", "model.d_model", "model.num_heads", "model.d_ff"}
    assert set(keys) == required | {"data.files", "data.seq_len", "data.batch_size", "optimizer.lr"}
    assert "model.d_model: missing; expected an integer greater than 0: width of the residual stream" in lines


def test_an_unknown_variant_lists_the_valid_ones():
    assert problems("model.name=lama") == [
        "model.name: expected one of llama, import, found 'lama'; did you mean llama?"
    ]
    (line,) = problems("optimizer.name=sophia")
    assert line == "optimizer.name: expected one of adamw, adafactor, lion, muon, sgd, import, found 'sophia'"


def test_a_value_in_a_sections_place_is_refused():
    assert problems("snapshots=3") == ["snapshots: expected a section (keys below it), found 3"]
    assert problems("steps.x=3") == ['steps: expected an integer greater than 0, found {"x": 3}']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: [1\nfoo: }", "line 2"),
        ("steps: 1\nsteps: 2", "duplicate key steps"),
        ("- steps", "expected a mapping"),
        ("steps", "expected a mapping"),
        ("3", "expected a mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_its_place(write, text, expected):
    path = write(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_and_an_undefined_interpolation_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    (line,) = problems("steps=${absent}")
    assert "absent" in line


def test_malformed_overrides_are_reported_beside_other_problems():
    lines = problems("=3", "optimizer.lr=[", "seed=x")
    assert lines[0].startswith("override '=3': expected key=value")
    assert lines[1].startswith("override 'optimizer.lr=[': line ")
    assert lines[2] == "seed: expected an integer of at least 0, found 'x'"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["run_dir=s3://bucket/x"],
            "run_dir: found 's3://bucket/x'; expected a local directory or gs://bucket/prefix, not s3://",
        ),
        (["run_dir=gs://bucket"], "run_dir: found 'gs://bucket'; expected gs://bucket/prefix"),
        (["run_dir=runs/a*"], "run_dir: found 'runs/a*'; * cannot be part of it"),
        (["optimizer.schedule.warmup_steps=301"], "optimizer.schedule.warmup_steps: 301 is more than steps (300)"),
        (
            ["optimizer.schedule.decay_steps=9"],
            "optimizer.schedule.warmup_steps: 20 is more than optimizer.schedule.decay_steps",
        ),
        (
            ["optimizer.schedule.name=wsd", "optimizer.schedule.decay_fraction=0.95"],
            "optimizer.schedule.decay_fraction: warmup (20 steps) and decay (285 steps) do not fit into steps (300)",
        ),
        (["mesh.data=-1", "mesh.fsdp=-1"], "mesh: data and fsdp are -1; one axis at most"),
        (["mesh.tensor=0"], "mesh.tensor: expected at least 1 device, or -1, found 0"),
        (["model.num_kv_heads=3"], "model.num_kv_heads: 3 does not divide model.num_heads=4"),
        (["model.num_heads=3", "model.num_kv_heads=1"], "model.d_model: 128 is not divisible by model.num_heads=3"),
        (["model.d_model=12"], "model.head_dim: 3 (d_model / num_heads) is odd"),
        (["model.head_dim=5"], "model.head_dim: 5 is odd"),
        (["model.dropout=1"], "model.dropout: expected a number in [0, 1), found 1"),
        (["model.remat=all"], "model.remat: expected one of none, full, "),
        (
            [
                "model.rope_scaling={factor: 8, low_freq_factor: 4, high_freq_factor: 1}",
                "model.rope_scaling.original_max_position_embeddings=64",
            ],
            "model.rope_scaling.high_freq_factor: 1.0 must be more than low_freq_factor (4.0)",
        ),
        (
            ["model.compute_dtype=float32", "placement.master=pinned_host"],
            "placement.master: pinned_host moves the float32",
        ),
        (["placement.opt_state=nvme"], "placement.nvme_dir: null, and placement.opt_state is nvme"),
        (["placement.paths={nu: nvme}"], "placement.nvme_dir: null, and placement.paths, 'nu' is nvme"),
        (["placement.grads=pinned_host"], "placement.grads: pinned_host is for params off the device"),
        (
            ["placement.opt_state=pinned_host", "placement.budget.device=1GiB"],
            "placement.budget: it chooses the tiers itself, and placement.opt_state is given too",
        ),
        (["placement.nvme_dir=gs://b/x"], "placement.nvme_dir: found 'gs://b/x'; expected a directory on a local disk"),
        (["placement.nvme_cache_bytes=1GiB"], "placement.nvme_cache_bytes: it is for state on local disks, and "),
        (
            ["placement.budget.nvme=1GiB"],
            "placement.budget.nvme: it is for state on local disks, and placement.nvme_dir is",
        ),
        (
            ["placement.budget.device=24GiX"],
            "placement.budget.device: expected a number of bytes such as 512MiB or 4GB or null, found '24GiX'",
        ),
        (
            ["placement.bucket_bytes=1.5.5GiB"],
            "placement.bucket_bytes: expected a number of bytes such as 512MiB or 4GB, found",
        ),
        (["model.remat=offload"], "model.remat: offload needs model.scan_layers: false"),
        (["placement.opt_state=tape"], "placement.opt_state: expected one of device, pinned_host, nvme, found 'tape'"),
        (["snapshots.keep=0"], "snapshots.keep: expected an integer greater than 0, found 0"),
        (
            ["optimizer.weight_decay_exclude='(norm'"],
            "optimizer.weight_decay_exclude: '(norm' is not a regular expression",
        ),
        (
            ["optimizer.weight_decay_exclude=''"],
            "optimizer.weight_decay_exclude: an empty regular expression matches every",
        ),
        (["mesh.rules={'a(': [fsdp]}"], "mesh.rules: 'a(' is not a regular expression"),
        (["mesh.rules={a: [model]}"], "mesh.rules: 'a' names 'model'; the mesh axes are data, fsdp, tensor"),
        (["mesh.rules={a: [fsdp, [fsdp, data]]}"], "mesh.rules: 'a' uses a mesh axis twice"),
        (["mesh.rules={a: fsdp}"], "mesh.rules: expected a mapping of text to list of "),
        (["distributed.process_id=0"], "distributed: coordinator_address, num_processes and process_id go together"),
        (
            ["distributed={coordinator_address: 'h:1', num_processes: 2, process_id: 2}"],
            "distributed.process_id: 2 is not below num_processes=2",
        ),
        (
            ["distributed={coordinator_address: h, num_processes: 2, process_id: 1}"],
            "distributed.coordinator_address: expected text like host:port",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_by_one_line(overrides, expected):
    (line,) = problems(*overrides)
    assert line.startswith(expected)


def test_imported_parts_need_what_the_own_ones_know(write):
    path = write(IMPORTS)
    config = load_config(path)
    assert to_dict(config)["model"]["args"] == {"width": 3, "deep": {"a": [1, None]}} and config.optimizer.lr is None
    assert problems("data.held_out=null", path=path)[0].startswith("eval.every: there is no data.held_out")
    assert problems("model.target=nonsense", path=path) == [
        "model.target: expected text like pkg.mod:thing, found 'nonsense'"
    ]
    text = TINY.read_text()
    llama = text[: text.index("data:")] + IMPORTS[IMPORTS.index("data:") :]
    assert problems(path=write(llama))[0].startswith("model.vocab_size: null takes the tokenizer's")


def test_sections_without_a_name_are_the_default_variant(write):
    text = "\n".join(line for line in TINY.read_text().splitlines() if not line.strip().startswith("name:"))
    assert load_config(write(text), ["optimizer.schedule.name=cosine"]) == tiny()


def test_an_empty_section_is_its_defaults(write):
    assert load_config(write(TINY.read_text() + "\nplacement:\n")) == tiny()


def test_resolved_yaml_holds_every_key_and_reads_back_equal(write):
    config = resolve(tiny("mesh.rules={'attn/.*w[qk]$': [fsdp, null, [data, tensor]]}"), None)
    text = to_yaml(config)
    assert load_config(write(text)) == config
    for row in describe():
        if "(" not in row.key:
            assert f"{row.key.rpartition('.')[2]}:" in text
    json_text = json.dumps(to_dict(config), allow_nan=False)
    assert RunConfig.model_validate(json.loads(json_text)) == config


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        tiny().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_decay_steps_are_fixed_at_the_first_start():
    first = resolve(tiny(), None)
    assert first.optimizer.schedule.decay_steps == 300
    longer = resolve(tiny("steps=600"), to_dict(first))
    assert (longer.steps, longer.optimizer.schedule.decay_steps) == (600, 300)
    given = resolve(tiny("steps=600", "optimizer.schedule.decay_steps=600"), to_dict(first))
    assert given.optimizer.schedule.decay_steps == 600
    constant = resolve(tiny("optimizer.schedule.name=constant"), None)
    assert constant.optimizer.schedule.decay_steps is None
    assert resolve(tiny(), to_dict(constant)).optimizer.schedule.decay_steps == 300


def test_a_stored_decay_that_ends_before_the_warmup_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps: 400 is more than optimizer.schedule.decay_steps \(300\)"):
        resolve(tiny("steps=600", "optimizer.schedule.warmup_steps=400"), to_dict(resolve(tiny(), None)))


def changed(*overrides: str) -> list[Difference]:
    old = to_dict(resolve(tiny("model.compute_dtype=bfloat16"), None))
    return differences(old, to_dict(resolve(tiny("model.compute_dtype=bfloat16", *overrides), old)))


@pytest.mark.parametrize(
    "override",
    [
        "steps=600",
        "run_dir=other",
        "snapshots.every=7",
        "eval.every=null",
        "mesh.fsdp=1",
        "mesh.rules={a: [fsdp]}",
        "placement.opt_state=pinned_host",
        "distributed.timeout_s=5",
        "data.num_threads=0",
        "data.files=[/somewhere/else]",
    ],
)
def test_what_does_not_alter_training_is_no_difference(override):
    assert changed(override) == []


@pytest.mark.parametrize(
    ("override", "key", "old", "new"),
    [
        ("seed=1", "seed", 0, 1),
        ("optimizer.lr=1", "optimizer.lr", 3e-3, 1.0),
        ("optimizer.schedule.final_ratio=0", "optimizer.schedule.final_ratio", 0.1, 0.0),
        ("optimizer.accumulation_steps=2", "optimizer.accumulation_steps", 1, 2),
        ("data.batch_size=32", "data.batch_size", 16, 32),
        ("data.holdout=0.1", "data.holdout", 0.05, 0.1),
        ("model.remat=full", "model.remat", "none", "full"),
        ("model.compute_dtype=float32", "model.compute_dtype", "bfloat16", "float32"),
        ("optimizer.name=sgd", "optimizer.name", "adamw", "sgd"),
    ],
)
def test_what_alters_training_is_a_difference(override, key, old, new):
    assert changed(override) == [Difference(key, old, new)]


def test_args_are_compared_key_by_key(write):
    path = write(IMPORTS)
    old, new = (to_dict(load_config(path, o)) for o in (["model.args.gone=1"], ["model.args.width=4"]))
    assert differences(old, new) == [Difference("model.args.width", 3, 4), Difference("model.args.gone", 1, ABSENT)]


def test_a_key_that_an_older_run_did_not_know_counts_as_its_default():
    new = to_dict(resolve(tiny(), None))
    old = json.loads(json.dumps(new))
    del old["model"]["qk_norm"], old["optimizer"]["schedule"]["final_ratio"], old["seed"]
    assert differences(old, new) == []
    assert differences(old, new | {"seed": 5}) == [Difference("seed", 0, 5)]
    new["model"]["qk_norm"] = True
    assert differences(old, new) == [Difference("model.qk_norm", False, True)]


def test_a_changed_run_is_refused_with_both_values_and_the_way_out():
    old, new = to_dict(tiny("data.seq_len=256")), to_dict(tiny("optimizer.lr=1e-4", "data.seq_len=128"))
    with pytest.raises(ConfigError) as caught:
        check_resumable(old, new, [])
    text = str(caught.value)
    assert "optimizer.lr: was 0.003, now 0.0001" in text and "data.seq_len: was 256, now 128" in text
    assert "--allow-changed data.seq_len --allow-changed optimizer.lr" in text and "run_dir" in text


def test_allowed_keys_and_sections_may_change_and_others_still_not():
    old, new = to_dict(tiny()), to_dict(tiny("optimizer.lr=1e-4", "optimizer.schedule.final_ratio=0"))
    check_resumable(old, old, [])
    check_resumable(old, new, ["optimizer"])
    check_resumable(old, new, ["optimizer.lr", "optimizer.schedule"])
    with pytest.raises(ConfigError) as caught:
        check_resumable(old, new, ["optimizer.lr", "seed"])
    assert "optimizer.schedule.final_ratio: was" in str(caught.value) and "optimizer.lr" not in str(caught.value)


def test_an_allowed_key_does_not_cover_a_key_that_only_begins_like_it(write):
    path = write(IMPORTS)
    old = to_dict(load_config(path, ["model.args.wide=1"]))
    with pytest.raises(ConfigError, match=r"model\.args\.wide: was 1, now 2"):
        check_resumable(old, to_dict(load_config(path, ["model.args.wide=2"])), ["model.args.w"])


def test_an_allowed_name_that_is_no_key_is_refused():
    same = to_dict(tiny())
    with pytest.raises(ConfigError, match=r"--allow-changed optimizer.lrr: no such key; did you mean optimizer.lr\?"):
        check_resumable(same, same, ["optimizer.lrr"])
    with pytest.raises(ConfigError, match="no such key"):
        check_resumable(same, same, ["optim"])
    check_resumable(same, same, ["model.args.width", "optimizer.b1"])


def test_the_table_has_every_key_once_with_type_default_and_meaning():
    rows = describe()
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    assert {"steps", "data.batch_size", "model(llama).num_layers", "optimizer(adamw|lion).weight_decay"} <= set(keys)
    assert "optimizer.schedule.warmup_steps" in keys and "optimizer.name" in keys
    without = [row.key for row in rows if not (row.type and row.default and row.meaning)]
    assert without == []
    by_key = {row.key: row for row in rows}
    assert by_key["steps"].type == "integer greater than 0" and by_key["steps"].default == "required"
    assert by_key["mesh.fsdp"].default == "-1" and by_key["eval.every"].type == "integer greater than 0 or null"
    assert by_key["optimizer.name"].default == "adamw" and "muon" in by_key["optimizer.name"].type


def test_every_key_of_the_resolved_config_is_in_the_table():
    known = {key for key, _, _ in all_keys(RunConfig)}

    def leaves(tree: dict, prefix: str = ""):
        for key, value in tree.items():
            if isinstance(value, dict) and prefix + key not in known:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    assert set(leaves(to_dict(tiny()))) <= known


def test_the_table_prints_within_its_width():
    text = format_table(describe(), width=80)
    meanings = [line for line in text.splitlines() if line.startswith("    ")]
    assert meanings and max(map(len, meanings)) <= 80
    assert "steps " in text and "(required)" in text


def test_the_llama_section_has_the_models_own_keys():
    from jaxckpt.models import llama_config

    own = set(llama_config.LlamaConfig.__dataclass_fields__)
    assert set(config_module.Llama.model_fields) == own | {"name", "compute_dtype"}
    assert set(llama_config.REMAT) == set(Remat.__args__)


def test_sections_are_made_in_python_too():
    config = RunConfig(
        run_dir="runs/x",
        steps=3,
        model=config_module.Llama(num_layers=1, d_model=8, num_heads=2, d_ff=8),
        data=config_module.TextData(files=["a"], seq_len=4, batch_size=2),
        optimizer=AdamW(lr=1e-3),
    )
    assert (config.mesh.fsdp, config.model.compute_dtype) == (-1, "bfloat16")
    assert to_dict(config)["optimizer"]["weight_decay"] == 0.1
    with pytest.raises(ValueError, match="not divisible"):
        RunConfig.model_validate(to_dict(config) | {"optimizer": {"lr": 1, "accumulation_steps": 3}})
