"""A token store that is not finished: what it is made from, how far it is, and the last moves that make it a store.

DIR/partial/started.json    the command; another one must not go on with these files
DIR/partial/progress.json   how far the other files are good; replaced as a whole, after the disk has them
DIR/partial/sources.jsonl   a line for each input that is done
DIR/partial/NAME/...        the files of each store

All of it may be lost at any moment but what progress.json tells of.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxckpt.data.sources import Input
from jaxckpt.data.store import HEADER, StoreHeader, header_bytes, read_header
from jaxckpt.data.writer import MASK, OFFSETS, TOKENS, sync_directory
from jaxckpt.errors import DataError, SaveError, SnapshotError, listed
from jaxckpt.snapshot.lock import RunLock

TOKENIZER = "tokenizer.json"
_DATA = (TOKENS, OFFSETS, MASK, TOKENIZER)
_OURS = {*_DATA, HEADER}


@dataclass(frozen=True)
class Command:
    """What decides the content of a store."""

    options: Mapping[str, Any]
    inputs: Sequence[Input]
    splits: tuple[str, ...]
    """names of the directories of the stores; ("",) if DIR is the only one"""

    def tree(self) -> dict[str, Any]:
        return {"options": dict(self.options), "inputs": [[i.name, i.bytes, i.modified] for i in self.inputs]}


class Partial:
    """The unfinished store in `out`, locked against other writers; close it."""

    def __init__(self, out: Path, command: Command, *, restart: bool) -> None:
        """Raises DataError where `out` holds something else, or another writer is at work."""
        self.out, self.command = out, command
        self.directory = out / "partial"
        _refuse_foreign(out, self.directory, command)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        try:
            if restart:
                self._clear()
        except BaseException:
            self.close()
            raise

    def _locked(self) -> RunLock:
        from etils import epath

        try:
            lock = RunLock(epath.Path(self.directory))
        except SnapshotError:
            owner = (self.directory / "lock").read_text() or "an unknown process"
            raise DataError(
                f"{self.out} is being prepared by another process ({owner}). Wait for it or stop it; or give another --out."
            ) from None
        try:
            lock.check()
        except SaveError:  # its owner removed it between our open and our lock
            raise DataError(f"{self.out} was finished by another process just now. Look at it and try again.") from None
        return lock

    def _clear(self) -> None:
        # First what says that something is there, last what says that all of it is ours.
        (self.directory / "progress.json").unlink(missing_ok=True)
        for entry in sorted(self.directory.iterdir(), key=lambda e: e.name == "started.json"):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def close(self) -> None:
        self._lock.release()

    # ---------------------------------------------------------------------------------------- what was begun

    def earlier(self) -> tuple[dict[str, Any] | None, int]:
        """The progress of an earlier life, None without one, and how many of the first inputs are the same as then.

        Raises DataError where its options were others.
        """
        started, progress = self._read("started.json"), self._read("progress.json")
        if started is None:
            return None, 0
        then, now = started["command"], self.command.tree()
        found = _differing_options(then["options"], now["options"])
        pairs = zip(then["inputs"], now["inputs"], strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(then["inputs"]), len(now["inputs"])))
        needed = max(progress["input"] if progress else 0, self.trained_on or 0)
        if progress and progress["done"]:
            needed = max(len(then["inputs"]), len(now["inputs"]))
        if then["inputs"] != now["inputs"] and same < needed:
            found.append(_differing_inputs(then["inputs"], now["inputs"], same))
        if found and not progress and not self.trained_on:
            self._clear()  # nothing was done that would be lost
        elif found:
            raise DataError(
                f"{self.directory} holds what another command has begun:\n{listed(found)}\nGive the same command to "
                "finish it, --restart to begin anew, or another --out."
            )
        return progress, same

    def start(self, trained_on: int) -> None:
        """Writes down the command. `trained_on`: of how many inputs the trained tokenizer has seen something."""
        self._write("started.json", {"command": self.command.tree(), "trained_on": trained_on})

    @property
    def trained_on(self) -> int | None:
        """Of how many inputs the tokenizer that was trained before has seen something; None: none was trained.

        One more than there are, if it has also seen that no more come.
        """
        started = self._read("started.json")
        return started["trained_on"] if started and (self.directory / TOKENIZER).exists() else None

    def save_tokenizer(self, content: bytes) -> Path:
        path = self.directory / TOKENIZER
        _replace(path, content)
        return path

    def save_progress(self, tree: Mapping[str, Any]) -> None:
        """Returns when the disk has it. What it tells of must be there before."""
        self._write("progress.json", tree)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.directory / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as e:
            raise DataError(
                f"{self.directory / name} is damaged ({e}). Begin anew with --restart, or give another --out."
            ) from None

    def _write(self, name: str, tree: Mapping[str, Any]) -> None:
        _replace(self.directory / name, json.dumps(tree).encode())

    # ---------------------------------------------------------------------------------------- the end

    def split(self, name: str) -> Path:
        """Where the files of a store are while it is not finished."""
        return self.directory / (name or "store")

    def finish(self, headers: Sequence[StoreHeader]) -> None:
        """Writes the headers of the stores, whose other files the disk has, and moves all into place."""
        for name, header in zip(self.command.splits, headers, strict=True):
            if (self.directory / TOKENIZER).exists():
                _replace(self.split(name) / TOKENIZER, (self.directory / TOKENIZER).read_bytes())
            _replace(self.split(name) / HEADER, header_bytes(header))
        self.save_progress({**(self._read("progress.json") or {}), "done": True})
        self.move()

    def move(self) -> None:
        """The last part of `finish`, which an earlier life may have begun. A header moves when all else is there."""
        for name in self.command.splits:
            target, source = self.out / name, self.split(name)
            target.mkdir(exist_ok=True)
            for file in (*_DATA, HEADER):
                if file == HEADER:
                    sync_directory(target)
                if (source / file).exists():
                    os.replace(source / file, target / file)
            sync_directory(target)
        sync_directory(self.out)
        self.remove()

    def remove(self) -> None:
        """Deletes the directory when the stores are whole."""
        (self.directory / "progress.json").unlink(missing_ok=True)  # without it the stores count, see `whole`
        shutil.rmtree(self.directory, ignore_errors=True)


def whole(out: Path, command: Command) -> list[StoreHeader] | None:
    """The headers of the stores that are in `out` already, made by the same command; None where there are none.

    Raises DataError where they are of another command. Removes what a killed life has left beside them.
    """
    paths = [out / name for name in command.splits]
    there = [p for p in {out, out / "train", out / "held_out"} if (p / HEADER).exists()]
    if not there or (out / "partial/progress.json").exists():
        return None
    if not all(p in there for p in paths) or len(there) != len(paths):
        found = ", ".join(str(p) for p in sorted(there))
        raise DataError(f"{out} holds other stores than this command would make: {found}. Give another --out.")
    headers = [read_header(p) for p in paths]
    inputs = [[s["name"], s["bytes"], s["modified"]] for s in headers[0].sources]
    now = command.tree()
    differing = _differing_options(headers[0].options, now["options"])
    if inputs != now["inputs"]:
        differing.append(_differing_inputs(inputs, now["inputs"], 0))
    if differing:
        raise DataError(
            f"{out} holds a whole store of another command:\n{listed(differing)}\nGive another --out, or remove that one."
        )
    if (out / "partial/started.json").exists():
        shutil.rmtree(out / "partial", ignore_errors=True)
    return headers


def _refuse_foreign(out: Path, partial: Path, command: Command) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file. Give --out a directory that does not exist, or an empty one.")
    known = {"partial"}
    if (partial / "progress.json").exists():  # a life that ended while it moved its files
        known |= _OURS | set(command.splits)
    foreign = sorted(set(os.listdir(out)) - known)
    if partial.exists() and not (partial / "started.json").exists():
        foreign += [f"partial/{n}" for n in sorted(os.listdir(partial)) if n not in ("lock", "started.json.new")]
    if foreign:
        raise DataError(
            f"{out} holds other files ({', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}), which stay as "
            "they are. Give --out a directory that does not exist, or an empty one."
        )


def _differing_options(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for key in sorted((set(then) | set(now)) - {"split"}):  # a header also says which of the stores it is of
        # To leave bad documents out after all changes nothing of what came before the first of them.
        if then.get(key) != now.get(key) and not (key == "skip_bad" and now.get(key)):
            found.append(f"{key}: {then.get(key)!r} then, {now.get(key)!r} now")
    return found


def _differing_inputs(then: Sequence[Any], now: Sequence[Any], first: int) -> str:
    """What differs from number `first` on."""
    differing = (
        f"{b[0]} ({a[1]} bytes then, {b[1]} bytes now)" if a[0] == b[0] else f"{b[0]} stands where {a[0]} stood"
        for a, b in zip(then[first:], now[first:], strict=False)
        if a != b
    )
    counts = f"{len(then)} files then, {len(now)} now"
    return f"inputs: {counts}, the first that differs: {next(differing, 'one more or one fewer at the end')}"


def _replace(path: Path, content: bytes) -> None:
    """The file whole or as it was, whatever happens; returns when the disk has it."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_directory(path.parent)
