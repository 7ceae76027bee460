"""A token store of gs:// as a local copy: training reads rows at random, which objects are too slow for."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxckpt.data.store import HEADER, block_hashes, parse_header
from jaxckpt.errors import DataError
from jaxckpt.snapshot import gcs, paths

log = logging.getLogger("jaxckpt")

CACHE_VARIABLE = "JAXCKPT_CACHE"
"""names the directory of the copies; else ~/.cache/jaxckpt"""


def local_store(path: str | os.PathLike[str]) -> Path:
    """Where the store at `path` lies on this machine; one of gs:// is copied first, unless a copy of its content is there.

    Processes of one machine copy it once: the others wait for it. Every block is checked against the store's hashes.
    Raises DataError.
    """
    name = os.fspath(path)
    if not name.startswith("gs://"):
        return Path(name)
    name = name.rstrip("/")
    paths.resolve(f"{name}/{HEADER}")
    try:
        content = gcs.read(f"{name}/{HEADER}")
    except FileNotFoundError:
        raise DataError(
            f"{name} is no token store: there is no object {name}/{HEADER}. Prepare one in a local directory and copy it there, "
            f"{HEADER} last."
        ) from None
    except OSError as e:
        raise DataError(f"{name}/{HEADER} cannot be read: {e}") from e
    header = parse_header(content, f"{name}/{HEADER}")
    stores = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache/jaxckpt") / "stores"
    copy = stores / f"{header.content_hash[:32]}-{header.tokenizer_hash[:16]}"
    if (copy / HEADER).is_file():
        return copy
    try:
        stores.mkdir(parents=True, exist_ok=True)
        with _alone(stores / f"{copy.name}.lock", name):
            if not (copy / HEADER).is_file():
                _copy(name, header.blocks, content, copy)
    except OSError as e:
        raise DataError(f"{name} cannot be copied to {copy}: {e}. {CACHE_VARIABLE} names another directory.") from e
    return copy


def _copy(name: str, blocks: Mapping[str, list[str]], header: bytes, copy: Path) -> None:
    sizes = {path.rpartition("/")[2]: size for path, size in gcs.objects_under(name).items()}
    if missing := sorted(set(blocks) - set(sizes)):
        raise DataError(
            f"{name} has no {' and no '.join(missing)}, which its {HEADER} tells of. Copy the store there again."
        )
    log.info("copying %s (%.1f MiB) to %s", name, sum(sizes[f] for f in blocks) / 2**20, copy)
    unfinished = copy.with_name(copy.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for file, expected in blocks.items():
        gcs.download(f"{name}/{file}", os.fspath(unfinished / file))
        found = list(block_hashes(unfinished / file))
        if found != expected:
            raise DataError(
                f"{name}/{file} is not what was written: its block {_first_difference(found, expected)} has another hash than in "
                f"{HEADER}. Copy the store there again."
            )
    (unfinished / HEADER).write_bytes(header)
    unfinished.rename(copy)


def _first_difference(found: list[str], expected: list[str]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )


@contextmanager
def _alone(file: Path, name: str) -> Iterator[None]:
    """While open, no other process of this machine copies the same store; says whom it waits for."""
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("waiting for another process on this machine that copies %s", name)
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with its owner, whatever ends it
        yield
