"""What a resumed run keeps from its first start, and what may not change unasked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

from jaxckpt.config.explain import did_you_mean, show, suggestions
from jaxckpt.config.load import validated
from jaxckpt.config.sections import RunConfig, to_dict
from jaxckpt.config.tree import all_keys, filled
from jaxckpt.errors import ConfigError

ABSENT = "(absent)"

# data.files, data.stores: another place of the same data is no change, and other data is seen by its identity. What is
# skipped is compared with what the snapshot itself has recorded.
_NO_INFLUENCE = {"data.files", "data.stores", "data.num_threads", "data.held_out", "data.skip"}


@dataclass(frozen=True)
class Difference:
    """One key that two resolved configs give different values; a side that does not know the key holds ABSENT."""

    key: str
    old: Any
    new: Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Where two resolved configs (`to_dict`) would train differently, by key; an absent key counts as its default.

    Only model, data, optimizer and seed count. How long, where and on how many devices a run trains may change freely.
    """
    old, new = filled(RunConfig, old), filled(RunConfig, new)
    return [d for key in ("model", "data", "optimizer", "seed") for d in _differ(key, old.get(key), new.get(key))]


def _differ(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if key in _NO_INFLUENCE or old == new:
        return
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        yield Difference(key, old, new)
        return
    keys = dict.fromkeys([*old, *new])
    if old.get("name") != new.get("name"):  # another variant: its own keys follow from the name
        keys = [k for k in keys if k in old and k in new]
    for name in keys:
        yield from _differ(f"{key}.{name}", old.get(name, ABSENT), new.get(name, ABSENT))


def check_resumable(old: Mapping[str, Any], new: Mapping[str, Any], allow_changed: Sequence[str] = ()) -> None:
    """Raises ConfigError if `new` would train differently from the run's stored config `old` in a key not allowed.

    An allowed name is a key or a section: `optimizer` covers `optimizer.lr`.
    """
    found = differences(old, new)
    keys = {key: field for key, _, field in all_keys(RunConfig)}
    known = list(dict.fromkeys([*keys, *(d.key for d in found)]))
    free = [key for key, field in keys.items() if get_origin(field.annotation) is dict]  # args: any key below
    lines = []
    for name in allow_changed:
        if not (any(_covers(name, key) for key in known) or any(_covers(key, name) for key in free)):
            lines.append(f"--allow-changed {name}: no such key{did_you_mean(suggestions(name, known))}")
    changed = [d for d in found if not any(_covers(name, d.key) for name in allow_changed)]
    for d in changed:
        was, now = (v if v == ABSENT else show(v) for v in (d.old, d.new))
        lines.append(f"{d.key}: was {was}, now {now}")
    if not lines:
        return
    if changed:
        lines.append("To go on with the change: " + " ".join(f"--allow-changed {d.key}" for d in changed))
        lines.append("To train anew instead: give another run_dir. To go on exactly: restore the old values.")
    raise ConfigError("\n  ".join(["the run in run_dir was started with another configuration", *lines]))


def _covers(name: str, key: str) -> bool:
    return key == name or key.startswith(name + ".")


def resolve(config: RunConfig, stored: Mapping[str, Any] | None) -> RunConfig:
    """`config` with a null optimizer.schedule.decay_steps taken from the run's stored config, else from `steps`.

    A decaying schedule is fixed at the first start: raising `steps` later trains on at the final learning rate and
    leaves the steps already taken as they were. To stretch the decay, give decay_steps and allow it to change.
    """
    schedule = config.optimizer.schedule
    if schedule.decay_steps is not None or schedule.name == "constant":
        return config
    tree = to_dict(config)
    before = filled(RunConfig, stored or {})["optimizer"].get("schedule", {}).get("decay_steps")
    tree["optimizer"]["schedule"]["decay_steps"] = config.steps if before is None else before
    return validated(tree, "the configuration with the schedule of the run's first start")
