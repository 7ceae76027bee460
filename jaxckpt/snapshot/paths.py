"""Where a run may live: a local directory or `gs://bucket/prefix`, and what must be set before either is touched."""

import importlib.util
import logging
import math
import os
import re
from typing import Any

from etils import epath

from jaxckpt.errors import SnapshotError

TIMEOUT_VARIABLE = "JAXCKPT_GCS_TIMEOUT_S"
TIMEOUT_S = 30.0
"""how long one request to gs:// may hear nothing before it is tried again; TIMEOUT_VARIABLE sets another"""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def resolve(path: str | os.PathLike[str]) -> epath.Path:
    """`path` as an absolute `epath.Path`, with `~` expanded; a gs:// path is ready for use by gcsfs and tensorstore.

    Raises SnapshotError for another scheme, for characters that Orbax takes for a pattern, and for gs:// without gcsfs.
    """
    text = os.fspath(path)
    if not text.strip():
        raise SnapshotError("expected a directory or gs://bucket/prefix, found an empty text")
    if odd := sorted(set("*?[") & set(text)):
        raise SnapshotError(
            f"path {text!r} holds {' and '.join(odd)}, which Orbax takes for a pattern: its snapshots could not be read "
            "again. Give a path without these characters."
        )
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", text)
    if scheme is None:
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if scheme[1] != "gs":
        raise SnapshotError(
            f"path {text!r}: {scheme[1]}:// cannot be used. Give a local directory or gs://bucket/prefix."
        )
    bucket, *parts = re.sub(r"^gs:/+", "", text).split("/")
    parts = [part for part in parts if part]
    if not text.startswith("gs://") or not _BUCKET.fullmatch(bucket) or not parts or {".", ".."} & set(parts):
        raise SnapshotError(
            f"path {text!r}: expected gs://bucket/prefix, with a bucket's name of 3 or more of a-z 0-9 . _ - and a prefix "
            "without . or .. as parts"
        )
    _prepare_gcs()
    return epath.Path("/".join(["gs:/", bucket, *parts]))


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether `path`, as `resolve` gives it, lies on this machine's file systems."""
    return not os.fspath(path).startswith("gs://")


def timeout_s() -> float:
    """Seconds of silence after which a request to gs:// is given up and tried again."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise SnapshotError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds from 0.1 to 86400")
    return seconds


def tensorstore_context() -> dict[str, Any]:
    """Entries for a tensorstore context: how often a request to gs:// is tried again.

    Its own default of 32 tries would let a server that never answers hold a restore for half an hour.
    """
    return {"gcs_request_retries": {"max_retries": 6, "initial_delay": "1s", "max_delay": "16s"}}


def _prepare_gcs() -> None:
    """Settings of the libraries that reach gs://, each read at its first use. What the user has set stays."""
    if importlib.util.find_spec("gcsfs") is None:
        raise SnapshotError("gs:// needs the package gcsfs. Install it: pip install 'jaxckpt[gcs]'")
    seconds = timeout_s()
    for name, value in {
        # An installed TensorFlow would silently become the file system of etils.
        "EPATH_USE_TF": "0",
        # Otherwise every bucket is first asked for its kind through another API, whose rights a run need not have.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # tensorstore sets no limit of its own on a transfer that has stopped.
        "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
        "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(math.ceil(seconds)),
        "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(math.ceil(seconds)),
    }.items():
        os.environ.setdefault(name, value)
    from etils.epath import gpath

    if hasattr(gpath._is_tf_installed, "cache_clear"):
        gpath._is_tf_installed.cache_clear()  # it may have been asked before EPATH_USE_TF was set
    # They tell of every file that is read, and print a traceback for every error that they also raise.
    for name, level in {
        "fsspec": logging.WARNING,
        "gcsfs": logging.CRITICAL,
        "gcsfs.credentials": logging.WARNING,
    }.items():
        if (logger := logging.getLogger(name)).level == logging.NOTSET:
            logger.setLevel(level)
    import aiohttp
    import fsspec.config

    settings = fsspec.config.conf.setdefault("gcs", {})
    # A cached listing hides what other processes have written since.
    settings["use_listings_cache"] = False
    # gcsfs waits for ever where nothing is set. Silence is tried again (six times); a body that trickles is cut at last.
    silence = aiohttp.ClientTimeout(total=20 * seconds, sock_connect=seconds, sock_read=seconds)
    settings.setdefault("requests_timeout", silence)
