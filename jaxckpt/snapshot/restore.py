"""Reading a committed step: what is said of it, and its leaves, every bit checked before anybody computes with it."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from etils import epath

from jaxckpt.distributed.sync import Group
from jaxckpt.errors import DamagedSnapshot, JaxckptError, SnapshotError, listed
from jaxckpt.nvme import array
from jaxckpt.nvme.store import NvmeStore
from jaxckpt.snapshot import host_arrays, orbax_io, packing, shards, steps, streamed
from jaxckpt.snapshot.environment import version
from jaxckpt.snapshot.leaves import check_leaves, from_words, leaf_table, stored_leaves, to_state, words
from jaxckpt.snapshot.manifest import FORMAT, check_files, hash_problems, read_manifest
from jaxckpt.state import fingerprint
from jaxckpt.state.train_state import TrainState


@dataclass(frozen=True)
class Snapshot:
    """Everything that may influence training from here on. What is not in it must not."""

    state: TrainState
    data: dict[str, Any]
    """position in the data, small and the same on every process"""
    meta: dict[str, Any]
    """format, step, config, versions, mesh, placement and the table of leaves"""


def read_snapshot(
    root: epath.Path,
    step: int,
    plan: TrainState,
    *,
    group: Group,
    compute_dtype: Any = None,
    store: NvmeStore | None = None,
    timeout_s: float = 600.0,
    restore_bytes: int | None = None,
) -> Snapshot:
    """The whole snapshot of `step`, laid out as `plan`, every bit of it checked.

    Raises SnapshotError with every leaf that does not fit, and what `read_leaves` raises.
    """
    meta = read_meta(root, step)
    check_leaves(steps.step_path(root, step), meta["leaves"], leaf_table(plan))
    leaves = stored_leaves(plan)
    limits = {"timeout_s": timeout_s, "restore_bytes": restore_bytes}
    arrays = read_leaves(root, step, leaves, group=group, store=store, **limits)
    data = orbax_io.read_json(steps.step_path(root, step), "data")
    return Snapshot(to_state(arrays, plan, compute_dtype, store=store), data, meta)


def read_meta(root: epath.Path, step: int) -> dict[str, Any]:
    """The `meta` of a step, without arrays. Raises SnapshotError where this version cannot read it."""
    directory = steps.step_path(root, step)
    try:
        meta = orbax_io.read_json(directory, "meta")
        found = int(meta["format"])
        if found == FORMAT:
            return {**meta, "step": int(meta["step"]), "leaves": dict(meta["leaves"])}
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise DamagedSnapshot(f"{directory}: the snapshot's meta cannot be read ({type(e).__name__}: {e})") from e
    other = "Update jaxckpt" if found > FORMAT else "Continue it with that version"
    raise SnapshotError(
        f"{directory}: the snapshot has format {found}, written by jaxckpt {meta.get('versions', {}).get('jaxckpt', '?')}; "
        f"this is jaxckpt {version('jaxckpt')}, which reads format {FORMAT}. {other}, or start a new run_dir."
    )


def check_sayings(root: epath.Path, step: int) -> None:
    """Raises DamagedSnapshot where the mark, the manifest, the config or the data position of a step is not what was
    saved: a few small files, checked before anything is decided from them."""
    directory = steps.step_path(root, step)
    files = read_manifest(root, step)["files"]
    said = {name: entry for name, entry in files.items() if name in ("meta/data.json", "data/data.json")}
    problems = [f"{name}: missing in the manifest" for name in ("meta/data.json", "data/data.json") if name not in said]
    problems += hash_problems(directory, said)
    if problems:
        raise damaged(directory, problems)


def read_leaves(
    root: epath.Path,
    step: int,
    target: Mapping[str, Any],
    *,
    group: Group,
    store: NvmeStore | None = None,
    timeout_s: float = 600.0,
    restore_bytes: int | None = None,
) -> dict[str, Any]:
    """The leaves that `target` names, made straight in its shardings and memory kinds, those on local disks in `store`;
    others are not read.

    Raises DamagedSnapshot where a file, a checksum or a leaf's fingerprint is not what was saved, SnapshotError where it
    cannot be read for another reason; every process of `group` raises alike.
    """
    directory = steps.step_path(root, step)
    if problems := group.from_primary("check the snapshot's files", lambda: _file_problems(root, step)):
        raise damaged(directory, problems)
    manifest = read_manifest(root, step)
    plain = words(dict(target))
    on_disk = array.on_disk(plain)
    large = {path: x for path, x in plain.items() if path not in manifest["packed"] and path not in on_disk}
    small = {path: x for path, x in plain.items() if path in manifest["packed"] and path not in on_disk}
    on_host = {path for path, x in large.items() if host_arrays.stays_on_host(x)}
    on_device = {path: x for path, x in large.items() if path not in on_host}
    preparing = threading.Thread(target=fingerprint.prepare, args=(list(on_device.values()),))
    preparing.start()  # compiles while the bytes are read
    arrays: dict[str, Any] = {}
    error = None
    entries: streamed.Entries = {path: [] for path in on_disk}
    try:
        if large:
            arrays = orbax_io.load_state(directory, large, timeout_s=timeout_s, restore_bytes=restore_bytes)
        arrays.update(_read_packed(directory, manifest, small))
        written, entries = streamed.read_into(
            store, directory, on_disk, manifest["fingerprints"], restore_bytes=restore_bytes
        )
        arrays.update(written)
    except Exception as e:
        error = json.dumps({"is_damage": _is_damage(e), "text": root_cause(e)})
    finally:
        preparing.join()
    _raise_alike(directory, group.errors("read the snapshot", error))
    # Where the arrays now live: this covers the disk, the host's memory and every copy between.
    on_devices = {path: fingerprint.of_array(arrays[path]) for path in on_device}
    found = host_arrays.fingerprints({path: arrays[path] for path in large if path in on_host}, group)
    found.update({path: fingerprint.to_hex(x) for path, x in on_devices.items()})
    found.update(host_arrays.added_up(entries, {path: x.shape for path, x in on_disk.items()}, group))
    wrong = [path for path, x in found.items() if x != manifest["fingerprints"].get(path)]
    if wrong:
        raise damaged(directory, [f"leaf {path!r}: other bits than were saved (fingerprint)" for path in wrong])
    return from_words({path: arrays[path] for path in plain}, dict(target))


def damaged(directory: epath.Path, problems: list[str]) -> DamagedSnapshot:
    return DamagedSnapshot(f"{directory} is damaged:\n{listed(problems)}")


def root_cause(error: BaseException) -> str:
    """The innermost reason, on one line: Orbax hides it below a chain of 'incompatible handler' errors. Of other errors than
    ours the first line."""
    error = _innermost(error)
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, JaxckptError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _innermost(error: BaseException) -> BaseException:
    # An error that was raised from itself makes a ring.
    seen: list[BaseException] = []
    while error.__cause__ is not None and error not in seen and not isinstance(error, JaxckptError):
        seen.append(error)
        error = error.__cause__
    return error


def _is_damage(error: BaseException) -> bool:
    # tensorstore reports a wrong checksum as DATA_LOSS and a cut file as OUT_OF_RANGE, both as ValueError.
    error = _innermost(error)
    return isinstance(error, DamagedSnapshot) or any(word in str(error) for word in ("DATA_LOSS", "OUT_OF_RANGE"))


def _file_problems(root: epath.Path, step: int) -> list[str]:
    try:
        return check_files(steps.step_path(root, step), read_manifest(root, step))
    except DamagedSnapshot as e:
        return [str(e)]


def _read_packed(
    directory: epath.Path, manifest: Mapping[str, Any], small: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    if not small:
        return {}
    packed = shards.read_array(directory / "state" / packing.NAME)
    try:
        host = packing.unpack(packed, manifest["packed"], small)
    except (KeyError, ValueError) as e:
        raise DamagedSnapshot(f"{directory}: the packed leaves do not fit the manifest: {e}") from e
    found = fingerprint.np_fingerprints(host)
    wrong = [p for p, x in found.items() if fingerprint.to_hex(x) != manifest["fingerprints"].get(p)]
    if wrong:
        raise DamagedSnapshot(f"{directory}: leaves {wrong[:10]} hold other bits than were saved (fingerprint)")
    return packing.to_devices(host, small)


def _raise_alike(directory: epath.Path, errors: Mapping[int, str]) -> None:
    """Raises what `errors` (by process) say: damage if any process met damage, so that all fall back together."""
    if not errors:
        return
    found = {process: json.loads(text) for process, text in errors.items()}
    is_alone = jax.process_count() == 1
    lines = [e["text"] if is_alone else f"process {process}: {e['text']}" for process, e in sorted(found.items())]
    if any(e["is_damage"] for e in found.values()):
        raise damaged(directory, lines)
    raise SnapshotError(
        f"{directory}: the snapshot cannot be read: {'; '.join(lines)}. Nothing was changed; mend what this says and start the "
        "same command again."
    )
