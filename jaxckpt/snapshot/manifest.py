"""`manifest.json`: every file of a committed step with its size, and every leaf with its fingerprint.

The manifest is protected by its hash in the step's mark, small files by their own hash in the manifest, and the arrays by
a checksum a chunk and by their fingerprints. So every byte of a snapshot is covered by something.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from jaxckpt.errors import DamagedSnapshot
from jaxckpt.snapshot import gcs, steps
from jaxckpt.snapshot.paths import is_local

FORMAT = 2
_READERS = 16


def describe(
    directory: epath.Path, *, step: int, fingerprints: Mapping[str, str], packed: Mapping[str, list[int]]
) -> str:
    """The manifest of a step directory that is written and not committed yet, as text."""
    sizes = _sizes(directory)
    hashes = _hashes(directory, _without_chunks(sizes))
    files = {
        name: {"bytes": size, **({"sha256": hashes[name]} if name in hashes else {})}
        for name, size in sorted(sizes.items())
    }
    manifest = {"format": FORMAT, "step": step, "fingerprints": fingerprints, "packed": packed, "files": files}
    return json.dumps(manifest, separators=(",", ":"))


def read_manifest(root: epath.Path, step: int) -> dict[str, Any]:
    """The manifest of a committed step. Raises DamagedSnapshot where it, or the mark that vouches for it, is not what
    was written."""
    directory = steps.step_path(root, step)
    mark = steps.read_mark(root, step)
    try:
        text = (directory / steps.MANIFEST).read_bytes()
    except FileNotFoundError as e:
        raise DamagedSnapshot(f"{directory}: {steps.MANIFEST} is missing") from e
    if hashlib.sha256(text).hexdigest() != mark["manifest_sha256"]:
        raise DamagedSnapshot(
            f"{directory}: {steps.MANIFEST} is not what was saved (its sha256 is not the one in the .ok mark)"
        )
    return json.loads(text)


def check_files(directory: epath.Path, manifest: Mapping[str, Any]) -> list[str]:
    """What differs between the files of a committed step and its manifest, a line each; the arrays' contents are not
    read."""
    expected = manifest["files"]
    sizes = _sizes(directory)
    problems = [f"{name}: missing ({entry['bytes']} bytes)" for name, entry in expected.items() if name not in sizes]
    problems += [f"{name}: not part of the snapshot" for name in sizes if name not in expected]
    same = [name for name in expected if name in sizes]
    problems += [
        f"{name}: {sizes[name]} bytes, {expected[name]['bytes']} were saved"
        for name in same
        if sizes[name] != expected[name]["bytes"]
    ]
    whole = {name: expected[name] for name in same if sizes[name] == expected[name]["bytes"]}
    return problems + hash_problems(directory, whole)


def hash_problems(directory: epath.Path, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which of these files of a manifest, as far as it holds their hash, do not have it; a line each."""
    hashes = _hashes(directory, [name for name, entry in entries.items() if "sha256" in entry])
    return [
        f"{name}: other bytes than were saved (sha256)"
        for name, found in hashes.items()
        if found != entries[name]["sha256"]
    ]


def _sizes(directory: epath.Path) -> dict[str, int]:
    """{relative name: bytes} of every file below `directory` but the manifest."""
    path = os.fspath(directory)
    if is_local(directory):
        sizes = {
            os.path.join(d, name): os.path.getsize(os.path.join(d, name)) for d, _, ns in os.walk(path) for name in ns
        }
    else:
        sizes = gcs.objects_under(path)
    found = {name.removeprefix(path + "/"): size for name, size in sizes.items()}
    found.pop(steps.MANIFEST, None)
    return found


def _without_chunks(names: Mapping[str, int]) -> list[str]:
    """The files that are not chunks of an array: those carry their own checksums, and are too large to read twice."""
    arrays = {name.removesuffix("/zarr.json") for name in names if name.endswith("/zarr.json")}

    def is_chunk(name: str) -> bool:
        parts = name.split("/")
        return any(part == "c" and "/".join(parts[:i]) in arrays for i, part in enumerate(parts))

    return [name for name in names if not is_chunk(name)]


def _hashes(directory: epath.Path, names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    read = lambda name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
    with ThreadPoolExecutor(_READERS) as pool:  # on gs:// each costs a round trip
        return dict(zip(names, pool.map(read, names), strict=True))
