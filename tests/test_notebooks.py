"""Every notebook of experiments/ runs from top to bottom, and is committed with what it printed."""

import importlib.metadata
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPOSITORY / "experiments").glob("*.ipynb"))
TIMEOUT_S = 300

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def native_kernel() -> AsyncKernelManager:
    """ipykernel under the interpreter that runs the tests; a kernel installed as 'python3' may be another one's."""
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def make_package_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.distribution("jaxckpt")
    except importlib.metadata.PackageNotFoundError:
        inherited = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *([inherited] if inherited else [])]))


def test_notebook_runs_without_an_error_from_any_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package_importable(monkeypatch)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, km=native_kernel(), timeout=TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(cleanup_kc=True)  # or the kernel and its sockets stay open, because the manager is ours


def test_notebook_is_committed_with_its_outputs_and_without_warnings(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it from the top, then save"
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    for text in map(output_text, outputs):
        assert not re.search(r"/(home|root|Users|tmp|var)/", text), f"a path of the machine that ran it: {text}"


def output_text(output: nbformat.NotebookNode) -> str:
    return output.get("text", "") + "".join(
        data for kind, data in output.get("data", {}).items() if kind.startswith("text/")
    )
