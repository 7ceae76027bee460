"""What all processes do together between the last byte of a save and the mark: nobody waits for one that has failed."""

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from jaxckpt.distributed.sync import Group
from jaxckpt.snapshot import host_arrays, orbax_io, restore
from jaxckpt.snapshot.linked import Held
from jaxckpt.snapshot.shards import array_directory


def hold(leaves: Mapping[str, Any], step: int, group: Group, *, copy_bytes_per_s: float | None) -> Held:
    """The files of the leaves on disk, which no later step writes to; where one process cannot, all raise."""
    held: list[Held] = []
    error = _error_of(lambda: held.append(Held(leaves, step, copy_bytes_per_s=copy_bytes_per_s)))
    if leaves:
        try:
            _agree("hold the files of a snapshot", error, group)
        except BaseException:
            for one in held:
                one.release()
            raise
    return held[0]


def complete(
    directory: epath.Path,
    response: Any,
    held: Held,
    on_host: Mapping[str, tuple[int, ...]],
    *,
    group: Group,
) -> dict[str, str]:
    """Returns when Orbax and all processes have written everything: the fingerprints of the leaves `on_host` (with
    their shapes).

    What is `held` is in the snapshot then, or is let go. No process waits longer for another one than the group's
    `timeout_s`. Raises where any process has an error.
    """
    error = _error_of(lambda: response.result(timeout=group.timeout_s))
    try:
        if held.leaves or on_host:
            _agree("write a snapshot", error, group)
        elif error is not None:
            raise error
        if held.leaves:
            # Only now: a directory that is there before Orbax has renamed its own would be in its way.
            _agree("place the files of a snapshot", _error_of(lambda: held.place(directory)), group)
    finally:
        held.release()
    sums = orbax_io.host_sums(directory)
    found = {path: sums.get(array_directory(path), []) for path in on_host}
    prints = host_arrays.added_up(found, on_host, group, "add up the fingerprints of a snapshot")
    if missing := [path for path, one in prints.items() if one is None]:
        raise OSError(f"the processes have not written every part of {missing[:5]} once")
    return {path: one for path, one in prints.items() if one is not None}


def _agree(what: str, error: BaseException | None, group: Group) -> None:
    """Raises this process's `error`, or tells of another one's."""
    errors = group.errors(what, None if error is None else restore.root_cause(error))
    if error is not None:
        raise error
    if errors:
        raise OSError("; ".join(f"process {i}: {text}" for i, text in errors.items()))


def _error_of(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as e:
        return e
    return None
