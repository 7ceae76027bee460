"""What a run directory and its snapshots hold, from their small files alone: no array is read, JAX is not imported."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import steps
from jaxckpt.snapshot.manifest import FORMAT, hash_problems, read_manifest
from jaxckpt.snapshot.shards import dtype_of

Leaf = Mapping[str, Any]
"""shape, dtype, spec and memory_kind of a leaf, from the table in `meta`"""
_ASIDE = {"damaged_": "damaged", "superseded_": "superseded", "unmarked_": "without its mark"}


def read_meta(root: epath.Path, step: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of a step. Raises DamagedSnapshot where it is not what was saved, SnapshotError for another format."""
    return _read_checked(root, step, manifest, "meta")


def read_data(root: epath.Path, step: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The data position of a step. Raises like `read_meta`."""
    return _read_checked(root, step, manifest, "data")


def list_steps(root: epath.Path) -> list[dict[str, Any]]:
    """What there is, oldest first: step, name, status, committed_at, bytes, pins and metrics of every committed step, then
    the damaged and superseded ones that were set aside. What cannot be told is None."""
    pins = steps.pins(root)
    rows = []
    for step in steps.committed_steps(root):
        row = _row(root, step, sorted(name for name, s in pins.items() if s == step))
        if row["status"] == "ok" or step in steps.committed_steps(root):  # else a run has deleted it while we looked
            rows.append(row)
    for name in sorted(path.name for path in root.iterdir()):
        prefix = next((p for p in _ASIDE if name.startswith(f"{p}step_")), None)
        if prefix and not name.endswith(".ok"):
            step = int(name.removeprefix(f"{prefix}step_").split(".")[0])
            size = _bytes_aside(root / name)
            rows.append(_as_row(step, name, _ASIDE[prefix], size))
    return rows


def inspect(root: epath.Path, step: int) -> dict[str, Any]:
    """All that is said of a step: the step, where, when, metrics, pins; bytes and leaves by group; every leaf; the data
    position; and `meta` as it was saved (config, versions, mesh, placement, processes, devices)."""
    mark, manifest = steps.read_mark(root, step), read_manifest(root, step)
    meta = read_meta(root, step, manifest)
    leaves = {path: _leaf(path, leaf, manifest) for path, leaf in meta.pop("leaves").items()}
    groups: dict[str, dict[str, int]] = {}
    for path, leaf in leaves.items():
        group = groups.setdefault(path.split("/")[0], {"leaves": 0, "elements": 0, "bytes": 0})
        group["leaves"] += 1
        group["elements"] += math.prod(leaf["shape"])
        group["bytes"] += leaf["bytes"]
    return {
        "path": str(steps.step_path(root, step)),
        "step": step,
        "committed_at": mark["committed_at"],
        "metrics": mark["metrics"],
        "pins": sorted(name for name, s in steps.pins(root).items() if s == step),
        "steps": steps.committed_steps(root),
        "bytes": _num_bytes(manifest),
        "groups": groups,
        "leaves": leaves,
        "data": read_data(root, step, manifest),
        "meta": {key: value for key, value in meta.items() if key != "step"},
    }


def leaf_dtype(leaf: Leaf) -> np.dtype:
    """The dtype that a leaf is stored in: random keys are stored as their words."""
    return np.dtype(np.uint32) if leaf["dtype"].startswith("key<") else dtype_of(leaf["dtype"])


def stored_shape(leaf: Leaf, nbytes: int) -> tuple[int, ...]:
    """The shape in which `nbytes` of a leaf are stored; the words of random keys are one more axis. Raises DamagedSnapshot
    where the leaf takes another number of bytes."""
    shape = tuple(leaf["shape"])
    if leaf["dtype"].startswith("key<"):
        shape = (*shape, nbytes // 4 // max(1, math.prod(shape)))
    if (expected := math.prod(shape) * leaf_dtype(leaf).itemsize) != nbytes:
        raise DamagedSnapshot(f"{nbytes} bytes are stored, {leaf['dtype']}{list(leaf['shape'])} takes {expected}")
    return shape


def _row(root: epath.Path, step: int, pins: list[str]) -> dict[str, Any]:
    row = _as_row(step, steps.step_path(root, step).name, "ok", None, pins=pins)
    try:
        mark = steps.read_mark(root, step)
        row.update(committed_at=mark["committed_at"], metrics=mark["metrics"])
        row["bytes"] = _num_bytes(read_manifest(root, step))
    except SnapshotError as e:  # one bad step must not hide the others
        row["status"] = f"damaged: {e}" if isinstance(e, DamagedSnapshot) else str(e)
    return row


def _as_row(step: int, name: str, status: str, size: int | None, pins: list[str] | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "name": name,
        "status": status,
        "committed_at": None,
        "bytes": size,
        "pins": pins or [],
        "metrics": {},
    }


def _leaf(path: str, leaf: Leaf, manifest: Mapping[str, Any]) -> dict[str, Any]:
    is_packed = path in manifest["packed"]
    size = manifest["packed"][path][1] if is_packed else math.prod(leaf["shape"]) * leaf_dtype(leaf).itemsize
    return {
        "shape": leaf["shape"],
        "dtype": leaf["dtype"],
        "spec": leaf["spec"],
        "tier": leaf["memory_kind"],
        "bytes": size,
        "packed": is_packed,
        "fingerprint": manifest["fingerprints"].get(path),
    }


def _read_checked(root: epath.Path, step: int, manifest: Mapping[str, Any], item: str) -> dict[str, Any]:
    directory = steps.step_path(root, step)
    if manifest["format"] != FORMAT:
        raise SnapshotError(
            f"{directory} has format {manifest['format']}, and this version reads format {FORMAT}. Use the jaxckpt that "
            "wrote it."
        )
    name = f"{item}/data.json"
    try:
        problems = hash_problems(directory, {name: manifest["files"][name]})
        if not problems:
            return json.loads((directory / item / "data.json").read_bytes())
    except (KeyError, FileNotFoundError):
        problems = [f"{name}: missing"]
    raise DamagedSnapshot(f"{directory}: {problems[0]}")


def _num_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(entry["bytes"] for entry in manifest["files"].values())


def _bytes_aside(directory: epath.Path) -> int | None:
    try:
        return _num_bytes(json.loads((directory / steps.MANIFEST).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it was set aside because something is wrong with it
