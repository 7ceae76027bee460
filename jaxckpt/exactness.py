"""What makes a resume exact, checked: at the first snapshot that it will be, at a resume that it is.

Everything here refuses by name rather than let a run continue as another one.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.reproducible import check_reproducible
from jaxckpt.data.stream import BatchStream
from jaxckpt.errors import DataError, SnapshotError
from jaxckpt.observe.report import Report
from jaxckpt.snapshot.environment import environment
from jaxckpt.state.fingerprint import combine, np_fingerprint, to_hex


def check_settings(run_dir: Any, stored: Mapping[str, Any], given: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """What was given in Python must be what the snapshot was made with, except what `allowed` names."""
    changed = [
        f"  {key}: was {stored.get(key)!r}, now {value!r}"
        for key, value in given.items()
        if stored.get(key) != value and key not in allowed
    ]
    if changed:
        raise SnapshotError(
            f"{run_dir}: this run was trained with other settings:\n"
            + "\n".join(changed)
            + "\nGive the old values, name a key in allow_changed to change it on purpose, or start a new run directory."
        )


def check_batch(stream: BatchStream | IteratedStream, *, step: int, digest: str) -> None:
    """The last batch that was handed out, made again, must be the one that `step` was trained on.

    In a run of several processes none has the whole batch, and the data's own identity must do; so must it where a batch
    cannot be made again.
    """
    if jax.process_count() > 1 or not isinstance(stream, BatchStream):
        return
    leaves = jax.tree.leaves(stream.batch_at(stream.batches - 1))
    again = to_hex(combine([jax.numpy.asarray(np_fingerprint(x)) for x in leaves]))
    if again != digest:
        raise SnapshotError(
            f"the batch of step {step} had the digest {digest} when it was trained on, and made again it has {again}: the data "
            "changed, or an example is not a function of its number alone. Give the data that the run began with, allow the "
            "change by name (data), or start a new run directory."
        )


def check_against_earlier_life(
    report: Report, lines: dict[int, dict[str, Any]], meta: Mapping[str, Any] | None
) -> None:
    """The batch of `report` must be the one that an earlier life of the run was trained on at that step.

    `lines` are that life's lines of metrics by step, each taken out once it is compared; `meta` is that of the snapshot
    that both began with. Nothing is compared where the data, the weights of a mixture, the batch size or what is skipped
    were changed on purpose: then the keys differ.
    """
    earlier = lines.pop(report.step, {})
    if earlier.get("batch_key") != report.batch_key or earlier.get("batch_digest") == report.batch_digest:
        return
    changed = changed_environment(meta, environment()) if meta else []
    raise DataError(
        f"step {report.step}: the batch has the digest {report.batch_digest}, and an earlier life of this run was trained here "
        f"on {earlier.get('batch_digest')}, from the same examples ({report.example} and on) of what calls itself the same "
        f"data. What changed since the snapshot: {', '.join(changed) or 'nothing that a snapshot records'}; so look for files "
        "that were edited in place (`python -m jaxckpt verify STORE` checks a token store), code that makes the examples, or "
        "an example that is not a function of its number. Nothing of this step was saved. Restore what was there, or start a "
        "new run directory."
    )


def changed_environment(meta: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """'numpy 2.1 -> 2.2' for each version and setting that is another than in a snapshot's meta."""
    return [f"{name} {was} -> {now}" for key in here for name, was, now in _changes(key, meta.get(key), here[key])]


def _changes(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*was, *now]):
            yield from _changes(name, was.get(name), now.get(name))
    elif was != now:
        yield key, was, now


def check_before_first_save(
    stream: BatchStream | IteratedStream, *, step: int, digest: str, captured: Sequence[Mapping[str, Any]], program: str
) -> list[str]:
    """Warnings of what could make a resume inexact; raises where it would not be exact.

    The batch just trained on is built again, so this comes before the next one is drawn.
    """
    warning = check_reproducible(stream, stream.batches - 1) if isinstance(stream, BatchStream) else None
    check_batch(stream, step=step, digest=digest)
    warnings = [warning] if warning else []
    if re.search(r"\b(pure|io)_callback\[", program):
        warnings.append(
            "the model or loss calls back into Python (pure_callback or io_callback): what it returns is in no snapshot, and "
            "a resume is exact only if it depends on its arguments alone"
        )
    if captured:
        warnings.append(
            f"the model or loss reads arrays that are neither parameters nor model state ({_shapes(captured)}); snapshots "
            "hold only their hash, and a resume with other values is refused"
        )
    return warnings


def captured_arrays(jaxpr: Any) -> list[dict[str, Any]]:
    """Shape, dtype and hash of the arrays and scalars that a traced step closes over: state that no snapshot holds."""
    arrays = [np.asarray(x) for x in jaxpr.consts]
    return [
        {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
        for a in arrays
    ]


def check_captured(
    stored: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], allowed: Sequence[str]
) -> None:
    if list(stored) != list(found) and "captured" not in allowed:
        raise SnapshotError(
            "the model or loss reads arrays that are neither parameters nor model state, and they are not those that "
            f"the snapshot was trained with: then {_shapes(stored)}, now {_shapes(found)}. Keep such arrays in an "
            "nnx.Variable of the model, or name 'captured' in allow_changed to go on with the new ones."
        )


def check_program(meta: Mapping[str, Any], here: Mapping[str, Any], program: str) -> None:
    """Raises SnapshotError where the traced step is another program than the snapshot's, as far as that can be told:
    under other versions, on another mesh or with another placement (`here` holds them) the text differs anyway."""
    is_comparable = all(meta.get(key) == value for key, value in here.items()) and meta.get("program")
    if is_comparable and meta["program"] != program:
        raise SnapshotError(
            f"the training step is not the program that the snapshot of step {meta['step']} was trained with: code or numbers "
            "of the model, the loss or the optimizer have changed since. Give the old ones, name 'program' in allow_changed "
            "to go on with the new ones, or start a new run directory."
        )


def program_text(jaxpr: Any) -> str:
    """A traced step as text, without the addresses of Python objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))


def program_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shapes(arrays: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{a['dtype']}{a['shape']}" for a in arrays) or "none"


def moved_params_warning(before: Mapping[str, Any], now: Mapping[str, Any], training: Mapping[str, Any]) -> str | None:
    """What to say where parameters leave the device, or come back, and that changes bits; `before`, `now`: placements."""
    was, there = (placement.get("params", "device") != "device" for placement in (before, now))
    dtype = training["compute_dtype"]
    if was == there or dtype in (None, "float32") or training["accumulation_steps"] == 1:
        return None
    return (
        f"parameters were {'off' if was else 'on'} the device until this snapshot and are {'off' if there else 'on'} it now. On the "
        f"device the microbatches are a loop within one program, which rounds {dtype} in another way: from here on the run has other "
        "last bits than it would have had"
    )
