"""`python -m jaxckpt.train --config FILE [key=value ...]`: arguments, signals and exit codes, nothing else.

Exit codes: 0 all steps are done; 2 the configuration or the snapshot cannot be used; 75 stopped early, the same
command continues; 1 training failed (the loss is not finite, a snapshot could not be written, another process failed).
"""

import gc
import logging
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

# Nothing that takes time: until `main` runs, a signal ends the process with its own exit code and not with 75.
from jaxckpt.distributed.signals import STOPPED, StopRequest, stop_on_signals
from jaxckpt.errors import JaxckptError

if TYPE_CHECKING:
    from jaxckpt.config import RunConfig
    from jaxckpt.run import Run


def main() -> None:
    """The command: trains, or continues from the newest snapshot of the run directory, bit for bit."""
    with stop_on_signals() as stop:
        _command(stop)()


def _command(stop: StopRequest) -> Any:
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def main(
        config: Annotated[Path, typer.Option(help="YAML file; `python -m jaxckpt config` lists every key.")],
        overrides: Annotated[
            list[str] | None,
            typer.Argument(help="Overrides of the file, such as optimizer.lr=1e-3.", metavar="[KEY=VALUE]..."),
        ] = None,
        allow_changed: Annotated[
            list[str] | None,
            typer.Option(help="A key (or section) that may differ from the snapshot's config; may be repeated."),
        ] = None,
    ) -> None:
        """Trains, or continues from the newest snapshot of the run directory, bit for bit."""
        from jaxckpt.config import load_config

        is_one_of_many = False
        try:
            loaded = load_config(config, overrides or ())
            is_one_of_many = (loaded.distributed.num_processes or 1) > 1
            exit_code = train(loaded, allow_changed=allow_changed or (), stop=stop)
        except Exception as e:
            if is_one_of_many:
                _tell_the_others(e)
            if isinstance(e, JaxckptError):
                print(e, file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            exit_code = e.exit_code if isinstance(e, JaxckptError) else 1
            # JAX's own way out waits minutes for the others, who end too.
            _leave(exit_code, at_once=is_one_of_many)
        if is_one_of_many:
            _leave_together(is_at_once=exit_code == STOPPED)
        # A run that was stopped may have left a compiler at work, for which Python would wait.
        _leave(exit_code, at_once=exit_code == STOPPED)

    return app


def train(config: "RunConfig", *, allow_changed: list[str] | tuple[str, ...], stop: StopRequest) -> int:
    """Runs `config` to its end or to a stop request; the exit code."""
    # One of several processes goes on until all can agree to stop, in `open` or after a step.
    is_alone = (config.distributed.num_processes or 1) == 1
    if not is_alone:
        stop.consequence = "stopping where all processes can: before the first step, or after a saved one"
    unopened = f"{config.run_dir}: stopped before the run was opened; what was saved before is untouched"
    if stop and is_alone:
        print(unopened, flush=True)
        return STOPPED
    # Importing and tracing make millions of objects that stay. Looking for garbage among them costs 0.4 s of a restart.
    gc.disable()
    # Imported here, so that a bad configuration is refused before JAX costs its seconds.
    from jaxckpt.observe.phases import Phases, process_age_s

    phases = Phases()
    with phases.phase("imports"):
        import jax
        from rich.console import Console

        from jaxckpt.build import build
        from jaxckpt.distributed import watch
        from jaxckpt.observe.progress import TrainingProgress
        from jaxckpt.planning.compare import compare
        from jaxckpt.state.memory import memory_table
    phases.seconds["imports"] = process_age_s()  # the interpreter's own start and the first imports count too

    is_primary = config.distributed.process_id in (None, 0)
    logging.basicConfig(
        level=logging.INFO if is_primary else logging.WARNING, format="%(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("absl").setLevel(logging.WARNING)
    logging.getLogger("jax").setLevel(logging.WARNING)
    console = Console(quiet=not is_primary)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)

    if stop and is_alone:
        say(unopened)
        return STOPPED
    with build(config, allow_changed=allow_changed, phases=phases) as run:
        if watching := watch.current():
            stop.before_leaving = watching.fail
        if stop and is_alone:
            say(f"{config.run_dir}: {_stopped_untrained(run)}")
            return STOPPED
        console.print(memory_table(run.plan))
        run.open(config.steps, should_stop=lambda: bool(stop))
        first = run.step
        if run.stopped:
            say(f"{config.run_dir}: {_stopped_untrained(run)}")
            return STOPPED
        say(
            f"{config.run_dir}: {'continues after' if first else 'starts at'} step {first} of {config.steps} on "
            f"{jax.device_count()} {jax.local_devices()[0].device_kind} device(s), {jax.process_count()} process(es)"
        )
        if first >= config.steps:
            say(f"all {config.steps} steps are done; raise steps to train on")
            return 0
        stop.consequence = "saving after the step at hand, then stopping"
        stop.loss = "the steps since the newest snapshot are lost"
        with TrainingProgress(console, total=config.steps, start=first) as progress:
            for report in run.train(config.steps, should_stop=lambda: bool(stop)):
                progress.show(
                    report.step, loss=report.loss, eval_loss=report.eval_loss, tokens_per_s=report.tokens_per_s
                )
                if "first step" in phases.seconds:
                    say(f"start-up: {phases.line()}; {process_age_s():.2f} s from process start")
                    if line := compare(run.executables):
                        say(line)
                    phases.seconds.clear()
                    gc.freeze()
                    gc.enable()
        stop.loss = "all that was trained is saved"
        if run.stopped and run.step == first:
            say(_stopped_untrained(run))
            return STOPPED
        if run.stopped:
            say(f"stopped after step {run.step} of {config.steps}, saved; the same command continues from there")
            return STOPPED
    say(f"done: {config.steps} steps; snapshots and metrics.jsonl are in {config.run_dir}")
    return 0


def _stopped_untrained(run: "Run") -> str:
    """What a stop before the first step has cost."""
    saved = run.snapshots.steps()[-1:] if run.snapshots else []
    since = f"since step {saved[0]}, which is saved" if saved else "and nothing is saved yet"
    return f"stopped; nothing was trained {since}; the same command continues from there"


def _tell_the_others(error: Exception) -> None:
    """Names `error` on the other processes, if this one has joined them."""
    from jaxckpt.distributed import watch

    if watching := watch.current():
        watching.fail_with(error)


def _leave_together(*, is_at_once: bool) -> None:
    """Returns once every process is done, so that none takes another's end for a failure."""
    from jaxckpt.distributed import watch

    if watching := watch.current():
        watching.leave(watch.LEAVING_TOGETHER_S)
        if is_at_once:
            import jax

            jax.distributed.shutdown()


def _leave(exit_code: int, *, at_once: bool) -> NoReturn:
    """Ends the process; at once, it skips what Python and JAX would still wait for."""
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
