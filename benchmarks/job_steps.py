"""Forecasts of whole training jobs against measured steps (`measurements/distributed/training_steps.csv`).

    python -m benchmarks.job_steps MEASUREMENTS_FOLDER

Prints mean and median error by source and kind, leaving one source out for the numbers of `Software`; with those
forecasts too, how bigscience's layouts are ranked, their memory, and how GPT-3 scales from 256 to 11,616 GPUs.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import neusight_jax as nj
from benchmarks.job_claims import claims
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name
from neusight_jax.hardware.cluster import Cluster, Topology
from neusight_jax.job.job import Job, job_from_config
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.schedule import critical_counts
from neusight_jax.job.step import facts, once, schedule_of, seconds_of_job, stage_durations
from neusight_jax.job.work import KINDS
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable, batch_from_columns
from neusight_jax.model.software import FITTED, WIDTHS, Software

GPUS = {
    "A100-SXM-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-SXM-80GB": "NVIDIA A100-SXM4-80GB",
    "H100-SXM-80GB": "NVIDIA H100 80GB HBM3",
    "V100-SXM3-32GB (DGX-2)": "Tesla V100-SXM2-32GB",
    "B200-SXM": "NVIDIA B200",
    "GB200-NVL72": "NVIDIA GB200",
}
CATALOG = {
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
}
"""Models whose sizes the table gives in part: their published configs."""
PLAIN_GRADIENTS = ("megatron-2020", "megatron-sc21", "megatron-recompute", "bigscience-176B", "nanotron-tp")
"""Sources whose framework sends gradients after the last backward pass (their public code of that time)."""
ADDED_GRADIENTS = ("megatron-2020", "megatron-sc21", "bigscience-176B", "llm-foundry", "jax-toolbox")
"""Sources whose framework adds gradients of micro-batches by kernels of their own."""
TENSOR_OVERLAP = ("mlperf-gpt3", "megatron-bridge")
"""Sources whose public recipes run tensor-parallel communication beside products."""
FRAMEWORKS = {
    "Megatron-LM": "megatron",
    "Megatron-DeepSpeed": "deepspeed",
    "Megatron-Bridge": "nemo",
    "MLPerf": "nemo",
    "NeMo": "nemo",
    "composer+FSDP": "llm-foundry",
    "nanotron": "nanotron",
}
"""Framework of a row by the first word of the table's column."""
DTYPES = {"fp16": "fp16", "mxfp8": "fp8", "nvfp4": "fp4"}
LORA = nj.Lora(16, ("qkv",))
"""Of Megatron-Bridge's recipe for Llama 3 70B."""
CHUNKS = (1, 2, 3, 4, 6)
"""Tried where the source does not say how many chunks a rank has: the fastest by forecast."""


def records(frame: pd.DataFrame) -> list[SimpleNamespace]:
    """Rows with their columns as attributes."""
    return [SimpleNamespace(**values) for values in frame.to_dict("records")]


def truth(row: Any) -> float:
    """Measured seconds of a step."""
    if np.isfinite(row.step_s):
        return float(row.step_s)
    return float(row.gbs * row.seq / (row.tokens_per_s_gpu * row.gpus))


def dtype_of(row: Any) -> str:
    """Dtype of the products."""
    word = row.dtype
    return DTYPES.get(word) or ("fp8" if "fp8" in word else "bf16")


def attention_of(row: Any) -> str:
    """How the source computes attention; nanotron's models call FlashAttention-2."""
    if "unfused" in str(row.attention):
        return "unfused"
    return "flash2" if "flash2" in str(row.attention) else "flash"


def config_of(row: Any) -> str | dict[str, Any]:
    """Config of the model of a row."""
    if row.model in CATALOG:
        return CATALOG[row.model]
    if not np.isfinite(row.hidden):
        raise InputError(f"{row.model}: sizes are not given")
    hidden, heads = int(row.hidden), re.sub(r"\D", "", str(row.heads))
    usual = [each for each in range(int(row.tp), hidden, int(row.tp)) if hidden % each == 0]
    count = int(heads) if heads else min(usual, key=lambda each: abs(hidden / each - 128))
    kv_heads = re.sub(r"\D", "", str(row.kv_heads)) or count
    gated = "llama" in row.model.lower()
    return {
        "model_type": "llama" if gated else "nemotron",
        "hidden_size": hidden,
        "num_hidden_layers": int(row.layers),
        "num_attention_heads": count,
        "num_key_value_heads": int(kv_heads),
        "head_dim": hidden // count,
        "intermediate_size": int(row.ffn),
        "vocab_size": int(row.vocab),
        "max_position_embeddings": 2_000_000,
        "attention_bias": "GPT" in row.model,
        "mlp_bias": "GPT" in row.model,
        "tie_word_embeddings": not gated,
        **({} if gated else {"no_rope_layers": [0] * int(row.layers)}),
    }


def cluster_of(row: Any) -> Cluster:
    """The cluster of a row: the network of a node is shared by its GPUs."""
    gpu = nj.load_gpu(GPUS[row.gpu])
    domain = 72 if "NVL72" in row.gpu else int(row.gpus_per_node)
    node = row.node_link_gbytes_per_s
    nic = (node if np.isfinite(node) else 200.0) * 1e9 / row.gpus_per_node
    reduces = float("H100" in row.gpu or "B200" in row.gpu)
    topology = Topology(domain, gpu.link_bytes_per_s, nic, switch_reduction=reduces)
    return Cluster(gpu, topology, int(row.gpus))


def jobs_of(row: Any) -> list[Job]:
    """The job of a row; several where the source leaves something open."""
    said = str(row.recompute)
    recompute = "full" if said == "full" else "selective" if said == "selective" else "none"
    whole = lambda value, usual: int(value) if np.isfinite(value) else usual  # noqa: E731
    chunks = CHUNKS if row.vp == "?" else (int(row.vp) if str(row.vp).isdigit() and row.pp > 1 else 1,)
    found = []
    for each in chunks:
        if each > 1 and each * row.pp > row.layers:
            continue
        layout = Parallelism(
            tensor=int(row.tp),
            pipeline=int(row.pp),
            data=int(row.gpus / (row.tp * row.pp * row.cp)),
            context=int(row.cp),
            expert=int(row.ep),
            chunks=each,
            zero=whole(row.zero, 0),
            sequence_parallel=bool(row.sp == 1),
            micro_batch_size=whole(row.mbs, 1),
            recompute=recompute,
        )
        at_once = layout.data * layout.micro_batch_size
        overlaps = [] if row.source in PLAIN_GRADIENTS else ["context", "shards", "gradients"]
        if row.source in TENSOR_OVERLAP and layout.sequence_parallel:
            overlaps.append("tensor")
        given = {
            "global_batch_size": max(round(row.gbs / at_once), 1) * at_once,
            "sequence_length": int(row.seq),
            "dtype": dtype_of(row),
            "framework": FRAMEWORKS.get(row.framework.split()[0]),
            "gradient_dtype": "fp32" if "fp32" in row.dtype else "bf16",
            "attention": attention_of(row),
            "fused_accumulation": row.source not in ADDED_GRADIENTS,
            "bucket_elements": 5e8 if row.framework == "Megatron-DeepSpeed" else 0.0,
            "overlaps": overlaps,
            "lora": LORA if row.mode == "lora" else None,
        }
        job = job_from_config(config_of(row), layout, **given)
        memory = np.asarray(nj.load_gpu(GPUS[row.gpu]).mem_bytes)
        if "not stated" in said and "none" not in said and job.plan.memory.total > memory:
            job = job_from_config(config_of(row), replace(layout, recompute="full"), **given)
        found.append(job)
    return found


def kinds_of(row: Any) -> list[str]:
    """Kinds a row counts for."""
    ways = {
        "FSDP": row.zero == 3,
        "TP": row.tp > 1,
        "PP": row.pp > 1,
        "CP": row.cp > 1,
        "EP": row.ep > 1,
        "multi-node": row.gpus > row.gpus_per_node,
        "LoRA": row.mode == "lora",
    }
    return [name for name, has in ways.items() if has]


class Rows:
    """Forecastable rows: what each is made of, so that numbers of the software can be fitted on all at once."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.skipped: dict[str, str] = {}
        found: list[tuple[int, Any, Job]] = []
        for at, row in enumerate(records(frame)):
            try:
                found += [(at, row, job) for job in jobs_of(row)]
            except InputError as error:
                self.skipped[row.id] = str(error)
        best: dict[int, tuple[float, Job, Any]] = {}
        for (at, _, job), own in zip(found, every_seconds(found), strict=True):
            total = forecast_s(own, Software(), job)
            if at not in best or total < best[at][0]:
                best[at] = (total, job, own)
        chosen = [id(job) for _, job, _ in best.values()]
        self.found = sorted(
            (each for each in found if id(each[2]) in chosen), key=lambda each: chosen.index(id(each[2]))
        )
        self.frame = frame.iloc[list(best)].reset_index(drop=True)
        self.jobs, self.seconds = [job for _, job, _ in best.values()], [own for _, _, own in best.values()]
        self.truth = np.array([truth(row) for row in records(self.frame)])
        self.own = stacked(self.seconds)
        self.facts = stacked([facts(job.plan) for job in self.jobs])

    def counts(self, software: Software) -> tuple[np.ndarray, np.ndarray]:
        """How often each duration of a kind of stage, and a message, is on the critical path of every row."""
        durations = np.asarray(stage_durations(self.own, software, self.facts)[0])
        found = [
            path(job, each, software.messages * own.between)
            for job, each, own in zip(self.jobs, durations, self.seconds, strict=True)
        ]
        return np.stack([counts for counts, _ in found]), np.array([messages for _, messages in found])

    def forecast(self, software: Software, counts: tuple[Any, Any]) -> Any:
        """Seconds of every row, given its critical path."""
        durations, tail = stage_durations(self.own, software, self.facts)
        return jnp.sum(durations * counts[0], axis=(-2, -1)) + counts[1] * software.messages * self.own.between + tail


def stacked(records: list[Any]) -> Any:
    """Records with one more axis in front."""
    return jax.tree.map(lambda *each: jnp.stack([jnp.asarray(one) for one in each]), *records)


def every_seconds(found: list[tuple[int, Any, Job]], once: Any = once) -> list[Any]:
    """`step.seconds_of_job` of all jobs: all distinct kernels by one program, on one GPU after another."""
    table, places = distinct([job.kernels for _, _, job in found])
    seconds, out = {}, []
    for (_, row, job), place in zip(found, places, strict=True):
        name = GPUS[row.gpu]
        if name not in seconds:
            predictor = nj.load_predictor("tensorcore", canonical_name(name))
            seconds[name] = predictor, once(predictor, nj.load_gpu(name), table)
        predictor, each = seconds[name]
        own = {family: each[family][at] for family, at in place.items()}

        def run(using: Any, machine: Any, kernels: KernelTable, job: Job = job, own: dict[str, Any] = own) -> Any:
            return own if kernels is job.kernels else once(using, machine, kernels)

        out.append(seconds_of_job(predictor, cluster_of(row), job, run=run))
    return out


def distinct(tables: list[KernelTable]) -> tuple[KernelTable, list[dict[str, np.ndarray]]]:
    """One table of the distinct kernels of several, and where each of them has its own."""
    families, places, rows = {}, [{} for _ in tables], 0
    for name in dict.fromkeys(name for table in tables for name in table.families):
        batches = [table.families[name] for table in tables if name in table.families]
        names = list(batches[0].dims)
        columns = [
            np.stack([*(each.dims[dim] for dim in names), each.op, each.dtype], axis=1).astype(np.float64)
            for each in batches
        ]
        unique, place = np.unique(np.concatenate(columns), axis=0, return_inverse=True)
        parts = iter(np.split(place.reshape(-1), np.cumsum([len(each) for each in columns])[:-1]))
        for own, table in zip(places, tables, strict=True):
            if name in table.families:
                own[name] = next(parts)
        family, zero = FAMILIES[name], np.zeros(len(unique))
        families[name] = batch_from_columns(
            family,
            [family.ops[int(op)] for op in unique[:, -2]],
            {dim: unique[:, at] for at, dim in enumerate(names)},
            dtype=unique[:, -1],
            count=zero + 1.0,
            phase=zero,
            node=zero,
            row=rows + np.arange(len(unique)),
        )
        rows += len(unique)
    return KernelTable(families), places


_critical = jax.jit(critical_counts)


def path(job: Job, durations: np.ndarray, between: Any) -> tuple[np.ndarray, float]:
    """Counts [kind of stage, kind of work] and messages of a job's critical path."""
    plan, order = job.plan, np.array(job.plan.kinds)
    counts = np.zeros((KINDS, 3))
    if plan.layout.pipeline == 1:
        counts[0] = plan.micro_batches
        return counts, 0.0
    of_stage = np.stack(
        [durations[order, 0], durations[order, 1] + durations[order, 2], 0 * durations[order, 0]], axis=-1
    )
    found, messages = _critical(schedule_of(plan), jnp.asarray(of_stage), between)
    np.add.at(counts, order, np.asarray(found))
    counts[:, 2] = counts[:, 1]
    return counts, float(messages)


def forecast_s(own: Any, software: Software, job: Job) -> float:
    """Seconds of one job."""
    durations, tail = stage_durations(own, software, facts(job.plan))
    between = software.messages * own.between
    counts, messages = path(job, np.asarray(durations), between)
    return float(jnp.sum(durations * counts) + messages * between + tail)


def _descended(slope: Any, at: np.ndarray) -> np.ndarray:
    from scipy.optimize import minimize

    found: np.ndarray = minimize(lambda x: [np.asarray(y, float) for y in slope(x)], at, jac=True, method="L-BFGS-B").x
    return found


def fit(rows: Rows, chosen: np.ndarray, rounds: int = 3) -> Software:
    """Numbers of the software on some rows, under their priors; every source counts as the root of its rows."""
    start = Software()
    first = np.log([float(getattr(start, name)) for name in FITTED])
    widths = np.array([WIDTHS[name] for name in FITTED])
    sources = rows.frame.source.to_numpy()
    number = pd.Series(sources[chosen]).value_counts()
    weight = np.where(chosen, 1.0 / np.sqrt([number.get(source, 1.0) for source in sources]), 0.0)
    at = np.zeros(len(first))

    def of(step: Any) -> Software:
        return Software(**dict(zip(FITTED, jnp.exp(first + widths * step), strict=True)))

    @jax.jit
    def loss(step: Any, counts: Any) -> Any:
        error = jnp.log(rows.forecast(of(step), counts) / rows.truth)
        return jnp.sum(weight * jnp.sqrt(error**2 + 0.05**2)) / 0.1 + 0.5 * jnp.sum(step**2)

    slope = jax.jit(jax.value_and_grad(loss))
    for _ in range(rounds):
        at = _descended(functools.partial(slope, counts=rows.counts(of(at))), at)
    return of(at)


def left_out(rows: Rows) -> np.ndarray:
    """Forecast of every row with the software fitted on all other sources."""
    out = np.zeros(len(rows.truth))
    for source in rows.frame.source.unique():
        own = (rows.frame.source == source).to_numpy()
        software = fit(rows, ~own)
        out[own] = np.asarray(rows.forecast(software, rows.counts(software)))[own]
    return out


def tables(rows: Rows, forecasts: dict[str, np.ndarray]) -> str:
    """Markdown: mean / median error in percent by source and kind."""
    frame = rows.frame
    groups = {
        "all": np.ones(len(frame), bool),
        "dense": frame.moe.isna().to_numpy(),
        "MoE": frame.moe.notna().to_numpy(),
    }
    groups |= {f"source {source}": (frame.source == source).to_numpy() for source in frame.source.unique()}
    kinds = [kinds_of(row) for row in records(frame)]
    groups |= {
        f"kind {name}": np.array([name in each for each in kinds])
        for name in ("FSDP", "TP", "PP", "CP", "EP", "multi-node", "LoRA")
    }
    groups |= {f"GPU {name}": (frame.gpu == name).to_numpy() for name in frame.gpu.unique()}
    lines = ["| rows | number | " + " | ".join(forecasts) + " |", "|---|---|" + "---|" * len(forecasts)]
    for name, own in groups.items():
        if own.any():
            errors = [100 * np.abs(each[own] / rows.truth[own] - 1) for each in forecasts.values()]
            cells = [f"{np.mean(each):.1f} / {np.median(each):.1f}" for each in errors]
            lines.append(f"| {name} | {own.sum()} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read(folder: Path) -> pd.DataFrame:
    """Rows to score."""
    frame = pd.read_csv(folder / "distributed" / "training_steps.csv")
    measured = np.isfinite(frame.step_s) | np.isfinite(frame.tokens_per_s_gpu)
    return frame[frame.noise.isna() & measured]


def main() -> None:
    """Score and print."""
    rows = Rows(read(Path(sys.argv[1])))
    usual = Software()
    forecasts = {"priors": np.asarray(rows.forecast(usual, rows.counts(usual))), "source left out": left_out(rows)}
    print(tables(rows, forecasts))
    gpus = [nj.load_gpu(GPUS[name]) for name in rows.frame.gpu]
    print(claims(rows.frame, rows.jobs, gpus, rows.truth, forecasts["source left out"]))
    print(f"\nleft out: {len(rows.skipped)}", *sorted(set(rows.skipped.values())), sep="\n- ")
    everything = fit(rows, np.ones(len(rows.truth), bool))
    print({name: round(float(getattr(everything, name)), 6) for name in FITTED})


if __name__ == "__main__":
    main()
