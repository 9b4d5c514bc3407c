"""Small configs of many types, sizes of our own making; what they leave out is the default of their class."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
"""A decoder that an engine serves."""
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
_KV: dict[str, Any] = {"num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {**_KV, "attention_bias": True, "mlp_bias": True},
    "mistral": {**_KV, "head_dim": 64},
    "qwen2": {**_KV, "tie_word_embeddings": True},
    "qwen3": _KV,
    "gemma2": _KV,
    "gemma3_text": _KV,
    "phi3": _KV,
    "glm4": _KV,
    "olmo2": _KV,
    "cohere": {**_KV, "use_qk_norm": True},
    "starcoder2": _KV,
    "nemotron": _KV,
    "seed_oss": _KV,
    "mixtral": {**_KV, **_LOCAL},
    "phimoe": {**_KV, **_LOCAL},
    "qwen2_moe": {**_KV, **_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [5]},
    "qwen3_moe": {**_KV, **_EXPERTS},
    "gpt_oss": {**_KV, **_LOCAL},
    "glm4_moe": {**_KV, **_ROUTED, "use_qk_norm": True},
    "minimax_m2": {**_KV, **_LOCAL},
    "ernie4_5_moe": {**_KV, "moe_num_experts": 8, "moe_intermediate_size": 64, "moe_k": 2},
    "llama4_text": {**_KV, "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 512},
    "gemma4_text": {
        **_KV,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "mimo_v2_flash": {**_KV, **_ROUTED},
    "minimax_m3_vl_text": {
        **_KV,
        **_LOCAL,
        "dense_intermediate_size": 320,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 5,
    },
    "deepseek_v2": {**_ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": _ROUTED,
    "deepseek_v32": _ROUTED,
    "glm_moe_dsa": {**_ROUTED, "indexer_types": ["full", "shared", "shared"] * 2},
    "deepseek_v4": {**_ROUTED, "o_groups": 4, "o_lora_rank": 32, "index_n_heads": 4},
    "qwen3_next": {**_KV, **_EXPERTS},
    "qwen3_5_text": _KV,
    "qwen3_5_moe_text": {**_KV, **_EXPERTS},
    "kimi_linear": {
        **_EXPERTS,
        "linear_attn_config": {
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "num_key_value_heads": 8,
    },
    "nemotron_h": {
        **_KV,
        **_ROUTED,
        "hybrid_override_pattern": "M*ME-E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "moe_shared_expert_intermediate_size": 96,
        "moe_latent_size": 128,
    },
    "granitemoehybrid": {
        **_KV,
        **_LOCAL,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention", "mamba"] * 2,
    },
}
DECODERS: dict[str, dict[str, Any]] = {kind: {"model_type": kind, **_COMMON, **own} for kind, own in _OWN.items()}
"""Decoders by type."""
DECODERS["deepseek_v4"].pop("intermediate_size")
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_COMMON, "type_vocab_size": 2},
    "roberta": {"model_type": "roberta", **_COMMON, "pad_token_id": 1, "type_vocab_size": 1},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 128},
    "gpt2 untied": {
        "model_type": "gpt2",
        **{"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 128},
        "tie_word_embeddings": False,
    },
    "opt": {"model_type": "opt", **_COMMON, "ffn_dim": 384},
    "opt narrow": {
        "model_type": "opt",
        **_COMMON,
        "ffn_dim": 384,
        "word_embed_proj_dim": 128,
        "do_layer_norm_before": False,
    },
    "switch": {
        "model_type": "switch_transformers",
        **{"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 6, "num_decoder_layers": 6},
        **{"num_experts": 4, "vocab_size": 500, "num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 3},
    },
    "vit": {"model_type": "vit", **_COMMON, "image_size": 64, "patch_size": 16, "num_labels": 10, "qkv_bias": False},
}
"""Eager models and ViT by name."""
