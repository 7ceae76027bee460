"""Chooses where state lives from what there is room for. Pure arithmetic on the plan of a state that is all on the device.

The order is that of the cost: what is moved first is read once a step (moments, then master weights), what is moved last
is read in every layer's forward and backward (parameters). Within a group leaves are moved in the order of the state,
and not one more than needed. What the host has no room for goes on to disks in the same order.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt.errors import PlanError
from jaxckpt.state import tree
from jaxckpt.state.memory import leaf_bytes
from jaxckpt.state.nvme import SMALLEST_BYTES, tier_of
from jaxckpt.state.plan import Placement, Tier, owner

COPIES_ON_DISK = {"state, two generations": 2, "what a save takes of it": 1}
"""of the state there: a step reads one generation and writes the other, and a snapshot takes one, for which a new file is made"""
NVME_SLOTS = 4
"""buckets of the tier nvme in host memory: being read, updated, written, and one between"""
_ORDER = ("opt_state", "master", "params")
_EACH = {"device": "of each device", "host": "of each process", "nvme": "on the disks of each process"}


class DoesNotFit(PlanError):
    """There is no placement within the budget; the text names the least that would do."""


@dataclass(frozen=True)
class Budget:
    """What there is room for, in bytes; None: no limit. `nvme` 0: no disk may be used."""

    device: int | None = None
    """of each device"""
    host: int | None = None
    """of each process"""
    nvme: int | None = 0
    """on the disks of each process"""


@dataclass(frozen=True)
class Needs:
    """What a step takes beside the state."""

    working_bytes: int = 0
    """of each device, for activations and whatever else the compiler wants"""
    gradient_bytes: int | None = None
    """of each device; None: as much as the parameters. With parameters off the device no whole gradient exists there"""
    host_bytes: int = 0
    """of each process, for the process itself"""
    staging_bytes: int | None = 0
    """of each process, for what a save copies aside; None: all that it copies, which is what is not on disks"""
    restore_bytes: int | None = 0
    """of each process, while a run resumes; None: as much as the state"""
    cache_bytes: int = 0
    """of each process, for state on disks that is kept in memory, too"""
    sums_gradients: bool = False
    """whether gradients are kept until all are there (accumulation, a global norm, skipping what is not finite)"""


@dataclass(frozen=True)
class Choice:
    placement: Placement
    device_bytes: int
    """of each device, all in all"""
    host_bytes: int
    """of each process, all in all"""
    nvme_bytes: int
    """on the disks of each process, all copies"""
    lasting_bytes: int
    """of `device_bytes`, the state and the gradients: what is left when activations and buckets come and go"""


@dataclass(frozen=True)
class _Leaf:
    path: str
    group: str
    device_bytes: int
    process_bytes: int
    """in host memory, where every local device has its part"""
    once_bytes: int
    """on disk and in a save, where copies on several local devices are one"""
    is_derived: bool
    """of the narrow copy of master weights, which no save holds"""
    is_movable: bool
    is_small: bool
    parameter: str | None


def choose_placement(
    plan: Any,
    budget: Budget,
    *,
    needs: Needs = Needs(),
    local_devices: int | None = None,
    bucket_bytes: int = 128 << 20,
    nvme_dir: tuple[str, ...] = (),
) -> Choice:
    """The cheapest placement that fits `budget`, for the state of `plan` (its tiers do not matter).

    `local_devices`: devices of each process; those of this one by default. Raises DoesNotFit with the smallest budget that
    would do, one resource at a time, where nothing fits.
    """
    room = _Room(plan, needs, local_devices, bucket_bytes)
    found = room.choose(budget)
    if isinstance(found, str):
        raise DoesNotFit(room.refusal(budget, found))
    away, disk = found
    return Choice(
        room.placement(away, disk, nvme_dir),
        room.device_sizes[away],
        room.host_sizes(away)[disk],
        room.disk_sizes(away)[disk],
        room.lasting_sizes[away],
    )


def refine(choose: Callable[[int], Choice], peak_of: Callable[[Placement], int], limit: int) -> tuple[Choice, int]:
    """(choice, its peak): `choose(working bytes)` until the compiler's own peak is at most `limit`.

    `peak_of` compiles, which takes long; three tries mend what arithmetic does not know of activations. Raises DoesNotFit
    where the peak stays above the limit.
    """
    working, peak, choice = 0, 0, choose(0)
    for _ in range(3):
        peak = peak_of(choice.placement)
        if peak <= limit:
            return choice, peak
        working = max(working, peak - choice.lasting_bytes)
        choice = choose(working)
    raise DoesNotFit(f"the compiled step takes {peak:,} bytes of each device and the budget has {limit:,}")


class _Room:
    """The sums that a choice is made by: what each beginning of the order would take, of every memory."""

    def __init__(self, plan: Any, needs: Needs, local_devices: int | None, bucket_bytes: int) -> None:
        self.needs, self.bucket_bytes = needs, bucket_bytes
        self.local_devices = local_devices or _local_devices(plan)
        self.leaves = _leaves(plan, self.local_devices)
        self.pieces = self._pieces()
        params = sum(x.device_bytes for x in self.leaves if x.group == "params")
        self.gradient_bytes = params if needs.gradient_bytes is None else needs.gradient_bytes
        self.device_sizes, self.lasting_sizes = self._device_sizes()
        self._host: dict[int, list[int]] = {}

    def choose(self, budget: Budget) -> tuple[int, int] | str:
        """(pieces off the device, leaves of these on disks), the fewest that fit; or the name of what does not."""
        away = _first_within(self.device_sizes, budget.device)
        if away is None:
            return "device"
        disk = _first_within(self.host_sizes(away), budget.host)
        if disk is None or (disk and budget.nvme == 0):
            return "host"
        return (away, disk) if budget.nvme is None or self.disk_sizes(away)[disk] <= budget.nvme else "nvme"

    def host_sizes(self, away: int) -> list[int]:
        """Host memory of each process, with the first 0, 1, 2... leaves that may be on disks there."""
        if away not in self._host:
            pinned = self.needs.host_bytes + sum(x.process_bytes for x in self._gone(away))
            gradients = [self.gradient_bytes * self.local_devices * self._do_gradients_leave(away, n) for n in (0, 1)]
            copied = sum(x.once_bytes for x in self.leaves if not x.is_derived)
            bucket, on_disk = _Bucket(self.bucket_bytes), 0
            layers: dict[str, int] = defaultdict(int)  # of parameters on disks, which are read a layer at a time
            sizes = [pinned + gradients[0] + self._saving_bytes(copied)]
            for x in self._for_disks(away):
                pinned, on_disk = pinned - x.process_bytes, on_disk + x.process_bytes
                copied -= 0 if x.is_derived else x.once_bytes
                if x.group == "params":
                    layers[_layer_of(x.path)] += x.device_bytes
                largest = max(bucket.add([x]), *layers.values(), 0)
                buffers = NVME_SLOTS * largest * self.local_devices + min(self.needs.cache_bytes, on_disk)
                sizes.append(pinned + gradients[1] + buffers + self._saving_bytes(copied))
            self._host[away] = sizes
        return self._host[away]

    def _saving_bytes(self, copied: int) -> int:
        """Host memory of each process for a save that copies so many bytes, or for resuming, which comes at another time."""
        whole = sum(x.once_bytes for x in self.leaves if not x.is_derived)
        staging, restore = self.needs.staging_bytes, self.needs.restore_bytes
        return max(bounded(copied, staging), bounded(whole, restore))

    def disk_sizes(self, away: int) -> list[int]:
        """Bytes on the disks of each process, for the same numbers of leaves."""
        return list(accumulate((sum(COPIES_ON_DISK.values()) * x.once_bytes for x in self._for_disks(away)), initial=0))

    def placement(self, away: int, disk: int, nvme_dir: tuple[str, ...]) -> Placement:
        on_disk = {x.path for x in self._for_disks(away)[:disk]}
        tiers: dict[str, Tier] = {x.path: "nvme" if x.path in on_disk else "pinned_host" for x in self._gone(away)}
        groups: dict[str, Tier] = {}
        paths: list[tuple[str, Tier]] = []
        for group in _ORDER:
            members = [x for x in self.leaves if x.group == group and x.is_movable]
            groups[group], more = _group_tiers(members, tiers)
            paths += more
        return Placement(
            params=groups["params"],
            master=groups["master"],
            opt_state=groups["opt_state"],
            grads="pinned_host" if self._do_gradients_leave(away, disk) else "device",
            paths=tuple(paths),
            nvme_dir=nvme_dir if disk else (),
            bucket_bytes=self.bucket_bytes,
        )

    def refusal(self, budget: Budget, what: str) -> str:
        """What does not fit, and what each resource would have to be for the rest of the budget to do."""
        has = {"device": budget.device, "host": budget.host, "nvme": budget.nvme}
        lines = [f"no placement of this state fits: budget.{what} is {_size(has[what])} {_EACH[what]}."]
        for name, sizes in self._candidates(budget).items():
            enough = (n for n in sorted(set(sizes)) if not isinstance(self.choose(replace(budget, **{name: n})), str))
            if has[name] is not None and (least := next(enough, None)) is not None:
                lines.append(f"  With the rest as it is, budget.{name} of {_size(least)} {_EACH[name]} would do.")
        if len(lines) == 1:
            lines.append("  No one resource is enough alone; raise the others of the budget too.")
        return "\n".join(lines)

    def _candidates(self, budget: Budget) -> dict[str, list[int]]:
        away = _first_within(self.device_sizes, budget.device)
        away = len(self.pieces) if away is None else away
        return {"device": self.device_sizes, "host": self.host_sizes(away), "nvme": self.disk_sizes(away)}

    def _pieces(self) -> list[list[_Leaf]]:
        """What may leave the device, in order, in pieces that leave together."""
        pieces = []
        for group in _ORDER:
            found = [x for x in self.leaves if x.group == group and x.is_movable]
            # A layer fetches all its weights or none, and the update must know which: all parameters, or none.
            pieces += [found] * bool(found) if group == "params" else [[x] for x in found]
        return pieces

    def _device_sizes(self) -> tuple[list[int], list[int]]:
        """Device memory with the first 0, 1, 2... pieces off it: all of it, and the state and gradients of it."""
        stays = sum(x.device_bytes for x in self.leaves)
        bucket, working = _Bucket(self.bucket_bytes), self.needs.working_bytes
        lasting = [stays + self.gradient_bytes]
        sizes = [lasting[0] + working]
        for piece in self.pieces:
            stays -= sum(x.device_bytes for x in piece)
            # The bucket at hand and the next one, each as it was and as it will be; beside a large weight lies a small one.
            streamed = 2 * (bucket.add(piece) + min(self.bucket_bytes, bucket.total))
            if piece[0].group == "params":  # buckets are updated in the midst of the backward pass
                lasting.append(stays)
                sizes.append(stays + working + streamed)
            else:  # and otherwise after it, when the activations are gone
                lasting.append(stays + self.gradient_bytes)
                sizes.append(stays + self.gradient_bytes + max(working, streamed))
        return sizes, lasting

    def _gone(self, away: int) -> list[_Leaf]:
        return [x for piece in self.pieces[:away] for x in piece]

    def _for_disks(self, away: int) -> list[_Leaf]:
        return [x for x in self._gone(away) if not x.is_small]

    def _do_gradients_leave(self, away: int, disk: int) -> bool:
        """Whether all gradients are in host memory at once: a layer that fetches its weights has no state from disks at hand."""
        do_params_leave = any(piece[0].group == "params" for piece in self.pieces[:away])
        return do_params_leave and (self.needs.sums_gradients or disk > 0)


class _Bucket:
    """Bytes a device of the largest bucket: what is asked for, or all that belongs to one large weight."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.total, self.largest = wanted, 0, 0
        self._sums: dict[str, int] = defaultdict(int)

    def add(self, streamed: Sequence[_Leaf]) -> int:
        for x in streamed:
            self._sums[x.parameter or x.path] += x.device_bytes
            self.total += x.device_bytes
            self.largest = max(self.largest, self._sums[x.parameter or x.path])
        return min(max(self.wanted, self.largest), self.total)


def _group_tiers(members: Sequence[_Leaf], tiers: Mapping[str, Tier]) -> tuple[Tier, list[tuple[str, Tier]]]:
    """(tier of the group, patterns for those of its leaves that are elsewhere)."""
    found: list[Tier] = [tiers.get(x.path, "device") for x in members]
    if "nvme" in found and all(t == "nvme" or x.is_small for x, t in zip(members, found, strict=True)):
        return "nvme", []  # a leaf too small for a file of its own is in host memory wherever its group is
    order: tuple[Tier, ...] = ("nvme", "pinned_host", "device")
    usual = max(order, key=found.count) if found else "device"
    paths: list[tuple[str, Tier]] = []
    for tier in order:
        own = [x.path for x, t in zip(members, found, strict=True) if t == tier != usual]
        others = [x.path for x, t in zip(members, found, strict=True) if t != tier]
        paths.extend((pattern, tier) for pattern in patterns(own, others))
    return usual, paths


def largest_bucket(plan: Any, bucket_bytes: int) -> int:
    """Bytes a device of the largest bucket that streams through the update of a state with this plan."""
    flat, bucket = tree.flatten(plan), _Bucket(bucket_bytes)
    return bucket.add([x for x in _leaves(plan, 1) if tier_of(flat[x.path]) != "device"])


def bounded(nbytes: int, bound: int | None) -> int:
    """The bytes, or the bound where there is one and it is less."""
    return nbytes if bound is None else min(nbytes, bound)


def _first_within(sizes: Sequence[int], limit: int | None) -> int | None:
    return next((i for i, n in enumerate(sizes) if limit is None or n <= limit), None)


def patterns(chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Regexes that are found in every path of `chosen` and in none of `others`; a whole branch is one regex."""
    found: list[str] = []
    left = list(chosen)
    while left:
        parts = left[0].split("/")
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
            is_whole = depth == len(parts)
            if is_whole or not any(path.startswith(prefix) for path in others):
                found.append(f"^{re.escape(prefix)}{'$' if is_whole else ''}")
                left = [p for p in left if not (p == prefix if is_whole else p.startswith(prefix))]
                break
    return found


def _leaves(plan: Any, local_devices: int) -> list[_Leaf]:
    flat = tree.flatten(plan)
    parameters = {path.partition("/")[2]: x.shape for path, x in flat.items() if path.startswith("params/")}
    has_master = any(path.startswith("master/") for path in flat)
    found = []
    for path, x in flat.items():
        group, _, rest = path.partition("/")
        part = leaf_bytes(x.sharding.shard_shape(x.shape), x.dtype)
        local, whole = part * local_devices, leaf_bytes(x.shape, x.dtype)
        found.append(
            _Leaf(
                path,
                group,
                part,
                local,
                min(local, whole),
                has_master and group == "params",
                _is_movable(group, x),
                whole <= SMALLEST_BYTES,
                owner(rest, x.shape, parameters) or None,
            )
        )
    return found


def _layer_of(path: str) -> str:
    """The beginning of a parameter's path that names its layer, up to the first number; '' outside the layers."""
    parts = path.split("/")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return "/".join(parts[: numbers[0] + 1]) if numbers else ""


def _is_movable(group: str, x: Any) -> bool:
    """As `Placement.tier` has it: scalars and keys stay."""
    return group in _ORDER and x.ndim > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _local_devices(plan: Any) -> int:
    return max(len(x.sharding.mesh.local_devices) for x in jax.tree.leaves(plan))


def _size(count: int | None) -> str:
    return "no limit" if count is None else f"{count:,} bytes ({count / 2**30:.2f} GiB)"
