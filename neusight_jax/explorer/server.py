"""The explorer's server: the page and its answers, to whoever has the address with its token, on this machine alone.

Python's own `http.server` is enough for a page with one user: no framework, nothing to download, and the pictures are
those of the reports.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from neusight_jax import __version__
from neusight_jax.errors import InputError, one_line
from neusight_jax.explorer import answers, copies
from neusight_jax.explorer.asked import Catalog
from neusight_jax.reports.page import gzipped_plotly, script_json, template, text_of
from neusight_jax.tables import parse_content

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")
MOST_BYTES = 1 << 16
"""Most bytes of a request; those of the page have a few hundred."""
MOST_WAITING = 32
"""Connections whose request is not whole yet: one more ends the oldest."""
MOST_WORKING = 16
"""Requests that are answered at a time: one more is told to try again."""
LIMIT_S = 10.0
"""Seconds a client may send nothing for."""
PAUSE_S = 3.0
"""Seconds without a request after which the next workload is compiled ahead."""
_LEAST_PRIORITY = 19
_JSON, _HTML, _SCRIPT = "application/json", "text/html; charset=utf-8", "text/javascript; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_NO_TOKEN = "the address lacks its token; open the one that `neusight-jax explore` printed, with ?token=\n"


class Explorer(ThreadingHTTPServer):
    """A server of the page.

    Args:
      port: of this machine, 0 = any.
      first: what the page shows when it opens: of files, it opens those and no others.
      ahead: whether common workloads are compiled from the first page on, in a thread that ends with the server.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, first: Mapping[str, Any] | None = None, *, ahead: bool = False) -> None:
        self.first = {"model": "gpt2-large", "gpu": "H100", **(first or {})}
        self.catalog = Catalog(str(self.first["model"]), str(self.first["gpu"]))
        self.token = secrets.token_urlsafe(24)
        self.working = threading.BoundedSemaphore(MOST_WORKING)
        self._waiting: dict[Any, None] = {}
        self._counting = threading.Lock()
        self._answered_at, self._busy = float("inf"), 0
        self._closing = threading.Event()
        self._ahead = threading.Thread(target=self._compile_ahead, name="ahead", daemon=True) if ahead else None
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"--port {port} cannot be used ({error}); give another, or 0 for any") from None

    @property
    def url(self) -> str:
        """Where the page is, with the token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/?token={self.token}"

    def page(self) -> str:
        """The page; while it loads, what it asks first is compiled."""
        with self._counting:
            if self._ahead is not None and self._ahead.ident is None:
                self._ahead.start()
        script = text_of("plots.js") + text_of("explore.js")
        start = script_json({**answers.choices(self.catalog.model), "first": self.first, "token": self.token})
        page: str = template("explore.html.jinja").render(
            style=text_of("page.css") + text_of("explore.css"),
            script=script,
            start=start,
            version=__version__,
            token=self.token,
        )
        return page

    def _compile_ahead(self) -> None:
        """Compile common workloads one by one, where nobody asks; the page's own at once, since it waits for it."""
        for load in answers.common(self.catalog.model):
            answers.warm(self.catalog, load)
            # Whoever moves a slider has the processor: the rest waits for a pause, and has the least priority.
            with suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
            while self._busy or time.monotonic() < self._answered_at + PAUSE_S:
                if self._closing.wait(PAUSE_S / 10.0):
                    return

    def server_close(self) -> None:
        """End the server, and with it what is compiled ahead; a program that XLA compiles cannot be ended earlier."""
        self._closing.set()
        super().server_close()
        if self._ahead is not None and self._ahead.ident is not None:
            self._ahead.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; where too many wait, the oldest of them is ended."""
        with self._counting:
            if len(self._waiting) >= MOST_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        with self._counting:
            self._waiting.pop(request, None)
        super().shutdown_request(request)

    @contextmanager
    def answering(self, request: Any) -> Iterator[bool]:
        """Whether there is room to work on a whole request; while the block runs its connection waits for nothing."""
        room = self.working.acquire(blocking=False)
        # A connection that is being answered must not be ended as the oldest of those that wait.
        with self._counting:
            self._waiting.pop(request, None)
            self._busy += 1
        try:
            yield room
        finally:
            with self._counting:
                self._waiting[request] = None
                self._busy -= 1
                self._answered_at = time.monotonic()
            if room:
                self.working.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing where a client left or was too slow; one line on stderr for a fault of this program."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            sys.stderr.write(one_line(f"explore: {type(error).__name__}: {error}") + "\n")


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of what is no HTTP at all: its answer has a status
    timeout = LIMIT_S

    def do_GET(self) -> None:
        path, query = self._path_and_query()
        if not self._allowed(query):
            return
        if path == "/":
            self._send(200, _HTML, self.server.page().encode())
        elif path == "/plotly.js":
            self._send(200, _SCRIPT, gzipped_plotly(), packed=True)
        elif path == "/sliders":
            self._answer(lambda: script_json(answers.sliders(self.server.catalog, query)), _JSON)
        else:
            self.send_error(404, "no such page")

    def do_POST(self) -> None:
        made: dict[str, tuple[Callable[[Catalog, Any], str], str]] = {
            "/forecast": (lambda catalog, content: script_json(answers.answer(catalog, content)), _JSON),
            "/question": (lambda catalog, content: script_json(answers.reported(catalog, content)), _JSON),
            "/gpu.yaml": (copies.machine_yaml, "application/yaml"),
            "/report.html": (answers.report_page, _HTML),
        }
        path, query = self._path_and_query()
        if not self._allowed(query):
            return
        length = self.headers.get("Content-Length", "")
        if path not in made:
            self.send_error(404, "no such page")
        elif not (length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= MOST_BYTES):
            self._refuse(f"Content-Length is {length!r}, expected one of at most {MOST_BYTES} bytes")
        elif self.headers.get("Content-Type") != _JSON:
            self._refuse(f"Content-Type is {self.headers.get('Content-Type')!r}, expected {_JSON}")
        else:
            body = self.rfile.read(int(length))
            make, kind = made[path]
            # A shorter body is of a client that left: nobody waits for an answer.
            if len(body) == int(length):
                self._answer(lambda: make(self.server.catalog, _parsed(body)), kind)

    def _path_and_query(self) -> tuple[str, dict[str, str]]:
        """Path and query of the request."""
        path, _, query = self.path.partition("?")
        try:
            return path, dict(parse_qsl(query, max_num_fields=16))
        except ValueError:
            return path, {}

    def _answer(self, make: Callable[[], str], kind: str) -> None:
        with self.server.answering(self.connection) as room:
            if not room:
                self.send_error(503, f"{MOST_WORKING} requests are being answered; try again")
                return
            try:
                text = make()
            except InputError as error:
                self._refuse(str(error), close=False)
            except Exception as error:
                self._refuse(f"the explorer failed: {type(error).__name__}: {error}", code=500)
                raise
            else:
                self._send(200, kind, text.encode())

    def _allowed(self, query: Mapping[str, str]) -> bool:
        """Whether a page of this machine asks, with the token; what is wrong is said otherwise.

        The name of the host has to be this machine's, or another site has its own name lead here; a page that asks has
        to be one of the same address.
        """
        hosts, origins = (self.headers.get_all(name) or [] for name in ("Host", "Origin"))
        if len(hosts) != 1 or _host(f"//{hosts[0]}") not in _NAMES or origins not in ([], [f"http://{hosts[0]}"]):
            self.send_error(403, "only for pages of this machine")
        elif not secrets.compare_digest(query.get("token", "").encode(), self.server.token.encode()):
            self.send_error(403, _NO_TOKEN.strip())
        elif self.command == "GET" and self.headers.get("Content-Length", "0") != "0":
            self.send_error(400, "expected no content with GET")
        elif self.headers.get("Transfer-Encoding"):
            self.send_error(411, "expected a Content-Length, not a Transfer-Encoding")
        else:
            return True
        return False

    def _refuse(self, message: str, *, code: int = 400, close: bool = True) -> None:
        self.close_connection |= close
        self._send(code, _JSON, json.dumps({"error": one_line(message)}).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One plain line, whatever is wrong with a request."""
        self.close_connection = True
        line = one_line(message or self.responses.get(code, ("refused", ""))[0])
        self._send(code, _TEXT, f"{line}\n".encode())

    def _send(self, code: int, kind: str, body: bytes, *, packed: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=86400" if packed else "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page is the log."""


def _host(address: str) -> str | None:
    """The host's name in an address; None where there is none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _parsed(body: bytes) -> Any:
    """Content of a request; `InputError` unless it is JSON."""
    expected = "workload and machines in JSON"
    return parse_content(body.decode("utf-8", "replace"), "not a request of the page", expected)
