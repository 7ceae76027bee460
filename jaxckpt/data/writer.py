"""The files of a token store while they are written: they grow, and can be cut back to any earlier size."""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxckpt.data.store import BLOCK_BYTES
from jaxckpt.errors import DataError

TOKENS, OFFSETS, MASK = "tokens.bin", "offsets.bin", "loss_mask.bin"


class BlockFile:
    """A file that is appended to, and the sha256 of each BLOCK_BYTES of it."""

    def __init__(self, path: Path, *, size: int = 0, blocks: Sequence[str] = ()) -> None:
        """Cuts the file at `size`; `blocks`: at least the hashes of the whole blocks before it."""
        self.path, self.size = path, size
        self._file = open(path, "r+b" if size else "w+b")  # noqa: SIM115 (open as long as this is)
        if (found := self._file.seek(0, os.SEEK_END)) < size:
            self._file.close()
            raise DataError(
                f"{path} has {found} bytes, and {size} had been written: the unfinished store is damaged. Begin anew "
                "with --restart."
            )
        self._file.truncate(size)
        self._whole = list(blocks[: size // BLOCK_BYTES])
        self._file.seek(len(self._whole) * BLOCK_BYTES)
        self._hash = hashlib.sha256(self._file.read())

    def write(self, data: np.ndarray) -> None:
        """Appends the bytes of a contiguous array."""
        if not data.size:
            return  # a memoryview of nothing cannot be cast
        rest = data.data.cast("B")
        self._file.write(rest)
        while len(rest):
            part = rest[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._hash.update(part)
            self.size += len(part)
            rest = rest[len(part) :]
            if self.size % BLOCK_BYTES == 0:
                self._whole.append(self._hash.hexdigest())
                self._hash = hashlib.sha256()

    @property
    def blocks(self) -> list[str]:
        """The hash of each block, of the last one as far as it goes."""
        return self._whole + ([self._hash.hexdigest()] if self.size % BLOCK_BYTES else [])

    def sync(self) -> None:
        """Returns when the disk has all of it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class StoreWriter:
    """The arrays of one store, in a directory."""

    def __init__(
        self,
        directory: Path,
        dtype: np.dtype,
        *,
        sizes: Mapping[str, int] | None = None,
        blocks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Goes on where `sizes()` was `sizes`, with what `blocks()` was then or later; without them it begins anew."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._dtype = directory, dtype.newbyteorder("<")
        sizes, blocks = sizes or {}, blocks or {}
        self._files = {
            name: BlockFile(directory / name, size=sizes.get(name, 0), blocks=blocks.get(name, ()))
            for name in (TOKENS, OFFSETS, *([MASK] if MASK in sizes else []))
        }
        if not self._files[OFFSETS].size:
            self._files[OFFSETS].write(np.zeros(1, "<i8"))
        if MASK not in sizes:
            (directory / MASK).unlink(missing_ok=True)

    @property
    def tokens(self) -> int:
        return self._files[TOKENS].size // self._dtype.itemsize

    @property
    def documents(self) -> int:
        return self._files[OFFSETS].size // 8 - 1

    @property
    def has_loss_mask(self) -> bool:
        return MASK in self._files

    def append(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None) -> None:
        """Documents of `lengths` [documents], whose `tokens` lie one after another; `mask` None: all are targets."""
        before = self.tokens
        self._files[TOKENS].write(np.ascontiguousarray(tokens, self._dtype))
        self._files[OFFSETS].write((before + np.cumsum(lengths)).astype("<i8"))
        if mask is not None and not self.has_loss_mask and not mask.all():
            self._begin_mask(before)
        if self.has_loss_mask:
            self._files[MASK].write(np.ones(tokens.size, np.uint8) if mask is None else mask)

    def _begin_mask(self, before: int) -> None:
        self._files[MASK] = BlockFile(self._directory / MASK)
        for start in range(0, before, BLOCK_BYTES):
            self._files[MASK].write(np.ones(min(BLOCK_BYTES, before - start), np.uint8))

    def sizes(self) -> dict[str, int]:
        """Bytes of each file: what to cut back to."""
        return {name: file.size for name, file in self._files.items()}

    def blocks(self) -> dict[str, list[str]]:
        """The hash of each block of each file."""
        return {name: file.blocks for name, file in sorted(self._files.items())}

    def sync(self) -> None:
        """Returns when the disk has all of it."""
        for file in self._files.values():
            file.sync()
        sync_directory(self._directory)

    def close(self) -> None:
        with contextlib.ExitStack() as each:  # on a full disk a close raises, and the others must come all the same
            for file in self._files.values():
                each.callback(file.close)


def sync_directory(path: Path) -> None:
    """Returns when the disk has the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
