"""Compares two snapshots: configuration, data position, structure, and every element of every leaf.

The two may be sharded, chunked and packed differently. Memory is a few MiB a thread and the packed small leaves of both.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import shards, steps
from jaxckpt.snapshot.inspect import Leaf, leaf_dtype, read_data, read_meta, stored_shape
from jaxckpt.snapshot.locate import Located
from jaxckpt.snapshot.manifest import read_manifest
from jaxckpt.snapshot.shards import PACKED, array_directory
from jaxckpt.snapshot.walk import Walk
from jaxckpt.state.np_fingerprint import bits_of

# The parts of a config that decide what is trained; the others say how long, where and on what.
_TRAINS = ("model", "data", "optimizer", "seed")
# What `meta` says of the step itself.
_OF_THE_STEP = ("config", "training", "leaves", "step", "format", "loss_bits", "batch_digest", "captured", "program")

Pair = tuple[Any, Any]
"""a value of the first snapshot, and of the second"""


@dataclass
class LeafDifference:
    """How a leaf of the one differs from that of the other; equal bits are equal, also those of a NaN."""

    elements: int
    differing: int = 0
    max_abs: float = 0.0
    """largest |a - b|, where neither is a NaN"""
    max_rel: float = 0.0
    """largest |a - b| / max(|a|, |b|), where both are finite"""
    nans: int = 0
    """differing elements of which one or both are NaNs"""
    first: list[int] | None = None
    """index of the first differing element"""


@dataclass
class Difference:
    """What two snapshots differ in; empty where they do not."""

    config: dict[str, Pair] = field(default_factory=dict)
    """keys of the configuration, and settings given in Python, that decide what is trained"""
    data: dict[str, Pair] = field(default_factory=dict)
    """the position in the data"""
    structure: dict[str, Pair] = field(default_factory=dict)
    """leaves that one side lacks (None), or that differ in dtype and shape"""
    leaves: dict[str, LeafDifference] = field(default_factory=dict)
    """leaves of one shape and dtype whose bits differ"""
    elsewhere: dict[str, Pair] = field(default_factory=dict)
    """what must not change the state: other keys of the configuration, versions, mesh, placement, devices"""
    num_equal: int = 0
    """leaves whose bits are equal"""

    @property
    def is_equal(self) -> bool:
        return not (self.config or self.data or self.structure or self.leaves)


def diff(
    a: Located,
    b: Located,
    *,
    quick: bool = False,
    on_bytes: Callable[[int], None] = lambda n: None,
    threads: int | None = None,
) -> Difference:
    """Compares every bit of two snapshots; with `quick`, leaves whose stored fingerprints are equal are not read.

    `on_bytes` is told of the bytes of one side as they are compared. Raises DamagedSnapshot for what cannot be trusted.
    """
    one, other = _Side(a), _Side(b)
    difference = Difference()
    _compare_meta(one, other, difference)
    common = _compare_structure(one, other, difference)
    one.read_packed()
    other.read_packed()
    pool = ThreadPoolExecutor(threads or min(8, len(os.sched_getaffinity(0))), thread_name_prefix="diff")
    over = threading.Event()  # a thread may be in the midst of many GiB when the user gives up

    def tell(num_bytes: int) -> None:
        if over.is_set():
            raise CancelledError
        on_bytes(num_bytes)

    try:
        jobs = {path: pool.submit(_compare_leaf, one, other, path, quick, tell) for path in common}
        for path, job in jobs.items():
            if (found := job.result()).differing:
                difference.leaves[path] = found
            else:
                difference.num_equal += 1
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)
    return difference


class _Source(Protocol):
    def read(self, starts: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class _InMemory:
    array: np.ndarray

    def read(self, starts: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        return self.array[(*(slice(s, s + n) for s, n in zip(starts, shape, strict=True)), ...)]

    def finish(self) -> None: ...


class _Side:
    """One of the two snapshots."""

    def __init__(self, at: Located) -> None:
        self.directory = steps.step_path(*at)
        self.manifest = read_manifest(*at)
        self.meta = read_meta(*at, self.manifest)
        self.data = read_data(*at, self.manifest)
        self.leaves: Mapping[str, Leaf] = self.meta["leaves"]
        self._packed = np.empty(0, np.uint8)

    def read_packed(self) -> None:
        self._packed = shards.read_array(self.directory / "state" / PACKED)

    @contextlib.contextmanager
    def source(self, path: str) -> Iterator[tuple[_Source, tuple[int, ...], np.dtype]]:
        """(reader, shape, dtype) of a leaf's elements as they are stored."""
        if path in self.manifest["packed"]:
            offset, nbytes = self.manifest["packed"][path]
            shape, dtype = stored_shape(self.leaves[path], nbytes), leaf_dtype(self.leaves[path])
            yield _InMemory(self._packed[offset : offset + nbytes].view(dtype).reshape(shape)), shape, dtype
            return
        array = shards.open_array(self.directory / "state" / array_directory(path))
        with Walk(array) as walk:
            yield walk, array.shape, array.dtype


def _compare_meta(a: _Side, b: _Side, into: Difference) -> None:
    for key, pair in _differing(a.meta.get("config") or {}, b.meta.get("config") or {}).items():
        if key.split(".")[0] in _TRAINS:
            into.config[key] = pair
        elif key != "run_dir":  # every run has its own
            into.elsewhere[key] = pair
    into.config.update(_differing(a.meta.get("training") or {}, b.meta.get("training") or {}, "training"))
    into.data.update(_differing(a.data, b.data))
    into.elsewhere.update(_differing(_around(a.meta), _around(b.meta)))


def _around(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key not in _OF_THE_STEP}


def _compare_structure(a: _Side, b: _Side, into: Difference) -> list[str]:
    """The leaves that both have in one shape and dtype."""
    say = lambda leaf: leaf and f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"
    kinds = {path: (say(a.leaves.get(path)), say(b.leaves.get(path))) for path in {**a.leaves, **b.leaves}}
    into.structure.update({path: pair for path, pair in kinds.items() if pair[0] != pair[1]})
    return [path for path, pair in kinds.items() if pair[0] == pair[1]]


def _compare_leaf(a: _Side, b: _Side, path: str, quick: bool, on_bytes: Callable[[int], None]) -> LeafDifference:
    saved = [side.manifest["fingerprints"].get(path) for side in (a, b)]
    with a.source(path) as (one, shape, dtype), b.source(path) as (other, shape_b, dtype_b):
        if (shape, dtype) != (shape_b, dtype_b):
            raise DamagedSnapshot(
                f"leaf {path!r} is stored as {dtype}{list(shape)} in {a.directory} and as {dtype_b}{list(shape_b)} in "
                f"{b.directory}, and their tables of leaves say that they are of one kind"
            )
        found = LeafDifference(math.prod(shape))
        if not found.elements or (quick and saved[0] == saved[1]):
            return found
        for starts, run in shards.runs(shape, dtype.itemsize):
            x, y = one.read(starts, run), other.read(starts, run)
            _add(found, x, y, starts)
            on_bytes(x.nbytes)
        one.finish()
        other.finish()
    if (found.differing == 0) != (saved[0] == saved[1]):
        bits = "differ" if found.differing else "are equal"
        raise DamagedSnapshot(
            f"leaf {path!r}: the bits of the two snapshots {bits} and the fingerprints that were saved, {saved[0]} and {saved[1]}, "
            f"do not say so: one of the two is damaged. `python -m jaxckpt verify` tells which: {a.directory}, {b.directory}"
        )
    return found


def _add(into: LeafDifference, x: np.ndarray, y: np.ndarray, starts: tuple[int, ...]) -> None:
    """Takes the elements of a run that begins at `starts` into account."""
    differs = _bits(x) != _bits(y)
    if not (count := int(np.count_nonzero(differs))):
        return
    into.differing += count
    if into.first is None:
        at = np.unravel_index(int(np.argmax(differs)), x.shape)
        into.first = [s + int(i) for s, i in zip(starts, at, strict=True)]
    x, y = (_wide(v.reshape(-1)[differs]) for v in (x, y))
    is_nan = np.isnan(x) | np.isnan(y)
    into.nans += int(np.count_nonzero(is_nan))
    x, y = x[~is_nan], y[~is_nan]
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(x == y, 0.0, np.abs(x - y))
        size = np.maximum(np.abs(x), np.abs(y))
    into.max_abs = max(into.max_abs, float(distance.max(initial=0.0)))
    is_scaled = np.isfinite(size) & (size > 0)
    into.max_rel = max(into.max_rel, float((distance[is_scaled] / size[is_scaled]).max(initial=0.0)))


def _bits(x: np.ndarray) -> np.ndarray:
    """One value an element in C order, which are equal exactly where all bits are."""
    x = np.ascontiguousarray(x).reshape(-1)
    if x.dtype.itemsize > 8:
        return x.view("V16")
    bits = x.view(f"u{x.dtype.itemsize}")
    return bits & ((1 << n) - 1) if (n := bits_of(x.dtype)) < 8 else bits  # an int4 lies in the low bits of a byte


def _wide(x: np.ndarray) -> np.ndarray:
    """In a type in which differences can be computed: complex128, or float64 (64-bit integers are rounded)."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, Pair]:
    """{dotted key: (value, value)} of the values that differ; one that is absent is None."""
    found: dict[str, Pair] = {}
    for key in dict.fromkeys([*a, *b]):
        name, x, y = f"{prefix}.{key}" if prefix else str(key), a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            found.update(_differing(x, y, name))
        elif x != y:
            found[name] = x, y
    return found
