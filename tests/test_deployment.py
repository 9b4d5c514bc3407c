"""Deployment files of a served layout: what they hold, in the shape that their readers take, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.graph.configs.config import hub_name
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving.choices import Serving
from neusight_jax.serving.deployment import FORMATS, deployment_text, write_deployment
from neusight_jax.serving.times import ENGINES

Capture = pytest.CaptureFixture[str]
OPTIONS = (
    *("model", "tensor-parallel-size", "enable-expert-parallel", "max-num-batched-tokens", "max-num-seqs"),
    *("gpu-memory-utilization", "kv-cache-dtype", "quantization"),
)
"""Long options of `vllm serve` that files may have, where vLLM is not there to be asked."""


class Strict(BaseModel):
    """Nothing beside the fields that are named."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Secret(Strict):
    name: str


class Source(Strict):
    secretRef: Secret


class Resources(Strict):
    limits: dict[str, str]
    requests: dict[str, str] = {}


class Container(Strict):
    """Of core/v1 of Kubernetes."""

    name: Literal["main"]
    image: str
    envFrom: list[Source]
    command: list[str]
    args: list[str]
    resources: Resources | None = None


class PodSpec(Strict):
    containers: list[Container]


class PodTemplate(Strict):
    spec: PodSpec


class Component(Strict):
    name: str
    type: Literal["frontend", "worker", "prefill", "decode"]
    replicas: int
    podTemplate: PodTemplate


class Components(Strict):
    components: list[Component]


class Graph(Strict):
    """A DynamoGraphDeployment as Dynamo 1.6.1 has it in `dynamo/profiler/templates/dgd/vllm`."""

    apiVersion: Literal["nvidia.com/v1beta1"]
    kind: Literal["DynamoGraphDeployment"]
    metadata: Secret
    spec: Components


class Artifacts(Strict):
    name: str
    uri: str
    size: str
    authSecretName: str


class Accelerator(Strict):
    type: Literal["nvidia"]


class Parallelism(Strict):
    tensor: int
    data: Literal[1]


class ModelServer(Strict):
    name: Literal["vllm"]
    image: str
    modelCommand: Literal["vllmServe"]
    args: list[str]
    resources: Resources
    mountModelVolume: Literal[True]


class Role(Strict):
    create: bool
    replicas: int
    parallelism: Parallelism | None = None
    containers: list[ModelServer] = []


class Values(Strict):
    """Values of llm-d-modelservice as AIConfigurator 0.12 has them in its template for vLLM."""

    modelArtifacts: Artifacts
    accelerator: Accelerator
    multinode: Literal[False]
    decode: Role
    prefill: Role


def asked(config: Any = TINY, **changes: Any) -> Serving:
    given: dict[str, Any] = {"input_tokens": 128, "output_tokens": 16, "users": 4, "method": "estimate"}
    given |= {"tensor_parallel": [2], "options": {"max_batch": 32, "chunk_tokens": 1024}}
    return nj.serve(RooflinePredictor(), "H100", config, **{**given, **changes})


@pytest.fixture(scope="module")
def plain() -> Serving:
    return asked()


@pytest.fixture(scope="module")
def pools(plain: Serving) -> Serving:
    prefill = {"tensor": 1, "expert": 1, "replicas": 3, "transfer_s": 0.01}
    return replace(plain, choices=(replace(plain.best, prefill=prefill, replicas=2, command=""),))


def read(serving: Serving, kind: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(deployment_text(serving, kind))
    return content


def words(options: dict[str, Any]) -> list[str]:
    """Options of a file as a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value)) if word != "True"]


def test_the_config_of_vllm_says_what_the_command_says(plain: Serving) -> None:
    options = read(plain, "vllm")
    assert set(options) <= set(OPTIONS)
    model = options.pop("model")
    assert " ".join(["vllm serve", model, *words(options)]) == plain.best.command
    assert options["tensor-parallel-size"] == 2
    assert options["max-num-seqs"] == 32


def test_vllm_takes_the_config(plain: Serving, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    write_deployment(plain, {"vllm": tmp_path / "vllm.yaml"})
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--config", str(tmp_path / "vllm.yaml")])
    assert (parsed.tensor_parallel_size, parsed.max_num_seqs, parsed.gpu_memory_utilization) == (2, 32, 0.9)


def test_dtypes_and_experts_are_options() -> None:
    experts = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    options = read(asked(experts, dtypes={"dtype": "fp8"}, expert_parallel=[2]), "vllm")
    assert options["enable-expert-parallel"] is True
    assert (options["quantization"], options["kv-cache-dtype"]) == ("fp8", "fp8")
    narrow = asked(dtypes={"dtype": "bf16", "weight_dtype": "int4"})
    assert "quantization" not in read(narrow, "vllm")
    assert "# forecast with weights in int4: give a checkpoint that holds them so\n" in deployment_text(narrow, "vllm")


def test_guesses_are_left_to_the_reader(plain: Serving) -> None:
    guessed = replace(plain, workload={**plain.workload, "options": {plain.best.gpu: {"draft_tokens": 3}}})
    assert "add vLLM's speculative-config" in deployment_text(guessed, "vllm")


def test_dynamo(plain: Serving, pools: Serving) -> None:
    one, two = (Graph.model_validate(read(serving, "dynamo")).spec.components for serving in (plain, pools))
    assert [(part.type, part.replicas) for part in one] == [("frontend", 1), ("worker", plain.best.replicas)]
    assert [(part.type, part.replicas) for part in two] == [("frontend", 1), ("prefill", 3), ("decode", 2)]
    (worker,), (prefill,), (decode,) = (part.podTemplate.spec.containers for part in (one[1], *two[1:]))
    assert " ".join(worker.args) == "--model " + plain.best.command.removeprefix("vllm serve ")
    assert worker.resources is not None
    assert worker.resources.limits == {"nvidia.com/gpu": "2"}
    assert prefill.args[-4:-2] == ["--disaggregation-mode", "prefill"]
    assert "kv_producer" in prefill.args[-1]
    assert decode.args[-2:] == ["--disaggregation-mode", "decode"]
    assert prefill.args[prefill.args.index("--tensor-parallel-size") + 1] == "1"


def test_llm_d(plain: Serving, pools: Serving) -> None:
    one, two = (Values.model_validate(read(serving, "llm-d")) for serving in (plain, pools))
    assert (one.decode.create, one.prefill.create) == (True, False)
    assert one.decode.parallelism == Parallelism(tensor=2, data=1)
    assert plain.best.command.endswith(" ".join(one.decode.containers[0].args))
    assert (two.prefill.replicas, two.decode.replicas) == (3, 2)
    assert two.prefill.parallelism == Parallelism(tensor=1, data=1)
    assert "NixlConnector" in two.prefill.containers[0].args[-1]


def test_the_whole_catalog_has_names_that_engines_know() -> None:
    assert hub_name("qwen3-32b") == hub_name("QWEN3_32B") == hub_name("qwen/qwen3-32b") == "Qwen/Qwen3-32B"
    assert hub_name("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_name("my-model") == "my-model"


def test_what_cannot_be_written_is_refused(plain: Serving, pools: Serving, tmp_path: Path) -> None:
    with pytest.raises(nj.InputError, match=r"unknown deployment 'helm'; .*expected one of vllm, dynamo, llm-d"):
        deployment_text(plain, "helm")
    with pytest.raises(nj.InputError, match=r"starts one kind of replicas.*give dynamo=FILE or llm-d=FILE"):
        write_deployment(pools, {"dynamo": tmp_path / "graph.yaml", "vllm": tmp_path / "vllm.yaml"})
    assert not list(tmp_path.iterdir())
    with pytest.raises(nj.InputError, match="files are of vLLM, and this answer is of sglang; give --engine vllm"):
        deployment_text(replace(plain, workload={**plain.workload, "engine": vars(ENGINES["sglang"])}), "vllm")
    options = {"AMD Instinct MI300X": plain.workload["options"][plain.best.gpu]}
    amd = replace(
        plain, workload={**plain.workload, "options": options}, choices=(replace(plain.best, gpu=next(iter(options))),)
    )
    assert read(amd, "vllm")["tensor-parallel-size"] == 2
    with pytest.raises(nj.InputError, match="asks for GPUs of NVIDIA, not AMD Instinct MI300X; give vllm=FILE"):
        deployment_text(amd, "llm-d")


def test_the_command_writes_them(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())
    words = ["serve", "llama-3.2-1b", "--gpu", "H100", "--input-tokens", "128", "--output-tokens", "16", "--users", "4"]
    words += ["--method", "estimate", "--tensor-parallel", "1", "--json", "--write"]
    files = {kind: tmp_path / f"{kind}.yaml" for kind in FORMATS}
    assert run([*words, *(f"{kind}={path}" for kind, path in files.items())]) == 0
    assert capsys.readouterr().err.splitlines()[-3:] == [f"wrote {path}" for path in files.values()]
    assert yaml.safe_load(files["vllm"].read_text())["model"] == "meta-llama/Llama-3.2-1B"
    assert yaml.safe_load(files["dynamo"].read_text())["metadata"]["name"] == "llama-3-2-1b"
    for text, message in {
        "vllm.yaml": "--write is 'vllm.yaml', expected KIND=FILE.yaml with a kind of vllm, dynamo, llm-d",
        "vllm=": "--write is 'vllm=', expected KIND=FILE.yaml",
        "helm=x.yaml": "unknown deployment 'helm'",
    }.items():
        assert run([*words, text]) == 2
        assert message in capsys.readouterr().err
    assert run([*words, "vllm=x.yaml", "--engine", "trtllm"]) == 2
    assert "this answer is of trtllm" in capsys.readouterr().err
