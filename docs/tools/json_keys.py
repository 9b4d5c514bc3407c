"""Writes `docs/json.csv`: the keys of what every command prints with --json. `python docs/tools/json_keys.py`

It runs the commands on small models, some minutes. A key that is there already and that this run did not see stays.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from neusight_jax.cli import run
from neusight_jax.cli.check import op_template

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "json.csv"
SMALL = "bert-tiny --sequence-length 16"
DECODER = "llama-3.2-1b"
FREE = "--free mem_bytes_per_s=1TB/s:8TB/s --starts 1 --steps 1 --rounds 1"
JOB = f"{DECODER} --gpu H100 --gpus 8 --data-parallel 8 --mode training --sequence-length 2048"
SERVICE = f"{DECODER} --gpu H100 --input-tokens 500 --output-tokens 100 --users 4 --method estimate"
COMMANDS: tuple[str, ...] = (
    f"predict {SMALL} --gpu T4",
    f"predict {JOB} --tokens 1e9",
    f"predict {DECODER} --gpu H100 --mode decode",
    f"compare {SMALL} --gpu T4 H100 --tokens 1e9",
    f"sensitivity {SMALL} --gpu T4",
    f"sensitivity {JOB}",
    f"powercap {SMALL} --gpu H100",
    f"sweep {SMALL} --gpu H100 --grid mem_bytes_per_s=1TB/s:8TB/s:2 --output FOLDER/sweep.parquet",
    f"design {SMALL} --base H100 {FREE}",
    f"design {DECODER} --mode decode --tensor-parallel 2 --base H100 {FREE}",
    f"design {SMALL} --base H100 {FREE} --pareto mem_bytes_per_s=2TB/s:6TB/s:2",
    f"design {SMALL} --base H100 --free mem_bytes_per_s=1TB/s:8TB/s --target 1ms",
    f"codesign {DECODER} --base H100 --free d_ff=4096:16384 --starts 1 --steps 1 --rounds 1",
    f"finetune {DECODER} --gpu H100 --gpus 1 --tokens 1e6",
    f"serve {SERVICE}",
    f"parallelize {DECODER} --gpu H100 --gpus 8 --global-batch-size 16 --sequence-length 2048",
    "scale-trace tests/data/torch_cpu_trace.json --from V100 --to T4",
    "evaluate --measurements FOLDER/rows.csv",
    "calibrate --measurements FOLDER/rows.csv --gpu H100 --identify --figures clock_hz launch_s",
    "check FOLDER/rows.csv",
    *("gpus", "models", "checkpoints", "schema", "doctor"),
)
COLUMNS = ["schema", "command", "key", "type", "always"]
"""`always`: whether every run of the command printed the key."""
TYPES = {bool: "true or false", int: "number", float: "number", str: "text", list: "list", dict: "mapping"}


def kind_of(value: Any) -> str:
    """Type of a JSON value in words, "" of null."""
    return "" if value is None else TYPES[type(value)]


def published() -> pd.DataFrame:
    """The file."""
    return pd.read_csv(FILE, keep_default_na=False)


def broken(content: Mapping[str, Any], keys: pd.DataFrame, command: str = "") -> list[str]:
    """Promises of the file that a printed result breaks: keys that one of both lacks, or of another type.

    Args:
      content: the result.
      keys: the file.
      command: that printed it, where several commands share its schema.
    """
    part = keys[(keys["schema"] == content["schema"]) & ((keys["command"] == command) | (command == ""))]
    types, always = dict(zip(part["key"], part["type"], strict=True)), part.loc[part["always"] == "yes", "key"]
    printed = {key: kind_of(value) for key, value in content.items()}
    wrong = [f"{key} ({kind})" for key, kind in printed.items() if key not in types or kind not in (types[key], "")]
    return wrong + [f"no {key}" for key in always if key not in content]


def main() -> None:
    """Runs and writes."""
    before = published() if FILE.exists() else pd.DataFrame(columns=COLUMNS)
    rows = {(row.schema, row.command, row.key): (row.type, row.always) for row in before.itertuples()}
    seen: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.csv").write_text(op_template("linear"), encoding="utf-8")
        for line in COMMANDS:
            out, words = io.StringIO(), line.replace("FOLDER", folder).split()
            with contextlib.redirect_stdout(out):
                code = run([*words, "--json"])
            if code:
                sys.exit(f"{line}: exit code {code}")
            content = json.loads(out.getvalue())
            again = (content["schema"], words[0]) in seen
            seen.add((content["schema"], words[0]))
            for key, value in content.items():
                kind, always = rows.get((content["schema"], words[0], key), ("", "no" if again else "yes"))
                rows[content["schema"], words[0], key] = (kind_of(value) or kind, always)
            for name, command, key in rows:
                if (name, command) == (content["schema"], words[0]) and key not in content:
                    rows[name, command, key] = (rows[name, command, key][0], "no")
    frame = pd.DataFrame([(*place, *facts) for place, facts in rows.items()], columns=COLUMNS)
    frame.sort_values(["schema", "command"], kind="stable").to_csv(FILE, index=False)


if __name__ == "__main__":
    main()
