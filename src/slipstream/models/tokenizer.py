"""The tokenizer of a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from slipstream.errors import ModelError
from slipstream.models.configuration import named
from slipstream.models.files.folder import (
    chat_template_beside,
    check_folder,
    check_tokenizer_files,
    is_tokenizer_folder,
)
from slipstream.models.files.gguf import Gguf, open_gguf
from slipstream.models.files.gguf_model import find_gguf
from slipstream.models.files.gguf_tokenizer import has_the_tokens, read_tokenizer
from slipstream.models.quiet import one_line, silenced

log = logging.getLogger(__name__)


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer; a fast one, since text is streamed through its decoder.

    Of a GGUF file it is the one that lies beside the file as `tokenizer.json`, else the file's own.
    """
    file = find_gguf(path, revision)
    if file is not None:
        return _gguf_tokenizer(open_gguf(file), trust_remote_code)
    if not is_tokenizer_folder(path):
        check_folder(path)
    check_tokenizer_files(path)
    return _folder_tokenizer(path, revision, trust_remote_code)


def _gguf_tokenizer(file: Gguf, trust_remote_code: bool) -> Any:
    beside = Path(file.path).parent
    if not (beside / "tokenizer.json").is_file():
        return read_tokenizer(file.fields, file.path)
    tokenizer = _folder_tokenizer(str(beside), None, trust_remote_code)
    if not has_the_tokens(tokenizer, file.fields):
        log.warning("the tokenizer in %s is another model's: that of %s is used", beside, file.path)
        return read_tokenizer(file.fields, file.path)
    if not tokenizer.chat_template:
        tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    return tokenizer


def _folder_tokenizer(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    with one_line(f"cannot load the tokenizer of {named(path)}"), silenced():
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {path!r} has no fast (tokenizers) form; convert it first")
    if not tokenizer.chat_template:
        tokenizer.chat_template = chat_template_beside(path)
    return tokenizer
