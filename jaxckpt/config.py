"""A run's configuration: a YAML file and `key=value` overrides, checked as a whole.

The sections come first (each key's meaning is the docstring under it), then loading, resuming, and the table of keys.
Nothing heavy is imported, so that `python -m jaxckpt config` answers at once.
"""

import difflib
import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from jaxckpt.errors import ConfigError

AXES = ("data", "fsdp", "tensor")

# --- types of values --------------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """Text such as '1e-3' as a float (YAML 1.1 reads it as a string); true, false, inf and nan are no numbers here."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise PydanticCustomError("number", "not a number") from None
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise PydanticCustomError("number", "not a number")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    if not value:
        raise ValueError("an empty regular expression matches every path; write null, or leave the key out")
    return value


def _rules(rules: dict[str, list]) -> dict[str, list]:
    for pattern, dims in rules.items():
        _regex(pattern)
        axes = [axis for dim in dims for axis in (dim if isinstance(dim, list) else [dim]) if axis is not None]
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise ValueError(f"{pattern!r} names {', '.join(map(_show, unknown))}; the mesh axes are {', '.join(AXES)}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"{pattern!r} uses a mesh axis twice ({', '.join(axes)}); each may shard one dimension")
    return rules


def _local_directory(value: str) -> str:
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise ValueError(f"found {value!r}; this version writes to local paths only, not to {scheme[0]}")
    if not value.strip():
        raise ValueError("expected a directory, found an empty text")
    return os.path.expanduser(value)


Int = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Int, Field(gt=0)]
Index = Annotated[Int, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Below1 = Annotated[Float, Field(ge=0, lt=1)]
Share = Annotated[Float, Field(ge=0, le=1)]
NonZeroShare = Annotated[Float, Field(gt=0, le=1)]
AxisSize = Annotated[Int, Field(ge=-1)]
Regex = Annotated[str, AfterValidator(_regex)]
Text = Annotated[str, Field(min_length=1)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Files = Annotated[list[Text], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), Field(min_length=1)]
Rules = Annotated[dict[str, list[str | list[str] | None]], AfterValidator(_rules)]
ComputeDtype = Literal["float32", "bfloat16"]
Tier = Literal["device", "pinned_host"]
Remat = Literal[
    "none", "full", "everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
]

# --- sections ---------------------------------------------------------------------------------------------------------


class Config(BaseModel):
    """A section. The class docstring is for readers of the code; users see the docstrings of the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RopeScaling(Config):
    """Llama 3.1's stretching of the rotary wavelengths; names and meaning as in Hugging Face's `rope_scaling`."""

    factor: Positive
    """how many times the context is stretched"""
    low_freq_factor: Positive
    """wavelengths above original_max_position_embeddings / low_freq_factor tokens are stretched fully"""
    high_freq_factor: Positive
    """wavelengths below original_max_position_embeddings / high_freq_factor tokens stay as they are"""
    original_max_position_embeddings: Count
    """tokens of context before the stretching"""


class Llama(Config):
    name: Literal["llama"] = "llama"
    """which model: `llama` is this package's decoder, `import` any Flax NNX module"""
    vocab_size: Count | None = None
    """size of the vocabulary; null: the tokenizer's"""
    num_layers: Count
    """number of decoder layers"""
    d_model: Count
    """width of the residual stream"""
    num_heads: Count
    """query heads"""
    num_kv_heads: Count | None = None
    """key/value heads, a divisor of num_heads; null: num_heads"""
    head_dim: Count | None = None
    """width of a head, even; null: d_model / num_heads"""
    d_ff: Count
    """width of the gated feed-forward layer"""
    rope_theta: Positive = 10000.0
    """base of the rotary position embedding"""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's context stretching; null: none"""
    norm_eps: Positive = 1e-5
    """added to the mean square in RMSNorm"""
    tie_embeddings: StrictBool = False
    """one matrix for input embedding and output head"""
    qkv_bias: StrictBool = False
    """a bias on the query, key and value projections (Qwen 2)"""
    qk_norm: StrictBool = False
    """RMSNorm on queries and keys, per head (Qwen 3)"""
    sliding_window: Count | None = None
    """tokens that a position attends to, itself included; null: all before it"""
    dropout: Below1 = 0.0
    """share of activations dropped while training"""
    remat: Remat = "none"
    """what a layer's backward computes again: nothing (none), everything but its input (full), or what the
    jax.checkpoint policy of that name does not save"""
    compute_dtype: ComputeDtype = "bfloat16"
    """dtype of weights and activations in forward and backward; bfloat16 keeps float32 master weights beside"""


class ImportModel(Config):
    name: Literal["import"] = "import"
    """which model: `llama` is this package's decoder, `import` any Flax NNX module"""
    target: Target
    """pkg.mod:thing, called as thing(rngs=nnx.Rngs, **args); returns the nnx.Module"""
    args: dict[str, JsonValue] = {}
    """keyword arguments of target"""
    loss: Target
    """pkg.mod:thing, called as thing(model, batch); returns (sum over targets, number of targets)"""
    compute_dtype: ComputeDtype = "float32"
    """dtype of the weights in forward and backward; bfloat16 keeps float32 master weights beside"""


class TextData(Config):
    name: Literal["text"] = "text"
    """which data: `text` reads text files, `import` any grain MapDataset"""
    files: Files
    """text files, directories or globs"""
    tokenizer: Text = "bytes"
    """`bytes`, or the path of a tokenizer.json (or of a directory with one)"""
    seq_len: Count
    """tokens in an example"""
    batch_size: Count
    """examples per optimizer step, over all devices and microbatches"""
    holdout: Below1 = 0.05
    """share of the documents kept out of training for evaluation"""
    num_threads: Index = 2
    """threads that read ahead in each process; no influence on what is read"""


class ImportData(Config):
    name: Literal["import"] = "import"
    """which data: `text` reads text files, `import` any grain MapDataset"""
    target: Target
    """pkg.mod:thing, called as thing(**args); returns a grain MapDataset of examples"""
    args: dict[str, JsonValue] = {}
    """keyword arguments of target"""
    batch_size: Count
    """examples per optimizer step, over all devices and microbatches"""
    held_out: Target | None = None
    """pkg.mod:thing, called like target, for the examples of evaluation; null: none"""
    num_threads: Index = 2
    """threads that read ahead in each process; no influence on what is read"""


class Schedule(Config):
    """Learning rate over optimizer steps: linear warmup to the peak, then what `name` says until `decay_steps`."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """after the warmup: stay, fall linearly, fall as a cosine, or stay and fall linearly at the end (wsd)"""
    warmup_steps: Index = 0
    """optimizer steps of linear warmup from 0"""
    decay_steps: Count | None = None
    """step at which the decay has ended (warmup included); null: `steps` at the run's first start, kept from then on
    so that a later, larger `steps` does not bend a schedule under way; unused by constant"""
    decay_fraction: NonZeroShare = 0.1
    """wsd: the last share of decay_steps, in which the rate falls"""
    final_ratio: Share = 0.1
    """learning rate after the decay, as a share of the peak"""


class _Optimizer(Config):
    """What every optimizer has."""

    lr: Positive
    """peak learning rate"""
    schedule: Schedule = Schedule()
    """learning rate over the steps"""
    weight_decay_exclude: Regex | None = "(norm|bias|scale)"
    """regex, searched in a parameter's path: no weight decay where it matches; null: decay all"""
    max_grad_norm: Positive | None = 1.0
    """gradients are scaled down to this global norm; null: never"""
    accumulation_steps: Count = 1
    """microbatches that a batch is split into, one after another"""
    nonfinite: Literal["stop", "skip"] = "stop"
    """on a loss or gradient that is not finite: stop the run, or skip that update and count it"""


class AdamW(_Optimizer):
    name: Literal["adamw"] = "adamw"
    """which optimizer, all of optax; `import` calls your own"""
    b1: Below1 = 0.9
    """decay of the first moment"""
    b2: Below1 = 0.95
    """decay of the second moment"""
    eps: Positive = 1e-8
    """added to the root of the second moment"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay, multiplied with the learning rate"""


class Adafactor(_Optimizer):
    name: Literal["adafactor"] = "adafactor"
    """which optimizer, all of optax; `import` calls your own"""
    decay_rate: Below1 = 0.8
    """exponent of the second moment's decay: 1 - step ** -decay_rate"""
    min_dim_size_to_factor: Count = 128
    """matrices with both dimensions at least this are factored"""
    multiply_by_parameter_scale: StrictBool = True
    """the learning rate is relative to each parameter's root mean square"""
    clipping_threshold: Annotated[Float, Field(ge=1)] | None = 1.0
    """each parameter's update is scaled down to this root mean square; null: never"""
    momentum: Below1 | None = None
    """decay of the first moment; null: none is kept"""
    weight_decay: NonNegative = 0.0
    """share of the weights removed each step, not multiplied with the learning rate"""


class Lion(_Optimizer):
    name: Literal["lion"] = "lion"
    """which optimizer, all of optax; `import` calls your own"""
    b1: Below1 = 0.9
    """weight of the momentum in the update's sign"""
    b2: Below1 = 0.99
    """decay of the momentum"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay, multiplied with the learning rate"""


class Muon(_Optimizer):
    name: Literal["muon"] = "muon"
    """which optimizer, all of optax; `import` calls your own"""
    beta: Below1 = 0.95
    """decay of the momentum of matrices"""
    nesterov: StrictBool = True
    """Nesterov momentum for matrices"""
    ns_steps: Count = 5
    """Newton-Schulz iterations"""
    consistent_rms: Positive | None = 0.2
    """scales a matrix's update to this root mean square, as AdamW's is; null: sqrt(fan_out / fan_in)"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay of all parameters, multiplied with the learning rate"""
    adam_b1: Below1 = 0.9
    """Adam's b1, for parameters that are not matrices"""
    adam_b2: Below1 = 0.95
    """Adam's b2, for parameters that are not matrices"""
    adam_lr_scale: Positive = 1.0
    """Adam's learning rate as a multiple of lr"""


class SGD(_Optimizer):
    name: Literal["sgd"] = "sgd"
    """which optimizer, all of optax; `import` calls your own"""
    momentum: Below1 | None = 0.9
    """decay of the momentum; null: none is kept"""
    nesterov: StrictBool = False
    """Nesterov momentum"""


class ImportOptimizer(_Optimizer):
    name: Literal["import"] = "import"
    """which optimizer, all of optax; `import` calls your own"""
    lr: Positive | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  (sections are frozen)
    """peak learning rate; null: target decides, and the schedule is unused"""
    target: Target
    """pkg.mod:thing, called as thing(learning_rate, **args), where lr is null as thing(**args);
    returns an optax.GradientTransformation"""
    args: dict[str, JsonValue] = {}
    """keyword arguments of target"""


class Mesh(Config):
    data: AxisSize = 1
    """devices along the axis over which batches are split and weights are copied; -1: the devices left over"""
    fsdp: AxisSize = -1
    """devices along the axis over which batches and weights are split; -1: the devices left over"""
    tensor: AxisSize = 1
    """devices along the axis over which each layer is split; -1: the devices left over"""
    cpu_devices: Count | None = None
    """simulate this many devices in each process, on CPU; null: the real devices"""
    rules: Rules = {}
    """regex on a parameter's path: [axis, list of axes or null for each dimension]; tried before the model's own"""


class Placement(Config):
    master: Tier = "device"
    """where the float32 master weights live between steps (with a bfloat16 compute_dtype)"""
    opt_state: Tier = "device"
    """where the optimizer's moments live between steps"""


class Snapshots(Config):
    every: Count = 100
    """optimizer steps between two snapshots"""
    keep: Count = 3
    """newest snapshots kept"""
    timeout_s: Positive = 600.0
    """seconds that a save, or another process's part in it, may take"""


class Evaluation(Config):
    every: Count | None = 100
    """optimizer steps between two evaluations on the held-out data; null: never"""
    batches: Count = 8
    """batches of data.batch_size examples in an evaluation, the same ones each time"""


class Distributed(Config):
    coordinator_address: Annotated[str, Field(pattern=r"^\S+:\d+$")] | None = None
    """host:port of process 0; null, with the two below: one process"""
    num_processes: Count | None = None
    """processes in the run"""
    process_id: Index | None = None
    """number of this process, from 0"""
    timeout_s: Positive = 300.0
    """seconds to wait for the other processes at the start"""


class RunConfig(Config):
    """A whole run. Frozen; two are equal when every key is."""

    run_dir: Annotated[str, AfterValidator(_local_directory)]
    """local directory for snapshots, metrics and the report; relative to the working directory"""
    steps: Count
    """optimizer steps of the whole run, over all its restarts"""
    seed: Index = 0
    """of parameters, dropout and the order of the data"""
    # The first class of a union is what a section without a `name` gets.
    model: Annotated[Llama | ImportModel, Field(discriminator="name")]
    """what is trained"""
    data: Annotated[TextData | ImportData, Field(discriminator="name")]
    """what it is fed"""
    optimizer: Annotated[AdamW | Adafactor | Lion | Muon | SGD | ImportOptimizer, Field(discriminator="name")]
    """how a step changes it"""
    mesh: Mesh = Mesh()
    """how the devices are arranged"""
    placement: Placement = Placement()
    """where state lives between steps"""
    snapshots: Snapshots = Snapshots()
    """how it survives"""
    eval: Evaluation = Evaluation()
    """how it is measured on data that it does not train on"""
    distributed: Distributed = Distributed()
    """several processes"""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, tree: Any) -> Any:
        return _filled(cls, tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _agree(self) -> "RunConfig":
        if lines := list(_conflicts(_valid_leaves(self.model_dump()))):
            raise ValueError("\n".join(lines))
        return self


def _conflicts(values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each pair of keys that do not fit together; keys that are wrong by themselves are absent."""

    def get(key: str, default: Any = None) -> Any:
        return values.get(key, default)

    def have(*keys: str) -> bool:
        return all(get(key) is not None for key in keys)

    steps, warmup, decay = get("steps"), get("optimizer.schedule.warmup_steps"), get("optimizer.schedule.decay_steps")
    end, end_key = (decay, "optimizer.schedule.decay_steps") if decay is not None else (steps, "steps")
    if warmup is not None and end is not None:
        schedule = get("optimizer.schedule.name")
        fall = math.ceil(end * get("optimizer.schedule.decay_fraction", 0)) if schedule == "wsd" else 0
        if warmup > end:
            yield f"optimizer.schedule.warmup_steps: {warmup} is more than {end_key} ({end})"
        elif warmup + fall > end:
            yield (
                f"optimizer.schedule.decay_fraction: warmup ({warmup} steps) and decay ({fall} steps) "
                f"do not fit into {end_key} ({end})"
            )
    batch, accumulation = get("data.batch_size"), get("optimizer.accumulation_steps")
    if have("data.batch_size", "optimizer.accumulation_steps") and batch % accumulation:
        yield f"data.batch_size: {batch} is not divisible by optimizer.accumulation_steps={accumulation}"

    heads, kv_heads, width, head = (get(f"model.{k}") for k in ("num_heads", "num_kv_heads", "d_model", "head_dim"))
    if have("model.num_heads", "model.num_kv_heads") and heads % kv_heads:
        yield f"model.num_kv_heads: {kv_heads} does not divide model.num_heads={heads}"
    if have("model.num_heads", "model.d_model") and head is None and "model.head_dim" in values:
        if width % heads:
            yield f"model.d_model: {width} is not divisible by model.num_heads={heads}; or set model.head_dim"
        elif width // heads % 2:
            yield f"model.head_dim: {width // heads} (d_model / num_heads) is odd; rotary embeddings need pairs"
    if head is not None and head % 2:
        yield f"model.head_dim: {head} is odd; rotary embeddings need pairs"
    low, high = get("model.rope_scaling.low_freq_factor"), get("model.rope_scaling.high_freq_factor")
    if low is not None and high is not None and low >= high:
        yield f"model.rope_scaling.high_freq_factor: {high} must be more than low_freq_factor ({low})"
    if get("data.name") == "import" and get("model.name") == "llama" and get("model.vocab_size", 0) is None:
        yield "model.vocab_size: null takes the tokenizer's, and data.name=import has none; give the number"

    if len(rest := [axis for axis in AXES if get(f"mesh.{axis}") == -1]) > 1:
        yield f"mesh: {' and '.join(rest)} are -1; one axis at most can take the devices left over"
    yield from (f"mesh.{axis}: expected at least 1 device, or -1, found 0" for axis in AXES if get(f"mesh.{axis}") == 0)
    if get("placement.master") == "pinned_host" and get("model.compute_dtype") == "float32":
        yield (
            "placement.master: pinned_host moves the float32 master weights, and with model.compute_dtype=float32 "
            "there are none beside the weights; use bfloat16 or leave master on the device"
        )
    if get("eval.every") is not None:
        if get("data.holdout") == 0:
            yield "eval.every: data.holdout=0 leaves nothing to evaluate on; raise it or set eval.every to null"
        if get("data.name") == "import" and get("data.held_out", "") is None:
            yield "eval.every: there is no data.held_out to evaluate on; give one or set eval.every to null"

    group = [f"distributed.{k}" for k in ("coordinator_address", "num_processes", "process_id")]
    absent = [k for k in group if k in values and values[k] is None]
    if absent and any(have(k) for k in group):
        yield f"distributed: coordinator_address, num_processes and process_id go together; {', '.join(absent)} missing"
    if have(*group[1:]) and values[group[2]] >= values[group[1]]:
        yield f"{group[2]}: {values[group[2]]} is not below num_processes={values[group[1]]}; processes count from 0"


# --- loading ----------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the YAML file `path`, merges overrides such as 'optimizer.lr=1e-3' in order, and checks the result.

    Raises ConfigError with every problem at once, a line each.
    """
    try:
        tree = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "the file holds a single value, expected a mapping of keys"
        raise ConfigError(f"{path}: cannot be read as a configuration: {reason}") from None
    except Exception as error:  # PyYAML's and OmegaConf's errors share no base class below Exception
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from None
    # OmegaConf reads a lone text as {text: null}, so a mapping is recognised by a value or by the colon in the file.
    if not OmegaConf.is_dict(tree) or (":" not in Path(path).read_text(encoding="utf-8") and len(tree)):
        raise ConfigError(f"{path}: expected a mapping of keys (`steps: 100`), found a list or a single value")
    problems = []
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            problems.append(f"override {item!r}: expected key=value, such as optimizer.lr=1e-3")
            continue
        try:
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([item]))
        except Exception as error:
            problems.append(f"override {item!r}: {_yaml_problem(error)}")
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except Exception as error:  # an interpolation ${...} that leads nowhere, or a ??? never filled in
        raise _config_error(str(path), [*problems, _yaml_problem(error)]) from None
    return _validated(plain, str(path), problems)


def resolve(config: RunConfig, stored: Mapping[str, Any] | None) -> RunConfig:
    """`config` with a null optimizer.schedule.decay_steps taken from the run's stored config, else from `steps`.

    A decaying schedule is fixed at the first start: raising `steps` later trains on at the final learning rate and
    leaves the steps already taken as they were. To stretch the decay, give decay_steps and allow it to change.
    """
    schedule = config.optimizer.schedule
    if schedule.decay_steps is not None or schedule.name == "constant":
        return config
    tree = to_dict(config)
    before = _filled(RunConfig, stored or {})["optimizer"].get("schedule", {}).get("decay_steps")
    tree["optimizer"]["schedule"]["decay_steps"] = config.steps if before is None else before
    return _validated(tree, "the configuration with the schedule of the run's first start")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Every key, in values that JSON can hold; a section's `name` first, for the reader."""
    tree = config.model_dump(mode="json")
    tree["optimizer"] = {"name": tree["optimizer"].pop("name"), **tree["optimizer"]}
    return tree


def to_yaml(config: RunConfig) -> str:
    """Every key, as YAML that `load_config` reads back into an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def _validated(tree: Any, origin: str, problems: Sequence[str] = ()) -> RunConfig:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        filled = _filled(RunConfig, tree)
        # The problem of the root are the conflicts, which pydantic only looks for once all keys are right.
        keys = [_explain(e, filled) for e in error.errors() if e["loc"]]
        raise _config_error(origin, [*problems, *keys, *_conflicts(_valid_leaves(filled))]) from None
    if problems:
        raise _config_error(origin, problems)
    return config


def _config_error(origin: str, problems: Sequence[str]) -> ConfigError:
    lines = list(dict.fromkeys(problems))  # a union's alternatives report one value several times
    return ConfigError("\n  ".join([f"{origin}: {len(lines)} problem{'s' * (len(lines) > 1)}", *lines]))


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{getattr(error, 'problem', None) or str(error).splitlines()[0]}"


# --- walking the sections ---------------------------------------------------------------------------------------------


def _sections(annotation: Any) -> list[type[Config]]:
    """The section classes that a key may hold; none for a key that holds a value."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, Config) else []
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [section for arg in get_args(annotation) for section in _sections(arg)]
    return []


def _variant(section: type[Config]) -> str:
    return section.model_fields["name"].default


def _chosen(field: FieldInfo, value: Any) -> type[Config] | None:
    """The section class that `value` is to be read as; None where it is a value, or names no variant."""
    sections = _sections(field.annotation)
    if not isinstance(value, Mapping) or len(sections) < 2:
        return sections[0] if sections and isinstance(value, Mapping) else None
    return next((s for s in sections if _variant(s) == value.get("name")), None)


def _filled(section: type[Config], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """`tree` with the defaults of absent keys, null sections as {}, and the `name` that selects a section's variant."""
    filled = dict(tree)
    for key, field in section.model_fields.items():
        sections, value = _sections(field.annotation), filled.get(key)
        if not sections or (NoneType in get_args(field.annotation) and value is None):
            if key not in filled and not field.is_required():
                filled[key] = field.default
            continue
        value = {} if value is None else value
        if isinstance(value, Mapping):
            if len(sections) > 1:
                value = {"name": _variant(sections[0]), **value}
            chosen = _chosen(field, value)
            value = _filled(chosen, value) if chosen else value
        filled[key] = value
    return filled


def _valid_leaves(tree: Mapping[str, Any], section: type[Config] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a filled tree, without the keys whose values are not of their type."""
    leaves = {}
    for key, field in section.model_fields.items():
        if key not in tree:
            continue
        if chosen := _chosen(field, tree[key]):
            leaves |= _valid_leaves(tree[key], chosen, f"{prefix}{key}.")
            continue
        try:
            # The None stands for a field without metadata: Annotated wants at least one.
            kind: Any = Annotated[field.annotation, *field.metadata, None]
            leaves[prefix + key] = TypeAdapter(kind).validate_python(tree[key])
        except ValidationError:
            continue
    return leaves


def _all_keys(section: type[Config] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """(dotted key, variant of its top section or '', field) of every key of every variant."""
    for key, field in section.model_fields.items():
        sections = _sections(field.annotation)
        if not sections or NoneType in get_args(field.annotation):
            yield prefix + key, "", field
        for child in sections:
            for dotted, variant, leaf in _all_keys(child, f"{prefix}{key}."):
                yield dotted, _variant(child) if len(sections) > 1 else variant, leaf


# --- words ------------------------------------------------------------------------------------------------------------

_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", NoneType: "null"}


def _show(value: Any) -> str:
    """A value as a user would write it in YAML."""
    if isinstance(value, str):
        return repr(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin: Any = get_origin(annotation)
    args: Any = get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0], [*args[1:], *metadata])
    flat = [m for outer in metadata for m in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]
    bound = {n: v for m in flat for n in ("gt", "ge", "lt", "le", "pattern") if (v := getattr(m, n, None)) is not None}
    if origin is Literal:
        return "one of " + ", ".join(map(str, args)) if len(args) > 1 else str(args[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_text(arg) for arg in args)
    if origin is list:
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return (
            "mapping with text keys"
            if args[1] is JsonValue
            else f"mapping of {_type_text(args[0])} to {_type_text(args[1])}"
        )
    if _sections(annotation):
        return "section"
    if "pattern" in bound:
        return "text like host:port" if "\\d" in bound["pattern"] else "text like pkg.mod:thing"
    if {"gt", "ge"} & set(bound) and {"lt", "le"} & set(bound):
        low = f"({bound['gt']}" if "gt" in bound else f"[{bound['ge']}"
        high = f"{bound['lt']})" if "lt" in bound else f"{bound['le']}]"
        return f"{_WORDS[annotation]} in {low}, {high}"
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
    return " ".join([_WORDS[annotation], *(f"{words[n]} {v}" for n, v in bound.items())])


def _expected(field: FieldInfo) -> str:
    text = _type_text(field.annotation, field.metadata)
    article = "" if text.startswith(("one of", "true", "text")) else "an " if text[0] in "aeiou" else "a "
    return article + text


def _explain(error: Any, tree: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a line that starts with the key as the user writes it."""
    section, field, keys = RunConfig, None, []
    value: Any = tree
    for part in error["loc"]:
        if field is not None:  # inside a section field: pydantic puts a variant's name into the path, users do not
            sections = _sections(field.annotation)
            if not sections:
                break
            field = None
            if len(sections) > 1:
                section = next(s for s in sections if _variant(s) == part)
                continue
            section = sections[0]
        keys.append(str(part))
        value = value.get(part) if isinstance(value, Mapping) else None
        field = section.model_fields.get(str(part))
    key, kind = ".".join(keys), error["type"]
    if field is None:
        return _no_such_key(key, tree)
    if kind == "missing":
        return f"{key}: missing; expected {_expected(field)}: {_one_line(field.description)}"
    if kind == "union_tag_invalid":
        names, name = [_variant(s) for s in _sections(field.annotation)], value["name"]
        hint = _did_you_mean(_close(name, names))
        return f"{key}.name: expected one of {', '.join(names)}, found {_show(name)}{hint}"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}"
    if _sections(field.annotation):
        return f"{key}: expected a section (keys below it), found {_show(value)}"
    return f"{key}: expected {_expected(field)}, found {_show(value)}"


def _no_such_key(key: str, tree: Mapping[str, Any]) -> str:
    owners = [variant for known, variant, _ in _all_keys() if known == key]
    if owners:  # a key of another variant of its section
        top = key.partition(".")[0]
        return f"{key}: no such key with {top}.name={tree[top]['name']}; it belongs to {', '.join(owners)}"
    chosen = {top: value["name"] for top, value in tree.items() if isinstance(value, Mapping) and "name" in value}
    known = [k for k, variant, _ in _all_keys() if variant in ("", chosen.get(k.partition(".")[0], variant))]
    return f"{key}: no such key{_did_you_mean(_suggestions(key, known))}"


def _suggestions(key: str, known: Sequence[str]) -> list[str]:
    """The known keys or sections that `key` may stand for: those of that name, else a close one nearby, or anywhere."""
    names = dict.fromkeys([*known, *(k.rpartition(".")[0] for k in known if "." in k)])
    parent, _, leaf = key.rpartition(".")
    leaf_of = {name: name.rpartition(".")[2] for name in names}
    siblings = {leaf_of[name]: name for name in names if name.rpartition(".")[0] == parent}
    if same := [name for name in names if leaf_of[name] == leaf]:
        return sorted(same, key=lambda name: name.partition(".")[0] != key.partition(".")[0])[:3]
    if near := _close(leaf, siblings):
        return [siblings[near[0]]]
    near = _close(leaf, set(leaf_of.values())) if parent == "" or parent in names else []
    return [name for name in names if leaf_of[name] in near][:3] or _close(key, names)


def _close(word: Any, choices: Any) -> list[str]:
    return difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


# --- resuming ---------------------------------------------------------------------------------------------------------

ABSENT = "(absent)"

# data.files: another spelling of the same files is no change, and other files are seen by the data's fingerprint.
_NO_INFLUENCE = {"data.files", "data.num_threads", "data.held_out"}


@dataclass(frozen=True)
class Difference:
    """One key that two resolved configs give different values; a side that does not know the key holds ABSENT."""

    key: str
    old: Any
    new: Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Where two resolved configs (`to_dict`) would train differently, by key; an absent key counts as its default.

    Only model, data, optimizer and seed count. How long, where and on how many devices a run trains may change freely.
    """
    old, new = _filled(RunConfig, old), _filled(RunConfig, new)
    return [d for key in ("model", "data", "optimizer", "seed") for d in _differ(key, old.get(key), new.get(key))]


def _differ(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if key in _NO_INFLUENCE or old == new:
        return
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        yield Difference(key, old, new)
        return
    keys = dict.fromkeys([*old, *new])
    if old.get("name") != new.get("name"):  # another variant: its own keys follow from the name
        keys = [k for k in keys if k in old and k in new]
    for name in keys:
        yield from _differ(f"{key}.{name}", old.get(name, ABSENT), new.get(name, ABSENT))


def check_resumable(old: Mapping[str, Any], new: Mapping[str, Any], allow_changed: Sequence[str] = ()) -> None:
    """Raises ConfigError if `new` would train differently from the run's stored config `old` in a key not allowed.

    An allowed name is a key or a section: `optimizer` covers `optimizer.lr`.
    """
    found = differences(old, new)
    known = list(dict.fromkeys([*(k for k, _, _ in _all_keys()), *(d.key for d in found)]))
    free = {k for k, _, field in _all_keys() if get_origin(field.annotation) is dict}  # args: any key below
    lines = []
    for name in allow_changed:
        if not any(k == name or k.startswith(name + ".") or (k in free and name.startswith(k + ".")) for k in known):
            lines.append(f"--allow-changed {name}: no such key{_did_you_mean(_suggestions(name, known))}")
    changed = [d for d in found if not any(d.key == a or d.key.startswith(a + ".") for a in allow_changed)]
    for d in changed:
        was, now = (v if v == ABSENT else _show(v) for v in (d.old, d.new))
        lines.append(f"{d.key}: was {was}, now {now}")
    if not lines:
        return
    if changed:
        lines.append("To go on with the change: " + " ".join(f"--allow-changed {d.key}" for d in changed))
        lines.append("To train anew instead: give another run_dir. To go on exactly: restore the old values.")
    raise ConfigError("\n  ".join(["the run in run_dir was started with another configuration", *lines]))


# --- the table of keys ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One key in words. `key` is `optimizer.lr`, or `model(llama).d_ff` where only that variant has it."""

    key: str
    type: str
    default: str
    meaning: str


def describe() -> list[Row]:
    """A row for every key; keys that all variants of a section share stand once, under the plain name."""
    variants: dict[tuple[str, str, str, str], list[str]] = {}
    names: dict[str, list[str]] = {}
    for key, field in RunConfig.model_fields.items():
        names[key] = [_variant(s) for s in sections] if len(sections := _sections(field.annotation)) > 1 else [""]
    for key, variant, field in _all_keys():
        top = key.partition(".")[0]
        if key == f"{top}.name" and variant:  # the choice itself: one row for all variants
            texts = ("one of " + ", ".join(names[top]), names[top][0], _one_line(field.description))
        else:
            default = "required" if field.is_required() else _plain(field.default)
            texts = (_type_text(field.annotation, field.metadata), default, _one_line(field.description))
        variants.setdefault((key, *texts), []).append(variant)
    rows = []
    for (key, kind, default, meaning), found in variants.items():
        top, _, rest = key.partition(".")
        shared = found == names[top] or found == [""]
        rows.append(Row(key if shared else f"{top}({'|'.join(found)}).{rest}", kind, default, meaning))
    order = list(RunConfig.model_fields)

    def place(row: Row) -> tuple[int, bool]:  # sections as declared, the choice of a variant before its keys
        top = re.split(r"[.(]", row.key)[0]
        return order.index(top), row.key != f"{top}.name"

    return sorted(rows, key=place)


def format_table(rows: Sequence[Row], *, width: int = 120) -> str:
    """`rows` as plain text: a line of key, type and default each, and the meaning below it, wrapped to `width`."""
    pad = max((len(row.key) for row in rows), default=0)
    lines = []
    for row in rows:
        default = "  (required)" if row.default == "required" else f" = {row.default}"
        lines.append(f"{row.key:<{pad}}  {row.type}{default}")
        lines += textwrap.wrap(row.meaning, max(width, 40), initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _show(value)
