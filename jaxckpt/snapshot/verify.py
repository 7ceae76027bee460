"""Checks a committed step against what was saved, without JAX's devices and in a few MiB a thread.

The mark vouches for the manifest, the manifest for every file: its size, the hash of small files, and the fingerprints of
the arrays, which are computed again from the bytes on disk. Checksums inside the array files tell where the damage is.
"""

import bisect
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from etils import epath

from jaxckpt.errors import DamagedSnapshot, SnapshotError
from jaxckpt.snapshot import shards, steps
from jaxckpt.snapshot.inspect import Leaf, leaf_dtype, stored_shape
from jaxckpt.snapshot.manifest import FORMAT, check_files, read_manifest
from jaxckpt.snapshot.paths import is_local
from jaxckpt.snapshot.shards import PACKED, StoredArray, array_directory
from jaxckpt.state.np_fingerprint import PartialFingerprint, np_fingerprint, to_hex

OnBytes = Callable[[int], None]


def verify(root: epath.Path, step: int, *, on_bytes: OnBytes = lambda n: None, threads: int | None = None) -> list[str]:
    """What is wrong with the snapshot of `step`, a line each, with leaf, file and byte range where they are known.

    `on_bytes` is told of the bytes of arrays as they are checked, from several threads. Raises SnapshotError where there
    is no such step, or where a training run deletes it meanwhile.
    """
    directory = steps.step_path(root, step)
    pool = ThreadPoolExecutor(threads or _threads(root), thread_name_prefix="verify")
    over = threading.Event()  # a thread may be in the midst of many GiB when the user gives up

    def tell(num_bytes: int) -> None:
        if over.is_set():
            raise CancelledError
        on_bytes(num_bytes)

    try:
        problems = _problems(pool, root, step, tell)
    except (DamagedSnapshot, OSError) as e:
        problems = [_text(e)]
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)
    if problems and step not in steps.committed_steps(root):
        raise SnapshotError(f"{directory} was deleted while it was checked, as a training run does with old snapshots.")
    return [problem.replace(f"{os.fspath(directory)}/", "") for problem in problems]


def array_bytes(root: epath.Path, step: int) -> int:
    """About as many bytes as `verify` will tell `on_bytes` of; 0 where the manifest cannot be read."""
    try:
        files = read_manifest(root, step)["files"]
    except DamagedSnapshot:
        return 0
    return sum(entry["bytes"] for entry in files.values() if "sha256" not in entry)


def _problems(pool: ThreadPoolExecutor, root: epath.Path, step: int, on_bytes: OnBytes) -> list[str]:
    directory = steps.step_path(root, step)
    manifest = read_manifest(root, step)
    if manifest["format"] != FORMAT:
        raise SnapshotError(f"{directory} has format {manifest['format']}, and this version checks format {FORMAT}.")
    problems = check_files(directory, manifest)
    broken = {problem.split(": ")[0] for problem in problems}  # told of already, and not read again
    if "meta/data.json" in broken:
        table = None
    else:
        table = json.loads((directory / "meta" / "data.json").read_bytes())["leaves"]
        problems += _table_problems(table, manifest)
    arrays: dict[str, StoredArray] = {}
    packed = None
    for path in [None, *(path for path in manifest["fingerprints"] if path not in manifest["packed"])]:
        name = PACKED if path is None else array_directory(path)
        if f"state/{name}/zarr.json" not in broken:
            try:
                array = shards.open_array(directory / "state" / name)
                if path is None:
                    packed = array
                else:
                    _check_kind(path, array, table)
                    arrays[path] = array
            except SnapshotError as e:
                problems.append(str(e))
    largest_first = sorted(arrays, key=lambda path: -arrays[path].nbytes)
    jobs = {path: _start(pool, arrays[path], directory, broken, on_bytes) for path in largest_first}
    if packed is not None and table is not None and not any(name.startswith(f"state/{PACKED}/") for name in broken):
        problems += _packed_problems(packed, manifest, table, on_bytes)
    for path, shares in sorted(jobs.items()):
        problems += _leaf_problems(path, arrays[path], shares, manifest["fingerprints"][path])
    return problems


def _table_problems(table: Mapping[str, Leaf], manifest: Mapping[str, Any]) -> list[str]:
    known = manifest["fingerprints"]
    return [f"leaf {path!r}: has no fingerprint in the manifest" for path in table if path not in known] + [
        f"leaf {path!r}: not in the table of leaves of meta/data.json" for path in known if path not in table
    ]


def _check_kind(path: str, array: StoredArray, table: Mapping[str, Leaf] | None) -> None:
    """Raises DamagedSnapshot where the array has not the shape and dtype that the table gives the leaf."""
    if table is None or path not in table:
        return
    found = array.dtype, array.shape
    expected = leaf_dtype(table[path]), stored_shape(table[path], array.nbytes)
    if found != expected:
        raise DamagedSnapshot(
            f"leaf {path!r}: {array.path}/zarr.json describes {found[0]}{list(found[1])}, the leaf is "
            f"{expected[0]}{list(expected[1])}"
        )


def _start(
    pool: ThreadPoolExecutor, array: StoredArray, directory: epath.Path, broken: set[str], on_bytes: OnBytes
) -> list[Future[PartialFingerprint] | None]:
    """A job for each shard file; None for one that is known to be broken."""
    names = {cell: os.fspath(array.file(cell)).removeprefix(f"{os.fspath(directory)}/") for cell in array.cells()}
    return [pool.submit(_share, array, cell, on_bytes) if name not in broken else None for cell, name in names.items()]


def _share(array: StoredArray, cell: tuple[int, ...], on_bytes: OnBytes) -> PartialFingerprint:
    share = PartialFingerprint(array.shape, array.dtype)
    for starts, block in shards.iter_chunks(array, cell):
        share.add(block, starts)
        on_bytes(block.nbytes)
    return share


def _leaf_problems(
    path: str, array: StoredArray, shares: list[Future[PartialFingerprint] | None], expected: str
) -> list[str]:
    problems = []
    total = PartialFingerprint(array.shape, array.dtype)
    for share in shares:
        try:
            if share is not None:
                total.merge(share.result())
        except (DamagedSnapshot, OSError) as e:
            problems.append(f"leaf {path!r}: {_text(e)}")
    if None in shares:
        problems.append(f"leaf {path!r}: not whole, see the files above")
    elif not problems and (found := to_hex(total.value())) != expected:
        problems.append(
            f"leaf {path!r}: has fingerprint {found}, and {expected} was saved; every checksum in its files is right, so "
            "files were exchanged, or come from another snapshot"
        )
    return problems


def _packed_problems(
    packed: StoredArray, manifest: Mapping[str, Any], table: Mapping[str, Leaf], on_bytes: OnBytes
) -> list[str]:
    problems: list[str] = []
    spans = {path: (offset, nbytes) for path, (offset, nbytes) in manifest["packed"].items() if path in table}
    unseen = set(spans)
    try:
        for path, raw in _cut(packed, spans, on_bytes):
            unseen.remove(path)
            a = raw.view(leaf_dtype(table[path])).reshape(stored_shape(table[path], raw.nbytes))
            if (found := to_hex(np_fingerprint(a))) != (expected := manifest["fingerprints"].get(path)):
                problems.append(f"leaf {path!r}: has fingerprint {found}, and {expected} was saved (packed)")
    except (DamagedSnapshot, OSError) as e:
        problems.append(_text(e))
    if unseen:
        problems.append(f"not checked, because they lie in the damaged state/{PACKED}: {', '.join(sorted(unseen))}")
    return problems


def _cut(
    packed: StoredArray, spans: Mapping[str, tuple[int, int]], on_bytes: OnBytes
) -> Iterator[tuple[str, np.ndarray]]:
    """(path, uint8[bytes]) of the leaves at `spans` (offset, bytes), each as soon as all of it is read, in one pass."""
    yield from ((path, np.empty(0, np.uint8)) for path, (_, nbytes) in spans.items() if nbytes == 0)
    rows = sorted((offset, offset + nbytes, path) for path, (offset, nbytes) in spans.items() if nbytes)
    ends = [end for _, end, _ in rows]
    halves: dict[str, tuple[np.ndarray, int]] = {}  # a leaf across a block's edge, and how much of it is there
    for (start,), block in shards.iter_chunks(packed):
        stop = start + len(block)
        for a, b, path in itertools.islice(rows, bisect.bisect_right(ends, start), None):
            if a >= stop:
                break
            part = block[max(a, start) - start : min(b, stop) - start]
            if len(part) == b - a:
                yield path, part
                continue
            whole, filled = halves.pop(path, (np.empty(b - a, np.uint8), 0))
            whole[max(start - a, 0) :][: len(part)] = part
            if filled + len(part) == b - a:
                yield path, whole
            else:
                halves[path] = whole, filled + len(part)
        on_bytes(block.nbytes)
    if halves:
        raise DamagedSnapshot(f"{packed.path}: {packed.shape[0]} bytes, too short for {', '.join(halves)}")


def _text(e: DamagedSnapshot | OSError) -> str:
    return str(e) if isinstance(e, DamagedSnapshot) else f"cannot be read: {e}"


def _threads(root: epath.Path) -> int:
    # Reading from gs:// is waiting; on a disk one thread a core keeps both busy.
    return 16 if not is_local(root) else min(16, len(os.sched_getaffinity(0)))
