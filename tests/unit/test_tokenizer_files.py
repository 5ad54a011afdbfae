"""Tokenizers of folders: what `tokenizer.json` says is what is read, whatever class the settings name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from slipstream.errors import ModelError
from slipstream.models import load_tokenizer
from tests.unit.tokenizer_families import byte_fallback, byte_level

TEXTS = ["12345 123 1", " hello  the dog", "naïve 👍<|user|> x", "<s>the</s> dog", "the\n\nfox", ""]
BY_TWO = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": r"\p{N}{1,2}"},
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def rewritten(folder: Path, tokenizer_class: str, settings: dict[str, Any], **changes: Any) -> Tokenizer:
    """Name a class in a folder's settings and change its `tokenizer.json`; returns what that file says."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    own = json.loads(config.read_text()) | settings | {"tokenizer_class": tokenizer_class}
    config.write_text(json.dumps({name: value for name, value in own.items() if value is not None}))
    return Tokenizer.from_file(str(file))


@pytest.mark.parametrize(
    "tokenizer_class", ["GPT2Tokenizer", "GPTNeoXTokenizerFast", "Qwen2Tokenizer", "CodeGenTokenizer"]
)
def test_a_pre_tokenizer_of_its_own_is_kept(tokenizer_class: str, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    said = rewritten(tmp_path, tokenizer_class, {}, pre_tokenizer=BY_TWO)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.tokenize("123 1") == ["12", "3", "Ġ", "1"]
    assert [tokenizer(text).input_ids for text in TEXTS] == [said.encode(text).ids for text in TEXTS]
    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizerFast"])
def test_a_normalizer_of_its_own_is_kept(tokenizer_class: str, tmp_path: Path) -> None:
    byte_fallback().save_pretrained(tmp_path)
    said = rewritten(tmp_path, tokenizer_class, {"legacy": False})
    tokenizer = load_tokenizer(str(tmp_path))
    assert [tokenizer(text).input_ids for text in TEXTS] == [said.encode(text).ids for text in TEXTS]
    assert tokenizer.tokenize("<s> the") == ["<s>", "▁", "▁the"]


def test_roles_that_only_the_class_knows_are_kept(tmp_path: Path) -> None:
    byte_level(specials=("<|pad|>", "<|end|>", "<|endoftext|>")).save_pretrained(tmp_path)
    said = rewritten(tmp_path, "GPT2Tokenizer", {"eos_token": None, "pad_token": None})
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 2)
    assert len(tokenizer) == said.get_vocab_size()  # a class adds no tokens to the file's


def test_code_of_a_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    rewritten(tmp_path, "OwnTokenizer", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}})
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))
