"""The families that come with Slipstream: by what names their Transformers classes have what the kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.models.families.experts import BesideNames
from slipstream.models.families.family import Family
from slipstream.models.families.frequencies import Rotation
from slipstream.models.families.inputs import InputNames

if TYPE_CHECKING:
    from slipstream.models.attention.base import Variant


class Llama(Family):
    """Llama, Mistral and Qwen 2, whose modules have the same names."""


class NormedHeads(Family):
    """Norms of queries and keys, under the names that most families have for them."""

    query_norm = "self_attn.q_norm"
    key_norm = "self_attn.k_norm"


class Qwen3(NormedHeads):
    """Llama with norms of queries and keys."""


class Mixtral(Family):
    """Llama with experts in the MLP's place."""

    experts = "mlp.experts"
    activation_module: ClassVar[str | None] = "mlp.experts.act_fn"


class Qwen3Moe(Mixtral, NormedHeads):
    """Mixtral with norms of queries and keys."""

    has_whole_shares = "mlp.gate.norm_topk_prob"


class Olmoe(Qwen3Moe):
    """Norms of all heads' queries and keys at once."""

    def misfits(self, model: Any, variants: Sequence[Variant]) -> Iterator[str]:
        if model.config.clip_qkv is not None:
            yield "its queries, keys and values are clipped"
        yield from super().misfits(model, variants)


class GptOss(Mixtral):
    """Experts with a gate of their own and biases everywhere, and attention with sinks."""

    sinks = "self_attn.sinks"
    router, num_chosen = "mlp.router", "mlp.router.top_k"
    gate_limit, gate_slope = "mlp.experts.limit", "mlp.experts.alpha"
    activation_module = None


class Gemma(Family):
    """Norms that add 1 to their weights, and scaled embeddings."""

    norm_epsilon, norm_offset = "eps", 1.0
    embedding_scale = "model.embed_tokens.scalar_embed_scale"


class VaultGemma(Gemma):
    """Gemma 2 without the norms behind attention and MLP."""

    activation = "hidden_activation"
    mlp_norm = "pre_feedforward_layernorm"
    logit_cap = "config.final_logit_softcapping"


class Gemma2(Gemma):
    """Gemma with norms behind attention and MLP too, and caps."""

    activation = "hidden_activation"
    attended_norm = "post_attention_layernorm"
    mlp_norm = "pre_feedforward_layernorm"
    mlp_out_norm = "post_feedforward_layernorm"
    logit_cap = "config.final_logit_softcapping"


class Gemma3(Gemma2, NormedHeads):
    """Gemma 2 with norms of queries and keys, and rotary embeddings by the kind of layer."""

    rotary_kind = "self_attn.layer_type"


class Gemma4(NormedHeads):
    """Gemma 3 whose layers differ: in their heads, in what they read, and by a scale each. Norms add nothing."""

    norm_epsilon = "eps"
    embedding_scale = "model.embed_tokens.scalar_embed_scale"
    activation = "hidden_activation"
    attended_norm = "post_attention_layernorm"
    mlp_norm = "pre_feedforward_layernorm"
    mlp_out_norm = "post_feedforward_layernorm"
    logit_cap = "config.final_logit_softcapping"
    rotary_kind = "self_attn.layer_type"
    head_dim, key_groups = "self_attn.head_dim", "self_attn.num_key_value_groups"
    reads_another = "self_attn.is_kv_shared_layer"
    value_norm = "self_attn.v_norm"
    layer_scale = "layer_scalar"

    @classmethod
    def of(cls, config: Any) -> Family:
        if getattr(config, "enable_moe_block", False):
            return Gemma4Experts()
        return Gemma4Inputs() if getattr(config, "hidden_size_per_layer_input", 0) else cls()


class Gemma4Inputs(Gemma4):
    """Its small sizes: layers are given an embedding of their own."""

    inputs = InputNames(
        table="model.embed_tokens_per_layer",
        table_scale="model.embed_tokens_per_layer.scalar_embed_scale",
        projection="model.per_layer_model_projection",
        projection_scale="model.per_layer_model_projection_scale",
        projection_norm="model.per_layer_projection_norm",
        scale="model.per_layer_input_scale",
        argument="per_layer_input",
        gate="per_layer_input_gate",
        last="per_layer_projection",
        norm="post_per_layer_input_norm",
    )


class Gemma4Experts(Gemma4):
    """Its size with experts, which stand beside the MLP."""

    experts, router = "experts", "router.proj"
    num_chosen = "config.top_k_experts"
    beside = BesideNames(
        router_scale="router.scale",
        router_factor="router.scalar_root_size",
        scales="router.per_expert_scale",
        input_norm="pre_feedforward_layernorm_2",
        mlp_out_norm="post_feedforward_layernorm_1",
        output_norm="post_feedforward_layernorm_2",
    )


class Phi3(Family):
    """Phi 3 and 4: Llama with fewer, wider linear layers."""

    qkv = "self_attn.qkv_proj"
    gate_up = "mlp.gate_up_proj"
    activation_module = "mlp.activation_fn"


class Granite(Family):
    """Llama with multipliers; attention's is among the scales of attention."""

    input_scale = "config.embedding_multiplier"
    residual_scale = "config.residual_multiplier"
    logit_divisor = "config.logits_scaling"


class Olmo2(NormedHeads):
    """Norms behind attention and MLP alone, and of all heads' queries and keys at once."""

    attention_norm = None
    attended_norm = "post_attention_layernorm"
    mlp_norm = None
    mlp_out_norm = "post_feedforward_layernorm"


class Olmo3(Olmo2):
    """OLMo 2 with rotary embeddings by the kind of layer."""

    rotary_kind = "self_attn.attention_type"


class Arcee(Family):
    """Llama with an MLP without a gate."""

    gate = None


class GraniteSwa(Granite):
    """Granite with sinks and windows, whose layers have rotary embeddings of their own, or none."""

    sinks = "self_attn.sinks"

    def rotations(self, model: Any) -> list[Rotation | None]:
        known = {
            each.config.rope_parameters["rope_theta"]: Rotation(each) for each in model.model.rotary_embs
        }
        return [known[theta] if theta else None for theta in model.config.layer_rope_theta]


class SmolLM3(Family):
    """Llama, some of whose layers do not count positions."""

    rotates = "self_attn.use_rope"


class Starcoder2(Family):
    """Layer norms, and an MLP without a gate."""

    norm_epsilon = "eps"
    gate, up, down = None, "mlp.c_fc", "mlp.c_proj"
    activation_module = "mlp.act"


class GptNeoX(Family):
    """Attention and MLP side by side, layer norms, no gate, and one linear layer for all that attention reads."""

    embedding, layers = "gpt_neox.embed_in", "gpt_neox.layers"
    rotary, final_norm = "gpt_neox.rotary_emb", "gpt_neox.final_layer_norm"
    parallel = "config.use_parallel_residual"
    norm_epsilon = "eps"
    qkv, has_interleaved_heads = "attention.query_key_value", True
    output = "attention.dense"
    gate, up, down = None, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
    activation_module = "mlp.act"
