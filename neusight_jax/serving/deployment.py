"""Deployment: the best layout of an answer as the files that start it: vLLM's config, Dynamo's graph, llm-d's values.

One function says the options of a replica (`vllm_flags`), for these files and for the command line alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from neusight_jax import __version__
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import write_text_atomically
from neusight_jax.graph.configs.config import hub_name
from neusight_jax.graph.configs.step import Precision
from neusight_jax.hardware.gpu import VENDORS, vendor_of_name
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.serving.choices import Serving, layout_of
from neusight_jax.serving.times import ENGINES, Options
from neusight_jax.units import GIB, counted

VLLM = "0.33.0"
"""Release of vLLM whose options are written; llm-d's values name its image."""
DYNAMO = "1.6.1"
"""Release of Dynamo whose graph is written, after its own `profiler/templates/dgd/vllm`."""
SECRET = "hf-token-secret"
"""Kubernetes secret with the token of Hugging Face's hub, as both projects call it in their examples."""
SPARE = 1.2
"""Disk space of a model over its weights: tokenizer and whatever else is downloaded."""


def vllm_flags(layout: Parallelism, options: Options, dtypes: Precision) -> dict[str, Any]:
    """Long options of vLLM for one replica, those that its forecast is made with; True = a switch.

    Args:
      layout: how it is split.
      options: how the engine is set up.
      dtypes: of a step; a quantized checkpoint says its own, and vLLM narrows a wide one to fp8 alone.
    """
    flags: dict[str, Any] = {"tensor-parallel-size": layout.tensor}
    flags |= {"data-parallel-size": layout.data} if layout.data > 1 else {}
    flags |= {"enable-expert-parallel": True} if layout.expert > 1 else {}
    flags |= {"max-num-batched-tokens": options.chunk_tokens, "max-num-seqs": options.max_batch}
    flags |= {"gpu-memory-utilization": options.memory_share}
    flags |= {"quantization": "fp8"} if dtypes.products == dtypes.weights == "fp8" else {}
    return flags | ({"kv-cache-dtype": "fp8"} if dtypes.kv_cache == "fp8" else {})


def vllm_command(model: str, flags: Mapping[str, Any]) -> str:
    """The line that starts a replica of vLLM with these options."""
    return " ".join(("vllm serve", hub_name(model), *_words(flags)))


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Options as words of a command line."""
    for name, value in flags.items():
        yield f"--{name}"
        if value is not True:
            yield str(value)


@dataclass(frozen=True)
class _Pool:
    """Equal replicas.

    Attributes:
      role: "" of those that do all, else "prefill" or "decode".
      replicas: how many; layout: of each; flags: vLLM's options of each.
    """

    role: str
    replicas: int
    layout: Parallelism
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class _Deployment:
    """What files are written of.

    Attributes:
      model: as an engine loads it; gpu: its name; machine: with that of another pool.
      pools: replicas, those that answer last.
      disk_gib: space for its weights; options, dtypes: how the engine is set up.
    """

    model: str
    gpu: str
    machine: str
    pools: tuple[_Pool, ...]
    disk_gib: int
    options: Options
    dtypes: Precision

    @property
    def name(self) -> str:
        """The model as Kubernetes takes names: lower case, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.model.rpartition("/")[2].lower())[:40].strip("-") or "model"


def _deployment(serving: Serving) -> _Deployment:
    """The best choice of an answer."""
    best, load = serving.best, serving.workload
    options = Options(**load["options"][best.gpu])
    dtypes = Precision(**{field.name: load[field.name] for field in fields(Precision)})

    def pool(role: str, split: Mapping[str, Any]) -> _Pool:
        layout = layout_of(split)
        return _Pool(role, int(split["replicas"] or 0), layout, vllm_flags(layout, options, dtypes))

    pools = [pool("prefill", best.prefill)] if best.prefill else []
    pools.append(pool("decode" if best.prefill else "", vars(best)))
    # A checkpoint that vLLM narrows on loading has 16 bits.
    stored = best.memory["weights"] * best.layout.gpus * (2.0 if "quantization" in pools[0].flags else 1.0)
    disk_gib = math.ceil(SPARE * stored / GIB) + 1
    return _Deployment(hub_name(load["model"]), best.gpu, best.machine, tuple(pools), disk_gib, options, dtypes)


def _vllm(served: _Deployment) -> dict[str, Any]:
    """A config file of one replica, for `vllm serve --config FILE`."""
    if len(served.pools) > 1:
        raise InputError(
            "vllm=FILE starts one kind of replicas, and the best layout has two, prompts and answers apart; give "
            "dynamo=FILE or llm-d=FILE, or leave --disaggregated out"
        )
    return {"model": served.model, **served.pools[0].flags}


def _dynamo(served: _Deployment) -> dict[str, Any]:
    """A DynamoGraphDeployment: a frontend, and a component for every kind of replicas."""

    def component(name: str, kind: str, replicas: int, container: Mapping[str, Any]) -> dict[str, Any]:
        secrets, image = [{"secretRef": {"name": SECRET}}], f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{DYNAMO}"
        template = {"spec": {"containers": [{"name": "main", "image": image, "envFrom": secrets, **container}]}}
        return {"name": name, "type": kind, "replicas": replicas, "podTemplate": template}

    def worker(pool: _Pool) -> dict[str, Any]:
        arguments = ["--model", served.model, *_words(pool.flags)]
        arguments += ["--disaggregation-mode", pool.role] if pool.role else []
        arguments += _transfer("kv_producer") if pool.role == "prefill" else []
        resources = {
            "limits": {"nvidia.com/gpu": str(pool.layout.gpus)},
            "requests": {"ephemeral-storage": f"{served.disk_gib}Gi"},
        }
        container = {"command": ["python3", "-m", "dynamo.vllm"], "args": arguments, "resources": resources}
        return component(pool.role or "worker", pool.role or "worker", pool.replicas, container)

    frontend = component("Frontend", "frontend", 1, {"command": ["python3"], "args": ["-m", "dynamo.frontend"]})
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": served.name},
        "spec": {"components": [frontend, *map(worker, served.pools)]},
    }


def _llm_d(served: _Deployment) -> dict[str, Any]:
    """Values of the Helm chart `llm-d-modelservice`, which calls replicas that do all `decode`."""

    def values(pool: _Pool) -> dict[str, Any]:
        container = {
            "name": "vllm",
            "image": f"vllm/vllm-openai:v{VLLM}",
            "modelCommand": "vllmServe",
            "args": [*_words(pool.flags), *(_transfer("kv_both") if pool.role else ())],
            "resources": {"limits": {"nvidia.com/gpu": str(pool.layout.gpus)}},
            "mountModelVolume": True,
        }
        parallelism = {"tensor": pool.layout.tensor, "data": pool.layout.data}
        return {"create": True, "replicas": pool.replicas, "parallelism": parallelism, "containers": [container]}

    roles = {pool.role or "decode": values(pool) for pool in served.pools}
    artifacts = {"name": served.model, "uri": f"hf://{served.model}", "size": f"{served.disk_gib}Gi"}
    return {
        "modelArtifacts": {**artifacts, "authSecretName": SECRET},
        "accelerator": {"type": "nvidia"},
        "multinode": False,
        "decode": roles["decode"],
        "prefill": roles.get("prefill", {"create": False, "replicas": 0}),
    }


def _transfer(role: str) -> list[str]:
    """Options by which KV caches go from one replica to another."""
    return ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]


@dataclass(frozen=True)
class _Format:
    """A kind of file.

    Attributes:
      content: what it holds; use: how it is used.
      vendors: whose GPUs it can ask for; None = all.
    """

    content: Callable[[_Deployment], dict[str, Any]]
    use: str
    vendors: tuple[str, ...] | None = ("NVIDIA",)


FORMATS: dict[str, _Format] = {
    "vllm": _Format(_vllm, f"vLLM {VLLM}, each replica: vllm serve --config FILE", None),
    "dynamo": _Format(_dynamo, f"Dynamo {DYNAMO}: kubectl apply -f FILE"),
    "llm-d": _Format(_llm_d, "llm-d: values of the Helm chart llm-d-modelservice"),
}
"""Kinds of files by the name that a command line gives them."""


def require_format(kind: str, engine: str = "vllm") -> None:
    """`InputError` unless such a file is written, and of that engine."""
    if kind not in FORMATS:
        raise unknown_name("deployment", kind, FORMATS, f"expected one of {', '.join(FORMATS)}")
    if engine != "vllm":
        raise InputError(
            f"deployment files are of vLLM, and this answer is of {engine}; give --engine vllm, or write the files of "
            f"{engine} from the layout in --json"
        )


def deployment_text(serving: Serving, kind: str) -> str:
    """The file of a kind that starts the best layout of an answer, YAML.

    Raises: `InputError` for an unknown kind, an engine other than vLLM, or a layout or GPU that the kind does not take.
    """
    numbers = serving.workload["engine"]
    require_format(kind, next((name for name, engine in ENGINES.items() if vars(engine) == numbers), "vllm"))
    served, form = _deployment(serving), FORMATS[kind]
    vendor = VENDORS[int(vendor_of_name(served.gpu).get("vendor", 0.0))]
    if form.vendors is not None and vendor not in form.vendors:
        raise InputError(f"{kind}=FILE asks for GPUs of {', '.join(form.vendors)}, not {served.gpu}; give vllm=FILE")
    content = yaml.safe_dump(form.content(served), sort_keys=False, allow_unicode=True, width=1000)
    return "".join(f"# {line}\n" for line in _remarks(served, form)) + content


def _remarks(served: _Deployment, form: _Format) -> list[str]:
    """Lines that open a file: what it starts, how, and what it leaves to its reader."""
    counts = [f"{counted(pool.replicas, 'replica')} of {counted(pool.layout.gpus, 'GPU')}" for pool in served.pools]
    replicas = " for prompts, ".join(counts)
    lines = [f"{served.model} on {served.machine}: {replicas}, forecast by neusight-jax {__version__}", form.use]
    if served.options.draft_tokens:
        guessed = served.options.draft_tokens
        lines.append(f"not written: the model that guesses {guessed} tokens ahead; add vLLM's speculative-config")
    if served.dtypes.weights != served.dtypes.activations and "quantization" not in served.pools[0].flags:
        lines.append(f"forecast with weights in {served.dtypes.weights}: give a checkpoint that holds them so")
    if served.machine != served.gpu:
        lines.append("not written: which pool runs on which GPU; add a nodeSelector to each")
    return [*lines, "Not run anywhere yet: read it before you apply it."]


def write_deployment(serving: Serving, files: Mapping[str, Path]) -> None:
    """Write files that start the best layout of an answer, by their kinds; none where one of them is refused."""
    texts = {path: deployment_text(serving, kind) for kind, path in files.items()}
    for path, text in texts.items():
        write_text_atomically(path, text)
