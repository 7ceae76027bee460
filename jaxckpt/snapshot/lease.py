"""A lock on gs://: an object that its owner rewrites now and then, and that is free once it has not been for a while.

Every write names the generation that it replaces, so of two processes that want the lock, or of an owner that comes back
too late and its successor, exactly one wins. Ages are differences of the server's own clock.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxckpt.errors import SaveError, SnapshotError
from jaxckpt.snapshot import gcs

log = logging.getLogger("jaxckpt")


class Lease:
    """Held from construction until `release`, or for `lease_s` after the owner's last sign of life."""

    def __init__(self, path: str, *, lease_s: float, renew_s: float, say: Callable[[str], None]) -> None:
        """Takes the lock `path`; waits for the lease of an owner that no longer shows itself, and `say`s so.

        Raises SnapshotError naming an owner that is alive, OSError where gs:// cannot be written.
        """
        self._path, self._lease_s, self._renew_s = path, lease_s, renew_s
        self._owner = {
            "owner": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "pid_started": _process_started(os.getpid()),
            "started": time.time(),
            "lease_s": lease_s,
        }
        self._lost: str | None = None
        self._guard = threading.Lock()  # of the generation and of requests that change it
        self._held_at = _now()
        self._generation = self._acquire(say)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="jaxckpt-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Returns while the lock is ours for certain; raises SaveError naming who took it."""
        if not self._guard.acquire(timeout=self._lease_s):
            raise SaveError(self._not_renewed())
        try:
            if self._lost is None:
                try:
                    if gcs.stat(self._path).generation != self._generation:
                        self._find_out()
                except FileNotFoundError:
                    self._lost = "somebody has removed it"
                except OSError as e:
                    log.warning("the lock %s cannot be looked at: %s", self._path, e)
            if self._lost is not None:
                raise SaveError(
                    f"{self._path}: this run no longer holds the lock of its run directory: {self._lost}. Nothing more is "
                    "saved from here; stop one of the two runs."
                )
            if _now() - self._held_at > self._lease_s:
                raise SaveError(self._not_renewed())
        finally:
            self._guard.release()

    def release(self) -> None:
        """Gives the lock free, if it is still ours. Raises nothing: a lease that cannot be ended ends by itself."""
        self._stop.set()
        self._thread.join(timeout=self._lease_s)
        try:
            found = gcs.stat(self._path)
            if self._read_owner().get("owner") == self._owner["owner"]:
                gcs.delete(self._path, if_generation=found.generation)
        except FileNotFoundError:
            pass
        except OSError as e:
            log.warning("the lock %s could not be given free, and is free in %g s: %s", self._path, self._lease_s, e)

    def _acquire(self, say: Callable[[str], None]) -> int:
        """The generation of our object."""
        started, is_said = _now(), False
        first: tuple[str, int] | None = None
        while True:
            self._held_at = _now()
            with contextlib.suppress(FileExistsError):
                return self._write(0)
            try:
                found = gcs.stat(self._path)
                owner = self._read_owner()
            except FileNotFoundError:
                continue  # given free this moment
            if owner.get("owner") == self._owner["owner"]:
                return found.generation  # the answer to our own request got lost
            left_s = float(owner.get("lease_s", self._lease_s)) - (found.now - found.updated)
            if left_s < 0 or _is_dead(owner):
                self._held_at = _now()
                with contextlib.suppress(FileExistsError):
                    return self._write(found.generation)
                continue
            if _is_this_process(owner):
                raise SnapshotError(
                    f"{self._path}: the run directory is in use by an earlier Run of this process. Close that one first: "
                    "run.close(), or `with jc.Run(...) as run:`; or give another run_dir."
                )
            is_renewed = first is not None and first[0] == owner.get("owner") and first[1] != found.generation
            first = first if first and first[0] == owner.get("owner") else (str(owner.get("owner")), found.generation)
            if is_renewed or _is_alive(owner):
                raise SnapshotError(
                    f"{self._path}: the run directory is in use by another run ({_describe(owner)}). Wait for it or stop it; "
                    "or give another run_dir."
                )
            if not is_said:
                say(
                    f"{self._path} is held by {_describe(owner)}; waiting at most {left_s + 1:.0f} s to see whether it is "
                    "still alive"
                )
                is_said = True
            if _now() - started > 10 * self._lease_s:
                raise SnapshotError(
                    f"{self._path}: others took the lock again and again; the last is {_describe(owner)}."
                )
            time.sleep(min(1.0, max(0.05, left_s / 10)))

    def _write(self, if_generation: int) -> int:
        return gcs.write(self._path, json.dumps(self._owner, sort_keys=True).encode(), if_generation=if_generation)

    def _read_owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(gcs.read(self._path))
        except ValueError:
            owner = None
        return owner if isinstance(owner, dict) else {}

    def _keep(self) -> None:
        wait_s = self._renew_s
        while not self._stop.wait(wait_s):
            with self._guard:
                if self._lost is not None:
                    return
                wait_s = self._renew_s
                asked_at = _now()
                try:
                    self._generation = self._write(self._generation)
                    self._held_at = asked_at
                except FileExistsError:
                    with contextlib.suppress(OSError):  # then the next round finds out
                        self._find_out()
                except OSError as e:
                    wait_s = self._renew_s / 4
                    log.warning("the lock %s could not be renewed: %s", self._path, e)

    def _find_out(self) -> None:
        """Who holds the object of a generation that is not ours; perhaps we do, and an answer got lost."""
        try:
            found, owner = gcs.stat(self._path), self._read_owner()
        except FileNotFoundError:
            self._lost = "somebody has removed it"
            return
        if owner.get("owner") == self._owner["owner"]:
            self._generation = found.generation
            self._held_at = (
                _now() - max(0.0, found.now - found.updated) - 1.0
            )  # the server tells its time to the second
        else:
            self._lost = f"{_describe(owner)} has taken it"

    def _not_renewed(self) -> str:
        return (
            f"{self._path}: the lock could not be renewed for {_now() - self._held_at:.0f} s, longer than its lease of "
            f"{self._lease_s:g} s, so another run may hold it by now. Nothing is saved until it is renewed."
        )


def _describe(owner: dict[str, Any]) -> str:
    if not {"host", "pid", "started"} <= set(owner):
        return "an unknown process"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(owner["started"])))
    return f"host {owner['host']}, pid {owner['pid']}, since {since}"


def _now() -> float:
    # Unlike the monotonic clock it counts the time that a machine was suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _machine() -> str | None:
    """Which kernel and which of its process namespaces this is: only there does a pid mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _process_started(pid: int) -> str | None:
    """When the process began, in the kernel's ticks: tells apart two that had the same pid. None: cannot be told."""
    fields = _proc_stat(pid)
    return fields[19] if len(fields) > 19 else None


def _proc_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_here(owner: dict[str, Any]) -> bool:
    return owner.get("machine") is not None and owner["machine"] == _machine() and isinstance(owner.get("pid"), int)


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine and is gone for certain."""
    if not _is_here(owner):
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's process
    fields = _proc_stat(owner["pid"])
    is_another = owner.get("pid_started") is not None and len(fields) > 19 and fields[19] != owner["pid_started"]
    return is_another or fields[:1] in (["Z"], ["X"])


def _is_alive(owner: dict[str, Any]) -> bool:
    return _is_here(owner) and not _is_dead(owner)


def _is_this_process(owner: dict[str, Any]) -> bool:
    return _is_alive(owner) and owner["pid"] == os.getpid()
