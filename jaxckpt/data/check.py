"""Compares the files of a token store with the hashes in its header."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxckpt.data.store import BLOCK_BYTES, HEADER, StoreHeader, block_hashes, read_header
from jaxckpt.data.tokens import load_tokenizer
from jaxckpt.errors import DataError


def stores_in(path: str | os.PathLike[str]) -> list[Path]:
    """The stores that `path` is or that `prepare --holdout` made in it; empty if it is something else."""
    directory = Path(path)
    found = [d for d in (directory, directory / "train", directory / "held_out") if (d / HEADER).is_file()]
    return found[:1] if found[:1] == [directory] else found


def store_bytes(path: Path) -> int:
    """Bytes that `check_store` reads; 0 where there is no telling."""
    return sum(file.stat().st_size for file in path.glob("*.bin"))


def check_store(path: Path, *, on_bytes: Callable[[int], object] = lambda n: None) -> list[str]:
    """What is damaged, a line each, with the file and the range of bytes."""
    try:
        header = read_header(path)
    except DataError as e:
        return [str(e)]
    return [*_of_files(path, header, on_bytes), *_of_tokenizer(path, header)]


def _of_files(path: Path, header: StoreHeader, on_bytes: Callable[[int], object]) -> Iterator[str]:
    width = 2 if header.dtype == "uint16" else 4
    sizes = {"tokens.bin": header.tokens * width, "offsets.bin": 8 * (header.documents + 1)}
    if header.has_loss_mask:
        sizes["loss_mask.bin"] = header.tokens
    for name, expected in sizes.items():
        try:
            found = (path / name).stat().st_size
            yield from _of_blocks(path / name, header.blocks.get(name, []), min(found, expected), on_bytes)
        except OSError as e:
            yield f"{name}: cannot be read ({e.strerror})"
            continue
        if found != expected:
            yield f"{name}: has {found} bytes, and {expected} were written"


def _of_blocks(path: Path, expected: list[str], size: int, on_bytes: Callable[[int], object]) -> Iterator[str]:
    count = -(-size // BLOCK_BYTES)
    for number, (found, hashed) in enumerate(zip(block_hashes(path), expected, strict=False)):
        start, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)
        if number >= count:
            return
        on_bytes(end - start)
        if found != hashed:
            yield f"{path.name}: bytes {start} to {end} are not what was written"
    if count > len(expected):
        yield f"{path.name}: bytes from {len(expected) * BLOCK_BYTES} on have no hash in {HEADER}"


def _of_tokenizer(path: Path, header: StoreHeader) -> Iterator[str]:
    name = "bytes" if header.tokenizer == "bytes" else path
    try:
        found = load_tokenizer(name, eos=header.eos).fingerprint
    except DataError as e:
        yield f"tokenizer.json: {e}"
        return
    if found != header.tokenizer_hash:
        yield "tokenizer.json: is not the tokenizer that the tokens were made with"
