"""The explorer's server: the page and its answers, to this machine alone.

Python's own `http.server` is enough for a page with one user: no framework, nothing to download, and the pictures are
those of the reports.
"""

from __future__ import annotations

import functools
import gzip
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from neusight_jax import __version__
from neusight_jax.errors import InputError
from neusight_jax.explorer import answers
from neusight_jax.reports.page import script_json, template, text_of

ADDRESS = "127.0.0.1"
MOST_BYTES = 1 << 16
"""Of a request; those of the page have a few hundred."""
_JSON, _HTML, _SCRIPT = "application/json", "text/html; charset=utf-8", "text/javascript; charset=utf-8"


class Explorer(ThreadingHTTPServer):
    """A server of the page; `first` is what it shows when it opens."""

    daemon_threads = True

    def __init__(self, port: int = 0, first: Mapping[str, Any] | None = None) -> None:
        self.first = {"model": "gpt2-large", "gpu": "H100", **(first or {})}
        self.working = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"--port {port} cannot be used ({error}); give another, or 0 for any") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def page(self) -> str:
        """The page."""
        script = text_of("plots.js") + text_of("explore.js")
        start = script_json({**answers.choices(), "first": self.first})
        page: str = template("explore.html.jinja").render(
            style=text_of("page.css") + text_of("explore.css"), script=script, start=start, version=__version__
        )
        return page


@functools.cache
def _plotly() -> bytes:
    return gzip.compress(resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes(), 6, mtime=0)


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if not self._local():
            return
        if path == "/":
            self._send(200, _HTML, self.server.page().encode())
        elif path == "/plotly.js":
            self._send(200, _SCRIPT, _plotly(), packed=True)
        elif path == "/sliders":
            said = dict(parse_qsl(query))
            self._answer(lambda asked: script_json(answers.sliders(asked["gpu"], asked["gpus"])), _machine(said), _JSON)
        else:
            self._send(404, "text/plain", b"no such page")

    def do_POST(self) -> None:
        made: dict[str, tuple[Callable[[Mapping[str, Any]], str], str]] = {
            "/forecast": (lambda asked: script_json(answers.answer(asked)), _JSON),
            "/gpu.yaml": (answers.gpu_yaml, "application/yaml"),
            "/report.html": (answers.report_page, _HTML),
        }
        length = self.headers.get("Content-Length", "")
        body = self.rfile.read(int(length)) if length.isdigit() and int(length) <= MOST_BYTES else None
        if not self._local():
            return
        if self.path not in made:
            self._send(404, "text/plain", b"no such page")
        elif body is None or self.headers.get("Content-Type") != _JSON:
            self.close_connection = True
            self._send(400, _JSON, b'{"error": "expected JSON of at most 64 KiB"}')
        else:
            try:
                asked = json.loads(body)
            except ValueError:
                asked = None
            self._answer(made[self.path][0], asked if isinstance(asked, dict) else {}, made[self.path][1])

    def _answer(self, make: Callable[[Mapping[str, Any]], str], asked: Mapping[str, Any], kind: str) -> None:
        try:
            with self.server.working:
                text = make(asked)
        except InputError as error:
            self._send(400, _JSON, json.dumps({"error": str(error)}).encode())
            return
        self._send(200, kind, text.encode())

    def _local(self) -> bool:
        """Whether the page was asked for by a name of this machine; another name is another site's."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        origin = self.headers.get("Origin", "").partition("//")[2].rpartition(":")[0]
        if host in (ADDRESS, "localhost") and origin in ("", ADDRESS, "localhost"):
            return True
        self.close_connection = True
        self._send(403, "text/plain", b"only for pages of this machine")
        return False

    def _send(self, code: int, kind: str, body: bytes, *, packed: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=86400" if packed else "no-store")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page is the log."""


def _machine(said: Mapping[str, str]) -> dict[str, Any]:
    gpus = said.get("gpus", "1")
    return {"gpu": said.get("gpu", ""), "gpus": int(gpus) if gpus.isdigit() and len(gpus) < 8 else 1}
