"""The sections of a run's configuration, and the whole of them; the docstring under a key is its meaning."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StrictBool, model_validator

from jaxckpt.config.conflicts import conflicts
from jaxckpt.config.optimizers import SGD, Adafactor, AdamW, ImportOptimizer, Lion, Muon
from jaxckpt.config.tree import filled, valid_leaves
from jaxckpt.config.values import (
    AxisSize,
    Below1,
    Bytes,
    ComputeDtype,
    Config,
    Count,
    Files,
    HostPort,
    Index,
    LocalDirectories,
    NonNegative,
    Positive,
    Regex,
    Remat,
    Rules,
    RunDirectory,
    StepRange,
    Target,
    Text,
    Tier,
)


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
    scan_layers: StrictBool = True
    """one array for the same weight of all layers, compiled as one layer; false: an array a layer, so that each layer can be
    fetched and updated by itself (placement)"""
    remat: Remat = "none"
    """what a layer's backward computes again: nothing (none), everything but its input (full), what the jax.checkpoint
    policy of that name does not save, or what is not kept in pinned host memory (offload; needs scan_layers: false)"""
    compute_dtype: ComputeDtype = "bfloat16"
    """dtype of weights and activations in forward and backward; bfloat16 keeps float32 master weights beside"""


class ImportModel(Config):
    name: Literal["import"] = "import"
    """which model: `llama` is this package's decoder, `import` any Flax NNX module"""
    target: Target
    """pkg.mod:thing, called as thing(rngs=nnx.Rngs, **args); returns the nnx.Module"""
    args: dict[str, JsonValue] = Field(default={})
    """keyword arguments of target"""
    loss: Target
    """pkg.mod:thing, called as thing(model, batch); returns (sum over targets, number of targets)"""
    layers: Target | None = None
    """pkg.mod:thing, the model as a list of layer functions (a jaxckpt.Layers), for placement.params off the device"""
    compute_dtype: ComputeDtype = "float32"
    """dtype of the weights in forward and backward; bfloat16 keeps float32 master weights beside"""


class TextData(Config):
    name: Literal["text"] = "text"
    """which data: `text` reads text files, `stores` what `python -m jaxckpt prepare` made, `import` any Grain data set"""
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
    skip: list[StepRange] = Field(default=[])
    """ranges [first, last] of steps whose batches are left out (after a loss spike), in order; each counts steps as the
    ranges before it left them"""
    num_threads: Index = 2
    """threads that read ahead in each process; no influence on what is read"""


class StoreData(Config):
    name: Literal["stores"] = "stores"
    """which data: `text` reads text files, `stores` what `python -m jaxckpt prepare` made, `import` any Grain data set"""
    stores: dict[str, Text] = Field(min_length=1)
    """name: directory of a token store, local or gs:// (copied once); several are mixed"""
    weights: dict[str, NonNegative] | None = None
    """name: its share of the examples, relative to the others; null: in proportion to the stores' rows"""
    weights_schedule: list[tuple[Count, dict[str, NonNegative]]] = Field(default=[])
    """[step, weights]: other weights from that step on, such as [[5000, {web: 0.5, code: 0.5}]]"""
    rows: Literal["cut", "packed", "documents"] = "cut"
    """cut: documents joined and cut; packed: whole documents packed into rows, which do not see each other; documents: one a
    row, padded"""
    long_documents: Literal["split", "truncate", "leave_out"] = "split"
    """what becomes of a document that is longer than a row, where rows is packed or documents"""
    held_out: Text | None = None
    """directory of the token store for evaluation; null: none"""
    seq_len: Count
    """tokens in an example"""
    batch_size: Count
    """examples per optimizer step, over all devices and microbatches"""
    transform: Target | None = None
    """pkg.mod:thing, called as thing(example, rng, **transform_args) with a generator of the example's own; null: none"""
    transform_args: dict[str, JsonValue] = Field(default={})
    """keyword arguments of transform"""
    skip: list[StepRange] = Field(default=[])
    """ranges [first, last] of steps whose batches are left out (after a loss spike), in order; each counts steps as the
    ranges before it left them"""
    num_threads: Index = 2
    """threads that read ahead in each process; no influence on what is read"""


class ImportData(Config):
    name: Literal["import"] = "import"
    """which data: `text` reads text files, `stores` what `python -m jaxckpt prepare` made, `import` any Grain data set"""
    target: Target
    """pkg.mod:thing, called as thing(**args); returns a grain MapDataset or IterDataset of examples"""
    args: dict[str, JsonValue] = Field(default={})
    """keyword arguments of target"""
    batch_size: Count
    """examples per optimizer step, over all devices and microbatches"""
    held_out: Target | None = None
    """pkg.mod:thing, called like target, for the examples of evaluation; null: none"""
    skip: list[StepRange] = Field(default=[])
    """ranges [first, last] of steps whose batches are left out (after a loss spike), in order; each counts steps as the
    ranges before it left them"""
    num_threads: Index = 2
    """threads that read ahead in each process; no influence on what is read"""


class Mesh(Config):
    data: AxisSize = 1
    """devices along the axis over which batches are split and weights are copied; -1: the devices left over"""
    fsdp: AxisSize = -1
    """devices along the axis over which batches and weights are split; -1: the devices left over"""
    tensor: AxisSize = 1
    """devices along the axis over which each layer is split; -1: the devices left over"""
    cpu_devices: Count | None = None
    """simulate this many devices in each process, on CPU; null: the real devices"""
    rules: Rules = Field(default={})
    """regex on a parameter's path: [axis, list of axes or null for each dimension]; tried before the model's own"""


class Budget(Config):
    device: Bytes | None = None
    """memory of one device that state, gradients and activations may take, such as 24GiB; null: no limit"""
    host: Bytes | None = None
    """host memory that a process may take, such as 100GiB; null: no limit"""
    nvme: Bytes | None = None
    """bytes on placement.nvme_dir that a process may take, such as 1TiB; null: no limit"""


class Placement(Config):
    params: Tier = "device"
    """where the weights that forward and backward read live; off the device each layer fetches its own"""
    master: Tier = "device"
    """where the float32 master weights live between steps (with a bfloat16 compute_dtype)"""
    opt_state: Tier = "device"
    """where the optimizer's moments live between steps"""
    grads: Literal["device", "pinned_host"] = "device"
    """where gradients are summed up; off the device with params off the device only"""
    paths: dict[Regex, Tier] = Field(default={})
    """regex on a leaf's path: its tier, such as {opt_state/.*/nu/: nvme}; the first that is found goes before the group's"""
    nvme_dir: LocalDirectories | None = None
    """directory on a local disk for the tier nvme; several, on several disks, share the bytes"""
    nvme_cache_bytes: Bytes | None = None
    """host memory that keeps state of the tier nvme, which is then not read again, such as 8GiB; null: none"""
    bucket_bytes: Bytes = 128 << 20
    """state that each device fetches, updates and writes back at a time"""
    budget: Budget = Budget()
    """what the run may take; given one, the tiers of params, master and opt_state are chosen by it"""


class Snapshots(Config):
    every: Count | None = 100
    """optimizer steps between two snapshots; null: by time alone"""
    every_minutes: Positive | None = None
    """minutes between two snapshots, beside `every`; null: by steps alone"""
    keep: Count = 3
    """newest snapshots kept"""
    keep_every: Count | None = None
    """also keep the snapshots of steps that this number divides; null: none"""
    keep_best: Index = 0
    """also keep so many of the best by best_metric"""
    best_metric: Literal["loss", "eval_loss"] = "eval_loss"
    """what keep_best looks at: the loss of the step, or of its evaluation (of steps that were evaluated)"""
    best_mode: Literal["min", "max"] = "min"
    """whether less or more of best_metric is better"""
    on_failure: Literal["stop", "continue"] = "stop"
    """what a snapshot that could not be written does to the run; the last one always stops it, and so does any of several
    processes"""
    staging_bytes: Bytes | None = None
    """host memory that a save may take for copies of device memory, such as 2GiB; a larger state then blocks training
    until its last part is copied; null: as much as the state"""
    restore_bytes: Bytes | None = 4 << 30
    """bytes that a restore has in flight between disk and device, such as 4GiB; null: no bound"""
    copy_bytes_per_s: Bytes | None = None
    """what a snapshot of state on nvme takes of the disks while it is copied elsewhere, such as 200MB; null: all there is.
    On the same file system nothing is copied"""
    timeout_s: Positive = 600.0
    """seconds that a save, or another process's part in it, may take"""


class Evaluation(Config):
    every: Count | None = 100
    """optimizer steps between two evaluations on the held-out data; null: never"""
    batches: Count = 8
    """batches of data.batch_size examples in an evaluation, the same ones each time"""


class Distributed(Config):
    coordinator_address: HostPort | None = None
    """host:port of process 0; null, with the two below: one process"""
    num_processes: Count | None = None
    """processes in the run"""
    process_id: Index | None = None
    """number of this process, from 0"""
    timeout_s: Positive = 300.0
    """seconds to wait for the other processes at the start"""
    heartbeat_timeout_s: Positive = 30.0
    """seconds of silence after which another process counts as dead, which ends the run on all"""


class RunConfig(Config):
    """A whole run. Frozen; two are equal when every key is."""

    run_dir: RunDirectory
    """directory for snapshots, metrics and the report: a local one, relative to the working directory, or gs://bucket/prefix"""
    steps: Count
    """optimizer steps of the whole run, over all its restarts"""
    resume: Literal["latest", "required", "never"] | Index = "latest"
    """latest: from the newest good snapshot in run_dir, or anew where there has never been one; required: there must be one;
    never: there must be none; a step's number: back to that step once, and on from what is trained since"""
    restore_from: Text | None = None
    """where a run without snapshots of its own begins: RUN_DIR, RUN_DIR@STEP or RUN_DIR@PIN of another run, local or gs://"""
    restore_paths: list[Regex] = Field(default=[])
    """regexes on the paths of the leaves to take from restore_from, such as ^params/; the run then starts at step 0; empty:
    the whole snapshot, and that run goes on"""
    seed: Index = 0
    """of parameters, dropout and the order of the data"""
    # The first class of a union is what a section without a `name` gets.
    model: Annotated[Llama | ImportModel, Field(discriminator="name")]
    """what is trained"""
    data: Annotated[TextData | StoreData | ImportData, Field(discriminator="name")]
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
        return filled(cls, tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _agree(self) -> "RunConfig":
        if lines := list(conflicts(valid_leaves(RunConfig, self.model_dump()))):
            raise ValueError("\n".join(lines))
        return self


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Every key, in values that JSON can hold; a section's `name` first, for the reader."""
    tree = config.model_dump(mode="json")
    tree["optimizer"] = {"name": tree["optimizer"].pop("name"), **tree["optimizer"]}
    return tree
