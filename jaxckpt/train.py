"""`python -m jaxckpt.train --config FILE [key=value ...]`: arguments and exit codes, nothing else.

Exit codes: 0 all steps are done; 2 the configuration or the snapshot cannot be used; 75 stopped early, the same
command continues; 1 training failed (the loss is not finite, a snapshot could not be written).
"""

import gc
import logging
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from jaxckpt.config import RunConfig, load_config
from jaxckpt.distributed.signals import STOPPED, StopRequest, stop_on_signals
from jaxckpt.errors import JaxckptError

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
    is_one_of_many = False
    try:
        with stop_on_signals() as stop:
            loaded = load_config(config, overrides or ())
            is_one_of_many = (loaded.distributed.num_processes or 1) > 1
            raise SystemExit(train(loaded, allow_changed=allow_changed or (), stop=stop))
    except JaxckptError as e:
        print(e, file=sys.stderr, flush=True)
        _leave(e.exit_code, at_once=is_one_of_many)
    except Exception:
        traceback.print_exc()
        _leave(1, at_once=is_one_of_many)


def _leave(exit_code: int, *, at_once: bool) -> NoReturn:
    """Ends the process. One of many does so at once: JAX's own way out waits minutes for the others, who wait for us."""
    if at_once:
        sys.stderr.flush()
        os._exit(exit_code)
    raise SystemExit(exit_code)


def train(config: RunConfig, *, allow_changed: list[str] | tuple[str, ...], stop: StopRequest) -> int:
    """Runs `config` to its end or to a stop request; the exit code."""
    # Importing and tracing make millions of objects that stay. Looking for garbage among them costs 0.4 s of a restart.
    gc.disable()
    # Imported here, so that a bad configuration is refused before JAX costs its seconds.
    from jaxckpt.observe.phases import Phases, process_age_s

    phases = Phases()
    with phases.phase("imports"):
        import jax
        from rich.console import Console

        from jaxckpt.build import build
        from jaxckpt.observe.progress import TrainingProgress
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

    with build(config, allow_changed=allow_changed, phases=phases) as run:
        console.print(memory_table(run.plan))
        run.open(config.steps)
        first = run.step
        say(
            f"{config.run_dir}: {'continues after' if first else 'starts at'} step {first} of {config.steps} on "
            f"{jax.device_count()} {jax.local_devices()[0].device_kind} device(s), {jax.process_count()} process(es)"
        )
        if first >= config.steps:
            say(f"all {config.steps} steps are done; raise steps to train on")
            return 0
        with TrainingProgress(console, total=config.steps, start=first) as progress:
            for report in run.train(config.steps, should_stop=lambda: bool(stop)):
                progress.show(
                    report.step, loss=report.loss, eval_loss=report.eval_loss, tokens_per_s=report.tokens_per_s
                )
                if "first step" in phases.seconds:
                    say(f"start-up: {phases.line()}; {process_age_s():.2f} s from process start")
                    phases.seconds.clear()
                    gc.freeze()
                    gc.enable()
        if run.stopped:
            say(f"stopped after step {run.step} of {config.steps}, saved; the same command continues from there")
            return STOPPED
    say(f"done: {config.steps} steps; snapshots and metrics.jsonl are in {config.run_dir}")
    return 0


if __name__ == "__main__":
    app()
