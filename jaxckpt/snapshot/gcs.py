"""Objects of gs://, through the JSON API of Google Cloud Storage: generations, listings, and many objects at once.

Paths are texts `gs://bucket/name`. gcsfs signs, sends and repeats the requests. Errors are OSErrors that name the path:
FileNotFoundError where nothing is there, FileExistsError where the generation is another than the one expected.
"""

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from jaxckpt.snapshot import paths

_AT_ONCE = 16


@dataclass(frozen=True)
class Stat:
    """What the server says of an object. Times are the server's own, in seconds since 1970."""

    generation: int
    updated: float
    now: float
    """the server's clock when it answered, to the second"""


def filesystem() -> Any:
    """The gcsfs file system, the same that `etils.epath` uses."""
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)


def names(directory: str) -> set[str]:
    """The names right under `directory`, of objects and of prefixes; empty where there is nothing."""
    bucket, prefix = _split(directory)
    found: set[str] = set()
    for page in _pages(directory, bucket, prefix=f"{prefix}/", delimiter="/"):
        found.update(item["name"] for item in page.get("items", []))
        found.update(name.rstrip("/") for name in page.get("prefixes", []))
    return {name.removeprefix(f"{prefix}/") for name in found} - {""}


def objects_under(directory: str) -> dict[str, int]:
    """{path: bytes} of all objects under `directory`, however deep."""
    bucket, prefix = _split(directory)
    pages = _pages(directory, bucket, prefix=f"{prefix}/")
    return {f"gs://{bucket}/{item['name']}": int(item["size"]) for page in pages for item in page.get("items", [])}


def read(path: str) -> bytes:
    """The whole object."""
    with _errors(path):
        return _call("GET", "b/{}/o/{}", *_split(path), alt="media")[1]


def stat(path: str) -> Stat:
    """The object's generation and age. Raises FileNotFoundError."""
    with _errors(path):
        headers, content = _call("GET", "b/{}/o/{}", *_split(path))
        found = json.loads(content)
        return Stat(
            generation=int(found["generation"]),
            updated=datetime.fromisoformat(found["updated"]).timestamp(),
            now=parsedate_to_datetime(headers["Date"]).timestamp(),
        )


def write(path: str, data: bytes, *, if_generation: int | None = None) -> int:
    """Writes the object in one request, so that it is there whole or not at all; its generation.

    With `if_generation` only over that generation (0: only where there is none), else FileExistsError. The answer may
    get lost and the request be repeated: then FileExistsError tells of our own object.
    """
    bucket, name = _split(path)
    boundary = uuid.uuid4().hex
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps({'name': name})}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    condition = {} if if_generation is None else {"ifGenerationMatch": str(if_generation)}
    with _errors(path):
        url = filesystem().base.removesuffix("storage/v1/") + "upload/storage/v1/b/{}/o"
        _, content = _call(
            "POST",
            url,
            bucket,
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=head.encode() + data + f"\r\n--{boundary}--\r\n".encode(),
            **condition,
        )
        return int(json.loads(content)["generation"])


def delete(path: str, *, if_generation: int | None = None) -> None:
    """Removes the object; one that is gone already is no error."""
    condition = {} if if_generation is None else {"ifGenerationMatch": str(if_generation)}
    with _errors(path), contextlib.suppress(FileNotFoundError):
        _call("DELETE", "b/{}/o/{}", *_split(path), **condition)


def delete_all(paths: Iterable[str]) -> None:
    """Removes many objects, some at a time. Tries each, and then raises the first error."""
    _each(delete, [(path,) for path in paths])


def copy_all(pairs: Iterable[tuple[str, str]]) -> None:
    """Copies objects (from, to) inside the service, some at a time. Tries each, and then raises the first error."""
    _each(_copy, list(pairs))


def upload(local: str, path: str) -> None:
    """Writes the object from a local file of any size."""
    with _errors(path):
        filesystem().put_file(local, path)


def download(path: str, local: str) -> None:
    """Writes the object to a local file, of any size."""
    with _errors(path):
        filesystem().get_file(path, local)


def _copy(source: str, target: str) -> None:
    with _errors(source):
        token: dict[str, str] = {}
        while True:
            _, content = _call("POST", "b/{}/o/{}/rewriteTo/b/{}/o/{}", *_split(source), *_split(target), **token)
            answer = json.loads(content)
            if answer["done"]:
                return
            token = {"rewriteToken": answer["rewriteToken"]}


def _each(work: Any, arguments: list[tuple[str, ...]]) -> None:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="jaxckpt-gcs") as pool:
        futures = [pool.submit(work, *a) for a in arguments]
    for future in futures:
        future.result()


def _pages(path: str, bucket: str, **query: str) -> Iterator[dict[str, Any]]:
    token: dict[str, str] = {}
    while True:
        try:
            with _errors(path):
                page = json.loads(_call("GET", "b/{}/o", bucket, **query, **token)[1])
        except FileNotFoundError:
            raise OSError(f"{path}: there is no bucket gs://{bucket}, or it may not be listed") from None
        yield page
        if "nextPageToken" not in page:
            return
        token = {"pageToken": page["nextPageToken"]}


def _call(method: str, path: str, *args: str, **query: Any) -> tuple[Any, bytes]:
    """Headers and body of the answer."""
    return filesystem().call(method, path, *args, **query)


def _split(path: str) -> tuple[str, str]:
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return bucket, name.rstrip("/")


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """Every failure of a request as an OSError that names the path."""
    import aiohttp
    import google.auth.exceptions
    from gcsfs.retry import HttpError

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such object, or no such bucket") from None
    except FileExistsError:
        raise FileExistsError(f"{path}: another generation of the object is there") from None
    except (TimeoutError, aiohttp.ServerTimeoutError) as e:
        raise OSError(
            f"{path}: the server was asked again and again, and said nothing for {paths.timeout_s():g} s each time "
            f"({paths.TIMEOUT_VARIABLE} sets another limit)"
        ) from e
    except (OSError, HttpError, aiohttp.ClientError, google.auth.exceptions.GoogleAuthError, ValueError) as e:
        raise OSError(f"{path}: {type(e).__name__}: {' '.join(str(e).split())}") from e
