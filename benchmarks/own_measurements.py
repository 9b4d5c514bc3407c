"""The measurements of this repository: how good they are, and how far today's forecasts are from them.

    python benchmarks/own_measurements.py [measurements/h100 measurements/h200] [--published DIR] [--longer-than 20]

Prints Markdown tables: what a run took and how steady it was; one GPU against the next; with `--published`, a folder of
the measurement schema, fp32 products and whole models of the same device measured by others; and the errors of the
checkpoints, `fp32` for fp32 and `tensorcore` for other dtypes, each with the effect of the device that `predict` uses.
A forecast is made twice: `alone` as a sweep measures a kernel (launch floor included), `in a model` as it runs among
others, which is what a loop that does not return to the host is.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd

import neusight_jax as nj
from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import read_measurements, table_from_frame

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("linear", "bmm")
GROUPS = dict.fromkeys((*schema.BINARY_OPS, *schema.UNARY_OPS), "elementwise")
VECTOR = ("elementwise", "softmax", "layernorm", "copy")
LENGTHS = (0, 5, 10, 20, 50, 10_000)
"""Where lengths of vector kernels are cut, microseconds."""
NEAR = 0.2
"""Shapes are near when the natural logarithms of no dim lie further apart."""


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """A Markdown table; floats with one decimal."""
    lines = [header, ["---"] * len(header), *rows]
    shown = [[f"{each:.1f}" if isinstance(each, float) else str(each) for each in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def load(folder: Path) -> pd.DataFrame:
    """Checked rows of a profile with everything the profiler wrote beside them, and columns `group` and `shape`."""
    checked = read_measurements(folder).frame
    raw = {str(file): pd.read_parquet(file) for file in sorted((folder / "kernels").glob("*.parquet"))}
    beside = ["call_s", "spread", "disturbed", "throttled", "input_channels", "output_channels"]
    parts = [
        raw[name].reindex(columns=beside).iloc[rows["row"]].set_index(rows.index)
        for name, rows in checked.groupby("file")
    ]
    frame = checked.join(pd.concat(parts))
    frame["group"] = frame["op"].map(lambda op: GROUPS.get(op, op))
    eights = frame[["m", "n", "k", "input_channels", "output_channels"]] % 8 == 0
    product, conv = frame["op"].isin(PRODUCTS), frame["op"] == "conv"
    contiguous = np.where(
        conv, eights[["input_channels", "output_channels"]].all(axis=1), eights[["n", "k"]].all(axis=1)
    )
    kinds = np.select([~contiguous, product & ~eights["m"]], ["n, k or channels are not", "m alone is not"], "all are")
    frame["shape"] = np.where(product | conv, kinds, "")
    return frame


def quality(folder: Path, frame: pd.DataFrame) -> list[object]:
    """One line on a run: rows, seconds for each, steadiness, clocks."""
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    took = datetime.fromisoformat(card["ended"]) - datetime.fromisoformat(card["began"])
    long = frame[frame["latency_s"] > 100e-6]
    capped = frame["throttled"].fillna("") != ""
    slow = frame["clock_hz"] < 0.95 * frame["clock_hz"].max()
    return [
        card["device"],
        len(frame),
        f"{took.total_seconds() / len(frame):.3f} s",
        f"{100 * frame['spread'].median():.2f} %",
        f"{100 * frame['spread'].quantile(0.99):.1f} %",
        int(frame["disturbed"].sum()),
        int(capped.sum()),
        int(slow.sum()),
        f"{1e6 * (frame['call_s'] - frame['latency_s']).median():.0f} us",
        f"{100 * (long['call_s'] / long['latency_s'] - 1).median():.1f} %",
    ]


def between(first: pd.DataFrame, second: pd.DataFrame, longer_than_s: float) -> list[list[object]]:
    """Median time of the second GPU over the first's, kernel by kernel, by operator and dtype."""
    key = ["op", "dtype", *(dim for dim in schema.FRAME_DIMS if dim in first)]
    both = first.merge(second[[*key, "latency_s"]], on=key, suffixes=("", "_other"))
    both = both[both["latency_s"] > longer_than_s]
    ratio = both["latency_s_other"] / both["latency_s"]
    return [
        [group, dtype, len(each), *(f"{each.quantile(q):.2f}" for q in (0.5, 0.1, 0.9))]
        for (group, dtype), each in ratio.groupby([both["group"], both["dtype"]])
    ]


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with `alone` and `in a model`: forecast over measured, less 1."""
    parts = []
    for (device, single), rows in frame.groupby(["device", frame["dtype"] == "fp32"]):
        predictor = nj.load_predictor("fp32" if single else "tensorcore", str(device))
        kernels, gpu = table_from_frame(rows.reset_index(drop=True)), nj.load_gpu(str(device))
        found = {
            name: np.asarray(nj.predict_kernels(predictor, gpu, kernels, isolated=isolated)) / rows["latency_s"] - 1
            for name, isolated in (("alone", True), ("in a model", False))
        }
        parts.append(rows.assign(**found))
    return pd.concat(parts)


def error_rows(frame: pd.DataFrame, key: Sequence[str], names: Sequence[str], fewest: int = 1) -> list[list[object]]:
    """Mean absolute and median signed errors of `errors`, %, by the columns of `key`, the devices side by side.

    Groups with fewer rows a device than `fewest` are left out.
    """
    devices = list(frame["device"].unique())
    found = []
    for values, rows in frame.groupby(list(key), observed=True):
        if len(rows) < fewest * len(devices):
            continue
        line: list[object] = [*values]
        for device in devices:
            here = rows[rows["device"] == device]
            line.append(len(here))
            line += [float(100 * value) for name in names for value in (here[name].abs().mean(), here[name].median())]
        found.append(line)
    return found


def near_products(frame: pd.DataFrame, published: Path) -> list[list[object]]:
    """Time per FLOP of fp32 products against that of the nearest published ones of the device, where these are near."""
    found = []
    for op in PRODUCTS:
        dims = [*(["b"] if op == "bmm" else []), "m", "n", "k"]
        ours = frame[(frame["op"] == op) & (frame["dtype"] == "fp32")]
        theirs = pd.read_parquet(published / f"{op}.parquet")
        theirs = theirs[theirs["device"] == ours["device"].iloc[0]]
        # The contraction is k here and n in the schema.
        here = np.log(ours.rename(columns={"batch": "b", "n": "k", "k": "n"})[dims].to_numpy(float))
        there = np.log(theirs[dims].to_numpy(float))
        if not len(there):
            continue
        apart = np.abs(here[:, None] - there[None]).max(axis=-1)
        nearest = apart.argmin(axis=1)
        work = np.exp(here.sum(axis=1) - there[nearest].sum(axis=1))
        for timing in ("latency_s", "call_s"):
            rate = ours[timing].to_numpy() / theirs["latency_s"].to_numpy()[nearest] / work
            for name, chosen in (
                ("under 200 us", ours["latency_s"].to_numpy() < 200e-6),
                ("longer", ours["latency_s"].to_numpy() >= 200e-6),
            ):
                some = rate[chosen & (apart.min(axis=1) < NEAR)]
                if len(some):
                    way = "loop" if timing == "latency_s" else "call"
                    equal = int((apart.min(axis=1)[chosen] < 1e-9).sum())
                    found.append(
                        [op, name, way, len(some), equal, *(f"{np.quantile(some, q):.2f}" for q in (0.5, 0.1, 0.9))]
                    )
    return found


def same_models(steps: Path, published: Path) -> list[list[object]]:
    """Whole fp32 models measured here and by others on the same device."""
    names = {"bert-large": "bert_large", "gpt2-large": "gpt2_large", "opt-1.3b": "opt_13", "gpt3-xl": "gpt3_xl"}
    ours, theirs = pd.read_csv(steps), pd.read_csv(published)
    ours = ours[(ours["precision"] == "fp32") & ours["optimizer"].isna() & (ours["attention"] == "eager")]
    ours = ours.assign(model=ours["model"].map(names), mode=ours["mode"].map({"inference": "inf", "training": "train"}))
    theirs = theirs[theirs["option"].isna()]
    both = ours.merge(theirs, on=["device", "model", "mode", "sequence_length", "batch_size"])
    return [
        [
            *(row.model, row.mode, row.batch_size, int(row.sequence_length)),
            *(1e3 * float(row.step_s), 1e3 * float(row.e2e_s), f"{100 * (row.step_s / row.e2e_s - 1):+.1f} %"),
        ]
        for row in both.itertuples()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[ROOT / "measurements/h100", ROOT / "measurements/h200"]
    )
    parser.add_argument("--published", type=Path, help="folder with kernels_models/ and models/end_to_end.csv")
    parser.add_argument("--fewest", type=int, default=8, help="kernels of a line, smaller groups are left out")
    parser.add_argument("--longer-than", type=float, default=20.0, help="microseconds")
    chosen = parser.parse_args()
    longer_than_s = 1e-6 * chosen.longer_than
    frames = [load(folder) for folder in chosen.folders]
    header = ["GPU", "kernels", "time for each", "spread, median", "99 % of rows", "disturbed", "at the power cap"]
    header += ["clock below 95 %", "call less loop", "the same, kernels over 100 us"]
    print(table([quality(*each) for each in zip(chosen.folders, frames, strict=True)], header))
    for other in frames[1:]:
        print(
            f"\nTime on {other['device'].iloc[0]} over {frames[0]['device'].iloc[0]}, over {chosen.longer_than:g} us\n"
        )
        print(
            table(between(frames[0], other, longer_than_s), ["operator", "dtype", "kernels", "median", "10 %", "90 %"])
        )
    if chosen.published is not None:
        for folder, frame in zip(chosen.folders, frames, strict=True):
            near = near_products(frame, chosen.published / "kernels_models")
            if near:
                print("\nTime per FLOP of fp32 products over that of the nearest published one, same GPU\n")
                header = ["operator", "length", "timing", "near", "of these equal", "median", "10 %", "90 %"]
                print(table(near, header))
            steps = folder / "training/training_steps.csv"
            if steps.exists():
                print("\nWhole fp32 models, ms\n")
                header = ["model", "mode", "batch", "sequence", "here", "published", "apart"]
                print(table(same_models(steps, chosen.published / "models/end_to_end.csv"), header))
    both = pd.concat([errors(frame) for frame in frames], ignore_index=True)
    vector = both[both["group"].isin(VECTOR)]
    spans = [f"{low} to {high}" for low, high in itertools.pairwise(LENGTHS)]
    vector = vector.assign(length=pd.cut(1e6 * vector["latency_s"], LENGTHS, labels=spans))
    shown = ", then ".join(frame["device"].iloc[0] for frame in frames)
    print(f"\nErrors of kernels over {chosen.longer_than:g} us, loop timing, %: {shown}\n")
    header = ["operator", "dtype", "multiples of 8"]
    header += ["kernels", "alone: mean", "median", "in a model: mean", "median"] * len(frames)
    long = both[both["latency_s"] > longer_than_s]
    print(table(error_rows(long, ("group", "dtype", "shape"), ("alone", "in a model"), chosen.fewest), header))
    print(f"\nErrors of vector kernels by length, us, in a model, %: {shown}\n")
    header = ["operator", "us", *["kernels", "mean", "median"] * len(frames)]
    print(table(error_rows(vector, ("group", "length"), ("in a model",)), header))


if __name__ == "__main__":
    main()
