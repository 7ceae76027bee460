"""Rows of parquet files and Arrow streams, and records of ArrayRecord files."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from jaxckpt.data.sources import END, Bad, Input, Wanted, open_file
from jaxckpt.errors import DataError
from jaxckpt.snapshot import paths

KINDS = ("parquet", "arrow", "array_record")
Row = tuple[int, float, Any]
"""number from 1, share of the file that is behind it, and the text, the record (a dict) or a Bad"""

_AT_ONCE = 64
_BATCH_BYTES = 4 << 20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def pyarrow_for(file: Input) -> Any:
    """The module pyarrow, or a DataError."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{file.path}: needs the package pyarrow. Install it: pip install 'jaxckpt[data]'") from None
    return pyarrow


def check(file: Input, wanted: Wanted) -> list[str]:
    """What the footer or the schema of a file tells to be wrong."""
    if file.kind == "array_record":
        _open_array_record(file).close()
        return []
    pa = pyarrow_for(file)
    try:
        with open_file(file) as raw:
            if file.kind == "parquet":
                import pyarrow.parquet

                schema = pyarrow.parquet.read_schema(raw)
            else:
                schema = pa.ipc.open_stream(raw).schema
                raw.seek(max(0, file.bytes - len(_END_OF_STREAM)))
                if raw.read() != _END_OF_STREAM:
                    # Arrow itself takes a stream that is cut between two batches for a whole one.
                    return [f"{file.path}: the file is cut short (its Arrow stream has no end); fetch it again"]
    except (pa.ArrowException, OSError) as e:
        return [f"{file.path}: {_not_whole(file, e)}"]
    if wanted.render is not None:
        return []
    if wanted.key not in schema.names:
        return [f"{file.path}: expected a column '{wanted.key}', found {', '.join(schema.names[:10]) or 'none'}"]
    if not _is_string(pa, kind := schema.field(wanted.key).type):
        return [f"{file.path}: expected strings in column '{wanted.key}', found {kind}"]
    return []


def rows(file: Input, wanted: Wanted, start: int) -> Iterator[Row]:
    """Rows of a file but the first `start`. One that breaks off gives a Bad as its last row, with the number END."""
    if file.kind == "array_record":
        yield from _array_record(file, wanted, start)
        return
    pa = pyarrow_for(file)
    behind = start
    try:
        with open_file(file) as raw:
            batches = _parquet(raw, wanted, start) if file.kind == "parquet" else _arrow(file, raw, start)
            for first, share, batch in batches:
                for row, found in _of_batch(file, wanted, batch, first):
                    if row > start:
                        behind = row
                        yield row, share, found
    except (pa.ArrowException, OSError) as e:
        yield END, 1.0, Bad(f"{file.at(behind + 1)}: {_not_whole(file, e)}")


def _parquet(raw: Any, wanted: Wanted, start: int) -> Iterator[tuple[int, float, Any]]:
    """(rows before it, share of the file behind it, batch) for all batches but those that end by `start`."""
    import pyarrow.parquet

    # Not pre_buffer: it takes a whole row group into memory.
    file = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)
    columns = None if wanted.render else [wanted.key]
    row, total = 0, max(1, file.metadata.num_rows)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if row + group.num_rows <= start:
            row += group.num_rows
            continue
        many = _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
        for batch in file.iter_batches(
            max(1, min(many, 1024)), row_groups=[number], columns=columns, use_threads=False
        ):
            if row + batch.num_rows > start:
                yield row, (row + batch.num_rows) / total, batch
            row += batch.num_rows


def _arrow(file: Input, raw: Any, start: int) -> Iterator[tuple[int, float, Any]]:
    pa = pyarrow_for(file)
    # A mapped batch takes no memory but for what is read of it; the batches of `datasets` have 1000 rows of any length.
    source = pa.memory_map(file.path) if paths.is_local(file.path) else raw
    row = 0
    with pa.ipc.open_stream(source) as stream:
        for batch in stream:
            if row + batch.num_rows > start:
                yield row, source.tell() / max(1, file.bytes), batch
            row += batch.num_rows


def _of_batch(file: Input, wanted: Wanted, batch: Any, first: int) -> Iterator[tuple[int, Any]]:
    column = None if wanted.render else batch.column(batch.schema.names.index(wanted.key))
    for offset in range(0, batch.num_rows, _AT_ONCE):
        part = (batch if column is None else column).slice(offset, _AT_ONCE)
        for row, value in enumerate(_values(part), first + offset + 1):
            if isinstance(value, UnicodeDecodeError):
                yield (
                    row,
                    Bad(f"{file.at(row)}: byte {value.start} of '{wanted.key}' is not UTF-8 ({value.reason})"),
                )
            elif value is None:
                yield row, Bad(f"{file.at(row)}: expected a string in column '{wanted.key}', found null")
            else:
                yield row, value


def _values(part: Any) -> list[Any]:
    """Python values; the error where one cannot be decoded."""
    try:
        return part.to_pylist()
    except UnicodeDecodeError:
        pass
    found = []
    for i in range(len(part)):
        try:
            found += part.slice(i, 1).to_pylist()
        except UnicodeDecodeError as e:
            found.append(e)
    return found


def _is_string(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _not_whole(file: Input, e: Exception) -> str:
    what = {"parquet": "parquet file", "arrow": "Arrow stream as `datasets` writes it"}[file.kind]
    return f"not a whole {what} ({' '.join(str(e).split())}); fetch it again"


# ------------------------------------------------------------------------------------------------ ArrayRecord


def _open_array_record(file: Input) -> Any:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise DataError(
            f"{file.path}: needs the package array_record. Install it: pip install 'jaxckpt[data]'"
        ) from None
    # By default every core reads 16 MiB ahead.
    reader = ArrayRecordReader(file.path, "readahead_buffer_size:2M,max_parallelism:1")
    if not reader.ok():
        try:
            reader.close()  # tells why
        except Exception as e:  # the library raises bare RuntimeErrors
            why = _first_line(e)
            raise DataError(
                f"{file.path}: not a whole ArrayRecord file ({why or 'it has no end'}); fetch it again"
            ) from None
    return reader


def _array_record(file: Input, wanted: Wanted, start: int) -> Iterator[Row]:
    try:
        reader = _open_array_record(file)
    except DataError as e:
        yield END, 1.0, Bad(str(e))
        return
    try:
        total = reader.num_records()
        if start:
            reader.seek(start)
        for row in range(start + 1, total + 1):
            try:
                content = reader.read()
            except Exception as e:
                yield END, 1.0, Bad(f"{file.at(row)}: cannot be read ({_first_line(e)}); fetch the file again")
                return
            yield row, row / total, _of_record(file, wanted, row, content)
    finally:
        with contextlib.suppress(Exception):  # it repeats what went wrong before
            reader.close()


def _of_record(file: Input, wanted: Wanted, row: int, content: bytes) -> Any:
    where = file.at(row)
    is_json = wanted.render is not None or wanted.field is not None
    try:
        value = json.loads(content.decode()) if is_json else content.decode()
    except UnicodeDecodeError as e:
        return Bad(f"{where}: byte {e.start} is not UTF-8 ({e.reason})")
    except (ValueError, RecursionError) as e:
        return Bad(f"{where}: not JSON text ({e})")
    if not is_json or (wanted.render is not None and isinstance(value, dict)):
        return value
    text = value.get(wanted.key) if isinstance(value, dict) and wanted.render is None else None
    if isinstance(text, str):
        return text
    what = f"an object with a string field '{wanted.key}'" if wanted.render is None else "an object"
    return Bad(f"{where}: expected {what}, found {type(value).__name__}")


def _first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0][:300]
