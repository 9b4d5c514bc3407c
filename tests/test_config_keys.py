"""Every key of a config is read, without effect, or named; `architectures` decides the head; folders of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized import DENSE, EMBEDDING, HIDDEN, LAYERS, LINEAR, NORMS, SPARSE, VOCABULARY, grouped
from refusals import Fails
from refusals import message as refused
from small_configs import DECODERS, ENCODERS

import neusight_jax as nj
from neusight_jax.graph.configs.config import list_models, load_model_config
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import footprint
from neusight_jax.kernels.families import FAMILIES

NAMED = "keys of the config that were not read, so they change nothing here: "


def graph(values: Any, mode: str = "decode", tokens: int = 32, **options: Any) -> Graph:
    return nj.graph_from_config(values, 1, tokens, mode, **options)


def unread(values: Any, mode: str = "decode", **options: Any) -> list[str]:
    """The keys a forecast names."""
    found = [note for note in graph(values, mode, **options).notes if note.startswith(NAMED)]
    return found[0].removeprefix(NAMED).split(", ") if found else []


def head_features(values: dict[str, Any], name: str) -> list[float]:
    """Outputs of the products of the nodes of a head."""
    nodes = [node for node in graph(values, "inference").nodes if node.name.split(".")[0] == name]
    return [kernel.dims["n"] for node in nodes for kernel in node.forward if FAMILIES[kernel.family].matrix]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, []),
        ({"rope_theta": 1e6, "bos_token_id": 1, "initializer_range": 0.02, "attention_dropout": 0.1}, []),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk_attention_config"]),
        ({"sparse_gadget": 3, "second_gadget": [1]}, ["sparse_gadget", "second_gadget"]),
        ({"sparse_gadget": None, "second_gadget": False, "third": [], "fourth": 0, "fifth": ""}, []),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 32}}, []),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}}, []),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "outlier_rows": 8}},
            ["quantization_config.outlier_rows"],
        ),
        ({"sliding_window": 128}, ["sliding_window"]),  # llama's class has none
        ({"use_sliding_window": False}, []),
    ],
)
def test_keys_nobody_reads_are_named(change: dict[str, Any], names: list[str]) -> None:
    assert unread({**DENSE, **change}) == names


def test_keys_of_a_language_part_are_named_with_their_place() -> None:
    inside = {**DENSE, "gadget": 1}
    assert unread({"model_type": "llava", "text_config": inside, "vision_config": {"depth": 3}}) == [
        "text_config.gadget"
    ]


def test_weights_as_asked_for_leave_no_quantization_to_read() -> None:
    config = {**DENSE, "quantization_config": {"quant_method": "awq", "bits": 4, "outlier_rows": 8}}
    assert unread(config, weight_dtype="bf16") == []


def test_long_lists_are_counted() -> None:
    names = unread({**DENSE, **{f"gadget_{at}": 1 for at in range(20)}})
    assert names[0] == "gadget_0"
    assert names[-1].endswith("and 8 more")


def test_jobs_and_serving_name_them_too() -> None:
    from neusight_jax.serving.steps import load_model

    config = {**DENSE, "gadget": 1}
    job = nj.job_from_config(config, nj.Parallelism(), global_batch_size=1, sequence_length=64)
    for notes in (job.plan.notes, load_model(config).notes):
        assert f"{NAMED}gadget" in notes


@pytest.mark.parametrize("name", list_models())
def test_catalog_is_read_whole(name: str) -> None:
    kind = load_model_config(name)["model_type"]
    assert unread(name, "inference", tokens=197 if kind == "vit" else 32) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_configs_that_transformers_writes_are_read_whole(kind: str) -> None:
    """Every key of every class, with its default."""
    transformers = pytest.importorskip("transformers")
    own = {**DECODERS, **ENCODERS}[kind]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    values = {key: value for key, value in own.items() if key not in ("model_type", "vocab_size") or kind != "vit"}
    if kind in ENCODERS:  # ours have keys of others
        values = {}
    whole = transformers.CONFIG_MAPPING[kind](**{k: v for k, v in values.items() if k != "model_type"}).to_dict()
    whole = json.loads(json.dumps(whole, default=str))
    assert unread(whole, "inference", tokens=197 if kind == "vit" else 32) == []


CLASSES: list[tuple[str, str, list[int]]] = [
    ("LlamaForCausalLM", "head", [VOCABULARY]),
    ("LlamaForSequenceClassification", "score", [5]),
    ("LlamaForTokenClassification", "score", [5]),
    ("LlamaForQuestionAnswering", "score", [2]),
    ("Qwen2ForRewardModel", "score", [HIDDEN, 1]),
    ("Qwen2ForProcessRewardModel", "score", [HIDDEN, 2]),
    ("LlamaForRewardModel", "score", [1]),
    ("Qwen2_5OmniModel", "head", [VOCABULARY]),
    ("LlamaModel", "head", []),
    ("LlamaModel", "score", []),
    ("LlamaForSequenceClassification", "head", []),
]


@pytest.mark.parametrize(("name", "node", "features"), CLASSES)
def test_the_class_decides_the_head(name: str, node: str, features: list[int]) -> None:
    assert head_features({**DENSE, "architectures": [name], "num_labels": 5}, node) == features


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "suffix", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model"]
)
@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("llama", "Llama"),
        ("qwen3", "Qwen3"),
        ("mixtral", "Mixtral"),
        ("gpt2", "GPT2"),
        ("bert", "Bert"),
        ("roberta", "Roberta"),
    ],
)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_parameters_of_every_head_equal_those_of_transformers(kind: str, prefix: str, suffix: str, mode: str) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers_counts import elements

    values = {**{**DECODERS, **ENCODERS}[kind], **({} if suffix == "ForQuestionAnswering" else {"num_labels": 3})}
    work = graph({**values, "architectures": [prefix + suffix]}, mode)
    assert work.parameters == elements(getattr(transformers, prefix + suffix), values)


def test_unknown_classes_are_said() -> None:
    notes = graph({**DENSE, "architectures": ["LlamaForEverything"]}).notes
    assert "architectures 'LlamaForEverything' is no class known here: forecast as llama with its usual head" in notes
    assert not any("architectures" in note for note in graph({**DENSE, "architectures": None}).notes)
    text = refused(lambda: graph({**DENSE, "architectures": 3}))
    assert text == "llama: architectures is 3, expected a list with the name of a class"


def test_an_encoder_for_masked_words_says_what_is_forecast() -> None:
    config = {**ENCODERS["bert"], "architectures": ["BertForMaskedLM"]}
    assert any("forecast with sequence labels" in note for note in graph(config, "inference").notes)
    assert not any("architectures" in note for note in graph(config, "training").notes)


def test_eagle3_drafts() -> None:
    """fc 3h -> h, a first layer that reads 2h and has a norm more, a head of its own, no embedding."""
    config = {**DENSE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300}
    work, plain = graph(config), graph(DENSE)
    extra = 3 * HIDDEN * HIDDEN + LINEAR[0][0] * HIDDEN + HIDDEN
    assert plain.parameters is not None
    assert work.parameters == plain.parameters + extra - VOCABULARY * HIDDEN - (VOCABULARY - 300) * HIDDEN
    assert head_features(config, "head") == [300]
    again = {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 300},
        **{"transformer_layer_config": DENSE},
    }
    assert graph(again).parameters == work.parameters


@pytest.mark.parametrize("name", ["EagleLlamaForCausalLM", "DFlashDraftModel"])
def test_drafts_that_share_embedding_and_head(name: str) -> None:
    listed = {"dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 7}, "block_size": 16}
    config = {**DENSE, "architectures": [name], **(listed if name[0] == "D" else {})}
    work, plain = graph(config), graph(DENSE)
    assert plain.parameters is not None
    assert work.parameters == plain.parameters - 2 * VOCABULARY * HIDDEN + 2 * HIDDEN * HIDDEN
    assert head_features(config, "head") == [VOCABULARY]
    assert unread(config) == []


@pytest.mark.parametrize("name", ["MedusaModel", "DeepSeekMTPModel", "MLPSpeculatorPreTrainedModel"])
def test_other_drafts_are_refused(name: str) -> None:
    text = refused(lambda: graph({**DENSE, "architectures": [name]}))
    assert text.startswith(f"llama: '{name}' is a draft that is not written here; expected")


@pytest.mark.parametrize(
    "change",
    [
        {"use_bidirectional_attention": True},
        {"is_causal": False},
        {"architectures": ["LlamaBidirectionalModel"]},
    ],
)
def test_attention_both_ways(change: dict[str, Any]) -> None:
    def pairs(values: dict[str, Any]) -> float:
        nodes = [node for node in graph(values, "prefill", 512, dtype="bf16").nodes if node.op == "attention"]
        return nodes[0].forward[0].dims["pairs"]

    config = {"architectures": ["LlamaModel"], **DENSE, **change}
    assert pairs(config) == 512 * 512
    assert pairs({**DENSE}) == 512 * 513 / 2
    assert "no decode step" in refused(lambda: graph({"architectures": ["LlamaModel"], **config}))


def test_models_without_a_vocabulary_are_not_served() -> None:
    from neusight_jax.serving.steps import load_model

    text = refused(lambda: load_model({**DENSE, "architectures": ["LlamaForSequenceClassification"]}))
    assert "no head over the vocabulary" in text


@pytest.mark.parametrize(
    ("kind", "pattern", "windowed"),
    [
        ("exaone4", "LLLG", 6),
        ("exaone4", "LG", 4),
        ("gemma2", "LLG", 6),  # the third and sixth of eight are full
        ("gemma3_text", ["L", "L", "L", "G"], 6),
        ("mistral", "lg", 4),
    ],
)
def test_patterns_of_letters(kind: str, pattern: Any, windowed: int) -> None:
    sizes = {**DENSE, "model_type": kind, "num_hidden_layers": 8, "sliding_window": 16, "max_position_embeddings": 4096}
    config = {**sizes, "sliding_window_pattern": pattern}
    token = 2 * 2 * 64 * 2  # bytes of keys and values in a layer
    if kind.startswith("gemma"):
        config["head_dim"] = 64
    assert footprint(graph(config, tokens=100)).kv_cache == token * (16 * windowed + 100 * (8 - windowed))


def test_letters_nobody_knows_are_refused() -> None:
    sizes = {**DENSE, "model_type": "exaone4", "sliding_window": 16}
    for pattern in ("LXG", "", "LLLLLLLG"):
        text = refused(lambda text=pattern: graph({**sizes, "sliding_window_pattern": text}))
        assert "or at most 3 letters of L (sliding_attention), S (sliding_attention)" in text


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize("tied", [False, True])
def test_mlx_quantizes_products_embedding_and_head(tied: bool) -> None:
    """4.5 bits an element: a scale and a bias of 16 bits for 64."""
    work = graph({**DENSE, "quantization": MLX, "tie_word_embeddings": tied})
    four = grouped(4, 64, 32)
    layer, tables = sum(four(n, k) for n, k in LINEAR), (1 if tied else 2) * four(VOCABULARY, HIDDEN)
    assert footprint(work).weights == pytest.approx(LAYERS * layer + tables + NORMS, rel=1e-9)
    assert "weights int4 (mlx, group 64), products in bf16" in work.notes


def test_mlx_modules_with_an_entry_of_their_own() -> None:
    whole, four = graph({**DENSE, "quantization": MLX}), grouped(4, 64, 32)
    entries = {"model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8}, "lm_head": False}
    work = graph({**DENSE, "quantization": {**MLX, **entries}})
    n, k = LINEAR[3]
    more = grouped(8, 64, 32)(n, k) - four(n, k) + EMBEDDING - four(VOCABULARY, HIDDEN)
    assert footprint(work).weights == pytest.approx(footprint(whole).weights + more, rel=1e-9)
    experts = graph({**SPARSE, "quantization": {**MLX, "model.layers.0.mlp.switch_mlp.up_proj": False}})
    assert footprint(experts).weights > footprint(graph({**SPARSE, "quantization": MLX})).weights


def test_mlx_beside_another_quantization() -> None:
    same = graph({**DENSE, "quantization": MLX, "quantization_config": MLX})  # as mlx-lm writes it
    assert footprint(same).weights == footprint(graph({**DENSE, "quantization": MLX})).weights
    other = {**DENSE, "quantization": MLX, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert "MLX's quantization and another quantization_config; expected one" in refused(lambda: graph(other))


def written(folder: Path, **files: Any) -> Path:
    """A folder with JSON files, `config` as config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / f"{name.replace('__', '.')}.json").write_text(json.dumps(values))
    return folder


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "mine", config=DENSE)
    work = graph(str(folder))
    assert work.name == "mine"
    assert work.parameters == graph(DENSE).parameters
    assert graph(folder).parameters == work.parameters


@pytest.mark.parametrize(
    ("file", "section", "says"),
    [
        ("quantize_config", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq, group 128"),
        ("quant_config", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq, group 64"),
        ("hf_quant_config", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_quantizers_files_beside_the_config(tmp_path: Path, file: str, section: dict[str, Any], says: str) -> None:
    work = graph(written(tmp_path, config=DENSE, **{file: section}))
    assert any(says in note for note in work.notes)
    assert f"how weights are stored is read from {file}.json" in work.notes
    assert not any(note.startswith(NAMED) for note in work.notes)


@pytest.mark.parametrize(("share", "told"), [(1.0, False), (1.015, False), (1.03, True), (0.5, True)])
def test_weights_are_compared_with_their_files(tmp_path: Path, share: float, told: bool) -> None:
    size = footprint(graph(DENSE, dtype="bf16")).weights * share
    config = {**DENSE, "torch_dtype": "bfloat16"}
    folder = written(tmp_path, config=config, model__safetensors__index={"metadata": {"total_size": size}})
    for place in (folder, folder / "config.json"):
        assert any("files beside the config hold" in note for note in graph(place).notes) is told
    assert not any("files beside" in note for note in graph(folder, dtype="fp8").notes)  # others are asked for


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    config = {**DENSE, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    size = footprint(graph(config)).weights + EMBEDDING
    folder = written(tmp_path, config=config, model__safetensors__index={"metadata": {"total_size": size}})
    assert not any("files beside" in note for note in graph(folder).notes)


def test_embedding_models_of_sentence_transformers_have_no_head(tmp_path: Path) -> None:
    config = {**DENSE, "architectures": ["LlamaForCausalLM"]}
    work = graph(
        written(tmp_path, config=config, modules=[{"idx": 0, "type": "sentence_transformers.models.Transformer"}])
    )
    assert work.parameters == graph({**DENSE, "architectures": ["LlamaModel"]}).parameters
    assert "LlamaModel has no head" in work.notes


ADAPTERS = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "down_proj"], "lora_alpha": 16}


def test_adapters_beside_a_config(tmp_path: Path) -> None:
    folder = written(tmp_path, config=DENSE, adapter_config=ADAPTERS)
    trained = graph(folder, "training")
    assert trained.trained == LAYERS * 8 * sum(n + k for n, k in (LINEAR[0], LINEAR[3]))
    assert "adapters of rank 8 on attention.qkv, mlp.down, as adapter_config.json says" in trained.notes
    merged = graph(folder)
    assert merged.parameters == graph(DENSE).parameters
    assert any("merged into the weights" in note for note in merged.notes)
    asked = graph(folder, "training", lora=nj.Lora(4, ("mlp.down",)))
    assert asked.trained == LAYERS * 4 * sum(LINEAR[3])
    regular = {**ADAPTERS, "target_modules": r".*\.(o_proj|up_proj)", "use_dora": True}
    more = graph(written(tmp_path, adapter_config=regular), "training")
    assert more.trained == LAYERS * 8 * sum(n + k for n, k in LINEAR[1:3])
    assert f"{NAMED}adapter_config.use_dora" in more.notes


def test_adapters_alone_name_their_model(tmp_path: Path) -> None:
    base = {**ADAPTERS, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    work = graph(written(tmp_path / "adapters", adapter_config=base))
    assert work.parameters == graph("qwen3-0.6b").parameters
    assert "adapters of Qwen/Qwen3-0.6B" in work.notes
    written(tmp_path / "tiny", config=DENSE)
    local = written(tmp_path / "adapters", adapter_config={**ADAPTERS, "base_model_name_or_path": "someone/tiny"})
    assert graph(local).parameters == graph(DENSE).parameters


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no config.json"),
        ({"adapter_config": {"peft_type": "LORA"}}, "no base_model_name_or_path"),
        ({"adapter_config": {**ADAPTERS, "base_model_name_or_path": "x/y"}}, "neither in the catalog nor a folder"),
        ({"config": DENSE, "adapter_config": {**ADAPTERS, "peft_type": "IA3"}}, "peft_type 'IA3' is not supported"),
        ({"config": DENSE, "adapter_config": {**ADAPTERS, "target_modules": ["wqkv"]}}, "names no product of llama"),
        ({"config": DENSE, "adapter_config": {**ADAPTERS, "r": 0}}, "r is 0, expected"),
        ({"config": [1]}, "holds a list, expected a JSON object"),
    ],
)
def test_folders_that_are_no_model(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    folder = written(tmp_path, **files)
    assert says in refused(lambda: graph(folder, "training"))


@pytest.mark.parametrize("values", [{"dim": 4096, "n_layers": 32, "n_heads": 32}, {"model_type": "lama"}, {}])
def test_unknown_types_are_refused_in_a_short_line(
    predict_fails: Fails, tmp_path: Path, values: dict[str, Any]
) -> None:
    text = predict_fails(str(written(tmp_path, params=values) / "params.json"))
    assert len(text) < 250
    assert "llama" in text
