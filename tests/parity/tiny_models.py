"""Tiny models of many families with weights that are random enough for mistakes to show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.kit.small_llama import sizes

VOCAB = 128
WINDOW = 4
"""Sliding window of the families that have one: shorter than the texts and the draft trees in the tests."""

_SHAPE: dict[str, Any] = sizes(32, 3, 4, 2, vocab=VOCAB, inner=48, context=128, bos=1, eos=None, pad=0)
_HEADS_OF_8: dict[str, Any] = {**_SHAPE, "head_dim": 8}
_NO_GQA: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 4}
_ODD: dict[str, Any] = {**_SHAPE, "hidden_size": 44, "intermediate_size": 53, "head_dim": 22}
"""Widths that fill no vector."""
_ODD_EXPERTS: dict[str, Any] = {**_ODD, "hidden_size": 40}
"""Transformers multiplies experts only whose rows are whole pieces of 16 bytes."""
_NEOX: dict[str, Any] = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_NEOX_ODD: dict[str, Any] = {**_NEOX, "hidden_size": 44, "intermediate_size": 53, "num_attention_heads": 2}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Some frequencies are kept, some divided, and some lie between; texts are as long as what they are scaled from."""
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_SHARING = ["sliding_attention", "full_attention"] * 3
"""Six layers, of which the last two read what the third and the fourth store."""
_GEMMA4: dict[str, Any] = {
    **_HEADS_OF_8,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_SHARED: dict[str, Any] = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": _SHARING,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
}
_FALCON: dict[str, Any] = sizes(32, 3, 4, vocab=VOCAB, alibi=False, bos=1, eos=None)
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_LATENT: dict[str, Any] = {
    **{**_NO_GQA, "intermediate_size": 64},
    **{
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
_GROUPED_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2},
    **{"topk_group": 1, "n_shared_experts": 1},
}
_DEEPSEEK: dict[str, Any] = {**_LATENT, **_GROUPED_EXPERTS, "first_k_dense_replace": 1}
_YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1},
}

LATENT: dict[str, Callable[[], Any]] = {
    "deepseek-v2": lambda: tf.DeepseekV2Config(**{**_DEEPSEEK, "q_lora_rank": None, "kv_lora_rank": 20}),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**_DEEPSEEK, rope_parameters=_YARN),
    "glm4-moe-lite": lambda: tf.Glm4MoeLiteConfig(
        **_LATENT, **_GROUPED_EXPERTS, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "axk1": lambda: tf.AXK1Config(**_DEEPSEEK),
    "longcat-flash": lambda: tf.LongcatFlashConfig(
        **{
            name: size
            for name, size in _LATENT.items()
            if name not in ("num_hidden_layers", "intermediate_size")
        },
        **{"num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "head_dim": 8},
        **{"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
    ),
    "youtu": lambda: tf.YoutuConfig(**_LATENT),
    "minicpm3": lambda: tf.MiniCPM3Config(**_LATENT),
}
"""Families whose keys and values are made of one latent a token. One has a latent that fills no vector."""

FAMILIES: dict[str, Callable[[], Any]] = {
    **{name: LATENT[name] for name in ("deepseek-v2", "deepseek-v3", "youtu")},
    "llama": lambda: tf.LlamaConfig(**_NO_GQA),
    "llama-gqa": lambda: tf.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama3-odd": lambda: tf.LlamaConfig(**_ODD, rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: tf.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "mistral-odd": lambda: tf.MistralConfig(**_ODD, sliding_window=WINDOW),
    "mixtral": lambda: tf.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-odd": lambda: tf.MixtralConfig(
        **{**_ODD_EXPERTS, "intermediate_size": 56},
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
    ),
    "qwen2": lambda: tf.Qwen2Config(**_SHAPE),
    "qwen2-odd": lambda: tf.Qwen2Config(**_ODD, tie_word_embeddings=True),
    "qwen2-window": lambda: tf.Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: tf.Qwen3Config(**_HEADS_OF_8),
    "qwen3-odd": lambda: tf.Qwen3Config(**_ODD, attention_bias=True),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(
        **_HEADS_OF_8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "qwen3-moe-odd": lambda: tf.Qwen3MoeConfig(
        **_ODD_EXPERTS, moe_intermediate_size=24, num_experts=9, num_experts_per_tok=4, norm_topk_prob=False
    ),
    "qwen3-moe-mixed": lambda: tf.Qwen3MoeConfig(
        **_HEADS_OF_8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gemma": lambda: tf.GemmaConfig(**_HEADS_OF_8),
    "gemma-odd": lambda: tf.GemmaConfig(**_ODD),
    "gemma2": lambda: tf.Gemma2Config(
        **_HEADS_OF_8,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=8,
    ),
    "gemma2-odd": lambda: tf.Gemma2Config(
        **_ODD,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_HEADS_OF_8, sliding_window=WINDOW, layer_types=_ALTERNATING, query_pre_attn_scalar=8
    ),
    "gemma3-odd": lambda: tf.Gemma3TextConfig(
        **_ODD,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=20,
        final_logit_softcapping=20.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **_HEADS_OF_8,
        intermediate_size_mlp=40,
        num_local_experts=4,
        moe_layers=[1],
        no_rope_layers=[1, 1, 0],
        attention_chunk_size=2 * WINDOW,
        floor_scale=3,
    ),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **{key: _GEMMA4_SHARED[key] for key in _GEMMA4_SHARED if key != "global_head_dim"}
        | {"hidden_size_per_layer_input": 8, "final_logit_softcapping": 20.0},
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, *[0.0] * 5],
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **_GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=20.0
    ),
    "gemma4-shared": lambda: tf.Gemma4TextConfig(
        **_GEMMA4_SHARED | {"hidden_size_per_layer_input": 8}, use_double_wide_mlp=True
    ),
    "gemma4-experts": lambda: tf.Gemma4TextConfig(
        **_GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4-unified": lambda: tf.Gemma4UnifiedTextConfig(
        **{key: _GEMMA4[key] for key in _GEMMA4 if key != "hidden_size_per_layer_input"},
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
    "phi": lambda: tf.PhiConfig(**_SHAPE, partial_rotary_factor=0.5),
    "phi3": lambda: tf.Phi3Config(**_SHAPE, sliding_window=WINDOW),
    "phi3-partial": lambda: tf.Phi3Config(**_ODD, partial_rotary_factor=0.5),
    "phi3-longrope": lambda: tf.Phi3Config(
        **_SHAPE,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.3, 1.9],
            "long_factor": [2.0, 2.5, 3.5, 4.5],
        },
    ),
    "gpt2": lambda: tf.GPT2Config(**_GPT2),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**_NEOX, rotary_pct=0.5),
    "gpt-neox-odd": lambda: tf.GPTNeoXConfig(**_NEOX_ODD, rotary_pct=0.28),
    "gpt-neox-serial": lambda: tf.GPTNeoXConfig(**_NEOX, use_parallel_residual=False, hidden_act="gelu_fast"),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_HEADS_OF_8,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt-oss-odd": lambda: tf.GptOssConfig(
        **{**_ODD_EXPERTS, "intermediate_size": 24},
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=7,
        num_experts_per_tok=3,
        swiglu_limit=0.5,
    ),
    "opt": lambda: tf.OPTConfig(
        **sizes(32, 3, 4, vocab=VOCAB, ffn_dim=48, context=128, word_embed_proj_dim=32)
    ),
    "olmo2": lambda: tf.Olmo2Config(**_SHAPE),
    "olmo2-odd": lambda: tf.Olmo2Config(**_ODD),
    "smollm3": lambda: tf.SmolLM3Config(**_ODD, no_rope_layers=[1, 0, 1], mlp_bias=True),
    "starcoder2": lambda: tf.Starcoder2Config(**_SHAPE, sliding_window=WINDOW),
    "starcoder2-odd": lambda: tf.Starcoder2Config(**_ODD),
    "cohere": lambda: tf.CohereConfig(**_SHAPE, logit_scale=0.5, use_qk_norm=True),
    "granite": lambda: tf.GraniteConfig(
        **_SHAPE,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
        mlp_bias=True,
    ),
    "granite-odd": lambda: tf.GraniteConfig(
        **_ODD,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    "falcon-old": lambda: tf.FalconConfig(**_FALCON, new_decoder_architecture=False, multi_query=True),
    "falcon-new": lambda: tf.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
}

_SPARSE: dict[str, Any] = {
    **{**_NO_GQA, "head_dim": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"index_topk": 6, "index_n_heads": 24, "index_head_dim": 8},
}
"""So many heads score that two entries never score alike."""

SPARSE: dict[str, Callable[[], Any]] = {
    "deepseek-v3.2": lambda: tf.DeepseekV32Config(**_SPARSE),
    "glm-moe-dsa": lambda: tf.GlmMoeDsaConfig(**_SPARSE, indexer_types=["full", "shared", "full"]),
}
"""Families whose rows attend to what an indexer chooses."""

_RECURRENT: dict[str, Any] = {**_SHAPE, "head_dim": 8}
_DELTA: dict[str, Any] = {
    **_RECURRENT,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}

RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(**_DELTA),
    "qwen3.5-moe": lambda: tf.Qwen3_5MoeTextConfig(**_DELTA, **_EXPERTS),
    "qwen3-next": lambda: tf.Qwen3NextConfig(**_DELTA, **_EXPERTS),
    "olmo-hybrid": lambda: tf.OlmoHybridConfig(**_DELTA),
    "kimi-linear": lambda: tf.KimiLinearConfig(
        **{**_NO_GQA, "head_dim": 8},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=4,
        linear_head_dim=8,
        kv_lora_rank=12,
        q_lora_rank=None,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    "lfm2": lambda: tf.Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention", "conv"]),
    "mamba": lambda: tf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, state_size=6, eos_token_id=None
    ),
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=6,
        n_groups=2,
        chunk_size=8,
        eos_token_id=None,
    ),
    "jamba": lambda: tf.JambaConfig(
        **_SHAPE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=6,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": lambda: tf.BambaConfig(**_SHAPE, **_MAMBA2, attn_layer_indices=[1]),
    "nemotron-h": lambda: tf.NemotronHConfig(
        **_HEADS_OF_8,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=6,
        n_groups=2,
        chunk_size=8,
    ),
    "granite-hybrid": lambda: tf.GraniteMoeHybridConfig(
        **_SHAPE, **_MAMBA2, layer_types=["mamba", "attention", "mamba"], num_local_experts=4
    ),
    "falcon-h1": lambda: tf.FalconH1Config(**_HEADS_OF_8, **_MAMBA2, mamba_d_ssm=64),
    "minimax": lambda: tf.MiniMaxConfig(
        **_HEADS_OF_8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        block_size=8,
        num_local_experts=4,
    ),
    "recurrent-gemma": lambda: tf.RecurrentGemmaConfig(
        **{**_HEADS_OF_8, "num_key_value_heads": 1}, lru_width=32, attention_window_size=WINDOW
    ),
    "zamba": lambda: tf.ZambaConfig(
        **_NO_GQA,
        mamba_d_state=6,
        mamba_dt_rank=4,
        layers_block_type=["hybrid", "linear_attention", "hybrid"],
    ),
    "zamba2": lambda: tf.Zamba2Config(
        **_NO_GQA,
        n_mamba_heads=4,
        mamba_d_state=6,
        mamba_ngroups=2,
        chunk_size=8,
        layers_block_type=["hybrid", "linear_attention", "hybrid"],
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
    ),
}
"""Families with recurrent layers: all of them, beside attention, or in the same layer."""

_DECODER: dict[str, Any] = {
    **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "decoder_ffn_dim": 48},
    **{"decoder_attention_heads": 4, "max_position_embeddings": 128, "is_encoder_decoder": False},
    **{"is_decoder": True, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    **{"decoder_start_token_id": 1, "forced_eos_token_id": None, "decoder_vocab_size": VOCAB},
}

DECODERS: dict[str, Callable[[], Any]] = {
    "bart": lambda: tf.BartConfig(**_DECODER),
    "blenderbot": lambda: tf.BlenderbotConfig(**_DECODER),
    "blenderbot-small": lambda: tf.BlenderbotSmallConfig(**_DECODER),
    "marian": lambda: tf.MarianConfig(**_DECODER),
    "mbart": lambda: tf.MBartConfig(**_DECODER),
    "pegasus": lambda: tf.PegasusConfig(**_DECODER),
    "plbart": lambda: tf.PLBartConfig(**_DECODER),
}
"""Decoders of encoder-decoders, each a language model without its encoder."""

LIKE_OTHERS: dict[str, Callable[[], Any]] = {
    **DECODERS,
    "ministral": lambda: tf.MinistralConfig(**_HEADS_OF_8, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "cwm": lambda: tf.CwmConfig(
        **_HEADS_OF_8, sliding_window=WINDOW, layer_types=_ALTERNATING, rope_parameters=_LLAMA3_ROPE
    ),
    "seed-oss": lambda: tf.SeedOssConfig(**_HEADS_OF_8, attention_bias=True, attention_out_bias=True),
    "internlm3": lambda: tf.InternLM3Config(**_HEADS_OF_8, attention_bias=True, mlp_bias=True),
    "iquestcoder": lambda: tf.IQuestCoderConfig(**_HEADS_OF_8),
    "olmoe": lambda: tf.OlmoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
    "vaultgemma": lambda: tf.VaultGemmaConfig(
        **_HEADS_OF_8,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=8,
    ),
    "olmo3": lambda: tf.Olmo3Config(
        **_SHAPE,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={
            "full_attention": _LLAMA3_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "arcee": lambda: tf.ArceeConfig(**_HEADS_OF_8, attention_bias=True, mlp_bias=True),
    "granite-swa": lambda: tf.GraniteSWAConfig(
        **_SHAPE,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        layer_rope_theta=[10_000.0, 0.0, 500.0],
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    "nemotron": lambda: tf.NemotronConfig(**_SHAPE),
    "stablelm": lambda: tf.StableLmConfig(**_SHAPE, use_qkv_bias=True),
    "hunyuan-moe": lambda: tf.HunYuanMoEV1Config(
        **_HEADS_OF_8, num_experts=4, moe_topk=2, num_shared_expert=1
    ),
    "gptj": lambda: tf.GPTJConfig(**_GPT2, rotary_dim=4),
    "codegen": lambda: tf.CodeGenConfig(**_GPT2, rotary_dim=4),
    "gpt-neox-japanese": lambda: tf.GPTNeoXJapaneseConfig(
        **{key: value for key, value in _NEOX.items() if key != "intermediate_size"},
        intermediate_multiple_size=2,
    ),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4, max_position_embeddings=128
    ),
    "bloom": lambda: tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6, bos_token_id=1, eos_token_id=None
    ),
    "mpt": lambda: tf.MptConfig(
        vocab_size=VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=128, attn_config={"clip_qkv": 2.0}
    ),
    "gpt-neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        attention_types=[[["local", "global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "dbrx": lambda: tf.DbrxConfig(
        vocab_size=VOCAB,
        d_model=32,
        n_heads=4,
        n_layers=3,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10_000.0},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "olmoe-clipped": lambda: tf.OlmoeConfig(
        **_SHAPE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.5
    ),
}
"""Families whose modules are those of a family above, or nearly so: fewer tests look at them."""

NOT_FUSED = (
    *DECODERS,
    "olmoe-clipped",
    "nemotron",
    "stablelm",
    "hunyuan-moe",
    "gptj",
    "codegen",
    "gpt-neox-japanese",
    "xglm",
    "bloom",
    "mpt",
    "gpt-neo",
    "dbrx",
)
"""Those of `LIKE_OTHERS` that run layer by layer."""


def randomise(model: Any, seed: int = 0, scale: float = 1.5) -> None:
    """Draw every weight anew, large enough for attention to be picky and for biases and norms to count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(dict(model.named_parameters()).items()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.3 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def save_tiny(config: Any, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of a model with this configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    return folder
