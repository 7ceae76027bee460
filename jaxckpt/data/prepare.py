"""Files of text to a token store, in a stream: reading, encoding and writing overlap, and a killed writer goes on.

The result depends on the inputs and the options alone: not on cores, on batches, or on how often it was interrupted.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxckpt.data import bpe, partial
from jaxckpt.data.encode import Encoded, Encoder
from jaxckpt.data.partial import Command, Partial
from jaxckpt.data.readers import Item, Place, check, read
from jaxckpt.data.sources import Bad, Document, Input, Wanted, expand, is_changed
from jaxckpt.data.store import StoreHeader
from jaxckpt.data.streams import Batch, Streams
from jaxckpt.data.tokens import SHOWN_PROBLEMS, load_tokenizer, split_place
from jaxckpt.errors import DataError, listed

_BATCH_DOCUMENTS = 4096
_LOOKED_AHEAD_FILES, _LOOKED_AHEAD_BYTES = 1000, 256 << 20
"""behind the first bad document, so that a corpus of small files does not take an attempt for each bad one"""


@dataclass(frozen=True)
class Settings:
    """What decides the content of a store, beside its inputs."""

    tokenizer: str = "bytes"
    """"bytes", the path of a tokenizer.json, or "train:SIZE" for a new byte-level BPE"""
    eos: str | int | None = None
    wanted: Wanted = field(default_factory=Wanted)
    render: str | None = None
    """what identifies `wanted.render`, as a hash of its template does"""
    holdout: float = 0.0
    """share of the documents that go to a store of their own"""
    seed: int = 0
    skip_bad: bool = False
    """leave out what cannot be read, instead of stopping"""
    train_bytes: int = 1 << 30
    """of text that a new tokenizer is trained on"""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "held_out") if self.holdout else ("",)


@dataclass(frozen=True)
class Watch:
    """How the one who prepares is told of it, and stops it."""

    say: Callable[[str], object] = lambda text: None
    phase: Callable[[str, int], object] = lambda name, total_bytes: None
    """called with "train the tokenizer" and "prepare", and the bytes of the inputs"""
    progress: Callable[[int, int], object] = lambda done_bytes, tokens: None
    stop: Callable[[], bool] = lambda: False
    save_every: int = 64 << 20
    """bytes of output between two places to go on from"""
    batch_characters: int = 1 << 20
    """of text that is encoded together; the tokenizer takes about 120 bytes of memory for each"""


class _BadInput(DataError):
    """An input that cannot be read to its end."""


class Stopped(Exception):
    """`Watch.stop` said yes; what was done is saved, and the same call goes on."""


@dataclass(frozen=True)
class Prepared:
    """What a call did."""

    stores: tuple[Path, ...]
    headers: tuple[StoreHeader, ...]
    is_new: bool
    """False: all of it was there before"""
    tokens: int = 0
    """encoded by this call; an earlier one may have encoded others"""
    seconds: float = 0.0
    """of this call"""
    tokens_per_s: float = 0.0
    """without the time that the tokenizer was trained"""


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    settings: Settings = Settings(),
    *,
    restart: bool = False,
    watch: Watch = Watch(),
) -> Prepared:
    """Makes the store(s) in `out`, or goes on where an earlier call was killed.

    Raises one DataError with all problems that can be seen without reading the inputs, or with those of the first input
    that cannot be read to its end; then no store is in `out`. Raises Stopped if `watch.stop` says so.
    """
    begun = time.monotonic()
    path = Path(out)
    if str(out).startswith("gs://"):
        raise DataError(
            f"--out {out}: a store is written to a local directory. Copy it to gs:// when it is whole; training reads it there."
        )
    if not 0 <= settings.holdout < 1:
        raise DataError(f"--holdout {settings.holdout}: expected a share of the documents from 0 to less than 1")
    if settings.seed < 0:
        raise DataError(f"--seed {settings.seed}: expected a whole number from 0.")
    files = _checked_inputs(inputs, settings.wanted, watch.say)
    command = Command(_options(settings), files, settings.splits)
    stores = tuple(path / name for name in settings.splits)
    if headers := partial.whole(path, command):
        return Prepared(stores, tuple(headers), is_new=False)
    begun_store = Partial(path, command, restart=restart)
    try:
        if headers := partial.whole(path, command):  # another process has made it while we looked
            begun_store.remove()
            return Prepared(stores, tuple(headers), is_new=False)
        work = _Work(begun_store, settings, watch)
        work.run()
    finally:
        begun_store.close()
    headers = partial.whole(path, command)
    assert headers is not None
    now = time.monotonic()
    speed = work.tokens / max(now - work.begun, 1e-3)
    return Prepared(stores, tuple(headers), True, tokens=work.tokens, seconds=now - begun, tokens_per_s=speed)


def _checked_inputs(
    inputs: Sequence[str | os.PathLike[str]], wanted: Wanted, say: Callable[[str], object]
) -> list[Input]:
    problems: list[str] = []
    files = expand(inputs, problems, say=say)
    for file in files:
        problems += check(file, wanted)
    if not files and not problems:
        problems.append("no inputs are given; give files, directories or glob patterns")
    if problems:
        raise DataError(f"the inputs cannot be used:\n{listed(problems)}\nNothing was written.")
    return files


def _options(settings: Settings) -> dict[str, Any]:
    is_fixed = settings.tokenizer == "bytes" or bpe.vocabulary(settings.tokenizer) is not None
    name = settings.tokenizer
    options = {
        "tokenizer": name if is_fixed else f"sha256 {load_tokenizer(name, eos=settings.eos).fingerprint}",
        "eos": settings.eos,
        "field": settings.wanted.field,
        "render": settings.render,
        "max_document": settings.wanted.max_document,
        "holdout": settings.holdout,
        "seed": settings.seed,
        "skip_bad": settings.skip_bad,
    }
    return options | ({"train_bytes": settings.train_bytes} if bpe.vocabulary(name) else {})


def _no_document(names: Sequence[str], left_out: int) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
    what = f" but {left_out} that are empty or cannot be read" if left_out else ": they are empty"
    return f"the inputs hold no document{what} ({shown}). Give other inputs."


class _Work:
    """One life of a preparation."""

    def __init__(self, store: Partial, settings: Settings, watch: Watch) -> None:
        self._store, self._settings, self._watch = store, settings, watch
        self._inputs = store.command.inputs
        self._behind = [0]
        for file in self._inputs:
            self._behind.append(self._behind[-1] + file.bytes)
        self._seen = 0
        """of how many inputs the tokenizer was trained on something, see `Partial.trained_on`"""
        self.tokens = 0
        self.begun = time.monotonic()
        """when the tokenizer was there"""

    def run(self) -> None:
        progress, same = self._store.earlier()
        if progress and progress["done"]:
            self._watch.say(f"{self._store.out}: moves the files that an earlier call has finished")
            self._store.move()
            return
        if progress is None:
            self._store.start(self._store.trained_on or 0)
        encoder = self._encoder()
        filler: tuple[str, int] | None = tuple(progress["filler"]) if progress and progress["filler"] else None
        if progress:
            self._watch.say(f"{self._store.out}: goes on at what an earlier call has saved")
        self._watch.phase("prepare", self._behind[-1])
        self.begun = time.monotonic()
        while True:
            streams = Streams(self._store, encoder.dtype, progress, same, filler)
            try:
                # The place before the command: it may lie in an input that has changed since then.
                streams.save()
                self._store.start(self._store.trained_on or 0)
                self._stream(streams, encoder)
                mover = self._missing_side(streams)
                if mover is None:
                    self._store.finish(streams.headers(encoder.tokenizer, encoder.dtype, self._settings.tokenizer))
                    return
            finally:
                streams.close()
            progress, filler = None, mover

    def _missing_side(self, streams: Streams) -> tuple[str, int] | None:
        """The document that must change sides because one side has none, and the side; None if all is well."""
        counts = streams.documents
        if not sum(counts):
            raise DataError(_no_document([file.path for file in self._inputs], streams.left_out))
        if all(counts):
            return None
        if streams.filler is not None or sum(counts) < 2:
            raise DataError(
                f"--holdout {self._settings.holdout} needs two documents or more with different names, one on each side; "
                f"found {sum(counts)}. Give more inputs, or leave --holdout out."
            )
        side = counts.index(0)
        self._watch.say("the split left one side empty: the nearest document fills it, and all is written again")
        return streams.nearest(side), side

    # ---------------------------------------------------------------------------------------- the tokenizer

    def _encoder(self) -> Encoder:
        size = bpe.vocabulary(self._settings.tokenizer)
        name = self._settings.tokenizer
        if size is not None:
            path = self._store.directory / partial.TOKENIZER
            if self._store.trained_on is None:
                self._watch.phase("train the tokenizer", self._behind[-1])
                content = bpe.train(self._texts_to_train_on(), size)
                # Before the tokenizer is there, lest other inputs come between the two.
                self._store.start(self._seen)
                self._store.save_tokenizer(content)
            return Encoder(path, eos=self._settings.eos)
        if name != "bytes":
            path = Path(name)
            self._store.save_tokenizer((path / partial.TOKENIZER if path.is_dir() else path).read_bytes())
        return Encoder(name, eos=self._settings.eos)

    def _texts_to_train_on(self) -> Iterator[str]:
        left = self._settings.train_bytes
        for batch in self._batches(0, Place(), None):
            number, place = batch.position
            self._seen = number + (place.row > 0)
            for document, side in zip(batch.documents, batch.sides, strict=True):
                if side == 0 and left > 0:
                    left -= len(document.text.encode())
                    yield document.text
            self._watch.progress(self._bytes_before(batch), 0)
            if self._watch.stop():
                raise Stopped
            if left <= 0:
                return
        self._seen = len(self._inputs) + 1

    # ---------------------------------------------------------------------------------------- the stream

    def _stream(self, streams: Streams, encoder: Encoder) -> None:
        cores = len(os.sched_getaffinity(0))
        workers = max(2, cores // 4)  # each uses all cores; a second one has work ready while the first is collected
        queue: deque[tuple[Batch, Future[Encoded]]] = deque()
        pool = ThreadPoolExecutor(workers, thread_name_prefix="jaxckpt-encode")
        try:
            try:
                for batch in self._batches(*streams.position, streams.filler):
                    queue.append((batch, pool.submit(encoder.encode, batch.documents)))
                    if len(queue) > workers:
                        self._write(streams, *queue.popleft())
            except _BadInput:  # what came before the bad place is good
                while queue:
                    self._write(streams, *queue.popleft())
                streams.save()
                raise
            while queue:
                self._write(streams, *queue.popleft(), is_last=True)
            streams.save()
        finally:
            pool.shutdown(cancel_futures=True)

    def _write(self, streams: Streams, batch: Batch, encoded: Future[Encoded], *, is_last: bool = False) -> None:
        found = encoded.result()
        streams.write(batch, found)
        self.tokens += found.tokens.size
        self._watch.progress(self._bytes_before(batch), found.tokens.size)
        is_stopped = not is_last and self._watch.stop()
        if is_stopped or streams.unsaved_bytes >= self._watch.save_every:
            streams.save()
        if is_stopped:
            raise Stopped

    def _bytes_before(self, batch: Batch) -> int:
        number, place = batch.position
        return self._behind[number] + place.byte

    def _batches(self, first: int, place: Place, filler: tuple[str, int] | None) -> Iterator[Batch]:
        """All documents from a place on. The first bad one ends the batches, and all of its file are told in an error."""
        settings, batch = self._settings, Batch(position=(first, place))
        for number in range(first, len(self._inputs)):
            items = read(self._inputs[number], settings.wanted, place)
            for place, found in items:
                if isinstance(found, Bad) and not settings.skip_bad:
                    yield batch
                    raise self._bad_input(number, found, items)
                if isinstance(found, Bad):
                    batch.leave_out(number, found)
                elif not found.text or found.text.isspace():
                    batch.leave_out(number, None)
                else:
                    batch.add(number, found, *self._side(found, filler))
                batch.position = (number, place)
                if batch.characters >= self._watch.batch_characters or len(batch.documents) >= _BATCH_DOCUMENTS:
                    yield batch
                    batch = Batch(position=(number, place))
            if is_changed(self._inputs[number]):
                yield batch
                raise _BadInput(
                    f"{self._inputs[number].path}: was changed while it was read. Give the same command again."
                )
            place = Place()
            batch.position = (number + 1, place)
        yield batch

    def _bad_input(self, number: int, first: Bad, rest: Iterator[Item]) -> _BadInput:
        """The error of a first bad document of input `number`, with all others of `rest` and of some inputs that follow."""
        to_come = iter(self._inputs[number + 1 : number + 1 + _LOOKED_AHEAD_FILES])
        looked = number

        def problems() -> Iterator[str]:
            nonlocal looked
            yield first.text
            yield from (item.found.text for item in rest if isinstance(item.found, Bad))
            left = _LOOKED_AHEAD_BYTES
            for file in to_come:
                left -= file.bytes
                if left < 0 or self._watch.stop():
                    return
                yield from (i.found.text for i in read(file, self._settings.wanted) if isinstance(i.found, Bad))
                looked += 1

        found = list(itertools.islice(problems(), SHOWN_PROBLEMS + 1))
        lines = listed(found[:SHOWN_PROBLEMS])
        if found[SHOWN_PROBLEMS:]:
            lines += "\n  ... and more"
        elif unseen := len(self._inputs) - 1 - looked:
            lines += (
                f"\nThe last {unseen} inputs were not looked at."
                if unseen > 1
                else "\nThe last input was not looked at."
            )
        return _BadInput(
            f"the inputs cannot be prepared:\n{lines}\nNo store was made. Correct the files, or leave such documents out with "
            "--skip-bad; the same command then goes on."
        )

    def _side(self, document: Document, filler: tuple[str, int] | None) -> tuple[int, float]:
        """Which store a document goes to, and its place in [0, 1) that decides it."""
        if not self._settings.holdout:
            return 0, 0.0
        place = split_place(document.name, self._settings.seed)
        if filler and document.name == filler[0]:
            return filler[1], place
        return int(place < self._settings.holdout), place
