"""Text files -> documents -> tokens -> examples that are addressed by a number.

The split is by document, the tokens of a split are concatenated and cut, and every epoch has its own permutation that
is computed, not stored. So example i is a pure function of (text, tokenizer, seq_len, holdout, seed, i), and a data
position is one number.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt.data.readers import check, read
from jaxckpt.data.rows import CutRows
from jaxckpt.data.shuffle import Epochs
from jaxckpt.data.sources import Bad, Wanted, expand, is_text
from jaxckpt.errors import DataError, listed

# Goes into every identity: raise it when the same text would give other examples than before.
ALGORITHM_VERSION = 1
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "<|endofdocument|>",
)
SHOWN_PROBLEMS = 20


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token numbers and back. `encode` gives uint16 if every token fits, else uint32, and adds nothing."""

    vocab_size: int
    eos: int
    fingerprint: str  # sha256 in hex of what defines it
    encode: Callable[[str], np.ndarray]
    decode: Callable[[Sequence[int] | np.ndarray], str]


def load_tokenizer(name: str | Path, *, eos: str | int | None = None) -> Tokenizer:
    """The tokenizer "bytes" (256 byte values and the end of document 256), or that of a Hugging Face `tokenizer.json`.

    `name` may also be the directory that holds a `tokenizer.json`. `eos` (a token or its number) wins over the usual
    names.
    """
    return _byte_tokenizer(eos) if str(name) == "bytes" else _json_tokenizer(Path(name), eos)


def _byte_tokenizer(eos: str | int | None) -> Tokenizer:
    if eos not in (None, 256):
        raise DataError(f"tokenizer 'bytes' ends a document with token 256 and cannot use eos={eos!r}. Leave eos out.")

    def decode(tokens: Sequence[int] | np.ndarray) -> str:
        values = np.asarray(tokens)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    return Tokenizer(
        vocab_size=257,
        eos=256,
        fingerprint=hashlib.sha256(b"jaxckpt bytes, end of document 256").hexdigest(),
        encode=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint16),
        decode=decode,
    )


def _json_tokenizer(path: Path, eos: str | int | None) -> Tokenizer:
    import tokenizers  # not needed for bytes, and start-up time counts

    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
        model = tokenizers.Tokenizer.from_str(content.decode())
        # Settings for the batches of a model's input, which would cut documents and fill them up.
        model.no_truncation()
        model.no_padding()
    except OSError as error:
        raise DataError(
            f"tokenizer '{path}' cannot be read ({error.strerror}). "
            'Give "bytes" or the path of a Hugging Face tokenizer.json.'
        ) from error
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"tokenizer '{path}' is not a Hugging Face tokenizer.json: {error}. "
            "A model's fast tokenizer writes one with save_pretrained(directory)."
        ) from error
    vocabulary = model.get_vocab(with_added_tokens=True)
    # Numbers may have gaps; the embedding must reach the largest, because JAX clamps an index that is out of range in
    # silence.
    vocab_size = max(vocabulary.values(), default=-1) + 1
    end = _end_of_document(path, vocabulary, vocab_size, eos)
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    return Tokenizer(
        vocab_size=vocab_size,
        eos=end,
        fingerprint=hashlib.sha256(content + f"\0eos {end}".encode()).hexdigest(),
        encode=lambda text: np.array(model.encode(text, add_special_tokens=False).ids, dtype),
        decode=lambda tokens: model.decode([int(t) for t in tokens], skip_special_tokens=True),
    )


def _end_of_document(path: Path, vocabulary: dict[str, int], vocab_size: int, eos: str | int | None) -> int:
    if isinstance(eos, int) and 0 <= eos < vocab_size:
        return eos
    if isinstance(eos, str) and eos in vocabulary:
        return vocabulary[eos]
    if eos is not None:
        raise DataError(
            f"tokenizer '{path}' has no token {eos!r}; it has {vocab_size} tokens. Give one of its tokens or numbers."
        )
    for token in END_OF_DOCUMENT:
        if token in vocabulary:
            return vocabulary[token]
    marked = sorted(t for t in vocabulary if t[:1] in "<[" and t[-1:] in ">]" and len(t) > 2)[:10]
    raise DataError(
        f"tokenizer '{path}' has none of the usual end-of-document tokens {', '.join(END_OF_DOCUMENT)}. "
        f"Name the right one with eos (tokens that look special: {', '.join(marked) or 'none'})."
    )


def load_text(files: Sequence[str | Path] | str | Path, *, text_field: str = "text") -> list[tuple[str, str]]:
    """[(name, text)] of all documents, in the order of `files`, all in memory.

    An entry is a file (one document; a `.jsonl` file: one a line, in `text_field`; see `data.sources` for others), a
    directory (its *.txt, sorted by name) or a glob pattern (sorted). A name is relative to the directory or to the
    fixed part of the pattern, so it does not change when the data moves to another place. Raises one DataError with
    every problem.
    """
    problems: list[str] = []
    documents: list[tuple[str, str]] = []
    wanted = Wanted(field=text_field, max_document=1 << 60)
    found = expand([files] if isinstance(files, str | Path) else files, problems, in_directory=is_text)
    for file in found:
        # What cannot be opened has nothing to be read.
        if unusable := check(file, wanted):
            problems += unusable
            continue
        for item in read(file, wanted):
            if isinstance(item.found, Bad):
                problems.append(item.found.text)
            elif item.found.text.strip():
                documents.append((item.found.name, item.found.text))
            elif file.kind == "text":
                problems.append(f"{file.path}: holds no text; leave it out")
            else:
                problems.append(f"{file.at(item.place.row)}: field '{text_field}' is empty; leave the line out")
    if not found and not problems:
        problems.append("no files are listed; list files, directories or glob patterns")
    if problems:
        raise DataError(f"the text cannot be read:\n{listed(problems)}")
    return documents


@dataclass(frozen=True, eq=False)
class TokenDatasets:
    """`train` never ends and is shuffled anew each epoch; `held_out` has a fixed order and an end."""

    train: Epochs
    held_out: CutRows  # empty if holdout is 0
    identity: dict[str, Any]  # by name, everything that decides which example has which number
    train_examples: int  # in one epoch
    train_tokens: int
    held_out_tokens: int
    held_out_documents: tuple[str, ...]


def make_token_datasets(
    documents: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, seq_len: int, holdout: float, seed: int
) -> TokenDatasets:
    """Examples {"tokens": int32[seq_len + 1]} of `documents` ([(name, text)]), split by document.

    Example i of a split is its tokens [i L, i L + L + 1): neighbours share one token, because the last target of one
    is the first input of the next. The last piece that is shorter is dropped.
    """
    if seq_len < 1 or not 0 <= holdout < 1 or not documents:
        raise DataError(
            f"token examples need seq_len >= 1, 0 <= holdout < 1 and a document; found {seq_len=}, {holdout=}, "
            f"{len(documents)} documents."
        )
    held = split_by_name([name for name, _ in documents], holdout=holdout, seed=seed)
    train_tokens = _concatenate([text for (_, text), out in zip(documents, held, strict=True) if not out], tokenizer)
    held_tokens = _concatenate([text for (_, text), out in zip(documents, held, strict=True) if out], tokenizer)
    splits = [("train", train_tokens, len(held) - sum(held))] + [("held-out", held_tokens, sum(held))] * (holdout > 0)
    short = [
        f"the {name} split has {tokens.size} tokens ({count} documents)"
        for name, tokens, count in splits
        if tokens.size <= seq_len
    ]
    if short:
        raise DataError(
            f"{' and '.join(short)}, but one example takes seq_len + 1 = {seq_len + 1}. "
            f"Give more text, a shorter seq_len, or another holdout than {holdout}."
        )
    digest = hashlib.sha256(json.dumps([train_tokens.size, held_tokens.size]).encode())
    for tokens in (train_tokens, held_tokens):
        digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    train = CutRows(train_tokens, seq_len=seq_len)
    return TokenDatasets(
        train=Epochs(train, seed=seed),
        held_out=CutRows(held_tokens, seq_len=seq_len),
        identity={
            "algorithm": ALGORITHM_VERSION,
            "content": digest.hexdigest()[:16],
            "tokenizer": tokenizer.fingerprint[:16],
            "seq_len": seq_len,
            "holdout": float(holdout),
            "seed": int(seed),
        },
        train_examples=len(train),
        train_tokens=train_tokens.size,
        held_out_tokens=held_tokens.size,
        held_out_documents=tuple(name for (name, _), out in zip(documents, held, strict=True) if out),
    )


def _concatenate(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    eos = np.array([tokenizer.eos], dtype)
    return np.concatenate([np.empty(0, dtype), *(part for text in texts for part in (tokenizer.encode(text), eos))])


def split_by_name(names: Sequence[str], *, holdout: float, seed: int) -> list[bool]:
    """Which documents are held out: about `holdout` of them, decided by a hash of (seed, name) alone.

    So another document moves none of the others. The one exception: if the hashes leave a side empty, the nearest
    document fills it.
    """
    if holdout == 0:
        return [False] * len(names)
    if len(names) < 2:
        raise DataError(
            f"{holdout=} needs two documents or more, one on each side; found {len(names)}. "
            "Give more files, or holdout 0."
        )
    place = [split_place(name, seed) for name in names]
    held = [p < holdout for p in place]
    if not any(held):
        held[int(np.argmin(place))] = True
    if all(held):
        held[int(np.argmax(place))] = False
    return held


def split_place(name: str, seed: int) -> float:
    """Where in [0, 1) the document `name` lies; those below the holdout are held out."""
    digest = hashlib.sha256(f"jaxckpt split {seed} {name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
