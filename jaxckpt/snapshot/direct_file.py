"""Files read and written past the page cache (O_DIRECT), in large aligned blocks; buffered where that cannot be."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

BLOCK_BYTES = 4 << 20
MOST_ALIGNMENT = 64 << 10
SAFE_ALIGNMENT = 4096  # what a file system needs that does not say what it needs

_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_thread = threading.local()


@dataclass
class Counters:
    """What was moved in this process."""

    files_written: int = 0
    bytes_written: int = 0
    files_read: int = 0
    bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                setattr(self, name, getattr(self, name) + n)


def allocate(nbytes: int, *, is_large: bool = True) -> np.ndarray:
    """uint8[nbytes] in whole pages of its own, large ones where wanted and there; they go back when the array does."""
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # page faults are most of the time that a large read costs the CPU
    return np.frombuffer(pages, np.uint8)[:nbytes]


class Workers:
    """The threads that move bytes. They live as long as somebody uses them, so that an idle process has none of them."""

    def __init__(self, threads: int = 8) -> None:
        self._threads = threads
        self._lock, self._users = threading.Lock(), 0
        self._pool: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """All users at one time share the threads. The last one to leave waits for what is running."""
        with self._lock:
            self._users += 1
            self._pool = pool = self._pool or ThreadPoolExecutor(self._threads, thread_name_prefix="jaxckpt-io")
        try:
            yield pool
        finally:
            with self._lock:
                self._users -= 1
                last = self._users == 0
                if last:
                    self._pool = None
            if last:
                pool.shutdown(wait=True, cancel_futures=True)


class File:
    """One open file. Every error is an OSError that names it."""

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        try:
            self._fd = os.open(path, flags | _O_DIRECT, 0o644)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o644)
        self.alignment = dio_alignment(self._fd)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def is_direct(self) -> bool:
        """Whether it goes past the page cache, as far as the kernel has refused nothing yet."""
        return bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & _O_DIRECT)

    def write(self, data: memoryview, offset: int) -> None:
        """All of `data`, whose address, size and offset are aligned. Goes on after a short write."""
        done = 0
        while done < len(data):
            done += self._move(os.pwritev, data[done:], offset + done)

    def read(self, into: memoryview, offset: int) -> int:
        """The number of bytes read: as many as `into` holds, fewer only at the end of the file."""
        done, there = 0, min(len(into), self.size - offset)
        while done < there:
            done += self._move(os.preadv, into[done:], offset + done)
        return done

    def cut(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), self.path) from e

    def _move(self, call: Callable[[int, list[memoryview], int], int], data: memoryview, offset: int) -> int:
        """The bytes that one call moved, at least one."""
        try:
            try:
                n = call(self._fd, [data], offset)
            except OSError as e:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if e.errno != errno.EINVAL or not flags & _O_DIRECT:
                    raise
                # It opened with O_DIRECT and yet cannot do it, or a short call has ended between two blocks.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
                n = call(self._fd, [data], offset)
        except OSError as e:
            raise OSError(e.errno, os.strerror(e.errno or 0), self.path) from e
        if not n:
            raise OSError(errno.EIO, f"none of {len(data)} bytes at {offset} could be moved", self.path)
        return n


class Sink:
    """Bytes that go to a new file one after the other, in blocks of at least BLOCK_BYTES. One a thread at a time."""

    def __init__(self, file: File) -> None:
        self._file, self._buffer = file, _buffer()
        self._fill = 0
        self._written = 0

    @property
    def offset(self) -> int:
        """Where in the file the next byte will lie."""
        return self._written + self._fill

    def room(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes], at most BLOCK_BYTES, to be filled by the caller, who then calls `push`."""
        if self._fill >= BLOCK_BYTES:
            self._flush()
        return self._buffer[self._fill : self._fill + nbytes]

    def push(self, nbytes: int) -> None:
        self._fill += nbytes

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), BLOCK_BYTES):
            part = view[start : start + BLOCK_BYTES]
            self.room(len(part))[:] = np.frombuffer(part, np.uint8)
            self.push(len(part))

    def finish(self) -> None:
        """Writes what is left; the file then ends with the last byte. `sync` makes it last."""
        self._flush()
        size = self.offset
        if self._fill:
            padded = -(-self._fill // self._file.alignment) * self._file.alignment
            self._buffer[self._fill : padded] = 0
            self._file.write(self._buffer.data[:padded], self._written)
        self._file.cut(size)

    def _flush(self) -> None:
        whole = self._fill // self._file.alignment * self._file.alignment
        if whole:
            self._file.write(self._buffer.data[:whole], self._written)
            self._buffer[: self._fill - whole] = self._buffer[whole : self._fill].copy()
            self._written, self._fill = self._written + whole, self._fill - whole


class Stream:
    """The bytes `start` to `stop` of a file, which must be there, one after the other. One a thread at a time."""

    def __init__(self, file: File, start: int, stop: int, counters: Counters) -> None:
        self._file, self._buffer, self._counters = file, _buffer(), counters
        self._next = start // file.alignment * file.alignment  # the file's offset of the next block
        self._stop = -(-stop // file.alignment) * file.alignment
        self._at, self._end = 0, 0
        before = start - self._next
        self._read_block()
        self._at = before

    def take(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes], at most BLOCK_BYTES, valid until the next call."""
        while self._end - self._at < nbytes:
            self._read_block()
        self._at += nbytes
        return self._buffer[self._at - nbytes : self._at]

    def _read_block(self) -> None:
        rest = self._end - self._at
        at = -rest % self._file.alignment  # so that the block after the rest comes to an aligned address
        self._buffer[at : at + rest] = self._buffer[self._at : self._end].copy()
        self._at, self._end = at, at + rest
        block = self._buffer.data[self._end : self._end + min(BLOCK_BYTES, self._stop - self._next)]
        n = self._file.read(block, self._next)
        if not n:
            raise OSError(errno.EIO, f"the file ends at {self._next}, not at {self._stop}", self._file.path)
        self._counters.add(bytes_read=n)
        self._next, self._end = self._next + n, self._end + n


def make_file(path: str, nbytes: int) -> None:
    """Makes a new file whose blocks are on the disk already: to write to it later costs half as much, and cannot fail for
    want of room. Raises OSError, with the path, where one is there or the disk has too little room."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as e:
        os.unlink(path)
        raise OSError(e.errno, os.strerror(e.errno or 0), path) from e
    finally:
        os.close(fd)


def sync(path: str) -> None:
    """Returns when the file is on the disk. Many at once, after all are written, cost little more than one."""
    fd = os.open(path, os.O_RDONLY)
    try:
        getattr(os, "fdatasync", os.fsync)(fd)
    except OSError as e:
        raise OSError(e.errno, os.strerror(e.errno or 0), path) from e
    finally:
        os.close(fd)


def dio_alignment(fd: int) -> int:
    """What addresses, sizes and offsets must be a multiple of for O_DIRECT; 4096 where the kernel does not say."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old C library
        answer = ctypes.create_string_buffer(256)
        statx = ctypes.CDLL(None, use_errno=True).statx
        if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) == 0:
            mask, memory, offset = (int.from_bytes(answer[i : i + 4], sys.byteorder) for i in (0, 0x98, 0x9C))
            largest = max(memory, offset)
            if mask & _STATX_DIOALIGN and 0 < largest <= MOST_ALIGNMENT:
                return largest
    return SAFE_ALIGNMENT


def _buffer() -> np.ndarray:
    """This thread's own block of memory; it goes when the thread ends."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = allocate(2 * BLOCK_BYTES + 2 * MOST_ALIGNMENT)
    return _thread.buffer
