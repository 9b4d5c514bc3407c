"""Jobs: a step's parts, messages, memory, slopes with respect to a cluster, and checks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax import InputError, calibrate_steps, latency, load_gpu, predict, sensitivity
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.hardware.cluster import Cluster, Topology
from neusight_jax.job.flop import step_flop
from neusight_jax.job.job import Job, job_from_config
from neusight_jax.job.messages import SLOTS
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.recipe import Recipe, recipe_of
from neusight_jax.job.step import facts, seconds_of_job, stage_durations
from neusight_jax.job.work import KINDS, WORK
from neusight_jax.kernels import attention
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.model.software import FITTED, Software
from neusight_jax.prediction import Shares, step_forecast

MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
MOE = {
    **MODEL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
}
PREDICTOR = RooflinePredictor()


def cluster(count: int, domain: int = 8) -> Cluster:
    gpu = load_gpu("NVIDIA H100 80GB HBM3")
    return Cluster(gpu, Topology(domain, gpu.link_bytes_per_s, 5e10), count)


def job(layout: Parallelism, config: dict[str, Any] = MODEL, batch: int = 32, **given: Any) -> Job:
    return job_from_config(config, layout, global_batch_size=batch, sequence_length=1024, **given)


def slots(own: Job) -> set[str]:
    return {message.slot for _, message in own.plan.messages}


def work_of(own: Job, name: str) -> float:
    return float(np.asarray(seconds_of_job(PREDICTOR, cluster(0), own).kernels).sum(axis=0)[0, WORK.index(name)])


def test_parts_add_up_to_the_latency() -> None:
    own = job(Parallelism(tensor=2, pipeline=4, data=2, sequence_parallel=True, zero=1))
    step = predict(PREDICTOR, cluster(16), own)
    assert step.total_s == pytest.approx(float(latency(PREDICTOR, cluster(16), own)), rel=1e-5)
    assert min(step.parts.values()) > 0.0
    assert step.tokens_per_s == pytest.approx(32 * 1024 / step.total_s)
    content = json.loads(step.to_json())
    assert content["schema"].startswith("neusight_jax.forecast/")
    assert content["workload"]["layout"]["tensor"] == 2
    assert "pipeline bubble" in str(step)


def test_one_gpu_has_neither_bubble_nor_messages() -> None:
    step = predict(PREDICTOR, cluster(1), job(Parallelism(), batch=2))
    assert step.bubble_s == step.exposed_communication_s == 0.0


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"tensor": 2}, {"tensor_forward", "tensor_backward", "gradients"}),
        ({"data": 4, "zero": 1}, {"gradients", "parameters"}),
        ({"data": 4, "zero": 3}, {"gather", "reduce"}),
        ({"context": 2}, {"context_forward", "context_backward", "gradients"}),
    ],
)
def test_layouts_send_what_they_must(layout: dict[str, Any], expected: set[str]) -> None:
    assert slots(job(Parallelism(**layout))) == expected <= set(SLOTS)


def test_experts_exchange_tokens_and_keep_their_width() -> None:
    own = job(Parallelism(data=8, expert=8), MOE)
    assert {"expert_forward", "expert_backward"} <= slots(own)
    whole, split = job(Parallelism(data=8), MOE), own
    assert split.plan.memory.weights < 0.5 * whole.plan.memory.weights
    assert work_of(split, "forward") == pytest.approx(work_of(whole, "forward"), rel=0.3)


def test_a_pipeline_shares_the_layers_and_a_context_the_tokens() -> None:
    alone = work_of(job(Parallelism()), "forward")
    assert work_of(job(Parallelism(pipeline=4)), "forward") < 0.4 * alone
    assert work_of(job(Parallelism(context=2)), "forward") == pytest.approx(alone / 2, rel=0.1)
    assert work_of(job(Parallelism(tensor=4)), "forward") < 0.5 * alone


def test_recompute_runs_layers_again_and_saves_memory() -> None:
    none, selective, full = (job(Parallelism(recompute=name)) for name in ("none", "selective", "full"))
    assert work_of(none, "recomputed") == 0.0 < work_of(selective, "recomputed") < work_of(full, "recomputed")
    assert work_of(full, "recomputed") < work_of(full, "forward")
    assert full.plan.memory.activations < 0.5 * none.plan.memory.activations


LAYER_BYTES = {
    # Of a token and layer: sums and norms, queries to values, what attention writes, gate and up, their product.
    "bf16": ({}, 4 * 2 * 1024 + 2 * 2048 + 2 * 1024 + 2 * 8192 + 2 * 4096),
    # What products read in eight bits, beside what attention writes.
    "fp8": ({"dtype": "fp8"}, 2 * 3 * 1024 + 2 * 2048 + 3 * 1024 + 2 * 8192 + 4096),
    # Frozen products need nothing of what they read; the adapter keeps eight elements of its own.
    "lora": ({"lora": Lora(8, ("qkv",))}, 3 * 2 * 1024 + 2 * 8 + 2 * 2048 + 2 * 1024 + 2 * 8192),
    # All scores after softmax, their mask and what is left: five bytes of every pair of a head.
    "unfused": ({"attention": "unfused"}, 4 * 2 * 1024 + 2 * 2048 + 2 * 1024 + 2 * 8192 + 2 * 4096 + 5 * 16 * 1024),
}


@pytest.mark.parametrize("name", LAYER_BYTES)
def test_memory_of_activations_is_what_backward_passes_read(name: str) -> None:
    """Counted as Korthikanti et al. do (2022, section 4.1): of GPT's layers 34 s b h less two masks of dropout."""
    facts, of_layer = LAYER_BYTES[name]
    facts = {"dtype": "bf16", **facts}
    ends = 1024 * ((2 if name == "lora" else 4) * 1024 + (2 + 4) * 32000)
    held = job(Parallelism(), **facts).plan.memory.activations
    assert held == pytest.approx(8 * 1024 * of_layer + ends)


def test_sequence_parallelism_splits_the_sums_too() -> None:
    whole, split = (
        job(Parallelism(tensor=2, sequence_parallel=each)).plan.memory.activations for each in (False, True)
    )
    assert whole - split == pytest.approx(8 * 1024 * (4 * 2 * 1024) / 2 + 1024 * 4 * 1024 / 2)


def test_some_layers_or_operators_are_run_again() -> None:
    """The more layers, the more work and the less memory; operators by themselves cost less than layers."""
    names = ("none", "norm,activation", "full:2", "full:6", "full:8", "full")
    jobs = [job(Parallelism(tensor=2, recompute=name), batch=1) for name in names]
    work = [work_of(each, "recomputed") for each in jobs]
    held = [each.plan.memory.activations for each in jobs]
    assert work[0] == 0.0 < work[1] < work[-1]
    assert work[2] == pytest.approx(work[-1] / 4, rel=1e-4)
    assert work[3] == pytest.approx(work[-1] * 3 / 4, rel=1e-4)
    assert sorted(held[2:], reverse=True) == held[2:]
    assert held[-2:] == [held[-1]] * 2
    again = 8 * 1024 * (2 * 2 * 1024 + 2 * 4096 / 2)  # outputs of two norms, and of the activation
    assert held[0] - held[1] == pytest.approx(again)
    sent = [
        sum(message.count for _, message in each.plan.messages if message.slot == "tensor_backward") for each in jobs
    ]
    assert sent == [17.0, 17.0, 17.0 + 4.0, 17.0 + 12.0, 33.0, 33.0]
    for wrong in ("full:", "full:0", "half", "norm,x"):
        with pytest.raises(InputError, match="expected one of none, selective, full, full:LAYERS"):
            Parallelism(recompute=wrong)


def test_grouped_experts_are_launched_once() -> None:
    looped, grouped = (job(Parallelism(), MOE, batch=1, experts=name) for name in ("looped", "grouped"))
    seconds = [seconds_of_job(PREDICTOR, cluster(1), each) for each in (looped, grouped)]
    launches = [float(np.asarray(each.launches).sum()) for each in seconds]
    assert launches[0] > 3.0 * launches[1]
    host, graphs = job(Parallelism(), batch=1), job(Parallelism(), batch=1, cuda_graphs=True)
    assert float(latency(PREDICTOR, cluster(1), graphs)) < float(latency(PREDICTOR, cluster(1), host))


def test_a_framework_has_facts_and_those_that_are_stated_win() -> None:
    assert recipe_of() == Recipe()
    assert recipe_of(framework="megatron").experts == "looped"
    own = job(Parallelism(), framework="deepspeed", attention="unfused")
    assert (own.plan.recipe.attention, own.plan.recipe.bucket_elements) == ("unfused", 5e8)
    with pytest.raises(InputError, match="unknown framework 'x'"):
        job(Parallelism(), framework="x")
    with pytest.raises(InputError, match="experts is 'all', expected one of grouped, looped"):
        job(Parallelism(), experts="all")


def test_sharding_divides_the_memory() -> None:
    held = [job(Parallelism(data=8, zero=zero)).plan.memory for zero in range(4)]
    assert held[1].optimizer == pytest.approx(held[0].optimizer / 8)
    assert held[2].gradients == pytest.approx(held[0].gradients / 8)
    assert held[3].weights == pytest.approx(held[0].weights / 8)


def test_slopes_reach_the_links_and_the_chip() -> None:
    """Every time of a step is one over a rate but for launches, latencies and what a step takes beside its work."""
    own = job(Parallelism(tensor=2, pipeline=2, data=4, zero=3, sequence_parallel=True))
    own = own.replace(software=dataclasses.replace(Software(), launch_s=0.0, step_s=0.0))
    machine = cluster(16)
    value, slope = jax.value_and_grad(latency, argnums=1)(PREDICTOR, machine, own)
    assert float(slope.topology.link_bytes_per_s) < 0.0
    assert float(slope.topology.nic_bytes_per_s) < 0.0
    assert float(slope.gpu.bf16_flop_per_s) < 0.0
    faster = machine.replace(topology=machine.topology.replace(nic_bytes_per_s=5e10 * 1.01))
    moved = float(latency(PREDICTOR, faster, own)) - float(value)
    assert moved == pytest.approx(float(slope.topology.nic_bytes_per_s) * 5e8, rel=0.05, abs=1e-6)


def test_never_slower_with_a_faster_network() -> None:
    rng = np.random.default_rng(0)
    for layout in (
        Parallelism(tensor=2, pipeline=2, data=4, zero=1),
        Parallelism(data=16, zero=3),
        Parallelism(tensor=4, pipeline=2, data=2, chunks=2, sequence_parallel=True),
    ):
        own, machine = job(layout), cluster(16, 4)
        many = Topology(4, *(jnp.asarray(10 ** rng.uniform(low, low + 2, 200), jnp.float32) for low in (10, 9)))

        def seconds(topology: Topology, own: Job = own, machine: Cluster = machine) -> Any:
            return latency(PREDICTOR, machine.replace(topology=topology), own)

        axes = Topology(4, 0, 0, None, None, None, None, None)
        run = jax.jit(jax.vmap(seconds, in_axes=(axes,)))
        slow, link, nic = (
            np.asarray(run(many.replace(**changes)))
            for changes in (
                {},
                {"link_bytes_per_s": many.link_bytes_per_s * 1.5},
                {"nic_bytes_per_s": many.nic_bytes_per_s * 1.5},
            )
        )
        assert np.all(link <= slow * (1 + 1e-5))
        assert np.all(nic <= slow * (1 + 1e-5))


def test_numbers_of_the_software_have_slopes() -> None:
    own = job(Parallelism(tensor=2, data=4, pipeline=2, zero=1), overlaps=["tensor", "gradients"])
    slope = jax.grad(lambda software: latency(PREDICTOR, cluster(16), own.replace(software=software)))(Software())
    assert all(np.isfinite(float(getattr(slope, name))) for name in FITTED)
    assert float(slope.tensor) > 0.0
    assert float(slope.step_s) == pytest.approx(1.0)


def test_chunks_hide_the_gradients_of_those_done_before() -> None:
    """In interleaved 1F1B a rank is done with its last chunk while every micro-batch of a group passes its others."""
    given: dict[str, Any] = {"overlaps": ["gradients"], "batch": 8}
    exposed = []
    for chunks in (1, 2):
        layout = Parallelism(data=2, pipeline=4, zero=1, chunks=chunks)
        laid = job(layout, **given)
        plan = laid.plan
        assert float(facts(plan).passes) == pytest.approx(1.0 + 3.0 * (chunks - 1.0) / chunks)
        own = seconds_of_job(PREDICTOR, cluster(8), laid)
        slow = dataclasses.replace(own, messages=30.0 * own.messages)
        _, tail = stage_durations(slow, Software(), facts(plan))
        _, sooner = stage_durations(dataclasses.replace(own, messages=0.0 * own.messages), Software(), facts(plan))
        exposed.append(float(tail - sooner))
    assert exposed[1] < exposed[0]


def test_hybrid_shards_lie_between_one_copy_and_all() -> None:
    """Copies inside every node: no parameter crosses the network, gradients do once a step, and memory is between."""
    whole, hybrid, few = (job(Parallelism(data=16, zero=3, shards=shards)) for shards in (0, 4, 8))
    sums = {shards: job(Parallelism(data=16, zero=3, shards=shards)).plan.memory for shards in (0, 4, 8)}
    assert sums[0].weights * 4 == pytest.approx(sums[4].weights)
    assert sums[0].optimizer * 2 == pytest.approx(sums[8].optimizer)
    slow = cluster(16, 4)
    slow = slow.replace(topology=slow.topology.replace(nic_bytes_per_s=1e9))
    seconds = [predict(PREDICTOR, slow, each).total_s for each in (whole, hybrid, few)]
    assert seconds[1] < seconds[2] < seconds[0]
    sent = {message.slot: message.group for _, message in hybrid.plan.messages}
    assert sent == {"gather": "shards", "reduce": "shards", "gradients": "copies"}
    same = job(Parallelism(data=16, zero=3, shards=16))
    assert same.plan.memory == whole.plan.memory
    for layout, words in (({"zero": 1, "shards": 4}, "needs zero 3"), ({"zero": 3, "shards": 3}, "divide .* = 16")):
        with pytest.raises(InputError, match=words):
            Parallelism(data=16, **layout)  # type: ignore[arg-type]


def test_bad_jobs() -> None:
    with pytest.raises(InputError, match=r"the layout takes 4 GPUs .* but the cluster has 8"):
        predict(PREDICTOR, cluster(8), job(Parallelism(data=4)))
    with pytest.raises(InputError, match="global_batch_size 6 is no multiple"):
        job(Parallelism(data=4), batch=6)
    with pytest.raises(InputError, match="overlaps has 'all', expected some of tensor"):
        job(Parallelism(), overlaps=["all"])
    with pytest.raises(InputError, match=r"bert-large runs as replicas, .* tensor is 2, expected 1"):
        job_from_config("bert-large", Parallelism(tensor=2), global_batch_size=8, sequence_length=512)
    with pytest.raises(InputError, match="16 heads do not split over 3 GPUs"):
        job(Parallelism(tensor=3), batch=1)
    with pytest.raises(InputError, match="unknown optimizer 'x'"):
        job(Parallelism(), optimizer="x")


def test_elasticities_of_all_rates_leave_the_host() -> None:
    own = job(Parallelism(tensor=2, pipeline=2, data=4, zero=1, sequence_parallel=True))
    found = sensitivity(PREDICTOR, cluster(16, 4), own)
    assert found.total["all rates"] == pytest.approx(-1.0 + found.host, abs=1e-3)
    assert found.total["link_bytes_per_s"] < 0.0
    assert found.total["nic_bytes_per_s"] < 0.0
    assert found.total["clock_hz with peaks"] < 0.0
    machine = cluster(16, 4)
    slope = jax.grad(latency, argnums=1)(PREDICTOR, machine, own).topology.nic_bytes_per_s
    assert found.total["nic_bytes_per_s"] == pytest.approx(float(slope) * 5e10 / found.total_s, rel=1e-3)
    assert json.loads(found.to_json())["schema"].startswith("neusight_jax.sensitivity/")
    assert "nic_bytes_per_s" in str(found)


def test_one_measured_step_calibrates_other_layouts() -> None:
    machine, first, other = cluster(8), job(Parallelism(data=8, zero=1)), job(Parallelism(tensor=2, data=4))
    before = [predict(PREDICTOR, machine, each).total_s for each in (first, other)]
    software = calibrate_steps(PREDICTOR, machine, [(first, 1.3 * before[0])])
    after = [predict(PREDICTOR, machine, each.replace(software=software)).total_s for each in (first, other)]
    assert 1.15 < after[0] / before[0] < 1.3
    assert 1.0 < after[1] / before[1] < 1.3
    same = calibrate_steps(PREDICTOR, machine, [(first, before[0])])
    assert all(getattr(same, name) == pytest.approx(getattr(first.software, name), rel=1e-3) for name in FITTED)
    with pytest.raises(InputError, match="no measured step"):
        calibrate_steps(PREDICTOR, machine, [])
    with pytest.raises(InputError, match=r"is -1.0 s, expected a positive number"):
        calibrate_steps(PREDICTOR, machine, [(first, -1.0)])


def eager(mbs: int = 2, **fields: Any) -> Job:
    """A forward and backward pass of a small GPT-2 in fp32."""
    layout = Parallelism(micro_batch_size=mbs, **fields)
    return job_from_config(
        GPT2, layout, global_batch_size=2 * layout.data, sequence_length=64, dtype="fp32", optimizer=None
    )


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 1000,
    "n_positions": 128,
    "activation_function": "gelu_new",
}


def test_a_job_of_one_gpu_in_fp32_is_the_graph() -> None:
    """GPT-2 in fp32 runs as eager PyTorch runs it in jobs too: the same kernels, parameters and seconds."""
    own, graph = eager(), graph_from_config(GPT2, 2, 64, "training", "fp32")
    machine = load_gpu("H100")
    expected = float(latency(RooflinePredictor(), machine, graph.kernels))
    assert float(latency(RooflinePredictor(), machine, own)) == pytest.approx(expected, rel=1e-6)
    assert float(np.asarray(own.software.step_s)) == 0.0
    assert own.plan.memory.weights == 4 * (graph.parameters or 0.0)


@pytest.mark.parametrize("ways", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 4}, {"context": 2}])
def test_eager_stages_have_the_models_products(ways: dict[str, int]) -> None:
    """The FLOP of all ranks' products are those of the model."""

    def flop(work: Job) -> float:
        kinds, total = np.bincount(work.plan.kinds, minlength=KINDS), 0.0
        for name in ("linear", "bmm"):
            batch, counts = work.kernels.families[name], np.asarray(work.counts[name])
            sizes = np.prod([np.asarray(batch.dims[each]) for each in ("batch", "m", "n", "k")], axis=0)
            total += float(kinds @ (counts.sum(axis=1) @ sizes))
        return total * work.plan.layout.tensor * work.plan.layout.context

    assert flop(eager(**ways)) == pytest.approx(flop(eager()), rel=1e-6)


def test_eager_jobs_split_as_their_heads_do() -> None:
    """Four heads are no three; and norms over a part of the tokens leave the products as they are."""
    with pytest.raises(InputError, match="3"):
        eager(tensor=3)
    plain, split = eager(tensor=2), eager(tensor=2, sequence_parallel=True)
    for name in ("linear", "bmm"):
        for dim, sizes in plain.kernels.families[name].dims.items():
            np.testing.assert_array_equal(sizes, split.kernels.families[name].dims[dim])
    rows = [np.max(np.asarray(work.kernels.families["norm"].dims["rows"])) for work in (plain, split)]
    assert rows[0] == 2 * rows[1]


def test_relaxation_may_be_traced() -> None:
    """Of a pipeline: its value under `jit` is that outside, at 0 the exact one, and it has a slope."""
    work, machine = job(Parallelism(pipeline=2, tensor=2)), cluster(4, 4)

    def relaxed(share: Any) -> Any:
        return latency(PREDICTOR, machine, work, relaxation=share)

    assert float(jax.jit(relaxed)(0.05)) == pytest.approx(float(relaxed(0.05)), rel=1e-5)
    assert float(jax.jit(relaxed)(0.0)) == pytest.approx(float(latency(PREDICTOR, machine, work)), rel=1e-5)
    assert np.isfinite(jax.grad(relaxed)(0.05))
    assert float(relaxed(0.2)) < float(relaxed(0.0))


def test_parts_of_a_step_are_never_negative() -> None:
    """What rounding leaves of differences is the first part's, so that the sum stays."""
    plan = job(Parallelism(data=2)).plan
    step = step_forecast(Shares(1.0, -1e-10, -2e-10), Software(), plan, cluster(2, 4))
    assert (step.bubble_s, step.exposed_communication_s) == (0.0, 0.0)
    assert step.total_s == pytest.approx(1.0 - 3e-10, abs=1e-15)


def test_parameters_gathered_in_eight_bits() -> None:
    """Half of the bytes of FSDP's gathers and of the layers that are held whole, no other message; the same in a search
    and of a model that is read as a graph."""
    layout = Parallelism(data=8, zero=3)
    load: dict[str, Any] = {"global_batch_size": 8, "sequence_length": 2048}
    wide, narrow = (
        nj.job_from_config("llama-3.2-1b", layout, gather_dtype=dtype, **load).plan for dtype in (None, "fp8")
    )
    for (_, one), (_, other) in zip(wide.messages, narrow.messages, strict=True):
        factor = 0.5 if one.slot == "gather" else 1.0
        assert other == dataclasses.replace(one, payload_bytes=factor * one.payload_bytes)
    gathered = 2.0 * 2.0 * nj.graph_from_config("llama-3.2-1b", 1, 128).parameters / 16  # two of 16 layers, in bf16
    assert wide.memory.total - narrow.memory.total == pytest.approx(gathered / 2.0, rel=1e-6)
    cluster = nj.load_cluster("8x H100")
    found = nj.parallelize(
        RooflinePredictor(),
        cluster,
        "llama-3.2-1b",
        space=nj.Space(zero=(3,), axes=("data",)),
        gather_dtype="fp8",
        **load,
    )
    values = {name: value for name, value in found.best.step.workload["layout"].items() if name != "gpus"}
    job = nj.job_from_config("llama-3.2-1b", Parallelism(**values), gather_dtype="fp8", **load)
    assert found.best.step.total_s == pytest.approx(nj.predict(RooflinePredictor(), cluster, job).total_s, rel=1e-5)
    graph = nj.graph_from_config("bert-large", 1, 128, "training", "bf16")
    plans = [nj.job_from_graph(graph, layout, gather_dtype=dtype).plan for dtype in (None, "fp8")]
    sent = [sum(each.payload_bytes for _, each in plan.messages if each.slot == "gather") for plan in plans]
    assert sent[1] == pytest.approx(sent[0] / 2.0)
    assert plans[1].memory.total < plans[0].memory.total
    with pytest.raises(nj.InputError, match="fp9"):
        nj.job_from_config("llama-3.2-1b", layout, gather_dtype="fp9", **load)


@pytest.mark.parametrize("layout", [Parallelism(), Parallelism(context=2)])
def test_attention_stays_inside_of_packed_documents(layout: Parallelism) -> None:
    """Attention is that of as many shorter sequences, whose pairs are so many times fewer; all else is as it was."""
    load: dict[str, Any] = {"global_batch_size": 2, "sequence_length": 2048}
    whole, packed = (
        nj.job_from_config("llama-3.2-1b", layout, document_tokens=tokens, **load) for tokens in (None, 256)
    )
    for name, batch in whole.kernels.families.items():
        if name != "prefill":
            jax.tree.map(np.testing.assert_array_equal, batch, packed.kernels.families[name])
    pairs = [np.asarray(attention.flop(job.kernels.families["prefill"].dims)) for job in (whole, packed)]
    # Of a causal mask: L (L + 1) / 2 pairs of each sequence.
    assert pairs[0][0] / pairs[1][0] == pytest.approx(2049 / 257, rel=1e-3)
    assert whole.plan.messages == packed.plan.messages
    assert step_flop(packed).model < step_flop(whole).model


def test_packed_documents_in_a_search_and_where_there_are_none() -> None:
    load: dict[str, Any] = {"global_batch_size": 8, "sequence_length": 2048, "document_tokens": 300}
    cluster = nj.load_cluster("8x H100")
    found = nj.parallelize(
        RooflinePredictor(), cluster, "llama-3.2-1b", space=nj.Space(zero=(3,), axes=("data",)), **load
    )
    values = {name: value for name, value in found.best.step.workload["layout"].items() if name != "gpus"}
    job = nj.job_from_config("llama-3.2-1b", Parallelism(**values), **load)
    assert found.best.step.total_s == pytest.approx(nj.predict(RooflinePredictor(), cluster, job).total_s, rel=1e-5)
    assert found.best.step.workload["document_tokens"] == 300
    with pytest.raises(nj.InputError, match="document_tokens 4096 is more than sequence_length 2048"):
        nj.job_from_config("llama-3.2-1b", Parallelism(), **{**load, "document_tokens": 4096})
    with pytest.raises(nj.InputError, match="document_tokens is 0, expected a positive whole number"):
        nj.job_from_config("llama-3.2-1b", Parallelism(), **{**load, "document_tokens": 0})
    graph = nj.graph_from_config("bert-large", 1, 128, "training", "bf16")
    with pytest.raises(nj.InputError, match="document_tokens is for decoders whose layers are split"):
        nj.job_from_graph(graph, Parallelism(), document_tokens=64)
    short = {"global_batch_size": 8, "sequence_length": 512, "document_tokens": 64}
    with pytest.raises(nj.InputError, match="gpt2 in fp32 runs without"):
        nj.job_from_config("gpt2", Parallelism(), dtype="fp32", **short)
