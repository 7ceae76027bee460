"""A run: restore or initialise, then train. The only place with a training loop."""

import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxckpt.data.batches import BatchStream, check_reproducible
from jaxckpt.distributed.sync import Group, StopAgreement
from jaxckpt.errors import ConfigError, NonFiniteError, PlanError, SnapshotError
from jaxckpt.observe.metrics import MetricsFile, float_bits
from jaxckpt.observe.phases import Phases
from jaxckpt.snapshot.snapshot import FORMAT, Snapshot, Snapshots, environment, leaf_table
from jaxckpt.state import tree
from jaxckpt.state.fingerprint import combine, np_fingerprint, to_hex
from jaxckpt.state.mesh import batch_sharding, make_mesh
from jaxckpt.state.plan import Placement, Rules, make_plan, shardings, unannotated
from jaxckpt.state.train_state import TrainState, take_apart
from jaxckpt.update.step import Loss, make_eval_step, make_finite_check, make_train_step

log = logging.getLogger("jaxckpt")


@dataclass(frozen=True)
class Report:
    """What one step did; plain numbers, read after the step is done."""

    step: int
    """updates done, this one included"""
    loss: float
    """mean over the targets of the batch, before the update"""
    loss_bits: str
    """the loss as the bits of a float32, in hexadecimal"""
    grad_norm: float
    """global norm before clipping"""
    lr: float | None
    tokens: float
    """targets in this batch"""
    tokens_per_s: float
    batch_digest: str
    """64-bit fingerprint of the global batch"""
    eval_loss: float | None = None
    """mean over the targets of the held-out batches, after the update; only at evaluation steps"""
    skipped: bool = False
    """the update was left out because its loss or gradient was not finite"""


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
        if nonfinite not in ("stop", "skip"):
            raise ConfigError(f"nonfinite={nonfinite!r}: expected 'stop' or 'skip'")
        if isinstance(model, nnx.Module) or not callable(model):
            raise ConfigError(
                f"model must be a function of nnx.Rngs that makes the module, such as lambda rngs: MyModel(rngs=rngs); found "
                f"{type(model).__name__}. A module made outside would hold its weights twice and could not be sharded."
            )
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise ConfigError(f"optimizer must be an optax.GradientTransformation; found {type(optimizer).__name__}")
        if eval_every and held_out is None:
            raise ConfigError(f"eval_every={eval_every} needs held_out data; give held_out, or eval_every=None")
        self.mesh = mesh if mesh is not None else make_mesh()
        self.snapshots = snapshots
        self.phases = phases or Phases()
        self.state: TrainState | None = None
        self.step = 0
        """updates done"""
        self.stopped = False
        """whether the last `train` ended because it was asked to stop"""

        self._training = {
            "seed": seed,
            "global_batch": global_batch,
            "accumulation_steps": accumulation_steps,
            "max_grad_norm": max_grad_norm,
            "nonfinite": nonfinite,
            "compute_dtype": None if compute_dtype is None else str(np.dtype(compute_dtype)),
        }
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
            if held_out is not None and eval_every:
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
        self._jaxpr: Any = None
        self._program: Future[str] | None = None
        self._is_closed = False
        self._resumed_meta: Mapping[str, Any] | None = None
        self._last_saved: int | None = None
        self._data_checked = False

    # ---------------------------------------------------------------------------------------------- training

    def train(self, until: int, *, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Report]:
        """Trains until `until` updates are done in all, from the newest snapshot or from the start; yields each step's Report.

        `should_stop` is asked after every step; once it says yes on any process, all stop after the same step and
        save it, and `stopped` is set. The last step is always saved. Reports come one step late, so that the device
        never waits for the host, except where a step is evaluated, saved or the last. Leaving the loop by `break` saves
        nothing: ask for a stop instead.
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
        if self.state is not None:
            if self._compiled is None:
                self._compiled = self._compile()
            return
        step = self._choose_step()
        meta = self.snapshots.read_meta(step) if self.snapshots and step is not None else None
        if meta is not None:
            self._check_training(meta)
        is_finished = step is not None and until is not None and step >= until
        compiling = None if is_finished else self._background.submit(self._compile)
        try:
            if self.snapshots and step is not None:
                with self.phases.phase("restore"):
                    snapshot = self.snapshots.restore(step, self.plan, compute_dtype=self._compute_dtype)
                    self._stream.restore(self._accepted_data(snapshot.data))
                    self._check_last_batch(snapshot)
                self.state, self.step, self._last_saved = snapshot.state, step, step
            else:
                with self.phases.phase("init"):
                    self.state = jax.block_until_ready(jax.jit(self._init, out_shardings=shardings(self.plan))())
            if not is_finished:
                self._stream.start()
        finally:
            if compiling is not None:
                self._compiled = compiling.result()
        if meta is not None and not is_finished:
            self._check_captured(meta)
        self._resumed_meta = meta
        if self.snapshots and self._group.is_primary:
            self._metrics = MetricsFile(self.snapshots.run_dir / "metrics.jsonl", resume_step=self.step)
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
        agreement = StopAgreement()
        self._clock = time.perf_counter()
        pending: _Pending | None = None
        is_first = True
        try:
            while self.step < until:
                batch = next(self._stream)
                started = time.perf_counter()
                # From here on the state and the stream's position are of this step, and a save must come before the
                # next batch is drawn.
                self.state, metrics = self._compiled(self.state, batch)
                self.step += 1
                previous, pending = pending, _Pending(self.step, metrics)
                if previous is not None:
                    yield self._write(self._read(previous))
                if is_first:
                    jax.block_until_ready(metrics)
                    self.phases.seconds["first step"] = time.perf_counter() - started
                    is_first = False
                    self._after_first_step()

                last = agreement.last_step(self.step, should_stop())
                is_last = self.step >= until or (last is not None and self.step >= last)
                is_eval = self._eval_every is not None and self.step % self._eval_every == 0
                is_save = self.snapshots is not None and (is_last or self.step % self.snapshots.every == 0)
                if is_last or is_eval or is_save:
                    # Order: the numbers of this step, then its line in the file, then the snapshot. A snapshot of
                    # step s therefore always finds the lines up to s in place, and its state has been checked.
                    report = self._read(pending)
                    pending = None
                    report = self._write(report, eval_loss=self.evaluate() if is_eval else None)
                    if is_save:
                        self._save(report)
                    self._clock = time.perf_counter()
                    yield report
                if self.snapshots:
                    self.snapshots.check()
                if is_last:
                    self.stopped = self.step < until
                    return
        except GeneratorExit:
            if pending is not None:  # the loop's body was left by `break`: the step is done, so its line belongs there
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
        return math.fsum(float(t) for t in totals) / max(math.fsum(float(c) for c in counts), 1.0)

    # ------------------------------------------------------------------------------------------ one step's parts

    def _read(self, pending: "_Pending") -> Report:
        values = jax.device_get(pending.metrics)
        previous, self._clock = self._clock, time.perf_counter()
        tokens = float(values["tokens"])
        is_finite = bool(values["finite"])
        report = Report(
            step=pending.step,
            loss=float(values["loss"]),
            loss_bits=float_bits(values["loss"]),
            grad_norm=float(values["grad_norm"]),
            lr=float(values["lr"]) if "lr" in values else None,
            tokens=tokens,
            tokens_per_s=tokens / max(self._clock - previous, 1e-9),
            batch_digest=to_hex(values["batch_digest"]),
            skipped=not is_finite,
        )
        if not is_finite and self._nonfinite == "stop":
            raise NonFiniteError(
                f"step {report.step}: the loss is {report.loss} and the gradient's norm {report.grad_norm}. {self._way_back()}"
            )
        if not is_finite:
            log.warning("step %d: loss %s, gradient norm %s: update skipped", report.step, report.loss, report.grad_norm)
        return report

    def _write(self, report: Report, *, eval_loss: float | None = None) -> Report:
        report = Report(**{**asdict(report), "eval_loss": eval_loss})
        if self._metrics:
            self._metrics.write(_json_line(report))
        return report

    def _save(self, report: Report) -> None:
        assert self.snapshots is not None and self.state is not None and self._finite_check is not None
        if self._last_saved == self.step:
            return
        bad = sorted(p for p, ok in jax.device_get(self._finite_check.result()(self.state)).items() if not ok)
        if bad:
            raise NonFiniteError(f"step {self.step}: not finite any more: {', '.join(bad[:10])}. {self._way_back()}")
        if not self._data_checked:
            self._check_data(report)
        self.snapshots.save(Snapshot(self.state, self._stream.state(), self._meta(report)))
        self._last_saved = self.step

    def _way_back(self) -> str:
        saved = self.snapshots.steps()[-1:] if self.snapshots else []
        here = f"Nothing of it was saved; the newest snapshot is step {saved[0]}." if saved else "Nothing of it was saved."
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
            "program": self._program.result() if self._program else None,
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
        return self._group.from_primary("choose the snapshot to resume from", lambda: next(reversed(snapshots.steps()), None))

    def _compile(self) -> Any:
        with self.phases.phase("trace"):
            traced = self._step_fn.trace(self.plan, self._batch)
            self._captured = [_describe_constant(c) for c in traced.jaxpr.consts if np.ndim(c)]
        with self.phases.phase("lower"):
            lowered = traced.lower()
        self._jaxpr = traced.jaxpr
        with self.phases.phase("compile"):
            return lowered.compile()

    def _after_first_step(self) -> None:
        """Work for the background, once it no longer delays the first step."""
        if self.snapshots and self._finite_check is None:
            check = make_finite_check(self.plan)
            self._finite_check = self._background.submit(lambda: check.lower(self.plan).compile())
            self._program = self._background.submit(_program_hash, self._jaxpr)
            self._jaxpr = None
            self._background.submit(self._warn_if_program_changed)

    def _warn_if_program_changed(self) -> None:
        meta = self._resumed_meta
        if meta is None or self._program is None or not meta.get("program"):
            return
        same = all(meta.get(key) == value for key, value in {**environment(), "mesh": dict(self.mesh.shape)}.items())
        if same and meta.get("placement") == asdict(self._placement) and meta["program"] != self._program.result():
            log.warning(
                "the training step is not the program that the snapshot of step %d was trained with: code or numbers of the "
                "model, the loss or the optimizer have changed since",
                meta["step"],
            )

    def _check_accumulation(self, global_batch: int, accumulation_steps: int) -> None:
        shards = math.prod(self.mesh.shape[a] for a in ("data", "fsdp") if a in self.mesh.shape)
        if accumulation_steps < 1 or global_batch % (shards * accumulation_steps):
            raise PlanError(
                f"a batch of {global_batch} cannot be cut into {accumulation_steps} microbatches over {shards} devices "
                f"(mesh axes data and fsdp); it must be a multiple of {shards * max(accumulation_steps, 1)}"
            )

    def _check_training(self, meta: Mapping[str, Any]) -> None:
        """What was given in Python must be what the snapshot was made with; two configs have been compared already."""
        if self._config is not None and meta.get("config") is not None:
            return
        old = meta.get("training", {})
        changed = [
            f"  {key}: was {old.get(key)!r}, now {value!r}"
            for key, value in self._training.items()
            if old.get(key) != value and key not in self._allow_changed
        ]
        if changed:
            raise SnapshotError(
                f"{self.snapshots.run_dir if self.snapshots else ''}: this run was trained with other settings:\n"
                + "\n".join(changed)
                + "\nGive the old values, name a key in allow_changed to change it on purpose, or start a new run directory."
            )

    def _accepted_data(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data position, under the present data's fingerprint where a change of data was allowed by name."""
        names = {key.partition(".")[0] for key in self._allow_changed}
        return {**state, "fingerprint": self._stream.fingerprint} if names & {"data", "seed"} else state

    def _check_last_batch(self, snapshot: Snapshot) -> None:
        """The batch before the restored position must be the one that was trained on: the data are still the same."""
        stored, start = snapshot.meta.get("batch_digest"), snapshot.data["next_example"] - self._stream.global_batch
        changed_on_purpose = snapshot.data != self._stream.state()
        if jax.process_count() > 1 or start < 0 or changed_on_purpose:
            return
        found = to_hex(_np_digest(self._stream.batch_at(start)))
        if found != stored:
            raise SnapshotError(
                f"the data changed: the batch of step {snapshot.meta['step']} had the digest {stored} when it was trained on "
                f"and now has {found}. Give the data that the run began with, or start a new run directory."
            )

    def _check_captured(self, meta: Mapping[str, Any]) -> None:
        stored = meta.get("captured", [])
        if stored != self._captured and "captured" not in self._allow_changed:
            raise SnapshotError(
                "the model or loss reads arrays that are neither parameters nor model state, and they are not those that "
                f"the snapshot was trained with: then {_shapes(stored)}, now {_shapes(self._captured)}. Keep such arrays "
                "in an nnx.Variable of the model, or name 'captured' in allow_changed to go on with the new ones."
            )

    def _check_data(self, report: Report) -> None:
        """Before the first snapshot: the batch just trained on can be made again, or a resume would not be exact."""
        position = self._stream.state()["next_example"] - self._stream.global_batch
        warning = check_reproducible(self._stream, position)
        if jax.process_count() == 1:
            again = self._stream.batch_at(position)
            digest = to_hex(_np_digest(again))
            if digest != report.batch_digest:
                raise SnapshotError(
                    f"step {report.step}: the batch that was trained on has digest {report.batch_digest} and the same batch "
                    f"made again has {digest}, so this run could not be resumed exactly. Each example must be a function of "
                    "its number alone."
                )
        if warning:
            log.warning(warning)
        if self._captured:
            log.warning(
                "the model or loss reads arrays that are neither parameters nor model state (%s); snapshots hold only their "
                "hash, and a resume with other values is refused",
                _shapes(self._captured),
            )
        self._data_checked = True


@dataclass(frozen=True)
class _Pending:
    step: int
    metrics: dict[str, jax.Array]


def _json_line(report: Report) -> dict[str, Any]:
    line = {key: value for key, value in asdict(report).items() if value is not None}
    if not line["skipped"]:
        del line["skipped"]
    # JSON has no NaN and no infinity; the bits of the loss say which it was.
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()} | (
        {} if report.lr is not None else {"lr": None}
    )


def _np_digest(batch: Any) -> np.ndarray:
    return np.asarray(combine([jax.numpy.asarray(np_fingerprint(x)) for x in tree.flatten(batch).values()]))


def _program_hash(jaxpr: Any) -> str:
    """sha256 of the traced step; addresses of Python objects in its text are left out."""
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr)).encode()).hexdigest()


def _describe_constant(x: Any) -> dict[str, Any]:
    array = np.asarray(x)
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}


def _shapes(constants: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{c['dtype']}{c['shape']}" for c in constants) or "none"
