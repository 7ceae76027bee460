"""One family of errors. The command line prints their text without a traceback and exits with `exit_code`."""


class JaxckptError(Exception):
    """Says what was found, what was expected and the way out, ready to print."""

    exit_code = 2


class ConfigError(JaxckptError):
    """The configuration cannot be used; the text lists every problem, a line each, with its key."""


class PlanError(JaxckptError):
    """The state cannot be laid out on this mesh or in these memory kinds."""


class OffloadError(JaxckptError):
    """State that lives off the device cannot be read, written or updated."""

    exit_code = 1


class UnusableDiskError(OffloadError):
    """A directory of the tier nvme cannot be used, as a run finds when it begins."""

    exit_code = 2


class DataError(JaxckptError):
    """The data cannot be read, or cannot be resumed exactly."""


class SnapshotError(JaxckptError):
    """A snapshot cannot be written, read, or does not fit this run."""


class DamagedSnapshot(SnapshotError):
    """A committed snapshot is not what was saved: a file is missing, cut, exchanged, or holds other bits."""


class SaveError(SnapshotError):
    """A snapshot could not be written while training; what was saved before is untouched."""

    exit_code = 1


class DistributedError(JaxckptError):
    """Another process did not do its part in time; the text names it."""

    exit_code = 1


class NonFiniteError(JaxckptError):
    """The loss, a gradient or the state is no longer finite."""

    exit_code = 1


def listed(problems: list[str]) -> str:
    """A line each, indented; a long list is cut with the number of what is left out."""
    left = len(problems) - 20
    return "\n".join(f"  {p}" for p in problems[:20] + ([f"... and {left} more"] if left > 0 else []))
