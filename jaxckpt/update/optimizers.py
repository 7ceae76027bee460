"""The optimizers and schedules that a configuration can name; each is optax's own."""

import math
import re
from typing import Any

import jax
import optax
from optax import contrib

from jaxckpt.state import tree


def make_schedule(
    name: str,
    *,
    lr: float,
    warmup_steps: int,
    decay_steps: int,
    decay_fraction: float = 0.1,
    final_ratio: float = 0.1,
) -> optax.Schedule:
    """The learning rate by update number, counted from 0.

    Linear warm-up from 0 over `warmup_steps` to the peak `lr`, then `constant`; or `linear` or `cosine` decay to
    `lr * final_ratio` at `decay_steps`; or `wsd` (warm-up, stable, decay: Hu et al. 2024, MiniCPM), which stays at
    the peak and decays linearly over the last `decay_fraction` of `decay_steps`. It keeps its last value after that.
    """
    after_warmup = max(decay_steps - warmup_steps, 1)
    end = lr * final_ratio
    match name:
        case "constant":
            main = optax.constant_schedule(lr)
        case "linear":
            main = optax.linear_schedule(lr, end, after_warmup)
        case "cosine":
            main = optax.cosine_decay_schedule(lr, after_warmup, alpha=final_ratio)
        case "wsd":
            decay = min(max(math.ceil(decay_steps * decay_fraction), 1), after_warmup)
            main = optax.join_schedules(
                [optax.constant_schedule(lr), optax.linear_schedule(lr, end, decay)], [after_warmup - decay]
            )
        case _:
            raise ValueError(f"unknown schedule {name!r}: constant, linear, cosine or wsd")
    if not warmup_steps:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, lr, warmup_steps), main], [warmup_steps])


def make_optimizer(
    name: str, schedule: optax.Schedule, *, weight_decay_exclude: str | None, **args: Any
) -> optax.GradientTransformation:
    """`adamw`, `adafactor`, `lion`, `muon` or `sgd` of optax, weight decay masked by parameter path.

    Parameters whose path contains the regex `weight_decay_exclude` do not decay; under Muon, neither do those that
    Adam updates. `args` are optax's own, except adafactor's `weight_decay` (optax: weight_decay_rate) and Muon's
    `adam_lr_scale` (Adam's learning rate over the schedule's).
    """

    def decays(params: Any) -> Any:
        return tree.map_with_path(lambda path, _: not re.search(weight_decay_exclude or r"(?!)", path), params)

    match name:
        case "adamw":
            return optax.adamw(schedule, mask=decays, **args)
        case "adafactor":
            rate = args.pop("weight_decay") or None
            return optax.adafactor(schedule, weight_decay_rate=rate, weight_decay_mask=decays, **args)
        case "lion":
            return optax.lion(schedule, mask=decays, **args)
        case "muon":
            scale = args.pop("adam_lr_scale")
            return contrib.muon(
                schedule,
                weight_decay_mask=decays,
                muon_weight_dimension_numbers=muon_dimensions,
                adam_learning_rate=lambda count: scale * schedule(count),
                **args,
            )
        case "sgd":
            return optax.sgd(schedule, **args)
        case _:
            raise ValueError(f"unknown optimizer {name!r}: adamw, adafactor, lion, muon or sgd")


def muon_dimensions(params: Any) -> Any:
    """Which parameters Muon orthogonalises: the matrices of layers, one by one where they are stacked.

    Embeddings and the output head go to Adam, as the method's authors do (Jordan et al. 2024), and so does everything
    that is no matrix. Under a key 'layers' the first axis of a parameter is the layer, unless the layers stand in a list
    and a number in the path says which one it is.
    """

    def dimensions(path: str, x: jax.Array) -> contrib.MuonDimensionNumbers | None:
        if re.search(r"(embed|lm_head)", path):
            return None
        is_stacked = re.search(r"(^|/)layers/(?!\d+/)", path)
        if x.ndim == 2 and not is_stacked:
            return contrib.MuonDimensionNumbers(0, 1)
        if x.ndim == 3 and is_stacked:
            return contrib.MuonDimensionNumbers(1, 2)
        return None

    return tree.map_with_path(dimensions, params)
