"""One writer a run directory: a lock that outlives no owner for long, however it dies."""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import TextIO

from etils import epath

from jaxckpt.errors import SaveError, SnapshotError
from jaxckpt.snapshot.lease import Lease
from jaxckpt.snapshot.paths import is_local

log = logging.getLogger("jaxckpt")


class RunLock:
    """Held from construction until `release` or the end of the process.

    A local directory is locked by the operating system, which frees it when its owner dies. On gs:// an owner renews its
    lease every `renew_s`; when it dies on another machine, the next one waits until `lease_s` have passed, and `say`s so.
    """

    def __init__(
        self,
        run_dir: epath.Path,
        *,
        lease_s: float = 60.0,
        renew_s: float = 15.0,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Raises SnapshotError naming the owner where there is one, OSError where the directory cannot be written."""
        lock = run_dir / "lock"
        self._held: _FileLock | Lease
        if is_local(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._held = _FileLock(os.fspath(lock))
        else:
            self._held = Lease(os.fspath(lock), lease_s=lease_s, renew_s=renew_s, say=say)

    def check(self) -> None:
        """Raises SaveError where another run may have taken the directory; call it before what only the owner may do."""
        self._held.check()

    def release(self) -> None:
        """Gives the directory free. Raises nothing."""
        self._held.release()


class _FileLock:
    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO = open(path, "a+")  # noqa: SIM115 (open as long as the lock is held)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "an unknown process"
            self._file.close()
            if f'"pid": {os.getpid()},' in owner:
                found, way_out = (
                    "an earlier Run of this process",
                    "Close that one first: run.close(), or `with jc.Run(...) as run:`",
                )
            else:
                found, way_out = f"another run ({owner})", "Wait for it or stop it"
            raise SnapshotError(
                f"{os.path.dirname(path)} is in use by {found}. {way_out}; or give another run_dir."
            ) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()

    def check(self) -> None:
        try:
            is_ours = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise SaveError(
                f"{self._path}: the lock file of this run was removed or replaced, so another run may write to the same "
                "directory. Nothing more is saved from here; stop one of the two runs."
            )

    def release(self) -> None:
        self._file.close()
