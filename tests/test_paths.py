"""A run lives in a local directory or on gs://; everything else is refused before anything is written."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxckpt.config.values import RunDirectory
from jaxckpt.errors import SnapshotError
from jaxckpt.snapshot import paths

RUN_DIRECTORY = TypeAdapter(RunDirectory)


def test_a_local_path_becomes_absolute_with_the_home_directory_filled_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.fspath(paths.resolve("runs/a")) == os.fspath(tmp_path / "runs" / "a")
    assert os.fspath(paths.resolve(Path("~/x"))) == os.path.expanduser("~/x")
    assert os.fspath(paths.resolve("a:b/c")) == os.fspath(tmp_path / "a:b" / "c")
    assert paths.is_local(paths.resolve("runs/a"))


def test_a_path_on_gs_keeps_its_scheme_through_every_child():
    path = paths.resolve("gs://bucket//run/a/")
    assert os.fspath(path) == "gs://bucket/run/a" == os.fspath(paths.resolve(path))
    assert os.fspath(path / "snapshots") == "gs://bucket/run/a/snapshots"
    assert not paths.is_local(path / "snapshots")


REFUSED = {
    "s3://bucket/x": "s3://",
    "gcs://bucket/x": "gcs://",
    "file:///tmp/x": "file://",
    "http://host/x": "http://",
    "gs:/bucket/x": "",  # what pathlib makes of a URL
    "gs://bucket": "prefix",
    "gs://bucket/": "prefix",
    "gs:///run": "prefix",
    "gs://Bucket/run": "prefix",
    "runs/a*": "pattern",
    "gs://bucket/run[1]": "pattern",
    " ": "empty",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_used_is_refused_by_the_configuration_and_by_the_library(path):
    with pytest.raises(SnapshotError) as refusal:
        paths.resolve(path)
    assert (path in str(refusal.value) or not path.strip()) and REFUSED[path] in str(refusal.value)
    with pytest.raises(ValidationError) as error:
        RUN_DIRECTORY.validate_python(path)
    assert REFUSED[path].replace("empty", "empty text") in str(error.value).replace("a pattern", "pattern")


@pytest.mark.parametrize("path", ["runs/a", "gs://bucket/run", "gs://my-bucket.org/a/b"])
def test_the_configuration_takes_what_the_library_takes(path):
    assert RUN_DIRECTORY.validate_python(path) == path
    paths.resolve(path)


def in_a_new_process(code, **environment):
    """What `code` prints."""
    # Without what this process has set for itself when it first saw a path on gs://.
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TENSORSTORE_", "EPATH_", "GCSFS_", "FSSPEC_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, **environment},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_gs_without_gcsfs_names_the_package_to_install(tmp_path):
    # A finder that hides one package, as if it were not installed.
    (tmp_path / "hide.py").write_text(
        "import importlib.util\nfound = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'gcsfs' else found(name, *a)\n"
    )
    code = (
        "import hide\nfrom jaxckpt.snapshot import paths\nfrom jaxckpt.errors import SnapshotError\n"
        "try: paths.resolve('gs://bucket/x')\nexcept SnapshotError as e: print(str(e).replace(' ', '_'))"
    )
    root = Path(importlib.util.find_spec("jaxckpt").origin).parents[1]
    (text,) = in_a_new_process(code, PYTHONPATH=f"{tmp_path}:{root}")
    assert text.endswith("pip_install_'jaxckpt[gcs]'")


SHOW = """
import os
from jaxckpt.snapshot import paths
paths.resolve("gs://bucket/x")
from jaxckpt.snapshot import gcs
fs = gcs.filesystem()
print(fs.dircache.use_listings_cache, fs.requests_timeout, fs.project or "-",
      os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"], os.environ["EPATH_USE_TF"])
"""
ANONYMOUS = '"token": "anon"'


def test_every_request_has_a_limit_and_no_listing_is_cached():
    out = " ".join(in_a_new_process(SHOW, FSSPEC_GCS=f"{{{ANONYMOUS}}}", JAXCKPT_GCS_TIMEOUT_S="7.5"))
    assert out.startswith("False ClientTimeout(total=150.0, ") and "sock_read=7.5, sock_connect=7.5" in out
    assert out.endswith("8 0")


def test_what_the_user_has_set_stays_except_for_the_cache():
    settings = f'{{{ANONYMOUS}, "requests_timeout": 3, "use_listings_cache": true, "project": "mine"}}'
    out = in_a_new_process(SHOW, FSSPEC_GCS=settings, TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS="99")
    assert out == ["False", "3", "mine", "99", "0"]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(value, monkeypatch):
    monkeypatch.setenv(paths.TIMEOUT_VARIABLE, value)
    with pytest.raises(SnapshotError, match=f"JAXCKPT_GCS_TIMEOUT_S='{value}': expected a number of seconds"):
        paths.resolve("gs://bucket/x")
