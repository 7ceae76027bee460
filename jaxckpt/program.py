"""The compiled training step and what is known of it: compiled beside the restore, checked against the snapshot's."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxckpt import exactness
from jaxckpt.errors import PlanError, SnapshotError
from jaxckpt.nvme.array import NvmeArray
from jaxckpt.observe.phases import Phases
from jaxckpt.snapshot import host_arrays, packing
from jaxckpt.snapshot.leaves import stored_leaves, words
from jaxckpt.state import fingerprint
from jaxckpt.state.nvme import resident
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.choose import compiler_options
from jaxckpt.update.step import make_finite_check

log = logging.getLogger("jaxckpt")

_POLL_S = 0.1


class Program:
    """A jitted step that is compiled in the background. `is_kept` says whether snapshots will tell of it."""

    def __init__(self, step_fn: Any, plan: TrainState, batch: Any, *, phases: Phases, is_kept: bool) -> None:
        self._step_fn, self._plan, self._batch = step_fn, plan, batch
        self._phases, self._is_kept = phases, is_kept
        self._background = ThreadPoolExecutor(1, thread_name_prefix="jaxckpt-compile")
        self._compiling: Future[Any] | None = None
        self._text: Future[str] | None = None
        self._finite_check: Future[Any] | None = None
        self.captured: list[dict[str, Any]] = []
        """the arrays that the step closes over, see `exactness.captured_arrays`"""

    def start(self) -> None:
        """Begins to compile, once."""
        if self._compiling is None:
            self._compiling = self._background.submit(self._compile)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Calls it in the background, once the step is compiled; an error of it is a line in the log."""

        def safely() -> None:
            try:
                call()
            except Exception:
                log.exception("a check beside the training has failed")

        self._background.submit(safely)

    def wait(self, is_unwanted: Callable[[], bool]) -> bool:
        """Waits for the compiler until `is_unwanted` says yes; whether the step is compiled now."""
        assert self._compiling is not None, "start() comes first"
        while not _is_done_within(self._compiling, _POLL_S):
            if is_unwanted():
                return False
        self._compiling.result()
        return True

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        assert self._compiling is not None
        return self._compiling.result()(state, batch)

    @property
    def executables(self) -> list[Any]:
        """What the step was compiled to: one program mostly; waits for the compiler."""
        assert self._compiling is not None
        return _executables(self._compiling.result())

    @property
    def text(self) -> str:
        """The traced step."""
        assert self._text is not None
        return self._text.result()

    def check(self, meta: Mapping[str, Any], here: Mapping[str, Any], allowed: Sequence[str], *, is_hint: bool) -> None:
        """The traced step against the one that the snapshot of `meta` was trained with; see `exactness`.

        `is_hint`: the configurations agree, so only code can differ. That is a warning, and not worth a moment of the
        start.
        """
        exactness.check_captured(meta.get("captured", []), self.captured, allowed)
        if allowed or self._text is None:
            return  # a change that was allowed changes the program too
        compare = lambda text: exactness.check_program(meta, here, exactness.program_hash(text))
        if is_hint:
            self._text.add_done_callback(lambda done: _warn_instead(compare, done.result()))
        else:
            compare(self._text.result())

    def prepare_saving(self) -> None:
        """Compiles what a save needs, in the background, once that no longer delays the first step."""
        if self._is_kept and self._finite_check is None:
            check = make_finite_check(self._plan)
            self._finite_check = self._background.submit(lambda: check.lower(resident(self._plan)).compile())
            large, _ = packing.split(words(stored_leaves(resident(self._plan))))
            on_device = [x for x in large.values() if not host_arrays.stays_on_host(x)]
            self._background.submit(fingerprint.prepare, on_device)

    def not_finite(self, state: TrainState) -> list[str]:
        """Paths of the leaves that hold an infinity or NaN."""
        self.prepare_saving()
        assert self._finite_check is not None
        # What is on disk was looked at when it was on the device.
        on_disk = {path: x.is_finite for path, x in stored_leaves(state).items() if isinstance(x, NvmeArray)}
        found = {**self._finite_check.result()(resident(state)), **on_disk}
        return sorted(path for path, ok in jax.device_get(found).items() if not ok)

    def close(self) -> None:
        """Waits for the background, except for a compiler that nobody waits for any more."""
        is_compiling = self._compiling is not None and not self._compiling.done()
        self._background.shutdown(wait=not is_compiling, cancel_futures=True)

    def _compile(self) -> Any:
        with self._phases.phase("trace"):
            traced = self._step_fn.trace(self._plan, self._batch)
            self.captured = exactness.captured_arrays(traced.jaxpr)
        with self._phases.phase("lower"):
            lowered = traced.lower()
        if self._is_kept:
            self._text = self._background.submit(exactness.program_text, traced.jaxpr)
        with self._phases.phase("compile"):
            compiled = lowered.compile(compiler_options(self._plan, jax.default_backend()) or None)
            if jax.default_backend() != "cpu":
                _check_no_host_compute(compiled)
            return compiled


def _executables(compiled: Any) -> list[Any]:
    return list(getattr(compiled, "programs", {"step": compiled}).values())


def _check_no_host_compute(compiled: Any) -> None:
    """Raises PlanError where XLA would compute with state in host memory instead of moving it, which it only logs."""
    if any("HostExecute" in executable.as_text() for executable in _executables(compiled)):
        raise PlanError(
            "the compiled step computes in host memory (HostExecute), far slower than on the device and not in place: something "
            "uses state off the device as it lies. Let the model, loss and optimizer leave placement alone "
            "(jax.device_put, compute_on), or place that state on the device."
        )


def _is_done_within(future: Future[Any], timeout_s: float) -> bool:
    try:
        future.exception(timeout=timeout_s)
    except TimeoutError:
        return False
    return True


def _warn_instead(check: Callable[[str], None], text: str) -> None:
    try:
        check(text)
    except SnapshotError as e:
        log.warning("%s", e)
