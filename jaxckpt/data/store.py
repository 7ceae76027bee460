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
_WIDTHS = {"uint16": 2, "uint32": 4}
_OFFSETS_AT_ONCE = 1 << 20
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
        self._check_offsets()
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

    def _check_offsets(self) -> None:
        """Raises DataError unless they go from 0 to the number of tokens and never back."""
        offsets = self.offsets
        problem = None
        if (offsets[0], offsets[-1]) != (0, self.header.tokens):
            problem = f"goes from {offsets[0]} to {offsets[-1]}, expected from 0 to {self.header.tokens}"
        for first in range(0, len(offsets), _OFFSETS_AT_ONCE):
            part = offsets[first : first + _OFFSETS_AT_ONCE + 1]
            if problem is None and not (part[1:] >= part[:-1]).all():
                document = first + int((part[1:] < part[:-1]).argmax())
                problem = (
                    f"has document {document} end at {offsets[document + 1]}, before its start {offsets[document]}"
                )
        if problem:
            raise DataError(
                f"{self.path / 'offsets.bin'} {problem}: the store is damaged. `python -m jaxckpt verify {self.path}` shows "
                "all that is; copy it again, or prepare it again."
            )


def read_header(path: str | os.PathLike[str]) -> StoreHeader:
    """The header of the store at `path`, or a DataError that says why it is none."""
    file = Path(path) / HEADER
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        if stores := [n for n in ("train", "held_out") if (Path(path) / n / HEADER).is_file()]:
            raise DataError(
                f"{path} is no token store, but holds the {'stores' if stores[1:] else 'store'} {' and '.join(stores)}: name "
                f"one of them, as in {Path(path) / stores[0]}."
            ) from None
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
    if problems := list(_wrong_fields(tree)):
        raise DataError(f"{file} is damaged: {'; '.join(problems)}. Copy the store again, or prepare it again.")
    return StoreHeader(**tree)


def _wrong_fields(tree: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of a header that has all its keys, each with its key."""
    for names, is_good, expected in (
        (("dtype",), lambda v: isinstance(v, str) and v in _WIDTHS, f"one of {', '.join(_WIDTHS)}"),
        (("tokens", "documents", "vocab_size", "eos"), _is_count, "a whole number from 0"),
        (("has_loss_mask",), lambda v: isinstance(v, bool), "true or false"),
        (("tokenizer", "tokenizer_hash", "content_hash", "jaxckpt"), lambda v: isinstance(v, str), "a string"),
        (("blocks",), lambda v: isinstance(v, dict) and all(map(_is_strings, v.values())), "lists of hashes by file"),
        (("sources",), lambda v: isinstance(v, list) and all(isinstance(s, dict) for s in v), "a list of objects"),
        (("options",), lambda v: isinstance(v, dict), "an object"),
    ):
        for name in names:
            if not is_good(tree[name]):
                yield f"{name} is {_shown(tree[name])}, expected {expected}"
    dtype, vocab_size, eos, blocks = (tree[n] for n in ("dtype", "vocab_size", "eos", "blocks"))
    if _is_count(vocab_size) and _is_count(eos) and eos >= vocab_size:
        yield f"eos is {eos}, expected less than vocab_size, which is {vocab_size}"
    if isinstance(dtype, str) and dtype in _WIDTHS and _is_count(vocab_size) and vocab_size > 1 << 8 * _WIDTHS[dtype]:
        yield f"vocab_size is {vocab_size}, expected what fits in {dtype}"
    if isinstance(blocks, dict):
        expected_files = {"tokens.bin", "offsets.bin", *(["loss_mask.bin"] if tree["has_loss_mask"] is True else [])}
        if set(blocks) != expected_files:
            found, expected = (", ".join(sorted(n)) or "no file" for n in (blocks, expected_files))
            yield f"blocks has hashes of {found}, expected of {expected}"
        if isinstance(tree["content_hash"], str) and content_hash(blocks) != tree["content_hash"]:
            yield f"content_hash is {_shown(tree['content_hash'])}, which is not that of blocks"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


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
