"""`python -m jaxckpt …`: the commands beside training."""

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def jaxckpt() -> None:
    """Exactly resumable training for JAX and Flax. To train: python -m jaxckpt.train --config FILE"""


@app.command()
def config() -> None:
    """Prints every configuration key with its type, default and meaning."""
    from jaxckpt.config import describe, format_table

    typer.echo(format_table(describe()))
