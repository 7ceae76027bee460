"""Keys that are right by themselves and do not fit together.

`values` maps dotted keys to values. A key that is wrong by itself, or belongs to another variant, is absent.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxckpt.config.values import AXES

Values = Mapping[str, Any]


def conflicts(values: Values) -> Iterator[str]:
    """A line for each group of keys that do not fit together."""
    yield from _of_steps_and_batch(values)
    yield from _of_data(values)
    yield from _of_model(values)
    yield from _of_devices(values)
    yield from _of_placement(values)
    yield from _of_evaluation(values)
    yield from _of_snapshots(values)
    yield from _of_processes(values)


def _of_steps_and_batch(values: Values) -> Iterator[str]:
    warmup, decay = (values.get(f"optimizer.schedule.{k}") for k in ("warmup_steps", "decay_steps"))
    end_key = "steps" if decay is None else "optimizer.schedule.decay_steps"
    end = values.get(end_key)
    if warmup is not None and end is not None:
        is_wsd = values.get("optimizer.schedule.name") == "wsd"
        fall = math.ceil(end * values.get("optimizer.schedule.decay_fraction", 0)) if is_wsd else 0
        if warmup > end:
            yield f"optimizer.schedule.warmup_steps: {warmup} is more than {end_key} ({end})"
        elif warmup + fall > end:
            yield (
                f"optimizer.schedule.decay_fraction: warmup ({warmup} steps) and decay ({fall} steps) "
                f"do not fit into {end_key} ({end})"
            )
    batch, accumulation = values.get("data.batch_size"), values.get("optimizer.accumulation_steps")
    if batch is not None and accumulation is not None and batch % accumulation:
        yield f"data.batch_size: {batch} is not divisible by optimizer.accumulation_steps={accumulation}"


def _of_data(values: Values) -> Iterator[str]:
    stores, weights = values.get("data.stores"), values.get("data.weights")
    schedule = values.get("data.weights_schedule", [])
    if stores is not None and "held_out" in stores:
        yield "data.stores: held_out cannot be the name of a store; the one to evaluate on is data.held_out"
    for key, found in [("weights", weights), *((f"weights_schedule, step {step}", w) for step, w in schedule)]:
        if found is None:
            continue
        if stores is not None and (unknown := sorted(set(found) - set(stores))):
            yield f"data.{key}: {', '.join(unknown)} is none of data.stores ({', '.join(stores)})"
        if not any(found.values()):
            yield f"data.{key}: the weights sum to zero, so nothing would be drawn; give one of them more"
    if (steps := [1, *(step for step, _ in schedule)]) != sorted(set(steps)):
        yield f"data.weights_schedule: the steps must rise and begin after step 1, found {steps[1:]}"
    skip = values.get("data.skip", [])
    for first, last in skip:
        if last < first:
            yield f"data.skip: [{first}, {last}] ends before it begins"
    if (firsts := [first for first, _ in skip]) != sorted(firsts):
        yield f"data.skip: the ranges must be in the order of their first steps, found {firsts}"


def _of_model(values: Values) -> Iterator[str]:
    heads, kv_heads, width, head = (
        values.get(f"model.{k}") for k in ("num_heads", "num_kv_heads", "d_model", "head_dim")
    )
    if heads is not None and kv_heads is not None and heads % kv_heads:
        yield f"model.num_kv_heads: {kv_heads} does not divide model.num_heads={heads}"
    if heads is not None and width is not None and head is None and "model.head_dim" in values:
        if width % heads:
            yield f"model.d_model: {width} is not divisible by model.num_heads={heads}; or set model.head_dim"
        elif width // heads % 2:
            yield f"model.head_dim: {width // heads} (d_model / num_heads) is odd; rotary embeddings need pairs"
    if head is not None and head % 2:
        yield f"model.head_dim: {head} is odd; rotary embeddings need pairs"
    if values.get("model.remat") == "offload" and values.get("model.scan_layers"):
        yield "model.remat: offload needs model.scan_layers: false; XLA may miscompile it under a scan over the layers"
    low, high = (values.get(f"model.rope_scaling.{k}_freq_factor") for k in ("low", "high"))
    if low is not None and high is not None and low >= high:
        yield f"model.rope_scaling.high_freq_factor: {high} must be more than low_freq_factor ({low})"
    is_llama_on_imported_data = (values.get("model.name"), values.get("data.name")) == ("llama", "import")
    if is_llama_on_imported_data and values.get("model.vocab_size", 0) is None:
        yield "model.vocab_size: null takes the tokenizer's, and data.name=import has none; give the number"


def _of_devices(values: Values) -> Iterator[str]:
    sizes = {axis: values.get(f"mesh.{axis}") for axis in AXES}
    if len(rest := [axis for axis, size in sizes.items() if size == -1]) > 1:
        yield f"mesh: {' and '.join(rest)} are -1; one axis at most can take the devices left over"
    for axis, size in sizes.items():
        if size == 0:
            yield f"mesh.{axis}: expected at least 1 device, or -1, found 0"


def _of_placement(values: Values) -> Iterator[str]:
    groups = ("params", "master", "opt_state")
    tiers = {f"placement.{group}": values.get(f"placement.{group}") for group in groups}
    tiers |= {f"placement.paths, {k!r}": tier for k, tier in (values.get("placement.paths") or {}).items()}
    if (tier := tiers["placement.master"]) not in (None, "device") and values.get("model.compute_dtype") == "float32":
        yield (
            f"placement.master: {tier} moves the float32 master weights, and with model.compute_dtype=float32 "
            "there are none beside the weights; use bfloat16 or leave master on the device"
        )
    on_disk = [key for key, tier in tiers.items() if tier == "nvme"]
    if on_disk and values.get("placement.nvme_dir", "") is None:
        yield f"placement.nvme_dir: null, and {on_disk[0]} is nvme; give a directory on a local disk"
    elif values.get("placement.nvme_dir", "") is None:
        for key in ("placement.nvme_cache_bytes", "placement.budget.nvme"):
            if values.get(key):
                yield f"{key}: it is for state on local disks, and placement.nvme_dir is null; give a directory on one"
    has_budget = any(value for key, value in values.items() if key.startswith("placement.budget."))
    if has_budget and (moved := [key for key, tier in tiers.items() if tier not in (None, "device")]):
        yield f"placement.budget: it chooses the tiers itself, and {moved[0]} is given too; leave one of the two out"
    if values.get("placement.grads") == "pinned_host" and tiers["placement.params"] == "device" and not has_budget:
        yield "placement.grads: pinned_host is for params off the device; move placement.params, or leave grads there"


def _of_evaluation(values: Values) -> Iterator[str]:
    if values.get("eval.every") is None:
        return
    if values.get("data.holdout") == 0:
        yield "eval.every: data.holdout=0 leaves nothing to evaluate on; raise it or set eval.every to null"
    if values.get("data.name") in ("import", "stores") and values.get("data.held_out", "") is None:
        yield "eval.every: there is no data.held_out to evaluate on; give one or set eval.every to null"


def _of_snapshots(values: Values) -> Iterator[str]:
    if values.get("snapshots.every", 0) is None and values.get("snapshots.every_minutes", 0) is None:
        yield "snapshots.every: null, and so is snapshots.every_minutes; one of them must say when to save"
    is_by_evaluation = values.get("snapshots.keep_best") and values.get("snapshots.best_metric") == "eval_loss"
    if is_by_evaluation and values.get("eval.every", 0) is None:
        yield "snapshots.keep_best: nothing is evaluated (eval.every is null); set best_metric to loss, or evaluate"
    if values.get("restore_paths") and values.get("restore_from", "") is None:
        yield "restore_paths: there is no restore_from to take these leaves from"


def _of_processes(values: Values) -> Iterator[str]:
    keys = [f"distributed.{k}" for k in ("coordinator_address", "num_processes", "process_id")]
    address, number, own = (values.get(key) for key in keys)
    absent = [key for key in keys if key in values and values[key] is None]
    if absent and (address, number, own) != (None, None, None):
        yield f"distributed: coordinator_address, num_processes and process_id go together; {', '.join(absent)} missing"
    if number is not None and own is not None and own >= number:
        yield f"distributed.process_id: {own} is not below num_processes={number}; processes count from 0"
