"""A headless Chromium driven over its own pipe (DevTools protocol), for tests of pages; needs no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), "")
LIMIT_S = 120.0


class Page:
    """One page of a browser: what it loads, says and shows."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self.buffer, self.number, self.session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.reading, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        said = {
            "Runtime.exceptionThrown": "exceptionDetails",
            "Runtime.consoleAPICalled": "args",
            "Log.entryAdded": "entry",
        }
        if part := said.get(str(event.get("method"))):
            what = event["params"]
            level = what.get("type", what.get("entry", {}).get("level", "error"))
            self.errors += [json.dumps(what[part])[:500]] if level in ("error", "assert") else []

    def run(self, script: str) -> Any:
        """The value of an expression, a promise's when it is kept."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, address: str, ready: str, width: int = 1000, height: int = 900) -> None:
        """Load an address and wait until an expression is true."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=address)
        self.wait(ready)

    def wait(self, ready: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not self.run(f"Boolean({ready})"):
            assert time.monotonic() < end, f"{ready} was never true; errors: {self.errors}"
            time.sleep(0.05)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of what is seen of it."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps its profile in a folder."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
    shell = f'exec 3<&{to_read} 4>&{from_write}; exec "$0" "$@"'
    command = ["bash", "-c", shell, PROGRAM, *flags, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(from_read)
        os.close(to_write)
