"""Where every leaf of the training state lives: mesh, partition spec and memory kind, decided once.

The plan is the training state with `jax.ShapeDtypeStruct(shape, dtype, sharding)` leaves. It alone drives sharded
initialisation, the signatures of the jitted step, the restore target and the memory table.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.state.nvme import SMALLEST_BYTES, NvmeStruct
from jaxckpt.state.train_state import TrainState

Tier = Literal["device", "pinned_host", "nvme"]
Rules = Sequence[tuple[str, P]]

# Gathering a leaf of this many elements or fewer costs more than keeping it whole on every device.
SMALL_LEAF = 2**12


@dataclass(frozen=True)
class Placement:
    """The tier of each group of state that may leave the device, and how it streams through the update.

    `paths` are (regex, tier): a leaf takes the tier of the first regex found in its path ('opt_state/0/nu/...'), else
    that of its group. Scalars stay on the device. `grads` says where gradients are summed up.
    """

    params: Tier = "device"
    master: Tier = "device"
    opt_state: Tier = "device"
    grads: Literal["device", "pinned_host"] = "device"
    paths: tuple[tuple[str, Tier], ...] = ()
    nvme_dir: tuple[str, ...] = ()
    """a directory on a local disk, or several, which are used as stripes"""
    nvme_cache_bytes: int = 0
    """host memory for buckets of the nvme tier that need not be read again"""
    bucket_bytes: int = 128 << 20
    """of state that is fetched, updated and written back together on each device"""

    def __post_init__(self) -> None:
        """Takes a mapping for `paths` and one text for `nvme_dir`, too. Raises PlanError with all that is odd."""
        if isinstance(self.paths, Mapping):
            object.__setattr__(self, "paths", tuple(self.paths.items()))
        if isinstance(self.nvme_dir, str | os.PathLike):
            object.__setattr__(self, "nvme_dir", (self.nvme_dir,))
        if isinstance(self.nvme_dir, Sequence):
            paths = (os.fspath(d) if isinstance(d, os.PathLike) else d for d in self.nvme_dir)
            object.__setattr__(self, "nvme_dir", tuple(paths))
        problems = []
        for name, least in (("bucket_bytes", 1), ("nvme_cache_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                problems.append(f"placement.{name}: expected a number of bytes, {least} at least, found {value!r}")
        if not isinstance(self.nvme_dir, Sequence) or not all(
            type(d) is str and d and "://" not in d for d in self.nvme_dir
        ):
            problems.append(f"placement.nvme_dir: expected directories on local disks, found {self.nvme_dir!r}")
        elif self.nvme_cache_bytes and not self.nvme_dir:
            problems.append("placement.nvme_cache_bytes: it is for state on local disks, and there is no nvme_dir")
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in self.paths):
            problems.append(f"placement.paths: expected pairs of a regex and a tier, found {self.paths!r}")
        if problems:
            raise PlanError("this placement cannot be used:\n" + "\n".join(f"  {p}" for p in problems))

    def to_json(self) -> dict[str, Any]:
        """As a snapshot's meta holds it."""
        return json.loads(json.dumps(asdict(self)))

    def tier(self, path: str, x: Any) -> Tier:
        """Where the leaf `x` of the training state (an array or a struct) with this path lives between steps."""
        # Scalars (step counts) stay on the device: moving them would cost a copy each and save nothing.
        if x.ndim == 0 or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return "device"
        groups: dict[str, Tier] = {"params": self.params, "master": self.master, "opt_state": self.opt_state}
        named: list[Tier] = [tier for pattern, tier in self.paths if re.search(pattern, path)]
        named.append(groups.get(path.partition("/")[0]) or "device")
        tier = named[0]
        return "pinned_host" if tier == "nvme" and math.prod(x.shape) * x.dtype.itemsize <= SMALLEST_BYTES else tier


def make_plan(
    abstract: TrainState,
    mesh: Mesh,
    *,
    rules: Rules = (),
    annotations: Mapping[str, P] | None = None,
    placement: Placement = Placement(),
) -> TrainState:
    """Attaches a sharding to every leaf of `abstract`.

    A parameter takes the first rule whose regex is found in its path, else its entry in `annotations` (the model's
    own partition specs by parameter path), else FSDP over its largest dimension that the axis divides, else it is
    replicated. A leaf of the master weights or of the optimizer state whose path ends with a parameter's path and
    that has its shape goes with that parameter. Raises PlanError with every leaf that cannot be laid out.
    """
    problems: list[str] = []
    specs = {
        path: _spec(path, x.shape, mesh, rules, annotations or {}, problems)
        for path, x in tree.flatten(abstract.params).items()
    }
    shapes = {path: x.shape for path, x in tree.flatten(abstract.params).items()}
    paths = list(tree.flatten(abstract))  # refuses paths that the disk could not tell apart
    _check_placement(placement, paths, mesh, problems)
    if problems:
        raise PlanError("the state cannot be laid out on this mesh:\n" + "\n".join(f"  {p}" for p in problems))

    def place(path: str, x: Any) -> Any:
        parameter = owner(path.partition("/")[2], x.shape, shapes)
        spec = specs[parameter] if parameter else _fsdp_spec(x.shape, mesh)
        tier = placement.tier(path, x)
        if tier == "nvme":
            return NvmeStruct(x.shape, x.dtype, NamedSharding(mesh, spec, memory_kind="device"))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=tier))

    return tree.map_with_path(place, abstract)


def unannotated(plan: TrainState, rules: Rules, annotations: Mapping[str, P]) -> frozenset[str]:
    """Paths of the parameters that neither a rule nor the model shards: FSDP by default."""
    return frozenset(
        path
        for path in tree.flatten(plan.params)
        if path not in annotations and not any(re.search(pattern, path) for pattern, _ in rules)
    )


def shardings(plan: Any, memory_kind: str | None = None) -> Any:
    """The sharding of every leaf, in its planned memory kind or all in `memory_kind`."""
    return jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind) if memory_kind else x.sharding, plan)


def owner(path: str, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]) -> str | None:
    """The longest parameter path that ends `path`, if that parameter has this shape."""
    parts = path.split("/")
    for start in range(len(parts)):
        name = "/".join(parts[start:])
        if name in parameters:
            return name if parameters[name] == shape else None
    return None


def _fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    size = mesh.shape.get("fsdp", 1)
    if size > 1 and math.prod(shape) > SMALL_LEAF:
        for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
            if shape[dim] % size == 0:
                return P(*[None] * dim, "fsdp")
    return P()


def _spec(
    path: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules, annotations: Mapping[str, P], problems: list[str]
) -> P:
    for pattern, spec in rules:
        if re.search(pattern, path):
            _check_spec(path, shape, mesh, spec, f"rule {pattern!r}", problems)
            return spec
    if path in annotations:
        spec = annotations[path]
        _check_spec(path, shape, mesh, spec, "the model's own annotation", problems)
        return spec
    return _fsdp_spec(shape, mesh)


def _check_spec(path: str, shape: tuple[int, ...], mesh: Mesh, spec: P, source: str, problems: list[str]) -> None:
    if len(spec) > len(shape):
        problems.append(f"params/{path} has {len(shape)} dimension(s) {shape} and {source} names {len(spec)}: {spec}")
        return
    for dim, axes in enumerate(spec):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        unknown = [a for a in names if a not in mesh.shape]
        if unknown:
            problems.append(f"params/{path}: {source} names the mesh axis {unknown[0]!r}; there are {list(mesh.shape)}")
            continue
        size = math.prod(mesh.shape[a] for a in names)
        if shape[dim] % size:
            problems.append(
                f"params/{path} has shape {shape}; {source} splits dimension {dim} of {shape[dim]} in {size} "
                f"({' x '.join(f'{a}={mesh.shape[a]}' for a in names)}), which does not divide it"
            )


def _check_placement(placement: Placement, paths: Sequence[str], mesh: Mesh, problems: list[str]) -> None:
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    asked = {group: getattr(placement, group) for group in ("params", "master", "opt_state", "grads")}
    for name, tier in [*asked.items(), *((f"paths, {pattern!r}", tier) for pattern, tier in placement.paths)]:
        known = ("device", "pinned_host") if name == "grads" else get_args(Tier)
        if tier not in known:
            problems.append(f"placement.{name}: {tier!r} is no tier; there are {', '.join(known)}")
        elif tier != "device" and "pinned_host" not in kinds:
            problems.append(f"placement.{name}: this {device.platform} device has no pinned_host memory, only {kinds}")
        elif tier == "nvme" and not placement.nvme_dir:
            problems.append(f"placement.{name}: the tier nvme needs placement.nvme_dir, a directory on a local disk")
    for pattern, _ in placement.paths:
        found = [path for path in paths if re.search(pattern, path)]
        if not found:
            problems.append(f"placement.paths: {pattern!r} is found in no path of the state, such as {paths[-1]}")
        elif odd := [p for p in found if p.partition("/")[0] not in asked]:
            problems.append(f"placement.paths: {pattern!r} is found in {odd[0]}, and that group stays on the device")
