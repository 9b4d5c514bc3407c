"""Adapters: what is trained, what travels, what memory holds, against sizes counted by hand."""

from typing import Any

import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax import InputError, Lora, Parallelism
from neusight_jax.graph.graph import Graph
from neusight_jax.job.job import Job
from neusight_jax.kernels.families import FAMILIES

HIDDEN, INNER, LAYERS, VOCABULARY, TOKENS = 512, 1024, 4, 1000, 256
TINY = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
PRODUCTS = {
    "attention.qkv": (HIDDEN + 2 * 2 * 64, HIDDEN),
    "attention.output": (HIDDEN, HIDDEN),
    "mlp.gate_up": (2 * INNER, HIDDEN),
    "mlp.down": (HIDDEN, INNER),
}
RANK = 8


def graph(**given: Any) -> Graph:
    """A step of the small model."""
    return nj.graph_from_config(TINY, 1, TOKENS, "training", **given)


def product_flop(work: Graph, phase: str) -> float:
    """FLOP of all matrix products of a phase."""
    return sum(
        2.0 * kernel.dims["m"] * kernel.dims["n"] * kernel.dims["k"] * kernel.count * node.repeat
        for node in work.nodes
        for kernel in getattr(node, phase)
        if FAMILIES[kernel.family].matrix and "m" in kernel.dims
    )


def adapter_elements(*names: str) -> int:
    """Elements of adapters of some products, all layers."""
    return LAYERS * RANK * sum(sum(PRODUCTS[name]) for name in names or PRODUCTS)


def test_only_adapters_are_trained() -> None:
    """Weight gradients are those of adapters alone; the other phases are as ever and have those of adapters too."""
    whole, part = graph(), graph(lora=Lora(RANK))
    more = 2.0 * TOKENS * adapter_elements()
    assert part.trained == adapter_elements()
    assert (part.parameters or 0.0) == (whole.parameters or 0.0) + adapter_elements()
    assert product_flop(part, "weight_gradient") == more
    for phase in ("forward", "backward"):
        assert product_flop(part, phase) == product_flop(whole, phase) + more


def test_targets_choose_products() -> None:
    """Parts of names say which products have adapters; one that no product has is refused with the names there are."""
    assert graph(lora=Lora(RANK, ("qkv",))).trained == adapter_elements("attention.qkv")
    assert graph(lora=Lora(RANK, ("mlp", "output"))).trained == adapter_elements(*list(PRODUCTS)[1:])
    with pytest.raises(InputError, match=r"'q_proj' is in no product's name; expected parts of attention\.qkv"):
        graph(lora=Lora(RANK, ("q_proj",)))


def test_memory_holds_gradients_of_adapters_only() -> None:
    """Of what is trained four bytes of a gradient, twelve of Adam and the master weight; QLoRA's base is narrow."""
    held = graph(lora=Lora(RANK)).footprint
    assert held is not None
    assert (held.gradients, held.optimizer) == (4 * adapter_elements(), 12 * adapter_elements())
    narrow = graph(lora=Lora(RANK), weight_dtype="int4").footprint
    assert narrow is not None
    assert narrow.weights < 0.6 * held.weights
    with pytest.raises(InputError, match="adapters beside them"):
        graph(weight_dtype="int4")


def test_the_optimizer_steps_over_adapters() -> None:
    """Its kernels have as many elements as are trained."""
    kernels = graph(lora=Lora(RANK), optimizer="sgd").nodes[-1].optimizer
    moved = sum(
        each.count * each.dims["rows"] * each.dims["cols"] * 4 * (each.dims["reads"] + each.dims["writes"])
        for each in kernels
    )
    assert moved == pytest.approx((4.0 + 12.0) * adapter_elements())  # gradients are read for their norm first


def test_quantized_models_have_adapters_too() -> None:
    """A config that is stored in four bits is trained with adapters, and refused without."""
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = {**TINY, "quantization_config": stored}
    work = nj.graph_from_config(config, 1, TOKENS, "training", lora=Lora(RANK))
    assert work.trained == adapter_elements()
    with pytest.raises(InputError, match="weights in bitsandbytes"):
        nj.graph_from_config(config, 1, TOKENS, "training")


def job(lora: Lora | None = None, **layout: Any) -> Job:
    """A job of the small model on four GPUs."""
    return nj.job_from_config(TINY, Parallelism(**layout), global_batch_size=4, sequence_length=TOKENS, lora=lora)


@pytest.mark.parametrize(("zero", "slot"), [(0, "gradients"), (1, "gradients"), (3, "reduce")])
def test_gradients_of_adapters_travel(zero: int, slot: str) -> None:
    """Replicas sum what is trained, four bytes each; FSDP still gathers every weight."""
    messages = [each for _, each in job(Lora(RANK), data=4, zero=zero).plan.messages]
    sent = sum(each.payload_bytes * each.count for each in messages if each.slot == slot)
    assert sent == 4 * adapter_elements()
    if zero == 3:
        plain = [each for _, each in job(data=4, zero=3).plan.messages if each.slot == "gather"]
        own = [each for each in messages if each.slot == "gather"]
        added = sum(each.payload_bytes * each.count for each in own)
        assert added == pytest.approx(
            sum(each.payload_bytes * each.count for each in plain) + 2 * adapter_elements(), rel=1e-6
        )


def test_a_tied_table_that_is_frozen_is_not_summed() -> None:
    """First and last stage share the gradient of an embedding only where it is trained."""
    tied = {**TINY, "tie_word_embeddings": True}

    def sends(lora: Lora | None) -> bool:
        layout = Parallelism(pipeline=2)
        own = nj.job_from_config(tied, layout, global_batch_size=4, sequence_length=TOKENS, lora=lora)
        return any(each.group == "pipeline" and each.slot == "gradients" for _, each in own.plan.messages)

    assert sends(None)
    assert not sends(Lora(RANK))


def test_jobs_with_adapters_are_lighter_and_faster() -> None:
    """A step and its memory, and the same step as `parallelize` forecasts it."""
    predictor, cluster = nj.load_predictor("tensorcore"), nj.load_cluster("4x H100")
    whole, part = (nj.predict(predictor, cluster, job(lora, data=4)) for lora in (None, Lora(RANK)))
    assert part.memory.total < whole.memory.total
    assert part.memory.optimizer < 0.2 * whole.memory.optimizer
    assert part.workload["lora"] == {"rank": RANK, "targets": []}
    found = nj.parallelize(
        predictor,
        cluster,
        TINY,
        global_batch_size=4,
        sequence_length=TOKENS,
        lora=Lora(RANK),
        space=nj.Space(recompute=("none",)),
        top=50,
    )
    layouts = {repr(each.step.workload["layout"]): each.step for each in found.machines[0].choices}
    same = layouts[repr(part.workload["layout"])]
    assert same.total_s == pytest.approx(part.total_s, rel=1e-4)
    assert same.memory.total == pytest.approx(part.memory.total, rel=1e-6)
    with pytest.raises(InputError, match="lora target 'nothing'"):
        job(Lora(RANK, ("nothing",)), data=4)


def test_routed_experts_are_frozen() -> None:
    """They have no adapters, so the replicas of an expert have nothing to sum."""
    experts = {
        **TINY,
        **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        **{"head_dim": 64, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []},
    }
    layout = Parallelism(data=4, expert=2)
    plan = nj.job_from_config(
        experts, layout, global_batch_size=4, sequence_length=TOKENS, lora=Lora(RANK, ("attention",))
    ).plan
    assert {each.group for _, each in plan.messages if each.slot == "gradients"} == {"data"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": 0}, "lora rank is 0, expected a positive whole number"),
        ({"rank": 1.5}, "lora rank is 1.5"),
    ],
)
def test_ranks_are_whole(given: dict[str, Any], told: str) -> None:
    """Others are refused."""
    with pytest.raises(InputError, match=told):
        Lora(**given)


def test_adapters_are_for_training_of_decoders() -> None:
    """Other workloads and models say so."""
    with pytest.raises(InputError, match="mode is inference"):
        nj.graph_from_config(TINY, 1, TOKENS, "inference", lora=Lora(RANK))
    with pytest.raises(InputError, match="lora is for decoders"):
        nj.graph_from_config("bert-large", 1, 128, "training", lora=Lora(RANK))


def test_a_frozen_torch_module_has_a_smaller_optimizer() -> None:
    """An optimizer of a module goes over the parameters that have gradients."""
    torch = pytest.importorskip("torch")
    from neusight_jax.graph.optimizers import with_states

    module = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 8, bias=False))
    module[0].weight.requires_grad_(False)
    work = nj.graph_from_torch(module, (torch.zeros(16, 64),), mode="training")
    assert (work.parameters, work.trained) == (64 * 72, 64 * 8)
    own = with_states(work, "adamw", work.dtype).footprint
    assert own is not None
    assert own.optimizer == np.float64(8 * 64 * 8)
