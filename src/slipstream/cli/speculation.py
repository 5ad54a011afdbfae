"""From flags to a speculative configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class SpeculationFlags:
    """How speculation is asked for; at most one of the first three."""

    spec: str | None = None
    """Drafter in short: off, ngram, suffix, token_recycling, lookahead, jacobi, draft:PATH, self:int8, or
    NAME:MODEL. `draft` alone is the embedded draft.
    Without any of these flags the embedded pair speculates with its draft, and another model does not speculate."""
    draft: str | None = None
    """Folder or hub id of a draft model; short for --spec draft:PATH."""
    speculative_config: str | None = None
    """All keys, as a JSON object or as the path of a file that holds one: '{"method": "ngram"}'. For the embedded
    pair, `draft_model` needs no `model`: '{"method": "draft_model", "tree_top_k": 3}' is a tree of its own draft."""
    num_speculative_tokens: int | None = None
    """The most draft tokens on a path, whatever the drafter."""
    verifier: str | None = None
    """coupled (the same text as without speculation), rejection or block (the same distribution)."""


def speculative_config(flags: SpeculationFlags, model: str | None) -> SpeculativeConfig:
    """What the flags ask for with the target `model`, None being the embedded one.

    Raises `ConfigError` for contradictions, and for all that can be told without loading a model.
    """
    config = _chosen(flags, embedded=model is None)
    if flags.num_speculative_tokens is not None:
        if config.method == "off":
            raise ConfigError("--num-speculative-tokens needs a drafter; choose one with --spec or --draft")
        options = {**config.options, "num_speculative_tokens": flags.num_speculative_tokens}
        config = replace(config, options=options)
    if flags.verifier is not None:
        config = replace(config, verifier=flags.verifier)
    from slipstream.draft.registry import validate

    validate(config)
    return config


def _chosen(flags: SpeculationFlags, embedded: bool) -> SpeculativeConfig:
    ways = {
        "--spec": flags.spec,
        "--draft": flags.draft,
        "--speculative-config": flags.speculative_config,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} say the same in two ways; give one of them")
    if flags.speculative_config is not None:
        return _with_embedded_draft(SpeculativeConfig.from_text(flags.speculative_config), embedded)
    if flags.draft is not None:
        return SpeculativeConfig("draft_model", options={"model": flags.draft})
    spec = flags.spec if flags.spec is not None else "draft" if embedded else "off"
    if spec in ("draft", "draft_model"):
        if not embedded:
            raise ConfigError(f"--spec {spec} needs the draft's folder or hub id: --spec draft:PATH")
        spec = f"draft:{EMBEDDED_DRAFT}"
    return SpeculativeConfig.from_short(spec)


def _with_embedded_draft(config: SpeculativeConfig, embedded: bool) -> SpeculativeConfig:
    """`draft` is short for `draft_model`, whose `model` is the embedded draft where none is named; so it is among the
    members of an ensemble."""
    if config.method == "ensemble" and isinstance(members := config.options.get("members"), list):
        named = [_named(member, embedded) for member in members]
        return replace(config, options={**config.options, "members": named})
    if config.method not in ("draft", "draft_model"):
        return config
    default = {"model": EMBEDDED_DRAFT} if embedded else {}
    return replace(config, method="draft_model", options={**default, **config.options})


def _named(member: Any, embedded: bool) -> Any:
    """An ensemble's member as `_with_embedded_draft` leaves it; what is no configuration is refused later."""
    if not isinstance(member, dict) or "verifier" in member or not isinstance(member.get("method"), str):
        return member
    config = _with_embedded_draft(SpeculativeConfig.from_mapping(member), embedded)
    return {"method": config.method, **config.options}
