"""The tokenizers: byte-level or SentencePiece-like BPE with single digits and a five-role chat template."""

import json
from collections.abc import Iterable
from enum import StrEnum

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("user", "assistant", "system", "tool")
SPECIALS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_POSITIONS = 2048


class Spelling(StrEnum):
    """How a tokenizer writes text down: what the pair shares, or another family for drafting across vocabularies."""

    byte_level = "byte-level"
    sentencepiece = "sentencepiece"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 4096, spelling: Spelling = Spelling.byte_level
) -> PreTrainedTokenizerFast:
    """Learn a BPE of at most `vocab_size` tokens, special tokens included, from `texts`."""
    learn = _byte_level if spelling is Spelling.byte_level else _sentencepiece
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learn(texts, vocab_size),
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=SPECIALS[2:],
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_level(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    # Single digits: a small model adds and copies numbers better when each digit is a token of its own.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _sentencepiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Pieces of characters, `▁` for a space, and a byte piece for each byte of what no piece covers."""
    bpe = Tokenizer(models.BPE(byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Split(Regex(r"\d|\n+|▁?[^\w\s▁]+"), "isolated"),
        ]
    )
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *byte_pieces],
        limit_alphabet=200,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # The trainer takes no pieces but special ones; in use the byte pieces are ordinary.
    state = json.loads(bpe.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(state))
