"""A token store: one directory of flat arrays, written once by `python -m jaxckpt prepare` and read by random access.

tokens.bin     little-endian uint16 (uint32 for vocabularies over 65536), the documents one after another; each ends
               with the end-of-document token
offsets.bin    little-endian int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
loss_mask.bin  uint8 [tokens], only where not every token is a target: 1 where the token is to be predicted
tokenizer.json the tokenizer, unless it is "bytes"
store.json     the header below, written last: a directory without it is no store
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt.errors import DataError

FORMAT = 1
HEADER = "store.json"
BLOCK_BYTES = 16 << 20
"""files are hashed in blocks of this size, so that an interrupted writer can go on, and damage is found by its place"""


@dataclass(frozen=True)
class StoreHeader:
    """What is in a store."""

    format: int
    dtype: str
    """"uint16" or "uint32\""""
    tokens: int
    documents: int
    has_loss_mask: bool
    vocab_size: int
    eos: int
    tokenizer: str
    """name of the tokenizer: "bytes" or where its tokenizer.json came from"""
    tokenizer_hash: str
    """`Tokenizer.fingerprint`"""
    content_hash: str
    """of tokens, offsets and mask: `content_hash(blocks)`"""
    blocks: Mapping[str, list[str]]
    """file name -> sha256 in hex of each BLOCK_BYTES of it"""
    sources: list[dict[str, Any]]
    """what it was made from, in order: name, bytes, documents, tokens"""
    options: Mapping[str, Any]
    """how: whatever of the command's settings decides the content"""
    jaxckpt: str
    """version of the writer"""


class TokenStore:
    """An open store; its arrays are memory-mapped, so only what is read takes memory."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises DataError where `path` is no whole store."""
        self.path = Path(path)
        self.header = read_header(self.path)
        h = self.header
        self.tokens: np.ndarray = self._map("tokens.bin", np.dtype(h.dtype).newbyteorder("<"), h.tokens)
        self.offsets: np.ndarray = self._map("offsets.bin", np.dtype("<i8"), h.documents + 1)
        self.loss_mask: np.ndarray | None = None
        if h.has_loss_mask:
            self.loss_mask = self._map("loss_mask.bin", np.dtype(np.uint8), h.tokens)

    @property
    def identity(self) -> dict[str, str]:
        """What decides its examples, as short hashes: for a data position to be compared with."""
        return {"content": self.header.content_hash[:16], "tokenizer": self.header.tokenizer_hash[:16]}

    def _map(self, name: str, dtype: np.dtype, length: int) -> np.ndarray:
        path = self.path / name
        expected = length * dtype.itemsize
        try:
            found = path.stat().st_size
        except OSError as e:
            raise DataError(
                f"{path} cannot be read ({e.strerror}), but {self.path / HEADER} says that it is there."
            ) from e
        if found != expected:
            raise DataError(
                f"{path} has {found} bytes and {self.path / HEADER} says {expected}: the store is not whole. Copy it "
                "again, or prepare it again."
            )
        if length == 0:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype, "r"))


def read_header(path: str | os.PathLike[str]) -> StoreHeader:
    """The header of the store at `path`, or a DataError that says why it is none."""
    file = Path(path) / HEADER
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        why = (
            "no such directory"
            if not Path(path).is_dir()
            else f"it has no {HEADER}: it was never finished, or is something else"
        )
        raise DataError(
            f"{path} is no token store: {why}. Make one with `python -m jaxckpt prepare --out {path} INPUT...`; the same "
            "command finishes one that was interrupted."
        ) from None
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e}. Prepare the store again.") from e
    return parse_header(content, str(file))


def parse_header(content: bytes, file: str) -> StoreHeader:
    """The header that a file called `file` holds, or a DataError."""
    try:
        tree = json.loads(content)
    except ValueError as e:
        raise DataError(f"{file} cannot be read: {e}. Prepare the store again.") from e
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        raise DataError(
            f"{file} has the format {found!r}; this jaxckpt reads format {FORMAT}. Prepare the store again."
        )
    names = {f.name for f in fields(StoreHeader)}
    if set(tree) != names:
        raise DataError(
            f"{file} does not hold what a header holds (differing keys: {', '.join(sorted(set(tree) ^ names))}). Prepare "
            "the store again."
        )
    return StoreHeader(**tree)


def header_bytes(header: StoreHeader) -> bytes:
    return json.dumps(asdict(header), indent=1).encode()


def content_hash(blocks: Mapping[str, list[str]]) -> str:
    """sha256 in hex over the block hashes of the files, in the order of their names."""
    return hashlib.sha256(json.dumps(sorted(blocks.items())).encode()).hexdigest()


def block_hashes(path: str | os.PathLike[str]) -> Iterator[str]:
    """sha256 in hex of each BLOCK_BYTES of a file."""
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield hashlib.sha256(block).hexdigest()
