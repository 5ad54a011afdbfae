"""The tokenizer of a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, VocabularyMismatchError
from slipstream.models.configuration import load_config, named
from slipstream.models.files.folder import (
    check_folder,
    check_tokenizer_files,
    find_file,
    folder_chat_template,
    has_tokenizer_files,
    is_tokenizer_folder,
)
from slipstream.models.files.gguf import Gguf, open_gguf
from slipstream.models.files.gguf_model import find_gguf
from slipstream.models.files.gguf_tokenizer import has_the_tokens, read_tokenizer
from slipstream.models.huggingface import AutoTokenizer, PreTrainedTokenizerFast
from slipstream.models.quiet import one_line, silenced
from slipstream.models.support import text_config

log = logging.getLogger(__name__)

MAX_FILLED_ROWS = 1024
"""A model may have fewer rows than this beyond its tokenizer's tokens, so that their number is a round one."""


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer; a fast one, since text is streamed through its decoder.

    Of a GGUF file it is the one that lies next to the file as `tokenizer.json`, else the file's own.
    """
    file = find_gguf(path, revision)
    if file is not None:
        return _gguf_tokenizer(open_gguf(file), trust_remote_code)
    if not is_tokenizer_folder(path):
        check_folder(path)
    check_tokenizer_files(path)
    return _folder_tokenizer(path, revision, trust_remote_code)


def load_draft_tokenizer(
    path: str, target: Any | None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a draft model, which is the tokenizer `target` where the draft has none and its vocabulary is of
    the same size, but for rows that fill it up.

    With None for `target` the draft must have its own. Raises `VocabularyMismatchError` where the size is another, and
    `ModelError` as `load_tokenizer` does.
    """
    if _has_tokenizer(path, revision):
        return load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    advice = "put the files of its tokenizer (tokenizer.json, tokenizer_config.json) next to its weights"
    if target is None:
        raise ModelError(f"the draft {path!r} has no tokenizer, and drafts in tokens of its own; {advice}")
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    size = text_config(config).vocab_size
    if not 0 <= size - len(target) < MAX_FILLED_ROWS:
        raise VocabularyMismatchError(
            f"the draft {path!r} has no tokenizer, and {size} tokens where the target has {len(target)}, so that the "
            f"target's tokenizer cannot be its own; {advice}"
        )
    log.warning("the draft %r has no tokenizer: the target's is used, which has as many tokens", path)
    return target


def _has_tokenizer(path: str, revision: str | None) -> bool:
    file = find_gguf(path, revision)
    if file is None:
        return has_tokenizer_files(path)
    return (
        "tokenizer.ggml.tokens" in open_gguf(file).fields or (Path(file).parent / "tokenizer.json").is_file()
    )


def _gguf_tokenizer(file: Gguf, trust_remote_code: bool) -> Any:
    folder = Path(file.path).parent
    if not (folder / "tokenizer.json").is_file():
        return read_tokenizer(file.fields, file.path)
    tokenizer = _folder_tokenizer(str(folder), None, trust_remote_code)
    if "tokenizer.ggml.tokens" in file.fields and not has_the_tokens(tokenizer, file.fields):
        log.warning("the tokenizer in %s is another model's: that of %s is used", folder, file.path)
        return read_tokenizer(file.fields, file.path)
    if not tokenizer.chat_template:
        tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    return tokenizer


def _folder_tokenizer(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    with one_line(f"cannot load the tokenizer of {named(path)}"), silenced():
        if _is_described(path, revision):
            tokenizer = _as_described(path, revision, trust_remote_code)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=revision, trust_remote_code=trust_remote_code
            )
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {path!r} has no fast (tokenizers) form; convert it first")
    if not tokenizer.chat_template:
        tokenizer.chat_template = folder_chat_template(path)
    return tokenizer


def _is_described(path: str, revision: str | None) -> bool:
    """Whether a checkpoint says with a `tokenizer.json`, and not in code of its own, how text is cut."""
    if find_file(path, "tokenizer.json", revision) is None:
        return False
    settings = find_file(path, "tokenizer_config.json", revision)
    return settings is None or "auto_map" not in json.loads(Path(settings).read_text(encoding="utf-8"))


def _as_described(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of `tokenizer.json`.

    `AutoTokenizer` would take the vocabulary out of the file and make the rest anew by the class that the settings
    name: normalizer, pre-tokenizer, decoder and the model's own options would be those of the class.
    """
    make: Any = PreTrainedTokenizerFast.from_pretrained
    tokenizer = make(path, revision=revision)
    if tokenizer.eos_token is None:  # older checkpoints leave it to the class which tokens have a role
        known = tokenizer.get_vocab()
        for role, token in _roles_of_class(path, revision, trust_remote_code).items():
            if getattr(tokenizer, role, None) is None and isinstance(token, str) and token in known:
                setattr(tokenizer, role, token)
    return tokenizer


def _roles_of_class(path: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """The tokens with a role in the class that the settings name; none where it cannot be loaded."""
    try:
        roles: dict[str, Any] = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        ).special_tokens_map
    except (
        Exception
    ) as error:  # the file has said how text is cut, so the tokenizer is usable without the roles
        log.info("%s: its tokenizer's class tells no roles of tokens: %s", named(path), error)
        return {}
    return roles
