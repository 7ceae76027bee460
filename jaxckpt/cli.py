"""`python -m jaxckpt …`: the commands beside training. None of them touches an accelerator.

Exit codes: 0 done, good, equal; 1 damaged (`verify`), different (`diff`), too large (`plan`); 2 it could not be done, and why.
"""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from jaxckpt.errors import JaxckptError, SnapshotError

if TYPE_CHECKING:
    from jaxckpt.observe.progress import BytesProgress


class _Commands(TyperGroup):
    """Prints what went wrong without a traceback, and exits with 2: 1 says damaged or different."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has left; click ends quietly
        except (JaxckptError, OSError) as e:
            typer.echo(str(e) if isinstance(e, JaxckptError) else f"{type(e).__name__}: {e}", err=True)
            raise typer.Exit(2) from None
        except typer.Abort:  # the answer was no, or nobody is there to answer
            typer.echo("nothing was done", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_WHERE = "a run directory, its snapshots, or a step's directory; local or gs://"
Run = Annotated[str, typer.Argument(metavar="PATH", help=_WHERE)]
Path = Annotated[str, typer.Argument(metavar="PATH[@STEP|@PIN]", help=f"{_WHERE}; the newest step without @")]
Step = Annotated[int | None, typer.Option("--step", help="the step, instead of @STEP")]
Json = Annotated[bool, typer.Option("--json", help="one JSON value on stdout")]


@app.callback()
def jaxckpt() -> None:
    """Exactly resumable training for JAX and Flax. To train: python -m jaxckpt.train --config FILE"""


@app.command()
def config() -> None:
    """Prints every configuration key with its type, default and meaning."""
    from jaxckpt.config import describe, format_table

    typer.echo(format_table(describe()))


@app.command()
def ls(path: Run, as_json: Json = False) -> None:
    """Lists the snapshots of a run: step, time, size, pins, metrics; also damaged and superseded ones."""
    from jaxckpt.observe import snapshot_text
    from jaxckpt.snapshot.inspect import list_steps
    from jaxckpt.snapshot.locate import root_of

    rows = list_steps(root_of(path))
    if as_json:
        _echo_json(rows)
    else:
        typer.echo(snapshot_text.of_steps(rows))


@app.command()
def inspect(path: Path, step: Step = None, as_json: Json = False) -> None:
    """Shows what a snapshot holds: sizes, leaves, shardings, tiers, configuration, versions, mesh, data position."""
    from jaxckpt.observe import snapshot_text
    from jaxckpt.snapshot.inspect import inspect as inspect_step
    from jaxckpt.snapshot.locate import locate_step

    found = inspect_step(*locate_step(path, step))
    if as_json:
        _echo_json(found)
    else:
        typer.echo(snapshot_text.of_step(found))


@app.command()
def verify(
    path: Path,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="all steps of the run")] = False,
    as_json: Json = False,
) -> None:
    """Checks a snapshot, or a token store, bit for bit against what was saved. Exit code 0: good, 1: damaged.

    A run may be writing to the snapshots.
    """
    if os.path.isfile(os.path.join(path, "store.json")) or os.path.isfile(os.path.join(path, "train", "store.json")):
        _verify_stores(path, as_json)
        return
    from jaxckpt.snapshot import steps
    from jaxckpt.snapshot.locate import locate_step, root_of
    from jaxckpt.snapshot.verify import array_bytes
    from jaxckpt.snapshot.verify import verify as verify_step

    if every and (step is not None or "@" in path.rpartition("/")[2]):
        raise SnapshotError("--all checks every step; give a run directory without a step.")
    if every:
        root = root_of(path)
        todo = steps.committed_steps(root)
    else:
        root, number = locate_step(path, step)
        todo = [number]
    if not todo:
        raise SnapshotError(f"no snapshot found in {root}. Give a run directory that has been saved to.")
    results: dict[int, list[str]] = {}
    for number in todo:
        try:
            with _progress(f"step {number}", array_bytes(root, number)) as progress:
                results[number] = verify_step(root, number, on_bytes=progress.add)
        except SnapshotError:
            if not every or number in steps.committed_steps(root):
                raise
            continue  # the run has deleted it, as it does with old ones
        if not as_json:
            problems = results[number]
            typer.echo(
                f"{steps.step_path(root, number)}: " + (f"damaged, {len(problems)} found" if problems else "good")
            )
            for problem in problems:
                typer.echo(f"  {problem}")
    if as_json:
        _echo_json([{"step": n, "is_good": not problems, "problems": problems} for n, problems in results.items()])
    if any(results.values()):
        raise typer.Exit(1)


@app.command()
def diff(
    a: Path,
    b: Path,
    quick: Annotated[bool, typer.Option("--quick", help="believe the saved fingerprints where they are equal")] = False,
    as_json: Json = False,
) -> None:
    """Compares two snapshots, every bit: configuration, data position, structure, leaves. Exit code 0: equal, 1: different.

    What cannot change the state (run_dir, versions, mesh, devices, how often is saved) is shown and does not count.
    """
    from jaxckpt.observe import snapshot_text
    from jaxckpt.snapshot.diff import diff as compare
    from jaxckpt.snapshot.locate import locate_step
    from jaxckpt.snapshot.verify import array_bytes

    one, other = locate_step(a), locate_step(b)
    with _progress("compare", array_bytes(*one)) as progress:
        found = compare(one, other, quick=quick, on_bytes=progress.add)
    if as_json:
        from dataclasses import asdict

        _echo_json({"is_equal": found.is_equal, **asdict(found)})
    else:
        typer.echo(snapshot_text.of_difference(found))
    if not found.is_equal:
        raise typer.Exit(1)


@app.command()
def pin(
    path: Path,
    name: Annotated[str, typer.Argument(metavar="NAME", help="of letters, digits, '.', '_' and '-'")],
    step: Step = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="remove the pin NAME; its step stays until a run deletes it")
    ] = False,
    as_json: Json = False,
) -> None:
    """Keeps a step for good, under a name. A run that is training goes on."""
    from jaxckpt.snapshot import steps
    from jaxckpt.snapshot.locate import locate_step, root_of

    if remove:
        root, number = root_of(path), None
        steps.unpin(root, name)
    else:
        root, number = locate_step(path, step)
        steps.pin(root, number, name)
        if number not in steps.committed_steps(root):  # a run deleted it between our look and the pin
            steps.unpin(root, name)
            raise SnapshotError(f"{root}: step {number} was deleted while it was pinned; pin another one.")
    if as_json:
        _echo_json({"pins": steps.pins(root)})
    else:
        typer.echo(f"the pin {name} is removed" if remove else f"step {number} is pinned as {name}")


@app.command()
def rm(
    path: Path,
    step: Step = None,
    force: Annotated[bool, typer.Option("--force", help="also the newest step, from which a run would go on")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Deletes a step. Not one that is pinned, and not while a run is training in this directory."""
    from jaxckpt.snapshot import steps
    from jaxckpt.snapshot.locate import locate_step
    from jaxckpt.snapshot.lock import RunLock

    root, number = locate_step(path, step)
    # Only a directory of this name is ever a run's.
    lock = RunLock(root.parent, say=lambda text: typer.echo(text, err=True)) if root.name == "snapshots" else None
    try:
        if pins := [name for name, pinned in steps.pins(root).items() if pinned == number]:
            raise SnapshotError(
                f"{root}: step {number} is pinned as {', '.join(pins)}. Remove the pin first: python -m jaxckpt pin --remove"
            )
        if number == steps.committed_steps(root)[-1] and not force:
            raise SnapshotError(
                f"{root}: step {number} is the newest, from which a run would go on. Give --force to delete it, or the step "
                "that you mean: --step N"
            )
        if not yes:
            typer.confirm(f"Delete step {number} of {root}?", abort=True, err=True)
        steps.delete(root, number)
    finally:
        if lock is not None:
            lock.release()
    if as_json:
        _echo_json({"deleted": number, "steps": steps.committed_steps(root)})
    else:
        typer.echo(f"step {number} is deleted")


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="files, directories or patterns, local or gs://: .txt, .jsonl, .parquet, .array_record (text and JSON also .gz "
            "and .zst), and what Hugging Face datasets saved to disk",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="the store; with --holdout DIR/train, DIR/held_out")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help='"bytes", a tokenizer.json, or train:SIZE for a new byte-level BPE')
    ] = "bytes",
    eos: Annotated[str | None, typer.Option("--eos", help="token or number that ends a document")] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="of a record: text, chat or prompt_response; of the last two answers are learned"
        ),
    ] = "text",
    field: Annotated[
        str | None,
        typer.Option(
            "--field",
            help="of the text in a record; of a chat; PROMPT,RESPONSE  [default: text, messages, prompt,response]",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", metavar="FILE", help="chat template in Jinja, instead of the tokenizer's"),
    ] = None,
    date: Annotated[
        str | None, typer.Option("--date", metavar="YYYY-MM-DD", help="for templates that write today's date")
    ] = None,
    holdout: Annotated[float, typer.Option("--holdout", help="share of the documents to evaluate on")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="which documents those are")] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out what cannot be read, and list it")] = False,
    max_document: Annotated[str, typer.Option("--max-document", metavar="SIZE", help="the longest")] = "256MiB",
    train_bytes: Annotated[
        str, typer.Option("--train-bytes", metavar="SIZE", help="of text that train:SIZE looks at")
    ] = "1GiB",
    restart: Annotated[bool, typer.Option("--restart", help="forget what an interrupted command has done")] = False,
) -> None:
    """Turns text into a token store to train on. The same command goes on after it was interrupted."""
    from jaxckpt.data import command
    from jaxckpt.data.prepare import Settings
    from jaxckpt.data.sources import Wanted

    render = command.make_render(format_, field=field, template=template, date=date, tokenizer=tokenizer)
    settings = Settings(
        tokenizer=tokenizer,
        eos=int(eos) if eos and eos.isdecimal() else eos,
        wanted=Wanted(
            field=field if render is None else None, render=render, max_document=command.parse_bytes(max_document)
        ),
        render=render and render.fingerprint,
        holdout=holdout,
        seed=seed,
        skip_bad=skip_bad,
        train_bytes=command.parse_bytes(train_bytes),
    )
    code, text = command.run(inputs, out, settings, restart=restart)
    typer.echo(text, err=bool(code))
    if code:
        raise typer.Exit(code)


@app.command()
def plan(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="YAML file, as for python -m jaxckpt.train")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="of the file")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="compile for h200, a100-80, a100-40, rtx4090, l4 or cpu")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="in all  [default: mesh.cpu_devices, or 1]")
    ] = None,
    device_memory: Annotated[str | None, typer.Option("--device-memory", metavar="SIZE", help="of each device")] = None,
    host_memory: Annotated[str | None, typer.Option("--host-memory", metavar="SIZE", help="of each process")] = None,
    h2d: Annotated[str | None, typer.Option("--h2d", metavar="RATE", help="to the device, such as 25GB/s")] = None,
    d2h: Annotated[str | None, typer.Option("--d2h", metavar="RATE", help="from the device")] = None,
    disk_read: Annotated[str | None, typer.Option("--disk-read", metavar="RATE", help="of each process")] = None,
    disk_write: Annotated[str | None, typer.Option("--disk-write", metavar="RATE", help="of each process")] = None,
    flops: Annotated[str | None, typer.Option("--flops", metavar="RATE", help="of each device: 400TFLOP/s")] = None,
    as_json: Json = False,
) -> None:
    """What a run will need, before it runs: memory, disk, seconds a step. Exit code 0: it fits, 1: it does not.

    Works without an accelerator, allocates nothing, and leaves the run directory alone.
    """
    from jaxckpt.planning import command

    rates = {"h2d": h2d, "d2h": d2h, "disk_read": disk_read, "disk_write": disk_write, "flops": flops}
    found = command.run(config, overrides or (), (target, devices, device_memory, host_memory, rates), as_json=as_json)
    if as_json:
        _echo_json(found)
    if not found["fits"]:
        raise typer.Exit(1)


def _verify_stores(path: str, as_json: bool) -> None:
    from jaxckpt.data import check

    results: dict[str, list[str]] = {}
    for store in check.stores_in(path):
        with _progress(str(store), check.store_bytes(store)) as progress:
            results[str(store)] = check.check_store(store, on_bytes=progress.add)
    if as_json:
        _echo_json([{"store": name, "is_good": not found, "problems": found} for name, found in results.items()])
    else:
        for name, found in results.items():
            typer.echo(f"{name}: " + (f"damaged, {len(found)} found" if found else "good"))
            for problem in found:
                typer.echo(f"  {problem}")
    if any(results.values()):
        raise typer.Exit(1)


def _echo_json(value: Any) -> None:
    from jaxckpt.observe.as_json import json_text

    typer.echo(json_text(value))


def _progress(what: str, total: int) -> "BytesProgress":
    from rich.console import Console

    from jaxckpt.observe.progress import BytesProgress

    return BytesProgress(Console(stderr=True), what, total=total)
