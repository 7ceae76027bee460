"""The sections of the optimizers and of the learning rate's schedule; the docstring under a key is its meaning."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StrictBool

from jaxckpt.config.values import (
    Below1,
    Config,
    Count,
    Float,
    Index,
    NonNegative,
    NonZeroShare,
    Positive,
    Regex,
    Share,
    Target,
)


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


class Optimizer(Config):
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


class AdamW(Optimizer):
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


class Adafactor(Optimizer):
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


class Lion(Optimizer):
    name: Literal["lion"] = "lion"
    """which optimizer, all of optax; `import` calls your own"""
    b1: Below1 = 0.9
    """weight of the momentum in the update's sign"""
    b2: Below1 = 0.99
    """decay of the momentum"""
    weight_decay: NonNegative = 0.1
    """decoupled weight decay, multiplied with the learning rate"""


class Muon(Optimizer):
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
    """decoupled weight decay of the matrices that Muon updates, multiplied with the learning rate; what Adam updates
    (embeddings, head, norms, biases) does not decay"""
    adam_b1: Below1 = 0.9
    """Adam's b1, for what Muon does not update"""
    adam_b2: Below1 = 0.95
    """Adam's b2, for what Muon does not update"""
    adam_lr_scale: Positive = 1.0
    """Adam's learning rate as a multiple of lr"""


class SGD(Optimizer):
    name: Literal["sgd"] = "sgd"
    """which optimizer, all of optax; `import` calls your own"""
    momentum: Below1 | None = 0.9
    """decay of the momentum; null: none is kept"""
    nesterov: StrictBool = False
    """Nesterov momentum"""


class ImportOptimizer(Optimizer):
    name: Literal["import"] = "import"
    """which optimizer, all of optax; `import` calls your own"""
    lr: Positive | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  (sections are frozen)
    """peak learning rate; null: target decides, and the schedule is unused"""
    target: Target
    """pkg.mod:thing, called as thing(learning_rate, **args), where lr is null as thing(**args);
    returns an optax.GradientTransformation"""
    args: dict[str, JsonValue] = Field(default={})
    """keyword arguments of target"""
