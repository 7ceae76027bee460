"""What one step did, in plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxckpt.observe.metrics import float_bits
from jaxckpt.state.fingerprint import to_hex


@dataclass(frozen=True)
class Report:
    """What one step did; plain numbers, read after the step is done."""

    step: int
    """updates done, this one included"""
    loss: float
    """mean over the targets of the batch, before the update"""
    loss_bits: str
    """the loss as the bits of a float32, in hexadecimal"""
    grad_norm: float
    """global norm before clipping"""
    lr: float | None
    tokens: float
    """targets in this batch"""
    tokens_per_s: float
    batch_digest: str
    """64-bit fingerprint of the global batch"""
    batch_key: str
    """what decides the content of the batch, hashed: two steps of the same key are trained on the same batch"""
    example: int
    """number of the first example of the batch"""
    eval_loss: float | None = None
    """mean over the targets of the held-out batches, after the update; only at evaluation steps"""
    skipped: bool = False
    """the update was left out because its loss or gradient was not finite"""
    offload: Mapping[str, float] | None = None
    """what the step moved for state off the device, in this process (`Tiers.moved`); None where there is none"""


def make_report(
    step: int,
    values: Mapping[str, Any],
    *,
    batch_key: str,
    example: int,
    seconds: float,
    offload: Mapping[str, float] | None = None,
) -> Report:
    """A report of the step's metrics as the host read them; `seconds` since the step before was read."""
    tokens = float(values["tokens"])
    return Report(
        step=step,
        loss=float(values["loss"]),
        loss_bits=float_bits(values["loss"]),
        grad_norm=float(values["grad_norm"]),
        lr=float(values["lr"]) if "lr" in values else None,
        tokens=tokens,
        tokens_per_s=tokens / max(seconds, 1e-9),
        batch_digest=to_hex(values["batch_digest"]),
        batch_key=batch_key,
        example=example,
        skipped=not bool(values["finite"]),
        offload=offload
        and {
            **offload,
            "bytes_per_s": (offload["to_device_bytes"] + offload["from_device_bytes"]) / max(seconds, 1e-9),
        },
    )


def metrics_line(report: Report) -> dict[str, Any]:
    """The report as a line of `metrics.jsonl`: `eval_loss`, `offload` and `skipped` only where they say something."""
    line = asdict(report)
    for name in ("eval_loss", "offload"):
        if line[name] is None:
            del line[name]
    if not line["skipped"]:
        del line["skipped"]
    # JSON has no NaN and no infinity; the bits of the loss say which it was.
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
