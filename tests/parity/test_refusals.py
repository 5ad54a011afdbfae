"""Models that would be decoded wrongly are refused when they are loaded, in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import FAMILIES, RECURRENT, SPARSE, randomise, save_tiny
from torch import Tensor, nn

from slipstream.errors import ModelError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import adapt, load_model, loading
from slipstream.models.attention import packed as attention
from slipstream.models.attention.base import ATTENTION_NAME
from slipstream.models.verdicts import LoadVerdict
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes

_SIZES: dict[str, Any] = sizes(32, 2, 4, vocab=64, inner=48)
_GQA: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has passed is compared again."""
    monkeypatch.setattr(LoadVerdict, "is_kept", lambda self: False)


def _with(config: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(config, name, value)
    return config


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rwkv": (
        lambda: tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)),
        "0 of its 2 layers attend through the attention interface",
    ),
    "led": (
        lambda: tf.LEDForConditionalGeneration(
            tf.LEDConfig(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                attention_window=8,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
            )
        ),
        "its configuration does not say how long its context is",
    ),
    "mvp": (
        lambda: tf.MvpForConditionalGeneration(
            tf.MvpConfig(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
            )
        ),
        "layers attend to the encoder's output by the hook",
    ),
    "bert": (lambda: tf.BertForMaskedLM(tf.BertConfig(**_SIZES)), "its attention is not causal"),
    "vit": (
        lambda: tf.ViTModel(
            tf.ViTConfig(
                **{k: v for k, v in _SIZES.items() if k != "vocab_size"}, image_size=16, patch_size=8
            )
        ),
        "it is not a causal language model",
    ),
    "falcon-alibi": (
        lambda: tf.FalconForCausalLM(
            tf.FalconConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
            )
        ),
        "ALiBi",
    ),
    "doge": (  # it makes a mask of its values
        lambda: tf.DogeForCausalLM(tf.DogeConfig(**_GQA)),
        "model.layers.0.self_attn (DogeAttention) cannot compute a pass whose masks it does not make",
    ),
    "gemma4-assistant": (
        lambda: tf.Gemma4UnifiedAssistantForCausalLM(
            tf.Gemma4UnifiedAssistantConfig(
                text_config={
                    **_GQA,
                    "num_hidden_layers": 4,
                    "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                },
                backbone_hidden_size=32,
            )
        ),
        "it drafts for a Gemma 4 over that model's keys and values",
    ),
    "phimoe-window": (  # its layers do not say that they have a window, only its mask does
        lambda: tf.PhimoeForCausalLM(
            tf.PhimoeConfig(**_SIZES, num_key_value_heads=2, sliding_window=20, num_local_experts=2)
        ),
        "the mask of layer 0 is neither causal nor a sliding window",
    ),
    "diffllama": (
        lambda: tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**_GQA)),
        "its layer 0 attends more than once in a pass",
    ),
    "deepseek-v3.2-ties": (
        lambda: tf.DeepseekV32ForCausalLM(_with(SPARSE["deepseek-v3.2"](), index_n_heads=1)),
        "where scores of an indexer may tie",
    ),
    "zaya": (  # it mixes neighbouring tokens beside its attention
        lambda: tf.ZayaForCausalLM(
            tf.ZayaConfig(
                **{**_GQA, "head_dim": 8}, num_experts=4, moe_intermediate_size=24, router_hidden_size=8
            )
        ),
        "a layer seems to keep more of a text than keys and values of each token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    model = make()
    randomise(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(tmp_path))
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"sliding_window": 0}, "its sliding_attention layers have sliding_window 0"),
        (
            "llama4",
            {"attention_chunk_size": None},
            "its chunked_attention layers have attention_chunk_size None",
        ),
        ("llama4", {"attention_chunk_size": -8}, "its chunked_attention layers have attention_chunk_size -8"),
    ],
)
def test_layers_that_see_nothing_are_refused_before_weights_are_read(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{reason}, which must be 1 or more"):
        load_model(str(tmp_path))


def test_layers_that_are_not_known_are_named_with_what_they_would_need(tmp_path: Path) -> None:
    tf.DeepseekV4Config(num_hidden_layers=2, layer_types=["compressed_sparse_attention"] * 2).save_pretrained(
        tmp_path
    )
    reason = (
        r"its compressed_sparse_attention layers are not plain attention \(the first is layer 0\); they would need a "
        "cache of compressed blocks"
    )
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path))


def test_a_kind_of_layer_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    RECURRENT["qwen3.5"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"][0] = "super_state"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"cannot read the configuration of .*super_state"):
        load_model(str(tmp_path))


def tiny_llama() -> Any:
    """A Llama that was made with our attention, not yet tried out."""
    model = tf.LlamaForCausalLM._from_config(FAMILIES["llama-gqa"](), attn_implementation=ATTENTION_NAME)
    randomise(model)
    return model.eval()


class OwnAttention(nn.Module):
    """What a custom model may bring: an attention that knows nothing of the interface."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None


class TiltedAttention(nn.Module):
    """One that calls the interface with something that the interface does not know: a bias on the positions."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        return self.attention(hidden_states, position_bias=torch.zeros(1), **options)


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (OwnAttention, "1 of its 3 layers attend through the attention interface"),
        (TiltedAttention, "its attention uses position_bias"),
    ],
)
def test_an_attention_that_bypasses_the_hook(replacement: type[nn.Module], reason: str) -> None:
    model = tiny_llama()
    for layer in model.model.layers[:2]:
        layer.self_attn = replacement(layer.self_attn)
    with pytest.raises(UnsupportedModelError, match=reason):
        adapt(model)


def test_two_way_attention() -> None:
    model = tiny_llama()
    model.config.is_causal = False  # the layers say nothing of it; the mask that Transformers would make does
    with pytest.raises(
        UnsupportedModelError, match="the mask of layer 0 is neither causal nor a sliding window"
    ):
        adapt(model)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral", "gemma2", "gpt-oss", "falcon-new"])
def test_the_canary_leaves_the_model_as_it_was(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    for name in ("check_masks", "StockPass", "check_cache"):
        _spy(monkeypatch, name, checks)
    lm = load_model(str(save_tiny(FAMILIES[family](), tmp_path)))
    assert checks == ["check_masks", "StockPass", "check_cache"]
    assert lm.config._attn_implementation == lm.backend.attn_implementation
    load_model(str(tmp_path), canary=False)
    assert len(checks) == 3


def _spy(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str]) -> None:
    check: Callable[..., object] = getattr(loading, name)

    def spy(*arguments: object) -> object:
        calls.append(name)
        return check(*arguments)

    monkeypatch.setattr(loading, name, spy)


@pytest.mark.parametrize(
    ("family", "field", "dtype"),
    [
        ("gemma2", "softcap", "float32"),
        ("gpt-oss", "sinks", "float32"),
        ("gpt-oss", "sinks", "bfloat16"),
        ("granite", "scaling", "float16"),
    ],
)
def test_the_canary_finds_a_hook_that_leaves_something_out(
    family: str, field: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(FAMILIES[family](), tmp_path)
    load = partial(load_model, str(tmp_path), dtype=dtype, attention_backend="packed")
    load()
    attend = attention.attend

    def forgetful(*tensors: Any) -> Tensor:
        variant = tensors[-1]
        fields = {name: getattr(variant, name) for name in ("scaling", "sliding_window", "softcap", "sinks")}
        return attend(
            *tensors[:-1], attention.Variant(**{**fields, field: 1.0 if field == "scaling" else None})
        )

    monkeypatch.setattr(attention, "attend", forgetful)
    with pytest.raises(
        UnsupportedModelError, match=r"its attention would be computed wrongly: .*; layer \d is the first"
    ):
        load()


def test_a_model_that_cannot_switch_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    adapt(model)
    assert "cannot switch its attention" in caplog.text


def save_with_key_biases(bias: float, folder: Path) -> str:
    """A Qwen 2 in float16 whose keys have a large part that all of them share, as those of this family do."""
    model = tf.Qwen2ForCausalLM(FAMILIES["qwen2"]())
    randomise(model)
    for layer in model.model.layers:
        for channel in (1, 5):  # two that are rotated together
            layer.self_attn.k_proj.bias.data[channel] = bias
            layer.self_attn.q_proj.weight.data[channel] *= 20 / bias  # so that scores are as usual
            layer.self_attn.q_proj.bias.data[channel] *= 20 / bias
    model.half().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cache_type_that_does_not_hold_the_keys(kernels: str, tmp_path: Path) -> None:
    """Rotated, two numbers of 60,000 make one of 84,853, which float16 does not have. int8 has one scale for all."""
    large, usual = (save_with_key_biases(bias, tmp_path / str(bias)) for bias in (60_000.0, 1_000.0))
    for path, asked, size, cure in (
        (large, "float16", "are no numbers", "bfloat16"),
        (usual, "int8", r"differ by 0\.\d+ of their spread", "float16"),
    ):
        message = (
            f"^'.*{Path(path).name}': {asked} does not hold the keys and values of this qwen2 model: over a dozen "
            f"rows the logits {size}; set kv_cache_dtype to {cure}$"
        )
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(path, cpu_kernels=kernels, kv_cache_dtype=asked)
        load_model(path, cpu_kernels=kernels, kv_cache_dtype=cure)
        load_model(path, cpu_kernels=kernels, kv_cache_dtype=asked, canary=False)


@needs_kernels
def test_the_canary_looks_at_the_cache_that_auto_takes(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="float16 does not hold the keys and values"):
        load_model(save_with_key_biases(60_000.0, tmp_path))


@pytest.mark.parametrize("cache", ["float16", "bfloat16", "int8"])
def test_the_canary_finds_a_cache_that_is_read_wrongly(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finds no fault with any type otherwise, weights rounded or not, experts or none."""
    for family in ("llama-gqa", "gpt-oss", "qwen3-moe-mixed"):
        path = str(save_tiny(FAMILIES[family](), tmp_path / family))
        for quantization in (None, "int8"):
            load_model(path, kv_cache_dtype=cache, quantization=quantization)
    read = KVPool.read

    def shifted(self: KVPool, layer: int, where: Any) -> tuple[Tensor, Tensor]:
        keys, values = read(self, layer, where)
        return keys, values if self.cache_dtype == torch.float32 else values.roll(1, dims=-1)

    monkeypatch.setattr(KVPool, "read", shifted)
    with pytest.raises(UnsupportedModelError, match=f"{cache} does not hold the keys and values"):
        load_model(path, kv_cache_dtype=cache, attention_backend="packed")
