"""Tokenizers of folders: what `tokenizer.json` says is read, whatever class the settings name; drafts without one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.model.tli import TliDrafter, TliOptions
from slipstream.errors import ModelError, VocabularyMismatchError
from slipstream.models import load_draft_tokenizer, load_tokenizer
from slipstream.models.files.folder import TOKENIZER_FILES
from slipstream.models.huggingface import AutoTokenizer
from slipstream.testing.stub_drafters import draft_context
from tests.kit.gguf_files import write
from tests.kit.tokenizer_families import byte_fallback, byte_level

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


@pytest.mark.parametrize("trusts", [False, True])
def test_a_class_that_cannot_be_loaded_tells_no_roles(
    trusts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level(specials=("<|pad|>", "<|end|>", "<|endoftext|>")).save_pretrained(tmp_path)
    said = rewritten(tmp_path, "GPT2Tokenizer", {"eos_token": None, "pad_token": None})
    asked: list[Any] = []

    def refuse(path: str, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        raise ValueError("it contains custom code")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=trusts)
    assert asked == [trusts]
    assert tokenizer.eos_token is None
    assert [tokenizer(text).input_ids for text in TEXTS] == [said.encode(text).ids for text in TEXTS]


def test_code_of_a_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    rewritten(tmp_path, "OwnTokenizer", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}})
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))


def without_tokenizer(folder: Path, source: str = EMBEDDED_DRAFT, **config: Any) -> str:
    """The draft's folder without its tokenizer, and with other settings."""
    folder.mkdir()
    for file in Path(source).iterdir():
        if file.name not in TOKENIZER_FILES and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    settings = json.loads((Path(source) / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def test_a_draft_without_a_tokenizer_has_the_targets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_tokenizer(EMBEDDED_TARGET)
    with caplog.at_level(logging.WARNING):
        assert load_draft_tokenizer(without_tokenizer(tmp_path / "as_large"), target) is target
    assert "has no tokenizer: the target's is used" in caplog.text
    assert (
        load_draft_tokenizer(without_tokenizer(tmp_path / "filled", vocab_size=4096 + 64), target) is target
    )
    for vocab_size in (4095, 4096 + 1024):
        folder = without_tokenizer(tmp_path / str(vocab_size), vocab_size=vocab_size)
        with pytest.raises(
            VocabularyMismatchError, match=f"{vocab_size} tokens where the target has 4096.* put"
        ):
            load_draft_tokenizer(folder, target)
    assert load_draft_tokenizer(EMBEDDED_DRAFT, target) is not target


def test_a_draft_without_a_tokenizer_drafts(tmp_path: Path) -> None:
    context = draft_context(4096, 512, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    folder = without_tokenizer(tmp_path / "draft")
    assert DraftModelDrafter(DraftModelOptions(model=folder), context).tokenizer is context.tokenizer
    with pytest.raises(
        ModelError, match=r"drafts in tokens of its own; put the files of its tokenizer"
    ) as caught:
        TliDrafter(TliOptions(model=folder), context)
    assert "\n" not in str(caught.value)
    for name in TOKENIZER_FILES:  # as the message says
        if (Path(EMBEDDED_DRAFT) / name).is_file():
            (Path(folder) / name).symlink_to(Path(EMBEDDED_DRAFT) / name)
    assert TliDrafter(TliOptions(model=folder), context).tokenizer is not context.tokenizer


def test_a_gguf_draft_without_a_tokenizer_takes_the_one_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    keys = sizes | {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    rows = {
        "token_embd.weight": np.zeros((4096, 8), np.float32),
        "blk.0.attn_norm.weight": np.ones(8, np.float32),
    }
    file = write(tmp_path / "x.gguf", "llama", {f"llama.{key}": value for key, value in keys.items()}, rows)
    target = load_tokenizer(EMBEDDED_TARGET)
    assert load_draft_tokenizer(str(file), target) is target
    byte_level().save_pretrained(tmp_path)
    assert len(load_draft_tokenizer(str(file), target)) == len(byte_level())
