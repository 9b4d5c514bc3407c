"""From a slider of the explorer to the new number, in a headless Chromium: 50 moves of several figures.

Usage: PYTHONPATH=.:tests python -m benchmarks.explore_speed [PICTURE.png]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from browser import browser
from test_explore import CHOOSE, MOVE

from neusight_jax.explorer.server import Explorer

MOVES = 50
LOADS = {
    "gpt2-large on an H100": ({}, ("mem_bytes_per_s", "clock_hz", "num_sms", "l2_bytes")),
    "the same under a cap": ({}, ("mem_bytes_per_s", "num_sms", "power_limit_w")),
    "llama-3.1-8b in bf16 on 8 of them": (
        {"model": "llama-3.1-8b", "mode": "training", "dtype": "bf16", "gpus": 8},
        ("mem_bytes_per_s", "num_sms", "link_bytes_per_s"),
    ),
}
TIMED = f"""(async (name, value) => {{
  const start = performance.now();
  await {MOVE}(name, value);
  return performance.now() - start;
}})"""


def main() -> None:
    """Time and print."""
    server = Explorer(0, {"model": "gpt2-large", "gpu": "H100"})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        page.open(server.url, "document.querySelectorAll('#plots .main-svg').length >= 3", width=1300)
        for name, (chosen, figures) in LOADS.items():
            if chosen:
                page.run(f"{CHOOSE}({chosen!r})")
                page.wait("document.querySelector('input[name=link_bytes_per_s]')")
                page.wait("document.querySelectorAll('#plots figure').length === 6")
            for each in figures:
                page.run(f"{MOVE}('{each}', -0.3)")
            # A cap is at its end where nothing holds the board: below it, it does.
            places = random.uniform(-1.0, -0.3 if "power_limit_w" in figures else 1.0, MOVES)
            took = [page.run(f"{TIMED}('{figures[at % len(figures)]}', {each})") for at, each in enumerate(places)]
            shown = page.run("document.querySelector('.card .value').textContent")
            print(f"{name}: median {np.median(took):.0f} ms, p95 {np.quantile(took, 0.95):.0f} ms of {MOVES} moves")
            print(f"  of {', '.join(figures)}; it shows {shown} at the end")
            if len(sys.argv) > 1 and not chosen:
                page.picture(Path(sys.argv[1]))
    server.shutdown()


if __name__ == "__main__":
    main()
