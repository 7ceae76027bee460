"""A run: restore or initialise, then train. The only place with a training loop."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxckpt.arguments import check_arguments, check_microbatches
from jaxckpt.beginning import Beginning
from jaxckpt.data.iterated_stream import IteratedStream
from jaxckpt.data.stream import BatchStream
from jaxckpt.distributed import watch
from jaxckpt.distributed.sync import Agreement, Group
from jaxckpt.errors import ConfigError
from jaxckpt.evaluation import Evaluation
from jaxckpt.exactness import moved_params_warning
from jaxckpt.models.layers import Layers
from jaxckpt.observe.phases import Phases
from jaxckpt.observe.report import Report
from jaxckpt.program import Program
from jaxckpt.reporting import Pending, Reporting
from jaxckpt.saving import Saving
from jaxckpt.snapshot import resume as resuming
from jaxckpt.snapshot.environment import environment
from jaxckpt.snapshot.origin import Origin
from jaxckpt.snapshot.snapshot import Snapshots
from jaxckpt.state.mesh import batch_sharding, make_mesh
from jaxckpt.state.plan import Placement, Rules, make_plan, unannotated
from jaxckpt.state.train_state import TrainState, take_apart
from jaxckpt.tiers import Tiers
from jaxckpt.update.choose import make_any_eval_step, make_any_step
from jaxckpt.update.step import Loss

log = logging.getLogger("jaxckpt")

_TRAINING = ("seed", "global_batch", "accumulation_steps", "max_grad_norm", "nonfinite", "compute_dtype")
"""settings of a Run that must not change between two lives"""


class Run:
    """Ties a model, a loss, an optimizer and data together, and trains so that a kill at any moment costs nothing but time.

    model: called as model(nnx.Rngs) -> nnx.Module. loss: loss(model, batch) -> (sum over targets, number of targets).
    data: a grain.MapDataset or a sequence of examples (dicts of arrays); global batch k is examples
    [k*global_batch, (k+1)*global_batch) of it, on any number of processes. Or a grain.IterDataset of each process's own
    examples, which resumes on as many processes only. skip: [(first step, last step)] whose batches are left out.
    held_out: as data with random access, for evaluation.
    placement: where state lives between steps, see jc.Placement; parameters off the device need layers, the model as a list
    of layer functions (jc.Layers). compute_dtype: 'bfloat16' computes in it and keeps float32 master weights. snapshots: where to save; without it
    nothing is saved. resume: which snapshot to continue from, see `jaxckpt.snapshot.resume.Resume`. restore_from: where a
    run that has no snapshot yet begins: 'RUN_DIR', 'RUN_DIR@STEP' or 'RUN_DIR@PIN' of another run, local or gs://; with
    restore_paths (regexes on leaf paths, such as '^params/') only those leaves are taken, and the run starts at step 0.
    config and allow_changed belong to the command line, which compares configurations itself.
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
        layers: Layers | None = None,
        compute_dtype: Any = None,
        accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        nonfinite: str = "stop",
        lr: optax.Schedule | None = None,
        held_out: Any = None,
        eval_every: int | None = None,
        eval_batches: int = 8,
        snapshots: Snapshots | None = None,
        resume: resuming.Resume = "latest",
        restore_from: str | None = None,
        restore_paths: Sequence[str] = (),
        data_identity: Mapping[str, Any] | None = None,
        skip: Sequence[tuple[int, int]] = (),
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
        self.phases = phases or Phases()
        self.state: TrainState | None = None
        self.step = 0
        """updates done"""
        self.stopped = False
        """whether the last `train` ended because it was asked to stop"""

        dtype = None if compute_dtype is None else str(np.dtype(compute_dtype))
        settings = (seed, global_batch, accumulation_steps, max_grad_norm, nonfinite, dtype)
        self._training: dict[str, Any] = dict(zip(_TRAINING, settings, strict=True))
        self._allow_changed = tuple(allow_changed)
        self._group = Group(timeout_s=timeout_s)

        rows = batch_sharding(self.mesh)
        with self.phases.phase("data"):
            source = {"global_batch": global_batch, "sharding": rows, "identity": data_identity, "skip": skip}
            self._stream = (
                IteratedStream(data, group=self._group, **source)
                if isinstance(data, grain.IterDataset)
                else BatchStream(data, num_threads=num_threads, **source)
            )
            batch = self._stream.batch_struct()
        check_microbatches(self.mesh, global_batch, accumulation_steps)
        with self.phases.phase("plan"):
            parts, abstract, init = take_apart(model, optimizer, seed=seed, compute_dtype=compute_dtype)
            self.plan = make_plan(abstract, self.mesh, rules=rules, annotations=parts.annotations, placement=placement)
        gathered = unannotated(self.plan, rules, parts.annotations)
        self._placement = placement
        run_dir = snapshots and str(snapshots.run_dir)
        self._tiers = Tiers(self.plan, optimizer, placement, run_dir=run_dir, microbatches=accumulation_steps)
        step_fn = self._tiers.step_fn = make_any_step(
            parts,
            loss,
            optimizer,
            self.plan,
            batch,
            layers=layers,
            store=self._tiers.store,
            placement=placement,
            seed=seed,
            accumulation_steps=accumulation_steps,
            max_grad_norm=max_grad_norm,
            nonfinite=nonfinite,
            compute_dtype=compute_dtype,
            lr=lr,
            gathered=gathered,
        )
        self._program = Program(step_fn, self.plan, batch, phases=self.phases, is_kept=snapshots is not None)
        self._evaluation: Evaluation | None = None
        if eval_every is not None:
            steps = {"layers": layers, "store": self._tiers.store, "gathered": gathered}
            eval_fn = make_any_eval_step(parts, loss, self.plan, batch, **steps)
            counts = {"every": eval_every, "batches": eval_batches, "global_batch": global_batch}
            self._evaluation = Evaluation(held_out, eval_fn, sharding=rows, **counts)
        self._watch: watch.Watch | None = None
        self._is_closed = self._is_torn = self._is_compiled = False
        self._beginning = Beginning(
            self.plan,
            init,
            self._stream,
            self._group,
            snapshots,
            resume,
            Origin(restore_from, tuple(restore_paths)) if restore_from is not None else None,
            training=self._training,
            has_config=config is not None,
            allow_changed=self._allow_changed,
            compute_dtype=compute_dtype,
            tiers=self._tiers,
            phases=self.phases,
        )
        self._resumed_meta: Mapping[str, Any] | None = None
        self._saving = Saving(
            snapshots,
            self.plan,
            self._stream,
            self._program,
            settings={
                "config": dict(config) if config is not None else None,
                "training": self._training,
                "mesh": dict(self.mesh.shape),
                "placement": placement.to_json(),
                "went_back_to": resume if isinstance(resume, int) else None,
            },
        )
        self._reporting = Reporting(self._stream, self._saving, nonfinite=nonfinite)

    # ---------------------------------------------------------------------------------------------- training

    def train(self, until: int, *, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """Trains until `until` updates are done in all, from the newest snapshot or from the start; yields each step's Report.

        `should_stop` is asked after every step, and while the step compiles or data is late; once it says yes on any
        process, all stop after the same step and save it, and `stopped` is set. The last step is always saved. Reports
        come one step late, so that the device never waits for the host, except where a step is evaluated, saved or the
        last. Leaving the loop by `break` saves nothing; `train` may be called again and goes on.
        """
        self.stopped = False
        self.open(until, should_stop=should_stop)
        if self.stopped:
            return
        try:
            yield from self._loop(until, should_stop)
        finally:
            self._stream.close()
            if self.snapshots:
                self.snapshots.wait()

    def open(self, until: int | None = None, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Restores or initialises the state, while the step compiles beside it. `train` calls it.

        If `should_stop` says yes on any process before the compiler is done, nothing is trained and `stopped` is set.
        """
        if self._is_closed:
            raise ConfigError("this Run is closed; make a new one to train on")
        if self._is_torn:
            raise ConfigError(
                "this Run was interrupted inside a step, and its state and its data may be a step apart; make a new Run, which "
                "continues from the newest snapshot"
            )
        is_new = self.state is None
        self._watch = self._reporting.watch = watch.start(newest_saved=self._saving.newest)
        if is_new:
            begun = self._beginning.begin(lambda step: self._program.start() if until is None or step < until else None)
            self.state, self.step = begun.state, begun.step
            self._resumed_meta = begun.meta
            self._saving.begin(begun)
            if until is None or self.step < until:
                self._stream.start()
            if self.snapshots and self._group.is_primary:
                path, is_own = self.snapshots.run_dir / "metrics.jsonl", begun.restored_from is None
                self._reporting.open(path, step=self.step, meta=begun.meta, is_own=is_own)
        if not self._is_compiled and (until is None or self.step < until):
            self._program.start()
            if self._group.is_primary:
                self._program.afterwards(self._tiers.check_update)
            self._wait_for_program(should_stop)
        if is_new:
            self._group.barrier("start training")

    def close(self) -> None:
        """Waits for the save that is under way, and gives the run directory free."""
        self._is_closed = True
        with ExitStack() as stack:  # the last one first; each, whatever another raises
            if self._watch:
                stack.callback(self._watch.close)
            if self.snapshots:
                stack.callback(self.snapshots.close)
            stack.callback(self._reporting.close)
            stack.callback(self._tiers.close)
            if self.snapshots:
                # The save that is under way still needs the file of metrics, and what it copies of the tier nvme.
                stack.callback(self.snapshots.wait)
            if self._evaluation:
                stack.callback(self._evaluation.close)
            stack.callback(self._stream.close)
            stack.callback(self._program.close)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._watch:
            self._watch.fail_with(error)  # first: to close, this process would wait for the others
        self.close()

    def _loop(self, until: int, should_stop: Callable[[], bool]) -> Iterator[Report]:
        agreement = Agreement()
        self._reporting.start_clock()
        last = self._reporting.last
        if self.step >= until and last and last.step == self.step:
            self._save(last)  # a loop that was left by `break` has come back to save its last step
        unread: list[Pending] = []
        is_first = True
        try:
            while self.step < until:
                # One of several processes must not leave the others alone in a step: it stops where all agree to.
                batch = self._stream.next_unless(should_stop if jax.process_count() == 1 else lambda: False)
                if batch is None:
                    yield from self._end_without_data(unread)
                    return
                self._is_torn = True
                started = time.perf_counter()
                assert self.state is not None
                self.state, metrics = self._program(self.state, batch)
                self.step += 1
                self._is_torn = False
                # A step that goes by way of disks has waited for all that it did.
                done = time.perf_counter() if self._tiers.store is not None else None
                unread.append(Pending(self.step, metrics, self._stream.batches - 1, self._tiers.moved(), done))
                if is_first:
                    jax.block_until_ready(metrics)
                    self.phases.seconds["first step"] = time.perf_counter() - started
                    is_first = False
                    self._program.prepare_saving()

                last = agreement.agreed_step(self.step, should_stop())
                is_last = self.step >= until or (last is not None and self.step >= last)
                is_eval = self._evaluation is not None and self._evaluation.is_due(self.step)
                is_save = self.snapshots is not None and (is_last or self._saving.is_due(self.step))
                is_due = is_last or is_eval or is_save
                reports = []
                # Order: the numbers of a step, then its line in the file, then its snapshot, then the next batch. So a
                # snapshot of step s finds the lines up to s in place, its state has been checked, and its data
                # position is that of s. The user's loop body comes last: it may leave, and all this is done.
                while len(unread) > (0 if is_due else 1):
                    report = self._reporting.read(unread[0])
                    is_current = report.step == self.step
                    eval_loss = self.evaluate() if is_eval and is_current else None
                    reports.append(self._reporting.write(report, eval_loss=eval_loss))
                    del unread[0]
                if is_save:
                    self._save(reports[-1])
                if is_eval or is_save:
                    self._reporting.start_clock()
                if self.snapshots:
                    self.snapshots.check()
                yield from reports
                if is_last:
                    self.stopped = self.step < until
                    return
        except (GeneratorExit, KeyboardInterrupt):
            for pending in unread:  # steps that are done have their lines, however the loop was left
                self._reporting.write(self._reporting.read(pending))
            raise

    def _end_without_data(self, unread: list[Pending]) -> Iterator[Report]:
        """Saves the last step that was done, where the run was asked to stop while it waited for data."""
        reports = [self._reporting.write(self._reporting.read(pending)) for pending in unread]
        unread.clear()
        if (last := self._reporting.last) and last.step == self.step:
            self._save(last)
        self.stopped = True
        yield from reports

    @property
    def executables(self) -> list[Any]:
        """What the compiler made of the step, for `memory_analysis` and `as_text`; waits for the compiler."""
        return self._program.executables

    def evaluate(self) -> float:
        """The mean loss over the targets of the held-out batches; always the same batches, and no change to training."""
        if self._evaluation is None or self.state is None:
            raise ConfigError("evaluation needs held_out data, eval_every and a state (open the run first)")
        return self._evaluation.loss(self.state)

    # ------------------------------------------------------------------------------------------ one step's parts

    def _save(self, report: Report) -> None:
        assert self.state is not None
        # The lines up to this step are written; a snapshot must never outlive them.
        self._saving.save(self.state, report, before_commit=self._reporting.sync)

    # ---------------------------------------------------------------------------------------------- starting

    def _wait_for_program(self, should_stop: Callable[[], bool]) -> None:
        # Agreed on as a step that lies before the first one: an answer after the barrier is the same everywhere, because
        # who wants to stop says so before he comes to it.
        agreement = Agreement()
        is_unwanted = lambda: agreement.agreed_step(self.step - 3, should_stop()) is not None
        self._is_compiled = self._program.wait(is_unwanted)
        is_unwanted()  # asked once at least: the compiler may have been done before the restore was
        self._group.barrier("compile the step")
        self.stopped = agreement.agreed_step(self.step - 3, False) is not None
        meta = self._resumed_meta
        if meta is not None and self._is_compiled and not self.stopped:
            here = {**environment(), "mesh": dict(self.mesh.shape), "placement": self._placement.to_json()}
            if text := moved_params_warning(meta.get("placement", {}), here["placement"], self._training):
                log.warning("%s", text)
            is_hint = self._beginning.is_compared_by_config(meta)
            self._program.check(meta, here, self._allow_changed, is_hint=is_hint)
