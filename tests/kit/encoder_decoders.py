"""Tiny encoder-decoders of random weights, as checkpoints, and Transformers' own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 200
RATE = 16000
SPEECH = 180
"""The first of a speech model's special tokens."""
_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
_ENDS = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 1}


def _t5(config: Any, model: Any, **options: Any) -> Any:
    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return model(config(vocab_size=VOCAB, **sizes | buckets | ends | options))


def _bart(config: Any, model: Any, **options: Any) -> Any:
    return model(config(**_SIZES, **_ENDS, max_position_embeddings=128, forced_eos_token_id=None, **options))


def _m2m() -> Any:
    model = _bart(tf.M2M100Config, tf.M2M100ForConditionalGeneration)
    model.generation_config.suppress_tokens = [0]  # its positions leave padding out
    return model


def _whisper() -> Any:
    sizes = {"num_mel_bins": 20, "max_source_positions": 50, "max_target_positions": 96}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), SPEECH)
    config = tf.WhisperConfig(
        **_SIZES, **sizes, **ends, decoder_start_token_id=SPEECH + 1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config)
    # Transformers ends segments at times, whose tokens come last.
    settings = tf.GenerationConfig(**ends, decoder_start_token_id=SPEECH + 1, max_length=96)
    settings.suppress_tokens = [7, 9, SPEECH + 1, *range(SPEECH + 8, VOCAB)]
    settings.begin_suppress_tokens = [33, SPEECH]
    settings.lang_to_id = {"<|en|>": SPEECH + 2, "<|de|>": SPEECH + 3, "<|fr|>": SPEECH + 4}
    settings.task_to_id = {"translate": SPEECH + 5, "transcribe": SPEECH + 6}
    settings.no_timestamps_token_id, settings.is_multilingual = SPEECH + 7, True
    model.generation_config = settings
    return model


FAMILIES: dict[str, Any] = {
    # As most: its encoder has as many layers as its decoder.
    "t5": lambda: _t5(tf.T5Config, tf.T5ForConditionalGeneration, num_layers=3),
    "flan": lambda: _t5(
        tf.T5Config, tf.T5ForConditionalGeneration, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": lambda: _t5(tf.MT5Config, tf.MT5ForConditionalGeneration),
    "umt5": lambda: _t5(tf.UMT5Config, tf.UMT5ForConditionalGeneration),
    "bart": lambda: _bart(tf.BartConfig, tf.BartForConditionalGeneration),
    "mbart": lambda: _bart(tf.MBartConfig, tf.MBartForConditionalGeneration),
    "marian": lambda: _bart(tf.MarianConfig, tf.MarianMTModel),
    "pegasus": lambda: _bart(tf.PegasusConfig, tf.PegasusForConditionalGeneration),
    "m2m_100": _m2m,
    "blenderbot": lambda: _bart(tf.BlenderbotConfig, tf.BlenderbotForConditionalGeneration),
    "whisper": _whisper,
}


def save(family: str, folder: Path, noise: float = 0.0) -> str:
    """The path of a checkpoint; with `noise` it is another model, which often thinks the same."""
    made = torch.Generator().manual_seed(5)
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=made)
        spread = (
            4.0
            if "attn" in name or "ttention" in name
            else 0.6
            if "embed" in name or "shared" in name
            else 2.5
        )
        with torch.no_grad():
            if parameter.ndim == 1:
                parameter += 0.1 * drawn
            else:
                parameter.copy_(drawn * spread / parameter.shape[-1] ** 0.5)
            parameter += noise * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=made)
    path = folder / f"{family}{noise or ''}"
    model.save_pretrained(path)
    _tokenizer(is_speech=family == "whisper").save_pretrained(path)
    if family == "whisper":
        tf.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(path)
    return str(path)


def _tokenizer(is_speech: bool) -> Any:
    if is_speech:
        special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>"]
        special += ["<|transcribe|>", "<|notimestamps|>", "<unk>"]
        words = [*(f"w{number}" for number in range(SPEECH)), *special]
    else:
        special = ["<pad>", "</s>", "<unk>"]
        words = [*special, *(f"w{number}" for number in range(3, VOCAB))]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if is_speech:
        return tf.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=special[0],
            unk_token="<unk>",
            additional_special_tokens=special[1:-1],
        )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def sound(number: int) -> NDArray[np.float32]:
    """Up to a second, another for each number."""
    size = 9000 + 900 * number
    noise = np.random.default_rng(number).standard_normal(size)
    return (noise * np.sin(np.arange(size) / (3 + number))).astype(np.float32)


def prompts(family: str, count: int = 5) -> list[Any]:
    """Prompts of several lengths."""
    if family == "whisper":
        return [{"audio": (sound(number), RATE), "language": "de"} for number in range(count)]
    return [
        " ".join(f"w{3 + (number * 7 + place * 13) % 190}" for place in range(3 + 6 * number))
        for number in range(count)
    ]


class Stock:
    """Transformers' own model of a checkpoint."""

    def __init__(self, path: str) -> None:
        config = tf.AutoConfig.from_pretrained(path)
        auto: Any = (
            tf.AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else tf.AutoModelForSeq2SeqLM
        )
        self.model = auto.from_pretrained(path).eval()
        self.is_speech = config.model_type == "whisper"
        self.tokenizer = tf.AutoTokenizer.from_pretrained(path)
        self.hears = tf.WhisperFeatureExtractor.from_pretrained(path) if self.is_speech else None

    def answer(self, prompt: Any, max_tokens: int) -> list[int]:
        """The greedy answer, of exactly so many tokens."""
        options = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": max_tokens,
            "do_sample": False,
            "num_beams": 1,
        }
        if self.hears is not None:
            heard = self.hears(prompt["audio"][0], sampling_rate=RATE, return_tensors="pt").input_features
            made = self.model.generate(heard, language=prompt.get("language"), task="transcribe", **options)
            return [int(token) for token in made[0][-max_tokens:]]
        given = self.tokenizer(prompt, return_tensors="pt").input_ids
        made = self.model.generate(
            given, use_cache=False, **options
        )  # its cache takes num_layers for the decoder's
        return [int(token) for token in made[0][1:]]
