"""What spoilt files and odd requests do: an answer or one line, and never a traceback, a hang, or a second line.

    PYTHONPATH=.:tests python -m benchmarks.mutated_inputs [--files 1000] [--requests 200] [--seed 0]

A good file of every kind is spoilt in one place, by bytes, by values or as a file, and read by the cheapest command
that takes it; requests (`odd_requests`) go to an explorer that runs here. Prints a table of counts and every fault.
Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.odd_requests import try_requests
from neusight_jax.cli import run
from neusight_jax.errors import MOST_SHOWN

LIMIT_S = 10
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [*{old},*{old},*{old},*{old},*{old},*{old},*{old},*{old},*{old}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
LITERALS: tuple[str, ...] = (
    *("null", "true", "[]", "{}", '""', '"12"', "-1", "0", "1.5", "1e400", "-1e400", "NaN", "Infinity", "-Infinity"),
    *('"\\u001b[31mred\\u202e"', '"\\ud800"', '"\\u0000"', '"a\\nb"', "9" * 310, "9" * 5000, "-" + "9" * 310),
    *('"' + "x" * 5000 + '"', '"' + "many words " * 500 + '"', "[" * 90 + "]" * 90, "[" * 100_000 + "]" * 100_000),
    *('{"a":' * 5000 + "1" + "}" * 5000, "[1,2,3]", '{"a": 1}', "[" + "1," * 5000 + "1]", "1e-320", "4294967296"),
)
"""JSON that replaces a value."""
CELLS: tuple[str, ...] = (
    *("", "nan", "inf", "-1", "0", "1e400", "9" * 310, "9" * 5000, "x" * 5000, "\x1b[31mred", "\x00", '"', "a,b,c"),
    *("é", "\ud800", "1,5", "=1+1", "many words " * 500, "None", "true", "\u202e", "-inf", "1e-320"),
)
"""Text that replaces a cell of a table."""
PLACE = "@@spoilt@@"


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
      name: in the table; path: of a good one; command: the arguments that read one; form: how its values are spoilt.
    """

    name: str
    path: Path
    command: Callable[[Path], list[str]]
    form: str = "json"


def kinds(folder: Path) -> list[Kind]:
    """A good file of every kind, made in a folder."""
    from conftest import ARCHITECTURE, CARD
    from small_configs import DECODERS, TINY
    from trace_files import GRID, kernel, sums

    import neusight_jax as nj
    from neusight_jax.hardware.gpu import REQUIRED_FIELDS
    from neusight_jax.model.checkpoint import save_checkpoint, untrained
    from synthetic import synthetic_rows

    def wrote(name: str, text: str) -> Path:
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    save_checkpoint(folder / "own" / "kept", untrained("mixture", ARCHITECTURE), CARD)
    card, weights = (folder / "own" / "kept" / name for name in ("card.json", "weights.safetensors"))
    own = ["--checkpoint", str(card.parent)]
    gpu = {"name": "Mine", **{name: float(getattr(nj.load_gpu("H100"), name)) for name in REQUIRED_FIELDS}}
    cluster = {"gpu": {"base": "H100", "clock_hz": 1.5e9}, "count": 2, "topology": {"node": "DGX H100"}}
    prices = {"currency": "USD", "H100": 2.5, "L4": 0.7, "T4": 0.35}
    tiny = wrote("llama.json", json.dumps(DECODERS["llama"]))
    names = [f"ampere_sgemm_128x64_tn_{at}" for at in range(4)]
    events = {"traceEvents": [kernel(name, 10.0 * at, 5.0, **GRID) for at, name in enumerate(names)]}
    loads = [{"timestamp": 100 * at, "input_length": 512, "output_length": 64, "hash_ids": [at]} for at in range(6)]
    synthetic_rows("linear", "Tesla T4", 8).to_parquet(folder / "linear.parquet", index=False)
    models = "device,model,mode,option,sequence_length,batch_size,num_layers,e2e_s,forward_s,backward_s\n"
    models += "".join(f"Tesla T4,bert_base,inf,,128,{at},12,{0.01 * at},,\n" for at in range(1, 5))
    job = ["--mode", "training", "--sequence-length", "16", "--dtype", "bf16"]
    serving = ["--gpu", "H100", "--ttft", "1s", "--tpot", "1s", "--tensor-parallel", "1"]

    def forecast(path: Path) -> list[str]:
        return ["predict", "bert-tiny", "--gpu", str(path), *own]

    def cost(path: Path) -> list[str]:
        return ["compare", "bert-tiny", "--gpu", "T4", "L4", "--prices", str(path), *own]

    def scaled(path: Path) -> list[str]:
        return ["scale-trace", str(path), "--from", "T4", "--to", "L4", *own]

    def scored(path: Path) -> list[str]:
        return ["evaluate", "--measurements", str(path), *own]

    def loaded(path: Path) -> list[str]:
        return ["predict", "bert-tiny", "--gpu", "T4", "--checkpoint", str(path.parent)]

    def of_model(path: Path) -> list[str]:
        return ["predict", str(path), "--gpu", "T4", "--sequence-length", "16", "--dtype", "fp32", *own]

    return [
        Kind("GPU, JSON", wrote("gpu.json", json.dumps(gpu)), forecast),
        Kind("GPU, YAML", wrote("gpu.yaml", yaml.safe_dump(gpu)), forecast, "yaml"),
        Kind(
            *("cluster, YAML", wrote("cluster.yaml", yaml.safe_dump(cluster))),
            *(lambda path: ["predict", str(tiny), "--cluster", str(path), *job], "yaml"),
        ),
        Kind("model config", wrote("config.json", json.dumps(TINY)), of_model),
        Kind("prices, JSON", wrote("prices.json", json.dumps(prices)), cost),
        Kind("prices, YAML", wrote("prices.yaml", yaml.safe_dump(prices)), cost, "yaml"),
        Kind("prices, CSV", wrote("prices.csv", "gpu,price\nT4,0.35\nL4,0.7\n"), cost, "csv"),
        Kind("trace, JSON", wrote("trace.json", json.dumps(events)), scaled),
        Kind("trace, CSV", wrote("trace.csv", sums(*((name, 50_000, 10) for name in names))), scaled, "csv"),
        Kind("measured, CSV", wrote("end_to_end.csv", models), scored, "csv"),
        Kind("measured, Parquet", folder / "linear.parquet", scored, "parquet"),
        Kind("checkpoint, card", card, loaded),
        Kind("checkpoint, weights", weights, loaded, "bytes"),
        Kind(
            *("load, JSON lines", wrote("load.jsonl", "\n".join(map(json.dumps, loads)))),
            *(lambda path: ["serve", str(tiny), "--trace", str(path), *serving], "lines"),
        ),
    ]


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a document."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from spots(entry, (*path, key))


def replaced(value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return PLACE
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:])
    return copy


def spoil_document(text: str, chance: random.Random, form: str) -> tuple[str, str]:
    """A document with one value, key or line spoilt, and what was done."""
    way = chance.choice(
        ["value"] * 5 + ["key twice", "new key", "deep", "two"] + ["bomb", "alias", "tag"] * (form == "yaml")
    )
    if way == "bomb":
        return text + BOMB, way
    if way == "tag":
        return text + chance.choice(
            ['z: !!int ""\n', "z: !!timestamp x\n", "z: !!python/object:os.system {}\n", "z: 2001-99-99\n"]
        ), way
    lines = text.splitlines()
    if way == "alias":
        return text + "y: &y [1]\nz: *y\n", way
    if way == "two":
        return text + "\n---\n" + text if form == "yaml" else text + text, way
    if way == "key twice":
        return (
            ("\n".join([*lines, chance.choice(lines)]), way)
            if form == "yaml"
            else (text.replace("{", '{"name": 1, "name": 2, ', 1), way)
        )
    if way == "new key":
        key = chance.choice(['"x"', '"\\u001b[2J"', '"' + "k" * 3000 + '"', '""', '"\\ud800"'])
        return (f"{text}{key}: 1\n", way) if form == "yaml" else (text.replace("{", f"{{{key}: 1, ", 1), way)
    if way == "deep":
        return "[" * 200_000 if chance.random() < 0.5 else '{"a":' * 50_000, way
    document = yaml.safe_load(text) if form == "yaml" else json.loads(text)
    spoilt = replaced(document, chance.choice(list(spots(document))))
    literal = chance.choice(LITERALS)
    dumped = yaml.safe_dump(spoilt) if form == "yaml" else json.dumps(spoilt)
    return dumped.replace(f'"{PLACE}"', literal).replace(f"'{PLACE}'", literal).replace(
        PLACE, literal
    ), f"value {literal[:20]}"


def spoil_bytes(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Bytes that are cut off, flipped, doubled or of another encoding, and what was done."""
    way = chance.choice(["flip", "flip", "cut", "insert", "empty", "double", "utf-16", "zeros", "mark", "latin"])
    at = chance.randrange(len(content) + 1)
    if way == "flip":
        spoilt = bytearray(content)
        for _ in range(chance.choice([1, 3, 20])):
            spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        return bytes(spoilt), way
    return {
        "cut": content[:at],
        "insert": content[:at] + chance.randbytes(8) + content[at:],
        "empty": b"",
        "double": content + content,
        "utf-16": content.decode("latin-1").encode("utf-16"),
        "zeros": content[:at] + bytes(64) + content[at:],
        "mark": b"\xef\xbb\xbf" + content,
        "latin": content[:at] + b"\xe9\xff" + content[at:],
    }[way], way


def spoil_table(text: str, chance: random.Random) -> tuple[str, str]:
    """A table with one cell, column or line spoilt, and what was done."""
    rows = [line.split(",") for line in text.splitlines()]
    row, cell = chance.choice(rows), chance.choice(CELLS)
    way = chance.choice(["cell", "cell", "cell", "column", "line twice", "no header", "short"])
    if way == "cell":
        row[chance.randrange(len(row))] = cell
    elif way == "column":
        at = chance.randrange(len(rows[0]))
        rows = [[part for place, part in enumerate(line) if place != at] for line in rows]
    elif way == "line twice":
        rows.append(row)
    elif way == "no header":
        rows = rows[1:]
    else:
        del row[chance.randrange(len(row)) :]
    return "\n".join(map(",".join, rows)) + "\n", f"{way} {cell[:20]!r}"


def spoil_parquet(path: Path, target: Path, chance: random.Random) -> str:
    """A Parquet file with one column spoilt; says what was done."""
    import pandas as pd

    frame = pd.read_parquet(path)
    name = chance.choice(list(frame.columns))
    way = chance.choice(["drop", "text", "nan", "inf", "huge", "negative", "lists", "twice", "none", "long", "bool"])
    values: dict[str, Any] = {
        "text": "many words", "nan": float("nan"), "inf": float("inf"), "huge": 1e300, "negative": -1.0, "none": None,
        "long": "x" * 5000 + "\x1b[31m", "bool": True,
    }  # fmt: skip
    if way == "drop":
        frame = frame.drop(columns=name)
    elif way == "lists":
        frame[name] = [[1, 2]] * len(frame)
    elif way == "twice":
        frame = pd.concat([frame, frame])
    else:
        frame[name] = [values[way]] * len(frame)
    frame.to_parquet(target, index=False)
    return f"{way} {name}"


def spoil_file(path: Path, chance: random.Random) -> str:
    """Something that is no regular file, or too large a one, at a path; says what."""
    way = chance.choice(
        ["folder", "pipe", "/dev/zero", "/dev/urandom", "/dev/null", "loop", "gone", "large", "/proc/kmsg"]
    )
    path.unlink(missing_ok=True)
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "large":
        with open(path, "wb") as file:
            file.truncate(20 << 30)
    elif way != "gone":
        path.symlink_to(path if way == "loop" else way)
    return way


def spoilt(kind: Kind, folder: Path, chance: random.Random) -> tuple[Path, str]:
    """A spoilt copy of a kind's good file in a folder of its own, and what was done."""
    for beside in kind.path.parent.iterdir() if kind.name.startswith("checkpoint") else ():
        (folder / beside.name).write_bytes(beside.read_bytes())
    target, content = folder / kind.path.name, kind.path.read_bytes()
    if kind.form != "bytes" and kind.name.startswith("checkpoint") and chance.random() < 0.7:
        content = json.dumps({key: value for key, value in json.loads(content).items() if key != "sha256"}).encode()
    draw = chance.random()
    if draw < 0.12:
        return target, spoil_file(target, chance)
    if draw < 0.4 or kind.form == "bytes":
        content, way = spoil_bytes(content, chance)
    elif kind.form == "parquet":
        return target, spoil_parquet(kind.path, target, chance)
    else:
        text = content.decode()
        if kind.form == "csv":
            text, way = spoil_table(text, chance)
        elif kind.form == "lines":
            first, *rest = text.splitlines()
            line, way = spoil_document(first, chance, "json")
            text = "\n".join([line, *rest])
        else:
            text, way = spoil_document(text, chance, kind.form)
        content = text.encode("utf-8", "surrogatepass")
    target.write_bytes(content)
    return target, way


class _Hang(BaseException):
    """More than `LIMIT_S` seconds."""


def outcome(arguments: list[str], limit_s: int = LIMIT_S) -> tuple[str, str]:
    """What a command did: "answered", "refused", or a fault; and its line or traceback."""

    def ring(*_: object) -> None:
        raise _Hang

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
    except _Hang:
        return "hang", "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    except Exception:
        return "traceback", "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    lines = err.getvalue().splitlines()
    if code not in (0, 2):
        return f"exit code {code}", err.getvalue()
    if len(lines) > 1 or "Warning" in err.getvalue():
        return "more than a line", err.getvalue()
    if not all(line.isprintable() for line in [*lines, *out.getvalue().splitlines()]):
        return "control characters", repr((out.getvalue() + err.getvalue())[:500])
    if code == 2 and not (lines and lines[0].startswith("error: ") and len(lines[0]) <= MOST_SHOWN + 7):
        return "no error line", err.getvalue()
    return ("answered", "") if code == 0 else ("refused", lines[0])


def try_files(count: int, seed: int, show: bool = False) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts of outcomes by kind of file, and faults, of so many spoilt files."""
    chance, faults = random.Random(seed), []
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "good").mkdir()
        every = kinds(Path(name) / "good")
        for kind in every:
            result, line = outcome(kind.command(kind.path), 300)  # compiles, so that what follows is timed alone
            if result != "answered" and "not installed" not in line:
                faults.append(f"{kind.name}, whole: {result}: {line}")
        for number in range(count):
            kind = every[number % len(every)]
            folder = Path(name) / str(number)
            folder.mkdir()
            path, way = spoilt(kind, folder, chance)
            result, line = outcome(kind.command(path))
            counts.setdefault(kind.name, Counter())[result] += 1
            if show:
                print(f"{number} {kind.name} ({way}): {result} {line}")
            if result not in ("answered", "refused"):
                faults.append(f"{number} {kind.name} ({way}): {result}: {line}")
    return counts, faults


def main() -> None:
    """Try and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--files", 1000), ("--requests", 200), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--show", action="store_true", help="print every file's outcome")
    chosen = parser.parse_args()
    counts, faults = try_files(chosen.files, chosen.seed, chosen.show)
    for name, outcomes in sorted(counts.items()):
        print(f"{name:20} {', '.join(f'{each} {number}' for each, number in sorted(outcomes.items()))}")
    print(f"all {sum(sum(each.values()) for each in counts.values())} files: {dict(sum(counts.values(), Counter()))}")
    requests, more = try_requests(chosen.requests, chosen.seed)
    print(f"all {sum(requests.values())} requests: {dict(sorted(requests.items()))}")
    for fault in [*faults, *more]:
        print(f"FAULT {fault}")
    sys.exit(1 if [*faults, *more] else 0)


if __name__ == "__main__":
    main()
