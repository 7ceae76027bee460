"""What a token store is made from: documents, and the files in which they are found.

A file's name is relative to the directory or to the fixed part of the pattern that found it, so it does not change
when the data moves to another place.
"""

import glob
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from jaxckpt.snapshot import gcs, paths

JSON_LINES = (".jsonl", ".json.lines", ".jsonlines", ".ndjson")
END = 1 << 62
"""as the number of a row: nothing of the file is behind it"""
_BUFFER_BYTES = 1 << 20
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KINDS = {
    **dict.fromkeys(JSON_LINES, "json"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".txt": "text",
}


@dataclass(frozen=True)
class Document:
    """One text, whole."""

    name: str
    """the file's name and the line or row in it, as in "speeches.jsonl:17" """
    text: str
    targets: tuple[tuple[int, int], ...] | None = None
    """half-open character ranges, in order, whose tokens are loss targets; None: all of them"""


@dataclass(frozen=True)
class Bad:
    """What stands where a document was expected; `text` says where, what was found and what was expected."""

    text: str


@dataclass(frozen=True)
class Input:
    """One file of documents."""

    name: str
    path: str
    """absolute or as given, or gs://..."""
    bytes: int
    modified: str
    """changes when the content does: time of the last change in nanoseconds, or the generation of an object"""

    @property
    def compression(self) -> str | None:
        """ "gzip", "zstd" or None; what is compressed inside, as parquet is, does not count"""
        return COMPRESSED.get(PurePosixPath(self.path).suffix)

    @cached_property
    def kind(self) -> str:
        """ "text" (one document), "json" (one a line), "parquet", "arrow" or "array_record" """
        return _kind(self.path) or "text"

    def at(self, row: int) -> str:
        """How messages call a line or a row."""
        return f"{self.path}:{row}" if self.kind == "json" else f"{self.path}: row {row}"


@dataclass(frozen=True)
class Wanted:
    """What is taken from a record."""

    field: str | None = None
    """of the text; None: "text", and an ArrayRecord record is text itself"""
    render: Callable[[Mapping[str, Any], str], Document] | None = None
    """makes the document from a whole record, instead of `field`, given how messages call the record; raises DataError that
    begins with this; the document's name is set afterwards"""
    max_document: int = 256 << 20
    """bytes; a longer document is refused, before it is whole in memory where the format allows"""

    @property
    def key(self) -> str:
        return self.field or "text"


def open_file(file: Input) -> io.BufferedReader:
    """The bytes of a local file or an object as they lie there."""
    raw = io.FileIO(file.path) if paths.is_local(file.path) else gcs.filesystem().open(file.path, "rb")
    return io.BufferedReader(raw, _BUFFER_BYTES)


def is_changed(file: Input) -> bool:
    """Whether a local file is another one than when it was listed."""
    if not paths.is_local(file.path):
        return False  # one request each; a reader of objects names the generation that it opened
    try:
        status = os.stat(file.path)
    except OSError:
        return True
    return (status.st_size, str(status.st_mtime_ns)) != (file.bytes, file.modified)


def _kind(path: str) -> str | None:
    for suffix in COMPRESSED:
        path = path.removesuffix(suffix)
    return next((kind for suffix, kind in _KINDS.items() if path.endswith(suffix)), None)


def is_text(name: str) -> bool:
    return name.endswith(".txt")


def is_known(name: str) -> bool:
    """Whether a file of this name in a directory is taken for documents."""
    return _kind(name) is not None and not name.startswith((".", "_"))


def expand(
    entries: Sequence[str | os.PathLike[str]],
    problems: list[str],
    *,
    in_directory: Callable[[str], bool] = is_known,
    say: Callable[[str], object] = lambda text: None,
) -> list[Input]:
    """The files that `entries` mean, in their order; what is wrong with them goes to `problems`.

    `say` is told what directories hold besides.

    An entry is a file, a directory (its files that `in_directory` wants, or the data that Hugging Face `datasets` saved
    there), or a glob pattern (sorted); local or gs://.
    """
    found: list[Input] = []
    seen: dict[str, str] = {}
    for entry in [os.fspath(e) for e in entries]:
        files = (
            _remote(entry, problems, in_directory, say)
            if entry.startswith("gs://")
            else _local(entry, problems, in_directory, say)
        )
        for file in files:
            same = file.path if file.path.startswith("gs://") else os.path.realpath(file.path)
            if first := seen.get(same):
                problems.append(f"{file.path}: listed twice, by '{first}' and by '{entry}'; list it once")
                continue
            seen[same] = entry
            found.append(file)
    return found


# ------------------------------------------------------------------------------------------------ local files


def _local(
    entry: str, problems: list[str], in_directory: Callable[[str], bool], say: Callable[[str], object]
) -> Iterator[Input]:
    path = Path(entry)
    if path.is_dir():
        try:
            found = sorted((e.name, e.is_dir()) for e in os.scandir(path))
        except OSError as e:
            problems.append(f"{entry}: cannot be listed ({e.strerror})")
            return
        here = [name for name, is_directory in found if not is_directory]
        names = _of_directory(entry, here, lambda n: (path / n).read_bytes(), problems, in_directory)
        _tell_left_out(entry, [n for n, is_directory in found if is_directory], set(here) - set(names), say)
        for name in names:
            yield from _stat(name, path / name, problems)
    elif path.exists():
        yield from _stat(path.name, path, problems)
    elif not glob.has_magic(entry):
        problems.append(f"{entry}: no such file or directory (looked in {Path.cwd()})")
    else:
        matches = sorted(f for f in map(Path, glob.glob(entry, recursive=True)) if f.is_file())
        if not matches:
            problems.append(f"{entry}: the pattern matches no file (looked in {Path.cwd()})")
        fixed = _fixed_part(path.parts)
        for file in matches:
            yield from _stat(file.relative_to(Path(*fixed)).as_posix(), file, problems)


def _stat(name: str, path: Path, problems: list[str]) -> Iterator[Input]:
    try:
        status = path.stat()
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as e:
        problems.append(f"{path}: cannot be read ({e.strerror})")
        return
    yield Input(name=name, path=str(path), bytes=status.st_size, modified=str(status.st_mtime_ns))


def _fixed_part(parts: Sequence[str]) -> list[str]:
    """The parts of a pattern before the first one that holds a wildcard."""
    magic = [glob.has_magic(part) for part in parts]
    return list(parts[: magic.index(True)])


def _of_directory(
    entry: str,
    here: Sequence[str],
    read: Callable[[str], bytes],
    problems: list[str],
    in_directory: Callable[[str], bool],
) -> list[str]:
    """Names of the files of a directory, given the names of all that is in it."""
    if "dataset_dict.json" in here:
        splits = ", ".join(f"{entry.rstrip('/')}/{n}" for n in _json_list(read("dataset_dict.json"), "splits"))
        problems.append(f"{entry}: holds several splits of a data set; name those that you mean: {splits}")
        return []
    if "state.json" in here and "dataset_info.json" in here:
        state = read("state.json")
        if _json_list(state, "_indices_files"):
            problems.append(f"{entry}: its rows are chosen by an index; call flatten_indices() and save it again")
        files = [str(f.get("filename")) for f in _json_list(state, "_data_files") if isinstance(f, dict)]
        if not files:
            problems.append(f"{entry}/state.json: names no data files, as Dataset.save_to_disk does; save it again")
        return files
    names = [n for n in here if in_directory(n)]
    if not names:
        what = (
            "*.txt"
            if in_directory is is_text
            else "file of a known kind (*.txt, *.jsonl, *.parquet, *.arrow, *.array_record)"
        )
        problems.append(f"{entry}: the directory holds no {what}; give a glob pattern for other names")
    return names


_OF_DATASETS = {"dataset_info.json", "state.json"}


def _tell_left_out(entry: str, directories: Iterable[str], files: Iterable[str], say: Callable[[str], object]) -> None:
    """Says what a directory holds besides its documents, but for what is hidden by its name."""
    if set(files) >= _OF_DATASETS:
        return  # it names its files itself
    counts = [sum(not n.startswith((".", "_")) for n in names) for names in (directories, files)]
    kinds = (("subdirectory", "subdirectories"), ("file of another kind", "files of other kinds"))
    found = [f"{n} {one if n == 1 else many}" for n, (one, many) in zip(counts, kinds, strict=True) if n]
    if found:
        say(f"{entry}: leaves out {' and '.join(found)}; give a glob pattern to include them")


def _json_list(content: bytes, key: str) -> list[Any]:
    try:
        tree = json.loads(content)
    except ValueError:
        return []
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, list) else []


# ------------------------------------------------------------------------------------------------ gs://


def _remote(
    entry: str, problems: list[str], in_directory: Callable[[str], bool], say: Callable[[str], object]
) -> list[Input]:
    parts = entry.removeprefix("gs://").split("/")
    fixed = _fixed_part(parts) if glob.has_magic(entry) else parts
    # The last part makes a whole bucket a path too.
    paths.resolve("gs://" + "/".join([*(p for p in fixed if p), "-"]))
    files = gcs.filesystem()
    try:
        return _remote_files(files, entry.rstrip("/"), "/".join(fixed), problems, in_directory, say)
    except Exception as e:  # gcsfs raises whatever the layers under it do
        problems.append(f"{entry}: cannot be listed ({type(e).__name__}: {' '.join(str(e).split())})")
        return []


def _remote_files(
    files: Any,
    entry: str,
    fixed: str,
    problems: list[str],
    in_directory: Callable[[str], bool],
    say: Callable[[str], object],
) -> list[Input]:
    if glob.has_magic(entry):
        infos = [i for _, i in sorted(files.glob(entry, detail=True).items()) if i["type"] == "file"]
        if not infos:
            problems.append(f"{entry}: the pattern matches no object")
        return [_object(i, i["name"].removeprefix(fixed.rstrip("/") + "/")) for i in infos]
    try:
        info = files.info(entry)
    except FileNotFoundError:
        problems.append(f"{entry}: no such object, and none begins with {entry}/")
        return []
    if info["type"] == "file":
        return [_object(info, PurePosixPath(info["name"]).name)]
    listing = files.ls(entry, detail=True)
    here = {PurePosixPath(i["name"]).name: i for i in listing if i["type"] == "file"}
    read = lambda name: files.cat_file(f"{entry}/{name}")
    names = _of_directory(entry, sorted(here), read, problems, in_directory)
    directories = [PurePosixPath(i["name"]).name for i in listing if i["type"] == "directory"]
    _tell_left_out(entry, directories, set(here) - set(names), say)
    problems += [f"{entry}/{n}: no such object" for n in names if n not in here]
    return [_object(here[n], n) for n in names if n in here]


def _object(info: dict[str, Any], name: str) -> Input:
    stamp = info.get("generation") or info.get("etag") or info.get("updated")
    return Input(name=name, path=f"gs://{info['name']}", bytes=int(info["size"]), modified=str(stamp))
