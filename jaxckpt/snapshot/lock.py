"""One writer a run directory: a lock that the operating system releases when its owner dies, however it dies."""

import fcntl
import json
import os
import socket
from pathlib import Path

from jaxckpt.errors import SnapshotError


class RunLock:
    """Held from construction until `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "lock").open("a+")
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
            raise SnapshotError(f"{run_dir} is in use by {found}. {way_out}; or give another run_dir.") from None
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
