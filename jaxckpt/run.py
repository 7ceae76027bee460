"""A run: restore or initialise, then train. The only place with a training loop."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxckpt import exactness
from jaxckpt.arguments import check_arguments
from jaxckpt.data.batches import BatchStream
from jaxckpt.distributed.sync import Agreement, Group
from jaxckpt.errors import ConfigError, NonFiniteError, PlanError, SnapshotError
from jaxckpt.observe.metrics import MetricsFile
from jaxckpt.observe.phases import Phases
from jaxckpt.observe.report import Report, make_report, metrics_line
from jaxckpt.snapshot.snapshot import FORMAT, Snapshot, Snapshots, check_leaves, environment, leaf_table
from jaxckpt.state.mesh import batch_sharding, make_mesh
from jaxckpt.state.plan import Placement, Rules, make_plan, shardings, unannotated
from jaxckpt.state.train_state import TrainState, take_apart
from jaxckpt.update.step import Loss, make_eval_step, make_finite_check, make_train_step

log = logging.getLogger("jaxckpt")

_TRAINING = ("seed", "global_batch", "accumulation_steps", "max_grad_norm", "nonfinite", "compute_dtype")
"""settings of a Run that must not change between two lives"""


class Run:
    """Ties a model, a loss, an optimizer and data together, and trains so that a kill at any moment costs nothing but time.

    model: called as model(nnx.Rngs) -> nnx.Module. loss: loss(model, batch) -> (sum over targets, number of targets).
    data: a grain.MapDataset or a sequence of examples (dicts of arrays); global batch k is examples
    [k*global_batch, (k+1)*global_batch) of it, on any number of processes. held_out: the same for evaluation.
    compute_dtype: 'bfloat16' computes in it and keeps float32 master weights. snapshots: where to save; without it
    nothing is saved. config and allow_changed belong to the command line, which compares configurations itself.
    """

    def __init__(
        self,
        *,
        model: Callable[[nnx.Rngs], nnx.Module],
        loss: Loss,
        optimizer: optax.GradientTransformation,
        data: Any,
        global_batch: int,
        seed: int = 0,
        mesh: Mesh | None = None,
        rules: Rules = (),
        placement: Placement = Placement(),
        compute_dtype: Any = None,
        accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        nonfinite: str = "stop",
        lr: optax.Schedule | None = None,
        held_out: Any = None,
        eval_every: int | None = None,
        eval_batches: int = 8,
        snapshots: Snapshots | None = None,
        data_fingerprint: str = "",
        num_threads: int = 2,
        config: Mapping[str, Any] | None = None,
        allow_changed: Sequence[str] = (),
        timeout_s: float = 300.0,
        phases: Phases | None = None,
    ) -> None:
        # Two configurations are compared by those who know their keys; without one, these names are the keys.
        names = None if config is not None else frozenset({*_TRAINING, "data", "captured", "program"})
        check_arguments({k: v for k, v in locals().items() if k != "self"}, allowed_keys=names)
        self.mesh = mesh if mesh is not None else make_mesh()
        self.snapshots = snapshots
        self._run_dir = snapshots.run_dir if snapshots else None
        self.phases = phases or Phases()
        self.state: TrainState | None = None
        self.step = 0
        """updates done"""
        self.stopped = False
        """whether the last `train` ended because it was asked to stop"""

        dtype = None if compute_dtype is None else str(np.dtype(compute_dtype))
        settings = (seed, global_batch, accumulation_steps, max_grad_norm, nonfinite, dtype)
        self._training: dict[str, Any] = dict(zip(_TRAINING, settings, strict=True))
        self._config, self._allow_changed = config, tuple(allow_changed)
        self._nonfinite, self._compute_dtype = nonfinite, compute_dtype
        self._eval_every, self._eval_batches = eval_every, eval_batches
        self._group = Group(timeout_s=timeout_s)

        rows = batch_sharding(self.mesh)
        with self.phases.phase("data"):
            self._stream = BatchStream(
                data, global_batch=global_batch, sharding=rows, fingerprint=data_fingerprint, num_threads=num_threads
            )
            self._stream.fingerprint = data_fingerprint or self._stream.probe()
            self._held_out = None
            if eval_every is not None:
                self._eval_batches = max(1, min(eval_batches, len(held_out) // global_batch))
                self._held_out = BatchStream(held_out, global_batch=global_batch, sharding=rows, fingerprint="held out")
            batch = self._stream.batch_struct()
        self._check_accumulation(global_batch, accumulation_steps)
        with self.phases.phase("plan"):
            self._model, abstract, self._init = take_apart(model, optimizer, seed=seed, compute_dtype=compute_dtype)
            self.plan = make_plan(
                abstract, self.mesh, rules=rules, annotations=self._model.annotations, placement=placement
            )
        gathered = unannotated(self.plan, rules, self._model.annotations)
        self._placement = placement
        self._step_fn = make_train_step(
            self._model,
            loss,
            optimizer,
            self.plan,
            batch,
            seed=seed,
            accumulation_steps=accumulation_steps,
            max_grad_norm=max_grad_norm,
            nonfinite=nonfinite,
            compute_dtype=compute_dtype,
            lr=lr,
            gathered=gathered,
        )
        self._batch = batch
        self._eval_fn = make_eval_step(self._model, loss, self.plan, batch, gathered=gathered)
        self._compiled: Any = None
        self._captured: list[dict[str, Any]] = []
        self._finite_check: Future[Any] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="jaxckpt-compile")
        self._metrics: MetricsFile | None = None
        self._clock = 0.0
        self._program: Future[str] | None = None
        self._is_closed = False
        self._is_torn = False
        self._last_report: Report | None = None
        self._resumed_meta: Mapping[str, Any] | None = None
        self._last_saved: int | None = None
        self._is_first_save_checked = False

    # ---------------------------------------------------------------------------------------------- training

    def train(self, until: int, *, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """Trains until `until` updates are done in all, from the newest snapshot or from the start; yields each step's Report.

        `should_stop` is asked after every step; once it says yes on any process, all stop after the same step and
        save it, and `stopped` is set. The last step is always saved. Reports come one step late, so that the device
        never waits for the host, except where a step is evaluated, saved or the last. Leaving the loop by `break` saves
        nothing; `train` may be called again and goes on.
        """
        self.stopped = False
        self.open(until)
        try:
            yield from self._loop(until, should_stop)
        finally:
            self._stream.close()
            if self.snapshots:
                self.snapshots.wait()

    def open(self, until: int | None = None) -> None:
        """Restores or initialises the state, while the step compiles beside it. `train` calls it."""
        if self._is_closed:
            raise ConfigError("this Run is closed; make a new one to train on")
        if self._is_torn:
            raise ConfigError(
                "this Run was interrupted inside a step, and its state and its data may be a step apart; make a new Run, which "
                "continues from the newest snapshot"
            )
        if self.state is not None:
            if self._compiled is None and (until is None or self.step < until):
                self._compiled = self._compile()
                self._check_program()
            return
        step = self._choose_step()
        meta = self.snapshots.read_meta(step) if self.snapshots and step is not None else None
        self._resumed_meta = meta
        if self.snapshots and meta is not None:
            if not self._is_compared_by_config():
                exactness.check_settings(self._run_dir, meta.get("training", {}), self._training, self._allow_changed)
            check_leaves(self.snapshots.root, meta["leaves"], leaf_table(self.plan))  # before the compiler's minutes
        is_finished = step is not None and until is not None and step >= until
        compiling = None if is_finished else self._background.submit(self._compile)
        try:
            self._restore(step) if step is not None else self._initialise()
            if compiling is not None:
                self._stream.start()
        except BaseException:
            if compiling is not None:
                compiling.cancel()
            raise
        if compiling is not None:
            self._compiled = compiling.result()
            self._check_program()
        if self.snapshots and self._group.is_primary:
            self._metrics = MetricsFile(self.snapshots.run_dir / "metrics.jsonl", resume_step=self.step)
            if self._metrics.last_step != self.step:
                log.warning(
                    "metrics.jsonl ends at step %d and the run continues after step %d: lines are missing",
                    self._metrics.last_step,
                    self.step,
                )
        self._group.barrier("start training")

    def close(self) -> None:
        """Waits for the save that is under way, and gives the run directory free."""
        self._is_closed = True
        self._background.shutdown(wait=True)
        self._stream.close()
        if self._held_out:
            self._held_out.close()
        if self._metrics:
            self._metrics.close()
        if self.snapshots:
            self.snapshots.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop(self, until: int, should_stop: Callable[[], bool]) -> Iterator[Report]:
        agreement = Agreement()
        self._clock = time.perf_counter()
        if self.step >= until and self._last_report and self._last_report.step == self.step:
            self._save(self._last_report)  # a loop that was left by `break` has come back to save its last step
        unread: list[_Pending] = []
        is_first = True
        try:
            while self.step < until:
                self._is_torn = True
                batch = next(self._stream)
                started = time.perf_counter()
                self.state, metrics = self._compiled(self.state, batch)
                self.step += 1
                self._is_torn = False
                unread.append(_Pending(self.step, metrics))
                if is_first:
                    jax.block_until_ready(metrics)
                    self.phases.seconds["first step"] = time.perf_counter() - started
                    is_first = False
                    self._after_first_step()

                last = agreement.agreed_step(self.step, should_stop())
                is_last = self.step >= until or (last is not None and self.step >= last)
                is_eval = self._eval_every is not None and self.step % self._eval_every == 0
                is_save = self.snapshots is not None and (is_last or self.step % self.snapshots.every == 0)
                is_due = is_last or is_eval or is_save
                reports = []
                # Order: the numbers of a step, then its line in the file, then its snapshot, then the next batch. So a
                # snapshot of step s finds the lines up to s in place, its state has been checked, and its data
                # position is that of s. The user's loop body comes last: it may leave, and all this is done.
                while len(unread) > (0 if is_due else 1):
                    report = self._read(unread[0])
                    is_current = report.step == self.step
                    reports.append(self._write(report, eval_loss=self.evaluate() if is_eval and is_current else None))
                    del unread[0]
                if is_save:
                    self._save(reports[-1])
                if is_eval or is_save:
                    self._clock = time.perf_counter()
                if self.snapshots:
                    self.snapshots.check()
                yield from reports
                if is_last:
                    self.stopped = self.step < until
                    return
        except (GeneratorExit, KeyboardInterrupt):
            for pending in unread:  # steps that are done have their lines, however the loop was left
                self._write(self._read(pending))
            raise

    def evaluate(self) -> float:
        """The mean loss over the targets of the held-out batches; always the same batches, and no change to training."""
        if self._held_out is None or self.state is None:
            raise ConfigError("evaluation needs held_out data, eval_every and a state (open the run first)")
        self._held_out.restore({**self._held_out.state(), "next_example": 0})
        sums = [
            self._eval_fn(self.state.params, self.state.model_state, next(self._held_out))
            for _ in range(self._eval_batches)
        ]
        self._held_out.close()
        totals, counts = zip(*jax.device_get(sums), strict=True)
        return math.fsum(float(t) for t in totals) / (math.fsum(float(c) for c in counts) or 1.0)

    # ------------------------------------------------------------------------------------------ one step's parts

    def _read(self, pending: "_Pending") -> Report:
        values = jax.device_get(pending.metrics)
        previous, self._clock = self._clock, time.perf_counter()
        report = make_report(pending.step, values, seconds=self._clock - previous)
        if report.skipped and self._nonfinite == "stop":
            raise NonFiniteError(
                f"step {report.step}: the loss is {report.loss} and the gradient's norm {report.grad_norm}. {self._way_back()}"
            )
        if report.skipped:
            log.warning(
                "step %d: loss %s, gradient norm %s: update skipped", report.step, report.loss, report.grad_norm
            )
        return report

    def _write(self, report: Report, *, eval_loss: float | None = None) -> Report:
        report = replace(report, eval_loss=eval_loss)
        self._last_report = report
        if self._metrics:
            self._metrics.write(metrics_line(report))
        return report

    def _save(self, report: Report) -> None:
        if self.snapshots is None or self._last_saved == self.step:
            return
        assert self.state is not None and self._finite_check is not None and self._program is not None
        bad = sorted(p for p, ok in jax.device_get(self._finite_check.result()(self.state)).items() if not ok)
        if bad:
            raise NonFiniteError(f"step {self.step}: not finite any more: {', '.join(bad[:10])}. {self._way_back()}")
        if not self._is_first_save_checked:
            for warning in exactness.check_before_first_save(
                self._stream,
                step=self.step,
                digest=report.batch_digest,
                captured=self._captured,
                program=self._program.result(),
            ):
                log.warning(warning)
            self._is_first_save_checked = True
        if self._metrics:
            self._metrics.sync()
        self.snapshots.save(Snapshot(self.state, self._stream.state(), self._meta(report)))
        self._last_saved = self.step

    def _way_back(self) -> str:
        if self.snapshots:
            self.snapshots.wait()  # a save that is under way counts too
        saved = self.snapshots.steps()[-1:] if self.snapshots else []
        here = (
            f"Nothing of it was saved; the newest snapshot is step {saved[0]}." if saved else "Nothing of it was saved."
        )
        return here + " Lower the learning rate or the clip, or let such updates be skipped (nonfinite: skip)."

    def _meta(self, report: Report) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "config": dict(self._config) if self._config is not None else None,
            "training": self._training,
            "mesh": dict(self.mesh.shape),
            "placement": asdict(self._placement),
            "leaves": leaf_table(self.plan),
            "captured": self._captured,
            "program": exactness.program_hash(self._program.result()) if self._program else None,
            "loss_bits": report.loss_bits,
            "batch_digest": report.batch_digest,
            **environment(),
        }

    # ---------------------------------------------------------------------------------------------- starting

    def _choose_step(self) -> int | None:
        if self.snapshots is None:
            return None
        snapshots = self.snapshots
        snapshots.open(self._group)
        return self._group.from_primary(
            "choose the snapshot to resume from", lambda: next(reversed(snapshots.steps()), None)
        )

    def _restore(self, step: int) -> None:
        assert self.snapshots is not None
        with self.phases.phase("restore"):
            snapshot = self.snapshots.restore(step, self.plan, compute_dtype=self._compute_dtype)
            self._stream.restore(self._accepted_data(snapshot.data))
            if snapshot.data == self._stream.state():  # unless another data or batch size was allowed by name
                start = snapshot.data["next_example"] - self._stream.global_batch
                exactness.check_batch(self._stream, start, step=step, digest=snapshot.meta["batch_digest"])
        self.state, self.step, self._last_saved = snapshot.state, step, step

    def _initialise(self) -> None:
        with self.phases.phase("init"):
            self.state = jax.block_until_ready(jax.jit(self._init, out_shardings=shardings(self.plan))())

    def _compile(self) -> Any:
        with self.phases.phase("trace"):
            traced = self._step_fn.trace(self.plan, self._batch)
            self._captured = exactness.captured_arrays(traced.jaxpr)
        with self.phases.phase("lower"):
            lowered = traced.lower()
        if self.snapshots:
            self._program = self._background.submit(exactness.program_text, traced.jaxpr)
        with self.phases.phase("compile"):
            return lowered.compile()

    def _after_first_step(self) -> None:
        """Work for the background, once it no longer delays the first step."""
        if self.snapshots and self._finite_check is None:
            check = make_finite_check(self.plan)
            self._finite_check = self._background.submit(lambda: check.lower(self.plan).compile())

    def _is_compared_by_config(self) -> bool:
        return self._config is not None and (self._resumed_meta or {}).get("config") is not None

    def _check_program(self) -> None:
        """The traced step against the one that the snapshot was trained with."""
        meta = self._resumed_meta
        if meta is None or self._program is None:
            return
        exactness.check_captured(meta.get("captured", []), self._captured, self._allow_changed)
        if self._allow_changed:
            return  # a change that was allowed changes the program too
        here = {**environment(), "mesh": dict(self.mesh.shape), "placement": asdict(self._placement)}
        check = lambda text: exactness.check_program(meta, here, exactness.program_hash(text))
        if not self._is_compared_by_config():
            check(self._program.result())
        else:
            # The configurations agree, so only code can differ: a hint, and not worth a moment of the start.
            self._program.add_done_callback(lambda done: _warn_instead(check, done.result()))

    def _check_accumulation(self, global_batch: int, accumulation_steps: int) -> None:
        shards = math.prod(self.mesh.shape[a] for a in ("data", "fsdp") if a in self.mesh.shape)
        if accumulation_steps < 1 or global_batch % (shards * accumulation_steps):
            raise PlanError(
                f"a batch of {global_batch} cannot be cut into {accumulation_steps} microbatches over {shards} devices "
                f"(mesh axes data and fsdp); it must be a multiple of {shards * max(accumulation_steps, 1)}"
            )

    def _accepted_data(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data position, under the present data's fingerprint where a change of data was allowed by name."""
        names = {key.partition(".")[0] for key in self._allow_changed}
        return {**state, "fingerprint": self._stream.fingerprint} if names & {"data", "seed"} else state


def _warn_instead(check: Callable[[str], None], text: str) -> None:
    try:
        check(text)
    except SnapshotError as e:
        log.warning("%s", e)


@dataclass(frozen=True)
class _Pending:
    step: int
    metrics: dict[str, jax.Array]
