"""Tokenizers of three families, made on the spot, the same ones every time, and tiny random models that speak them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations
from math import log
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.kit.small_llama import sizes

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Speculative decoding lets a small model guess what a large model will say next.",
    "There were 12 apples; 7 of them were eaten, so there are 5 apples left.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))\n",
    "Ein Übermaß an Höflichkeit ist manchmal unhöflich. Ça va très bien, merci!",
    "日本語のテキストもあります。 👍 naïve café",
] * 3
SPECIALS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
LATIN = set(ascii_letters + digits + ".,;:()=+-!'\n") | set("üßöÇç")
"""Characters that the byte-fallback vocabulary has pieces for."""
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@cache
def byte_level(vocab_size: int = 600, specials: tuple[str, ...] = ("<|pad|>", "<|end|>", "<|user|>")) -> Any:
    """Byte-level BPE, as GPT-2's, Llama 3's and Qwen's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=list(specials[2:]),
    )


@cache
def byte_fallback(vocab_size: int = 500) -> Any:
    """SentencePiece-like BPE without pre-tokenisation, as Llama 2's: `▁` is put in front of every text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIALS, show_progress=False)
    words = [word for text in SENTENCES for word in text.split(" ")]
    backend.train_from_iterator([word for word in words if set(word) <= LATIN], trainer)
    return _without_special_bytes(backend)


@cache
def unigram(vocab_size: int = 600) -> Any:
    """SentencePiece-like unigram pieces with byte fallback, as T5's and Gemma's.

    The pieces are the strings that say most of the text. The library's trainer would choose others in every process.
    """
    counts: Counter[str] = Counter()
    for word in "".join(SENTENCES).replace(" ", " ▁").split(" "):
        counts.update(word[a:b] for a, b in combinations(range(len(word) + 1), 2) if b - a <= 8)
    said = sorted(counts, key=lambda piece: (len(piece) > 1, -counts[piece] * len(piece), piece))
    pieces = [(special, 0.0) for special in SPECIALS]
    pieces += [(piece, log(counts[piece] / counts.total())) for piece in said[: vocab_size - len(pieces)]]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return _with_roles(backend)


def _state(backend: Tokenizer) -> Any:
    return json.loads(backend.to_str())


def _without_special_bytes(backend: Tokenizer) -> Any:
    """The trainer wants byte pieces to be special; in a model they are ordinary pieces."""
    state = _state(backend)
    state["added_tokens"] = []
    return _with_roles(Tokenizer.from_str(json.dumps(state)))


def _with_roles(backend: Tokenizer) -> Any:
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROLES)


FAMILIES: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
}


def save_model(tokenizer: Any, folder: Path, seed: int = 0, num_layers: int = 1) -> str:
    """Write a random Llama that speaks `tokenizer`, and the tokenizer; returns the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **sizes(32, num_layers, 2, 1, vocab=len(tokenizer), inner=48, context=512, spread=0.5),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


PAIRS = [("byte-level", "unigram"), ("byte-fallback", "byte-level"), ("unigram", "byte-fallback")]
"""A target's family and its draft's."""


def draft_folders(base: Path) -> dict[str, Path]:
    """A small model a family, in folders below `base`."""
    for family, make in FAMILIES.items():
        save_model(make(), base / family)
    return {family: base / family for family in FAMILIES}
