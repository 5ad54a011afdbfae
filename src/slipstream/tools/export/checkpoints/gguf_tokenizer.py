"""Tokenizers written into GGUF files; `models.files.gguf_tokenizer` reads them.

A tokenizer whose rule for words is not one of `WORDS` is refused: llama.cpp would read the prompt as other tokens than
the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.models.files.gguf_tokenizer import WORDS
from slipstream.tools.export.checkpoints.gguf_fields import gguf_package
from slipstream.tools.export.refusals import ExportError

CONVERTER = "use llama.cpp's own convert_hf_to_gguf.py for this model"


def add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int, name: str) -> None:
    """Write a fast tokenizer into a `gguf.GGUFWriter`, filled up to the `vocab_size` rows of the model's logits.

    Raises `ExportError` for a tokenizer that llama.cpp would follow differently.
    """
    kinds = gguf_package().TokenType
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    words = words_of(described, name)
    vocabulary = {index: token for token, index in described["model"]["vocab"].items()}
    types = dict.fromkeys(vocabulary, kinds.NORMAL)
    for token in described["added_tokens"]:
        vocabulary[token["id"]] = token["content"]
        types[token["id"]] = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([vocabulary.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types([types.get(index, kinds.UNUSED) for index in range(vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    _add_roles(writer, tokenizer, name)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def words_of(described: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of the rule by which a tokenizer cuts words; `described` is its JSON form."""
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = "BPE with bytes as a fallback" if model["type"] == "BPE" else model["type"]
        raise ExportError(
            f"{name!r} has a tokenizer of kind {kind}; only byte-level BPE is written: {CONVERTER}"
        )
    normalizer = described.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise ExportError(
            f"{name!r} has a tokenizer that changes the text first ({normalizer['type']}): {CONVERTER}"
        )
    given = described.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    found = [words for words, known in WORDS.items() if _plain(known) == _plain(steps)]
    if not found:
        raise ExportError(
            f"{name!r} has a tokenizer whose rule for words is none that is known here: {CONVERTER}"
        )
    return found[0]


def _add_roles(writer: Any, tokenizer: Any, name: str) -> None:
    """The begin, end and padding tokens, and whether a prompt begins or ends with one."""
    if tokenizer.eos_token_id is None:
        raise ExportError(f"{name!r} has no end token (eos_token), which GGUF files must have: {CONVERTER}")
    around = tokenizer("a").input_ids
    begin = tokenizer.bos_token_id
    # A file must name a begin token; where there is none it is never added.
    writer.add_bos_token_id(tokenizer.eos_token_id if begin is None else begin)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(begin is not None and around[0] == begin)
    writer.add_add_eos_token(len(around) > 1 and around[-1] == tokenizer.eos_token_id)


def _plain(steps: Any) -> list[dict[str, Any]]:
    """Pre-tokenizers without what does not matter to how text is cut."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
