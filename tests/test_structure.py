"""Imports go one way; this file is the drawing of the house."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxckpt"

# Each floor may import its own and those below it.
FLOORS = [
    {"errors", "state", "models", "distributed"},
    {"update", "nvme", "snapshot", "data", "hf", "observe", "config"},
    {"exactness", "arguments", "program", "beginning", "evaluation", "saving", "tiers", "reporting"},
    {"run"},
    {"build", "planning"},
    {"train", "cli", "__main__", "__init__"},
]
CONFIG_READERS = {"build", "planning", "train", "cli", "config"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """Absolute names of every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def area(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(name):
    floors = [i for i, names in enumerate(FLOORS) if name in names]
    assert floors, f"jaxckpt/{name} stands on no floor: add it to FLOORS"
    return floors[0]


def ours(path):
    """The areas of this package that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("jaxckpt.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_or_stay_in_their_own_area(path):
    here = area(path)
    for other in ours(path) - {here}:
        assert floor_of(other) <= floor_of(here), f"{path} imports jaxckpt.{other}, which stands above it"
        assert here == "__main__" or other not in ("train", "cli"), f"{path} imports an entry point"


def test_models_import_nothing_of_ours():
    assert {p: ours(p) - {"models"} for p in FILES if area(p) == "models" if ours(p) - {"models"}} == {}


def test_only_three_files_talk_to_orbax():
    assert [str(p.relative_to(PACKAGE)) for p in FILES if any(n.split(".")[0] == "orbax" for n in imported(p))] == [
        "snapshot/orbax_arrays.py",
        "snapshot/orbax_io.py",
        "snapshot/orbax_seam.py",
    ]


def test_only_hf_reads_safetensors_and_transformers():
    users = {area(p) for p in FILES if any(n.split(".")[0] in ("safetensors", "transformers") for n in imported(p))}
    assert users <= {"hf"}


def test_the_configuration_ends_where_building_begins():
    assert {area(p) for p in FILES if "config" in ours(p)} <= CONFIG_READERS


def test_no_file_is_a_drawer_for_everything():
    assert not {p.stem for p in FILES} & {"utils", "util", "common", "helpers", "misc", "manager"}


def test_the_walk_sees_what_it_should():
    assert {"state", "snapshot"} <= ours(PACKAGE / "run.py") and len(FILES) > 20
