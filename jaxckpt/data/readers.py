"""Documents of one file after another, in bounded memory, from any place in it.

Text and JSON lines are read here; what comes in tables or records, in `tables.py`.
"""

import codecs
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

from jaxckpt.data import tables
from jaxckpt.data.sources import END, JSON_LINES, Bad, Document, Input, Wanted, open_file
from jaxckpt.errors import DataError
from jaxckpt.snapshot import paths

_BUFFER_BYTES = 1 << 20


class Place(NamedTuple):
    """How far a file is read."""

    row: int = 0
    """lines, rows or records that are behind"""
    byte: int = 0
    """bytes of the file that are behind; exact for JSON lines that are not compressed, else about"""


class Item(NamedTuple):
    place: Place
    """behind this one"""
    found: Document | Bad


def check(file: Input, wanted: Wanted) -> list[str]:
    """What can be seen to be wrong with a file without reading it."""
    if wanted.render is not None and file.kind == "text":
        return [
            f"{file.path}: is no file of records; --format chat and prompt_response read JSON lines "
            f"({', '.join(JSON_LINES)}), parquet, Arrow (`datasets`) and ArrayRecord"
        ]
    try:
        if file.kind in tables.KINDS:
            return tables.check(file, wanted)
        if file.compression == "zstd":
            tables.pyarrow_for(file)
        if not paths.is_local(file.path):
            return []  # it was listed a moment ago, and each look takes a request
        with open_file(file) as raw:
            if file.compression and not raw.read(1):
                return [
                    f"{file.path}: the file has no bytes, which no {file.compression} file is without; fetch it again"
                ]
            return []
    except DataError as e:
        return [str(e)]
    except OSError as e:
        return [f"{file.path}: cannot be read ({e.strerror or e})"]


def read(file: Input, wanted: Wanted, start: Place = Place()) -> Iterator[Item]:
    """The documents of a file behind `start`. A file that breaks off gives a Bad as its last item."""
    if start.row >= END:
        return iter(())
    if file.kind == "text":
        return _text(file, wanted, start)
    if file.kind == "json":
        return _json_lines(file, wanted, start)
    rows = tables.rows(file, wanted, start.row)
    return (Item(Place(row, int(share * file.bytes)), document(file, row, found, wanted)) for row, share, found in rows)


def document(file: Input, row: int, found: Any, wanted: Wanted) -> Document | Bad:
    """The document in a record (a Mapping if there is `render`, else the text), or what is wrong with it."""
    name = f"{file.name}:{row}"
    if isinstance(found, Bad):
        return found
    if wanted.render is None:
        result = Document(name, found)
    else:
        try:
            result = replace(wanted.render(found, file.at(row)), name=name)
        except DataError as e:
            return Bad(str(e))
    return _checked(file, row, result, wanted.max_document)


def _checked(file: Input, row: int, found: Document, max_document: int) -> Document | Bad:
    where = file.at(row)
    # A character takes four bytes at most, so most texts need not be measured.
    if 4 * len(found.text) > max_document or not found.text.isascii():
        try:
            size = len(found.text.encode())
        except UnicodeEncodeError as e:
            # JSON can spell half a surrogate pair, which no encoding accepts.
            return Bad(f"{where}: not {'a line of JSON text' if file.kind == 'json' else 'text'} ({e})")
        if size > max_document:
            return Bad(too_long(where, max_document))
    return found


def too_long(where: str, max_document: int) -> str:
    size = f"{max_document >> 20} MiB" if max_document >= 1 << 20 else f"{max_document} bytes"
    return f"{where}: the document is longer than {size}; split it, or allow more with --max-document"


# ------------------------------------------------------------------------------------------------ text


def _text(file: Input, wanted: Wanted, start: Place) -> Iterator[Item]:
    if start.row:
        return
    place = Place(1, file.bytes)
    try:
        with _uncompressed(file) as (content, _):
            data = bytearray()  # read(limit) would take that much memory for any file
            while len(data) <= wanted.max_document and (part := content.read(1 << 20)):
                data += part
    except _BROKEN as e:
        yield Item(place, Bad(f"{file.path}: {_broken(e)}"))
        return
    if len(data) > wanted.max_document:
        yield Item(place, Bad(too_long(file.path, wanted.max_document)))
        return
    try:
        yield Item(place, Document(file.name, data.removeprefix(codecs.BOM_UTF8).decode()))
    except UnicodeDecodeError as e:
        yield Item(place, Bad(f"{file.path}: byte {e.start} is not UTF-8 ({e.reason}); convert the file to UTF-8"))


def _json_lines(file: Input, wanted: Wanted, start: Place) -> Iterator[Item]:
    for place, line in _lines(file, wanted.max_document, start):
        if isinstance(line, Bad):
            yield Item(place, line)
        elif line.strip():
            yield Item(place, _json_line(file, place.row, line, wanted))


def _json_line(file: Input, row: int, line: bytes, wanted: Wanted) -> Document | Bad:
    where = file.at(row)
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as e:
        return Bad(f"{where}: byte {e.start} of the line is not UTF-8 ({e.reason}); convert the file to UTF-8")
    except RecursionError:
        return Bad(f"{where}: not a line of JSON text (nested too deep)")
    except ValueError as e:
        return Bad(f"{where}: not a line of JSON text ({e})")
    return from_record(file, row, record, wanted)


def from_record(file: Input, row: int, record: Any, wanted: Wanted) -> Document | Bad:
    """The document in a value of JSON."""
    where = file.at(row)
    if wanted.render is not None and isinstance(record, dict):
        return document(file, row, record, wanted)
    value = record.get(wanted.key) if isinstance(record, dict) else None
    if isinstance(value, str):
        return document(file, row, value, wanted)
    if wanted.render is not None:
        return Bad(f"{where}: expected an object, found {type(record).__name__}")
    if not isinstance(record, dict):
        found = type(record).__name__
    elif wanted.key in record:
        found = f"{type(value).__name__} in it"
    else:
        found = f"the fields {', '.join(sorted(record)[:10]) or 'none'}"
    return Bad(f"{where}: expected an object with a string field '{wanted.key}', found {found}")


def _lines(file: Input, limit: int, start: Place) -> Iterator[tuple[Place, bytes | Bad]]:
    """Lines with the place behind each; a Bad where one is longer than `limit` bytes, or where the file breaks off."""
    row = 0
    try:
        with _uncompressed(file) as (content, raw):
            if file.compression is None:
                row, _ = start
                content.seek(start.byte)
            while line := content.readline(limit + 1):
                is_long = len(line) > limit and not line.endswith(b"\n")
                while is_long and (rest := content.readline(_BUFFER_BYTES)) and not rest.endswith(b"\n"):
                    pass
                row += 1
                if row > start.row:
                    place = Place(row, raw.tell())
                    line = line.removeprefix(codecs.BOM_UTF8) if row == 1 else line
                    yield place, Bad(too_long(file.at(row), limit)) if is_long else line
    except _BROKEN as e:
        # Of a compressed file some lines before the break are lost too.
        where = f"{file.path}: after line {row}" if file.compression else file.at(row + 1)
        yield Place(END, file.bytes), Bad(f"{where}: {_broken(e)}")


_BROKEN = (OSError, EOFError, zlib.error)


def _broken(e: Exception) -> str:
    is_cut = isinstance(e, EOFError) or "truncated" in str(e).lower()
    return f"the file {'is cut short' if is_cut else 'cannot be read any further'} ({e}); fetch it again"


@contextlib.contextmanager
def _uncompressed(file: Input) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """The content, and the file whose position tells how far that is."""
    with open_file(file) as raw:
        if file.compression is None:
            yield raw, raw
        elif file.compression == "gzip":
            # The buffer: GzipFile's own readline costs five times as much.
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER_BYTES), raw
        else:
            yield io.BufferedReader(cast(io.RawIOBase, _Zstd(file, raw)), _BUFFER_BYTES), raw


class _Zstd(io.RawIOBase):
    """Content of a zstd file, by pyarrow: Python before 3.14 has no reader of its own."""

    def __init__(self, file: Input, raw: io.BufferedReader) -> None:
        self._stream = tables.pyarrow_for(file).CompressedInputStream(raw, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
