from jaxckpt.cli import app

app()
