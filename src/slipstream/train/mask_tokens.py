"""Which token stands for a mask: one that the texts do not use."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.train.batches import TrainingDocument


def mask_token(
    wanted: str | None, tokenizer: Any, vocab_size: int, documents: Seq[TrainingDocument]
) -> tuple[int, str]:
    """(the id of the mask token, what it is, in words).

    `wanted` is a token's text or id; None takes the tokenizer's own mask token, then the last special token that the
    data do not use, then any other unused id. Raises `ConfigError` where there is none, or it is not the target's.
    """
    if wanted is not None:
        token = int(wanted) if wanted.isdecimal() else tokenizer.get_vocab().get(wanted)
        if token is None or token >= vocab_size:
            raise ConfigError(
                f"--mask-token {wanted} is not among the target's {vocab_size} tokens; give the text or the id of one, "
                "best of one that no text uses"
            )
        return token, f"{_name(tokenizer, token)}, as --mask-token says"
    own = tokenizer.mask_token_id
    if own is not None and own < vocab_size:
        return own, f"{_name(tokenizer, own)}, the tokenizer's own"
    used = np.zeros(vocab_size, dtype=bool)
    for document in documents:
        used[document.tokens] = True
    for token in (
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    ):
        if token is not None and token < vocab_size:
            used[token] = True
    special = [token for token in tokenizer.added_tokens_decoder if token < vocab_size and not used[token]]
    unused = np.flatnonzero(~used)
    if not len(unused):
        raise ConfigError(
            "the data use every token of the target; say with --mask-token which one stands for a mask"
        )
    token = max(special, default=int(unused[-1]))
    return token, f"{_name(tokenizer, token)}, which the data do not use"


def _name(tokenizer: Any, token: int) -> str:
    text = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    return f"id {token}" if text is None else f"{text!r} (id {token})"
