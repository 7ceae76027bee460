"""The stores of a preparation while documents flow into them, and what came of each input."""

import contextlib
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxckpt.data.encode import Encoded
from jaxckpt.data.partial import Partial
from jaxckpt.data.readers import Place
from jaxckpt.data.sources import Bad, Document
from jaxckpt.data.store import FORMAT, StoreHeader, content_hash
from jaxckpt.data.tokens import SHOWN_PROBLEMS, Tokenizer
from jaxckpt.data.writer import BlockFile, StoreWriter
from jaxckpt.snapshot.environment import version


@dataclass
class Batch:
    """Documents that are encoded together, in order, from one input or several."""

    position: tuple[int, Place]
    """number of the input, and the place in it, behind the batch"""
    documents: list[Document] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    """of each document: 0, or 1 if it is held out"""
    places: list[float] = field(default_factory=list)
    """of each document: what decided its side"""
    inputs: list[int] = field(default_factory=list)
    """of each document: number of its input"""
    left_out: dict[int, list[str | None]] = field(default_factory=dict)
    """of each input: what was wrong with documents; None: one is empty"""
    characters: int = 0

    def add(self, number: int, found: Document, side: int, place: float) -> None:
        self.documents.append(found)
        self.sides.append(side)
        self.places.append(place)
        self.inputs.append(number)
        self.characters += len(found.text)

    def leave_out(self, number: int, bad: Bad | None) -> None:
        """`bad` None: the document is empty."""
        self.left_out.setdefault(number, []).append(bad.text if bad else None)


class Streams:
    """The stores of a partial directory, open for appending; close them."""

    def __init__(
        self,
        store: Partial,
        dtype: np.dtype,
        progress: Mapping[str, Any] | None = None,
        same: int = 0,
        filler: tuple[str, int] | None = None,
    ) -> None:
        """Goes on at `progress`, or at the start of its input if only the first `same` inputs are as they were then.

        `filler`: a document that changes sides, and the side.
        """
        self._store, self.filler = store, filler
        splits = store.command.splits
        number, place = (progress["input"], Place(*progress["place"])) if progress else (0, Place())
        here = progress
        if progress and place.row and number >= same:
            here, place = progress["mark"], Place()
        self.position: tuple[int, Place] = (number, place)
        self._tally = dict(progress["tally"]) if progress and place.row else self._new_tally()
        self._extremes: list[list[Any]] = [list(e) for e in here["extremes"]] if here else [[2.0, ""], [-1.0, ""]]
        self._left_out: int = here["left_out"] if here else 0
        sizes = here["sizes"] if here else [{}] * len(splits)
        blocks = progress["blocks"] if progress else [{}] * len(splits)
        self._writers = [
            StoreWriter(store.split(name), dtype, sizes=s, blocks=b)
            for name, s, b in zip(splits, sizes, blocks, strict=True)
        ]
        self._lines = BlockFile(store.directory / "sources.jsonl", size=here["lines"] if here else 0)
        self._mark = progress["mark"] if progress and place.row else self._here()
        self._saved_bytes = self._bytes()

    # ---------------------------------------------------------------------------------------- what is there

    @property
    def documents(self) -> list[int]:
        """Of each store."""
        return [writer.documents for writer in self._writers]

    @property
    def left_out(self) -> int:
        return self._left_out

    @property
    def unsaved_bytes(self) -> int:
        return self._bytes() - self._saved_bytes

    def nearest(self, side: int) -> str:
        """The document that would be the first to change to an empty `side`."""
        return self._extremes[0 if side == 1 else 1][1]

    def _bytes(self) -> int:
        return sum(sum(writer.sizes().values()) for writer in self._writers)

    def _here(self) -> dict[str, Any]:
        """What to cut back to, to go on from here."""
        return {
            "sizes": [writer.sizes() for writer in self._writers],
            "lines": self._lines.size,
            "extremes": [list(e) for e in self._extremes],
            "left_out": self._left_out,
        }

    def _new_tally(self) -> dict[str, Any]:
        """What came of one input: documents and tokens of each store, and what was left out."""
        zeros = [0] * len(self._store.command.splits)
        return {"documents": zeros, "tokens": zeros, "empty": 0, "bad": 0, "first_bad": []}

    # ---------------------------------------------------------------------------------------- growing

    def write(self, batch: Batch, encoded: Encoded) -> None:
        """Appends the documents of a batch."""
        number, last = self.position[0], batch.position[0]
        borders = [bisect_left(batch.inputs, n) for n in range(number, last + 1)] + [len(batch.inputs)]
        ends = np.concatenate([[0], np.cumsum(encoded.lengths)])
        if last > number:
            self._append(batch, encoded, ends, 0, borders[-2])
            for i in range(last - number):
                self._count(batch, encoded, number + i, borders[i], borders[i + 1])
                self._end_of_input(number + i)
            self._mark = self._here()
        self._append(batch, encoded, ends, borders[-2], borders[-1])
        self._count(batch, encoded, last, borders[-2], borders[-1])
        self.position = batch.position

    def _append(self, batch: Batch, encoded: Encoded, ends: np.ndarray, first: int, end: int) -> None:
        """Documents first to end; document i is tokens ends[i] to ends[i + 1]."""
        if first == end:
            return
        these = slice(ends[first], ends[end])
        tokens, mask = encoded.tokens[these], None if encoded.mask is None else encoded.mask[these]
        lengths = encoded.lengths[first:end]
        if len(self._writers) == 1:
            self._writers[0].append(tokens, lengths, mask)
            return
        sides = np.array(batch.sides[first:end])
        for side, writer in enumerate(self._writers):
            chosen = sides == side
            each = np.repeat(chosen, lengths)
            writer.append(tokens[each], lengths[chosen], None if mask is None else mask[each])
        places = np.array(batch.places[first:end])
        for which, index in ((0, int(places.argmin())), (1, int(places.argmax()))):
            place, is_lowest = float(places[index]), which == 0
            if (place < self._extremes[which][0]) == is_lowest and place != self._extremes[which][0]:
                self._extremes[which] = [place, batch.documents[first + index].name]

    def _count(self, batch: Batch, encoded: Encoded, number: int, first: int, end: int) -> None:
        """Adds documents first to end, which are of the input `number`, and what it left out."""
        tally, sides = self._tally, np.array(batch.sides[first:end], np.int64)
        for key, weights in (("documents", None), ("tokens", encoded.lengths[first:end])):
            more = np.bincount(sides, weights, minlength=len(self._writers))
            tally[key] = [n + int(m) for n, m in zip(tally[key], more, strict=True)]
        for why in batch.left_out.get(number, ()):
            self._left_out += 1
            tally["empty" if why is None else "bad"] += 1
            if why is not None and len(tally["first_bad"]) < SHOWN_PROBLEMS:
                tally["first_bad"] = [*tally["first_bad"], why]

    def _end_of_input(self, number: int) -> None:
        file = self._store.command.inputs[number]
        line = {"name": file.name, "bytes": file.bytes, "modified": file.modified, **self._tally}
        self._lines.write(np.frombuffer(json.dumps(line).encode() + b"\n", np.uint8))
        self._tally = self._new_tally()

    def save(self) -> None:
        """A killed writer goes on from here. Returns when the disk has all of it."""
        for writer in self._writers:
            writer.sync()
        self._lines.sync()
        number, place = self.position
        self._store.save_progress(
            {
                "input": number,
                "place": list(place),
                "tally": self._tally,
                **self._here(),
                "blocks": [writer.blocks() for writer in self._writers],
                "mark": self._mark,
                "filler": self.filler,
                "done": False,
            }
        )
        self._saved_bytes = self._bytes()

    def close(self) -> None:
        with contextlib.ExitStack() as each:  # on a full disk a close raises, and the others must come all the same
            for file in (*self._writers, self._lines):
                each.callback(file.close)

    # ---------------------------------------------------------------------------------------- the end

    def headers(self, tokenizer: Tokenizer, dtype: np.dtype, name: str) -> list[StoreHeader]:
        """Of each store; `save` comes first."""
        with open(self._lines.path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return [
            StoreHeader(
                format=FORMAT,
                dtype=dtype.name,
                tokens=writer.tokens,
                documents=writer.documents,
                has_loss_mask=writer.has_loss_mask,
                vocab_size=tokenizer.vocab_size,
                eos=tokenizer.eos,
                tokenizer=name,
                tokenizer_hash=tokenizer.fingerprint,
                content_hash=content_hash(writer.blocks()),
                blocks=writer.blocks(),
                sources=[_source(line, side) for line in lines],
                options={**self._store.command.options, "split": self._store.command.splits[side] or None},
                jaxckpt=version("jaxckpt"),
            )
            for side, writer in enumerate(self._writers)
        ]


def _source(line: Mapping[str, Any], side: int) -> dict[str, Any]:
    source = {key: line[key] for key in ("name", "bytes", "modified")}
    source |= {"documents": line["documents"][side], "tokens": line["tokens"][side]}
    if line["empty"] or line["bad"]:
        source["left_out"] = {key: line[key] for key in ("empty", "bad", "first_bad")}
    return source
