"""Whose answers an engine gives: what records are compared by."""

from __future__ import annotations

from typing import Any

from slipstream.engine.engine import Engine
from slipstream.learn.segments import RingIdentity
from slipstream.models.files.digest import digest_of, digest_of_model


def template_hash(tokenizer: Any) -> str:
    """Return the hash of the chat template that prompts are wrapped in; a tokenizer without one has a hash too."""
    template = getattr(tokenizer, "chat_template", None)
    return digest_of(repr(template).encode("utf-8", "surrogatepass"))


def identity_of(engine: Engine) -> RingIdentity:
    """The loaded target, its adapter and tokenizer included, and its chat template."""
    config = engine.config
    return RingIdentity(
        digest_of_model(config.model, config.tokenizer, config.lora), template_hash(engine.tokenizer)
    )
