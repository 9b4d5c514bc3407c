"""Odd requests to the explorer, for `mutated_inputs`: each gets a status or an end, and nothing is printed."""

from __future__ import annotations

import contextlib
import io
import json
import random
import socket
import threading
import time
from collections import Counter
from unittest import mock

LIMIT_S = 10


def odd_requests(token: str, port: int) -> list[bytes]:
    """Requests that no browser sends, and some that other sites' pages would."""
    host, at = f"Host: 127.0.0.1:{port}\r\n".encode(), f"?token={token}".encode()
    kind = b"Content-Type: application/json\r\n"

    def post(body: bytes, more: bytes = b"", path: bytes = b"/forecast", length: bytes | None = None) -> bytes:
        size = str(len(body)).encode() if length is None else length
        return (
            b"POST "
            + path
            + at
            + b" HTTP/1.1\r\n"
            + host
            + kind
            + more
            + b"Content-Length: "
            + size
            + b"\r\n\r\n"
            + body
        )

    from benchmarks.mutated_inputs import LITERALS, PLACE, replaced, spots

    load = {"model": "bert-tiny", "batch_size": 1, "sequence_length": 16}
    good = {"workload": load, "machines": [{"base": "H100", "figures": {"clock_hz": 1.5e9}}]}
    documents = [
        json.dumps(replaced(good, spot)).replace(f'"{PLACE}"', literal).encode()
        for spot in spots(good)
        for literal in (*LITERALS[:22], "[" * 30_000)
    ]
    methods = [
        b"HEAD",
        b"PUT",
        b"DELETE",
        b"OPTIONS",
        b"TRACE",
        b"CONNECT",
        b"PATCH",
        b"get",
        b"G\x00T",
        b"\xff",
        b"GET" * 99,
    ]
    paths = [
        b"/",
        b"//",
        b"/../../etc/passwd",
        b"/%00",
        b"*",
        b"",
        b"/" + b"x" * 70_000,
        b"http://example.com/",
        b"/sliders?gpu=/etc/passwd",
        b"/?" + b"a=1&" * 999,
    ]
    lengths = [b"-1", b"x", b"\xb2", b"9" * 400, b"1e3", b"", b"65537", b" 5 ", b"0x10", b"5, 5"]
    headers = [
        *(
            b"Origin: " + each + b"\r\n"
            for each in (b"http://example.com", b"null", b"http://127.0.0.1", b"file://", b"\xff")
        ),
        *(
            b"Transfer-Encoding: chunked\r\n",
            b"Expect: 100-continue\r\n",
            b"Content-Length: 3\r\n",
            b"X: " + b"y" * 70_000 + b"\r\n",
        ),
        *(
            b"A: b\r\n" * 200,
            b"no colon\r\n",
            b": empty\r\n",
            b"Host: example.com\r\n",
            b"Connection: keep-alive, Upgrade\r\n",
        ),
    ]
    odd = [method + b" /" + at + b" HTTP/1.1\r\n" + host + b"\r\n" for method in methods]
    odd += [b"GET " + path + b" HTTP/1.1\r\n" + host + b"\r\n" for path in paths]
    odd += [
        b"GET /" + at + b" HTTP/" + version + b"\r\n" + host + b"\r\n"
        for version in (b"0.9", b"1.0", b"2.0", b"x", b"1.1.1", b"9" * 99)
    ]
    odd += [
        b"GET /" + at + b"\r\n",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\x00" * 9,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET",
    ]
    odd += [post(b"[1]", length=length) for length in lengths]
    odd += [post(b"{}", more) for more in headers]
    odd += [
        b"GET /" + at + b" HTTP/1.1\r\nHost: " + name + b"\r\n\r\n"
        for name in (b"example.com", b"", b"[", b"127.0.0.1.evil", b"\xff")
    ]
    odd += [post(b"x" * 65_536), post(b"x" * 10), post(b"{}", path=b"/other"), post(b"\xff\xfe"), post(b"[" * 60_000)]
    return [*odd, *map(post, documents), post(json.dumps(good).encode())]


def send(port: int, request: bytes, leave: bool = False, limit_s: float = LIMIT_S + 5) -> str:
    """What a request gets: its status, "ended" where the server hung up, "left" where this side did, or "hang"."""
    with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as client:
        try:
            client.sendall(request[: len(request) // 2] if leave else request)
            if leave:
                return "left"
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            head = client.recv(64)
        except TimeoutError:
            return "hang"
        except OSError:
            return "ended"
    return (
        head.split()[1].decode()
        if head.startswith(b"HTTP/") and len(head.split()) > 1
        else "ended"
        if not head
        else "no status"
    )


def try_requests(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Counts of what so many odd requests got, and faults: lines on stderr, hangs, a server that answers no more."""
    from neusight_jax.explorer.server import Explorer
    from neusight_jax.model.predictor import RooflinePredictor

    server, err, faults = Explorer(0, {"model": "bert-tiny", "gpu": "H100"}), io.StringIO(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, chance = int(server.server_address[1]), random.Random(seed)
    every = odd_requests(server.token, port)
    plain, documents = every[:80], every[80:]
    chosen = [*plain, *chance.sample(documents, max(min(count - len(plain), len(documents)), 0))][:count]
    counts: Counter[str] = Counter()
    plainly = mock.patch("neusight_jax.explorer.answers.predictor_of", return_value=RooflinePredictor())
    with plainly, contextlib.redirect_stderr(err):  # the doors are tried: what is behind them need not be compiled
        send(port, every[-1], limit_s=300)  # a good one: it compiles
        for request in chance.sample(chosen, len(chosen)):
            begin = time.monotonic()
            result = send(port, request, leave=chance.random() < 0.1)
            counts[result] += 1
            bad = ("hang", "500") if b"HTTP/0.9" in request else ("hang", "no status", "500")  # 0.9 has no status
            if result in bad or time.monotonic() - begin > LIMIT_S:
                faults.append(
                    f"{result} after {time.monotonic() - begin:.1f} s: {request[:120]!r} ... {request[-200:]!r}"
                )
        alive = send(port, f"GET /?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    server.shutdown()
    server.server_close()
    if alive != "200":
        faults.append(f"the explorer answers {alive} at the end")
    if err.getvalue():
        faults.append(f"lines on stderr: {err.getvalue()[:2000]}")
    return counts, faults
