"""Leaves that live on local disks, in a snapshot: hard links of their files, which are shard files of its own format already.

Before the save returns each file gets a second name in its store's directory `held`, and is never written to again. In the
background the held files get their names in the snapshot, or are copied where it lies on another file system or on gs://,
and are let go. A held file that a killed process leaves is swept with the store's directory. On a file system without hard
links a file is held open, and copied.
"""

import contextlib
import errno
import functools
import logging
import os
import resource
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from jaxckpt.errors import SnapshotError, listed
from jaxckpt.nvme.array import KEPT, NvmeArray, Place
from jaxckpt.snapshot import direct_file, gcs, orbax_arrays
from jaxckpt.snapshot.paths import is_local
from jaxckpt.snapshot.shards import array_directory

log = logging.getLogger("jaxckpt")

BLOCK_BYTES = 8 << 20
_THREADS = 8
_OPEN_FILES = "/proc/self/fd/"
_SPARE_FILES = 512
# The snapshot lies on another file system, on one without hard links, or the file has as many names as it may.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


class Held:
    """The files of a step's leaves on disk that this process saves, held until `release`: meanwhile
    no step writes to them, whatever becomes of their own names.

    copy_bytes_per_s: what copies take at most of the disk, where they must be copied; None leaves them unbounded.
    """

    def __init__(self, leaves: Mapping[str, NvmeArray], step: int, *, copy_bytes_per_s: float | None = None) -> None:
        """Raises OSError where a file cannot be held, and SnapshotError where its disk has no room for what takes its place."""
        self.leaves = dict(leaves)
        self._pace = _Pace(copy_bytes_per_s)
        self._files: dict[tuple[str, Place], str] = {}
        self._directories: set[str] = set()
        self._open: dict[str, int] = {}
        try:
            self._check_room(1)
            for path, x in self.leaves.items():
                x.check_current()
                for place, file in x.owned.items():
                    self._files[path, place] = self._hold(path, place, file, f"step_{step:010d}")
            if self._open:  # for a copy of each, too, if the snapshot lies there
                self._check_room(2)
        except BaseException:
            self.release()
            raise

    def place(self, directory: epath.Path) -> None:
        """Gives the files their names below `directory`, the snapshot that Orbax has written, and makes them last. They are
        held until `release`. Raises OSError."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxckpt-link") as pool:
            jobs = [
                pool.submit(self._bring, held, _target(directory, path, place), self.leaves[path].layout.file_bytes)
                for (path, place), held in self._files.items()
            ]
        for job in jobs:
            job.result()

    def release(self) -> None:
        """Lets the files go. Their directories belong to the store, and may be gone already."""
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        for file, fd in self._open.items():
            with contextlib.suppress(FileNotFoundError):  # the store has a new file in its place
                os.unlink(file + KEPT)
            os.close(fd)
        self._directories, self._files, self._open = set(), {}, {}

    def _check_room(self, times: int) -> None:
        """A held file is the snapshot's: the store makes a new one in its place, and a step that finds no room ends the run."""
        needed: dict[int, int] = defaultdict(int)
        where: dict[int, str] = {}
        for x in self.leaves.values():
            for file in x.owned.values():
                device = os.stat(file).st_dev
                needed[device] += times * x.layout.file_bytes
                where.setdefault(device, os.path.dirname(file))
        problems = []
        for device, nbytes in needed.items():
            free = shutil.disk_usage(where[device]).free
            if free < nbytes:
                problems.append(
                    f"{where[device]}: {nbytes / 2**20:.1f} MiB are needed, {free / 2**20:.1f} MiB are free"
                )
        if problems:
            raise SnapshotError(
                "the disks of the nvme tier have no room for new working files in the place of those that the snapshot "
                "takes:\n" + listed(problems) + "\nFree some, or keep fewer snapshots (snapshots.keep)."
            )

    def _hold(self, path: str, place: Place, file: str, step: str) -> str:
        directory = os.path.join(_store_directory(file), "held", step)
        self._directories.add(directory)
        held = os.path.join(directory, array_directory(path), *map(str, place))
        os.makedirs(os.path.dirname(held), exist_ok=True)
        try:
            os.link(file, held)
        except OSError as e:
            if e.errno not in _NO_LINK:
                raise
            return self._keep_open(file)
        return held

    def _keep_open(self, file: str) -> str:
        """Holds a file that can have no second name. It goes with its name when the store makes a new one in its place, or
        is closed, and its bytes last as long as it is open. Returns a name for it that this process alone can use."""
        _tell_of_copies(_store_directory(file))
        _allow_open_files(sum(len(x.files) for x in self.leaves.values()))
        self._open[file] = fd = os.open(file, os.O_RDONLY)
        os.close(os.open(file + KEPT, os.O_WRONLY | os.O_CREAT, 0o644))
        return f"{_OPEN_FILES}{fd}"

    def _bring(self, held: str, target: epath.Path, nbytes: int) -> None:
        if os.path.getsize(held) != nbytes:
            raise OSError(errno.EIO, f"{os.path.getsize(held)} bytes, expected {nbytes}", held)
        if not is_local(target):
            self._pace.wait(nbytes)
            gcs.upload(held, os.fspath(target))
            return
        path = os.fspath(target)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if held.startswith(_OPEN_FILES) or not _is_linked(held, path):
            _copy(held, path, self._pace)
        direct_file.sync(path)


def describe(directory: epath.Path, leaves: Mapping[str, NvmeArray]) -> None:
    """Adds the leaves, whose files all processes have placed, to what Orbax has written of the other ones. The primary
    calls it. Raises OSError where a file is missing or has another size."""
    problems = []
    for path, x in leaves.items():
        whole = tuple(slice(0, n) for n in x.shape)
        expected = {os.fspath(_target(directory, path, place)) for place in x.layout.shards_of(whole)}
        found = _sizes(directory / "state" / array_directory(path))
        problems += [f"{file}: missing" for file in sorted(expected - found.keys())]
        problems += [
            f"{file}: {n} bytes, expected {x.layout.file_bytes}"
            for file, n in sorted(found.items())
            if n != x.layout.file_bytes
        ]
    if problems:
        raise OSError("not all files of the nvme tier have come into the snapshot:\n" + listed(problems))
    orbax_arrays.add_arrays(directory / "state", {path: (x.layout, x.sharding) for path, x in leaves.items()})


class _Pace:
    """Keeps several threads together under so many bytes a second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Returns when `nbytes` more may be moved."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_s
        time.sleep(start - now)


def _is_linked(held: str, path: str) -> bool:
    """Whether the file has got a second name; False where it cannot have that one."""
    try:
        os.link(held, path)
    except OSError as e:
        if e.errno not in _NO_LINK:
            raise
        return False
    return True


@functools.cache  # once for each directory
def _tell_of_copies(directory: str) -> None:
    log.warning(
        "%s: this file system makes no hard links, so that every snapshot copies the state that lies there, in the background, "
        "and needs room for two more copies of it meanwhile",
        directory,
    )


def _allow_open_files(count: int) -> None:
    """Lets this process open so many more, as far as the system allows; many shells ask for no more than 1024."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
        )


def _copy(source: str, target: str, pace: _Pace) -> None:
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        size, done = os.fstat(old.fileno()).st_size, 0
        while done < size:
            pace.wait(min(BLOCK_BYTES, size - done))
            n = os.sendfile(new.fileno(), old.fileno(), done, min(BLOCK_BYTES, size - done))
            if not n:
                raise OSError(errno.EIO, f"only {done} of {size} bytes could be copied", source)
            done += n


def _store_directory(file: str) -> str:
    """The directory of the store that a working file belongs to: <directory>/work/<leaf>/<file>."""
    return os.path.dirname(os.path.dirname(os.path.dirname(file)))


def _target(directory: epath.Path, path: str, place: Place) -> epath.Path:
    return directory.joinpath("state", array_directory(path), "c", *map(str, place))


def _sizes(directory: epath.Path) -> dict[str, int]:
    if not is_local(directory):
        return gcs.objects_under(os.fspath(directory))
    names = [os.path.join(d, name) for d, _, ns in os.walk(directory) for name in ns]
    return {name: os.path.getsize(name) for name in names}
