"""What `python -m jaxckpt prepare` does: progress, signals, and what it says at the end."""

import datetime
import errno
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from rich.console import Console

from jaxckpt.data.chat import Renderer, make_renderer
from jaxckpt.data.prepare import Prepared, Settings, Stopped, Watch, prepare
from jaxckpt.data.store import StoreHeader
from jaxckpt.distributed.signals import SAME_S
from jaxckpt.errors import DataError
from jaxckpt.observe.preparing import PrepareProgress

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(inputs: Sequence[str], out: str, settings: Settings, *, restart: bool = False) -> tuple[int, str]:
    """Exit code and closing text: 0, or 128 and the number of the signal that stopped it. Raises DataError."""
    with PrepareProgress(Console(stderr=True)) as progress, _Signals() as signals:

        def phase(name: str, total_bytes: int) -> None:
            # The training of a tokenizer is one call into a library, during which no handler of ours would run.
            signals.note() if name == "prepare" else signals.end_the_process()
            progress.phase(name, total_bytes)

        watch = Watch(say=progress.say, phase=phase, progress=progress.show, stop=lambda: signals.number is not None)
        try:
            done = prepare(inputs, out, settings, restart=restart, watch=watch)
        except OSError as e:  # what is wrong with an input comes as a DataError
            raise DataError(not_written(out, e)) from e
        except Stopped:
            assert signals.number is not None
            name = signal.Signals(signals.number).name
            return 128 + signals.number, f"{name}: stopped; the same command goes on from here"
    return 0, summary(done)


def not_written(out: str, e: OSError) -> str:
    """What the system refused, where, and what helps. What was saved before stays."""
    what = f"{e.strerror or e}{f' ({e.filename})' if e.filename else ''}"
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"--out {out}: {what}. Free space and give the same command again, which goes on."
    return f"--out {out}: cannot be written: {what}. Mend that and give the same command again, or give another --out."


def parse_bytes(text: str) -> int:
    """ "256MiB", "64 KiB", "1GiB" or a number of bytes."""
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not int(found[1]):
        raise DataError(f"{text!r}: expected a size as in 256MiB, 1GiB or 65536")
    return int(found[1]) * unit


def make_render(
    kind: str, *, field: str | None, template: str | None, date: str | None, tokenizer: str
) -> Renderer | None:
    """What makes a document of a record of `kind`: None for "text". Raises DataError for options that do not fit."""
    if field is not None and not all(part.strip() for part in field.split(",")):
        raise DataError(f"--field {field!r}: expected the name of a field.")
    if kind == "text":
        if given := [name for name, value in (("--template", template), ("--date", date)) if value]:
            raise DataError(f"{' and '.join(given)}: only records of --format chat or prompt_response have a template.")
        return None
    keys = [] if field is None else field.split(",")
    if kind not in ("chat", "prompt_response") or (keys and len(keys) != (1 if kind == "chat" else 2)):
        raise DataError(
            f"--format {kind} --field {field}: expected --format text, chat (--field MESSAGES) or prompt_response (--field "
            "PROMPT,RESPONSE)."
        )
    names = ("messages_key",) if kind == "chat" else ("prompt_key", "response_key")
    try:
        day = datetime.date.fromisoformat(date) if date else None
    except ValueError as e:
        raise DataError(f"--date {date}: expected YYYY-MM-DD ({e}).") from None
    beside = None if tokenizer.startswith("train:") else tokenizer
    kind_of_record = "chat" if kind == "chat" else "prompt_response"
    return make_renderer(
        kind_of_record, template=template, tokenizer=beside, date=day, **dict(zip(names, keys, strict=False))
    )


# ------------------------------------------------------------------------------------------------ the end


def summary(done: Prepared) -> str:
    """What is there now, and how to train on it."""
    lines = [] if done.is_new else ["nothing to do: a whole store of these inputs and options is there"]
    for path, header in zip(done.stores, done.headers, strict=True):
        size = header.tokens * (2 if header.dtype == "uint16" else 4)
        lines.append(
            f"{path}: {header.documents:,} documents, {header.tokens:,} tokens of {header.vocab_size:,} ({header.dtype}, "
            f"{_size(size)})"
        )
    lines += _left_out(done.headers[0])
    if done.is_new:
        read = _size(sum(source["bytes"] for source in done.headers[0].sources))
        files = len(done.headers[0].sources)
        speed = f", {done.tokens_per_s:,.0f} tokens/s" if done.tokens else ""
        lines.append(f"from {files:,} {'file' if files == 1 else 'files'}, {read}, in {done.seconds:,.1f} s{speed}")
    keys = ("data.stores.main", "data.held_out")
    stores = " ".join(f"{key}={path}" for key, path in zip(keys, done.stores, strict=False))
    lines.append(f"train on it: data.name=stores {stores}")
    return "\n".join(lines)


def _left_out(header: StoreHeader) -> Iterator[str]:
    found = [source["left_out"] for source in header.sources if "left_out" in source]
    empty, bad = sum(f["empty"] for f in found), sum(f["bad"] for f in found)
    if empty or bad:
        yield f"left out: {empty:,} empty documents" + (f", {bad:,} that could not be read:" if bad else "")
    shown = [text for f in found for text in f["first_bad"]][:20]
    yield from (f"  {text}" for text in shown)
    if bad > len(shown):
        yield f"  ... and {bad - len(shown):,} more"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"


# ------------------------------------------------------------------------------------------------ signals


class _Signals:
    """As they were before, until `note` or `end_the_process` is called, and again when this is closed."""

    def __init__(self) -> None:
        self.number: int | None = None
        """the signal that was noted"""
        self._noted_at = 0.0

    def __enter__(self) -> "_Signals":
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def note(self) -> None:
        """The first SIGINT or SIGTERM is noted, a second one ends the process."""
        for number in _SIGNALS:
            signal.signal(number, self._noted)

    def end_the_process(self) -> None:
        """Either ends the process, as it does where nobody handles it."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.number == number and time.monotonic() - self._noted_at < SAME_S:
            return
        if self.number is not None:
            os._exit(128 + number)
        self.number, self._noted_at = number, time.monotonic()
