"""Makes a speculative configuration from flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.assets import EMBEDDED_DRAFTERS
from slipstream.assets.embedded import SMOLLM2_NAME, SMOLLM2_SHAPE
from slipstream.cli.flags.flags import parse_json
from slipstream.cli.output.console import say_fetching
from slipstream.config import SpeculativeConfig, check_types, reject_unknown, renamed
from slipstream.core.model_path import check_model_path, models_in
from slipstream.core.pretrained import own_drafters, with_fetched_drafts
from slipstream.draft.methods import (
    ALIASES,
    AUTO,
    DRAFT_MODEL,
    METHODS,
    OFF,
    SUFFIX,
    MethodSpec,
    full_name,
    spec_of,
)
from slipstream.errors import ConfigError

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Z]\w*")
"""A drafter class, `my_module:MyDrafter`; a model's path does not look like that."""

AUTO_DEPTH = 6
"""The deepest chain that `--spec auto` chooses."""


@dataclass(frozen=True)
class SpeculationFlags:
    """The flags of speculation; at most one of `spec` and `speculative_config`."""

    spec: str | None = None
    """Drafter in short: off, ngram, suffix, token_recycling, siblings, lookahead, jacobi, draft:PATH, self:int8,
    NAME:MODEL, or my_module:MyDrafter for one of your own. `auto` chooses for each step the fastest drafter, or none:
    from suffix and a draft model (auto:PATH) or what ships for the target, without these from suffix and, on a CPU, the
    target itself in int8 if its weights are wider. `draft` and `eagle3` alone are the embedded target's own, and
    `eagle3` alone with smollm2 is the head that ships for it. Without any of these flags the embedded pair speculates
    with its draft, and another model does not speculate."""
    draft: str | None = None
    """Retired, and accepted for one more release: write --spec draft:PATH, or --spec auto:PATH."""
    speculative_config: str | None = None
    """All keys, as a JSON object or as the path of a file that holds one: '{"method": "ngram"}'. For the embedded
    pair, `draft_model` and `eagle3` need no `model`: '{"method": "draft_model", "tree_top_k": 3}' is a tree of its own
    draft."""
    num_speculative_tokens: int | None = None
    """The most draft tokens on a path, for any drafter."""
    verifier: str | None = None
    """coupled (the same text as without speculation), rejection or block (the same distribution), one that a package
    installed, or package.module:Class."""

    reasoning_draft: str | None = None
    """Who drafts whole steps of thinking for requests that choose it, which may change their text: folder or hub id of
    a draft model, `embedded`, or all keys of `reasoning` as a JSON object. Needs --allow-lossy."""

    def __post_init__(self) -> None:
        check_types(self, "speculation")


def speculative_config(flags: SpeculationFlags, model: str | None) -> SpeculativeConfig:
    """The configuration that the flags describe, for the target `model`; None is the embedded one.

    Raises `ConfigError` for contradictions, and for all errors that show without loading a model.
    """
    config = _chosen(flags, own_drafters(model))
    config = replace(config, options=with_fetched_drafts(config.options, config.method, say_fetching))
    if flags.reasoning_draft is not None:
        config = replace(config, reasoning=_reasoning(flags.reasoning_draft, config))
    if flags.num_speculative_tokens is not None:
        if config.method == OFF.name:
            raise ConfigError("--num-speculative-tokens needs a drafter; choose one with --spec")
        config = replace(config, options=_limited(config, flags.num_speculative_tokens))
    if flags.verifier is not None:
        if _CLASS.fullmatch(flags.verifier):
            _search_working_directory()
        config = replace(config, verifier=flags.verifier)
    for path in (*models_in(config.options), *models_in(config.reasoning)):
        check_model_path(path)

    from slipstream.engine.speculation import ParsedSpeculation

    ParsedSpeculation.of(config)
    return config


def speculative_configs(
    specs: list[str] | None, configs: list[str] | None, model: str | None, verifier: str | None = None
) -> list[SpeculativeConfig]:
    """Read several drafters, of --spec and --speculative-config that may be repeated; raises `ConfigError`."""
    flags = [
        *(SpeculationFlags(spec=short, verifier=verifier) for short in specs or []),
        *(SpeculationFlags(speculative_config=text, verifier=verifier) for text in configs or []),
    ]
    return [speculative_config(each, model) for each in flags]


def _reasoning(text: str, config: SpeculativeConfig) -> dict[str, Any]:
    """The value of `reasoning` that --reasoning-draft describes."""
    if config.reasoning is not None:
        raise ConfigError(
            "--reasoning-draft and reasoning in --speculative-config both choose; give one of them"
        )
    if not text.lstrip().startswith("{"):
        return {"model": text}
    keys: dict[str, Any] = parse_json(text, "--reasoning-draft")
    return keys


def _chosen(flags: SpeculationFlags, own: Mapping[str, str]) -> SpeculativeConfig:
    """`own`: see `own_drafters`."""
    ways = {
        "--spec": flags.spec,
        "--draft": flags.draft,
        "--speculative-config": flags.speculative_config,
    }
    given = [name for name, value in ways.items() if value is not None]
    is_auto = flags.spec == AUTO.name and flags.speculative_config is None
    if len(given) > 1 and not is_auto:
        raise ConfigError(f"{' and '.join(given)} both choose a drafter; give one of them")
    if flags.speculative_config is not None:
        return _with_own_model(SpeculativeConfig.from_text(flags.speculative_config), own)
    spec = flags.spec if flags.spec is not None else _default(own).short_name
    if flags.draft is not None:
        spec = f"{flags.spec or DRAFT_MODEL.short_name}:{flags.draft}"
    name, _, path = spec.partition(":")
    if name == AUTO.name:
        return _auto(path, own)
    method = full_name(spec)
    if method in own:
        return SpeculativeConfig(method, options=_own_options(own, method))
    if method in EMBEDDED_DRAFTERS:
        what = METHODS[method].weights.value
        raise ConfigError(f"--spec {spec} needs the {what}'s folder or hub id: --spec {spec}:PATH")
    from slipstream.draft.registry import drafter_names

    # The registry has only the long names, so it would not suggest `draft` for a misspelt name.
    names = [*drafter_names(), *ALIASES]
    if _CLASS.fullmatch(spec) and name not in names:
        _search_working_directory()
        return SpeculativeConfig(spec)
    if name not in names and set(get_close_matches(name, names, n=1)) & ALIASES.keys():
        reject_unknown([name], names, "drafter")
    return _with_own_model(SpeculativeConfig.from_short(spec), own)


def _default(own: Mapping[str, str]) -> MethodSpec:
    """What drafts where no flag chooses: a draft model that ships for the target. A head that ships gains on some
    machines and texts only, so it must be asked for."""
    return DRAFT_MODEL if DRAFT_MODEL.name in own else OFF


def _search_working_directory() -> None:
    """Allow classes in modules of the working directory, which are not installed."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _limited(config: SpeculativeConfig, num_speculative_tokens: int) -> dict[str, Any]:
    limit = {"num_speculative_tokens": num_speculative_tokens}
    if config.method == AUTO.name:
        if not isinstance(drafters := config.options.get("drafters"), list):
            raise ConfigError(
                "--num-speculative-tokens needs a drafter; auto without a draft chooses the number itself"
            )
        return {**config.options, "drafters": [{**one, **limit} for one in drafters]}
    return {**config.options, **limit}


def _own_options(own: Mapping[str, str], method: str) -> dict[str, Any]:
    shape = SMOLLM2_SHAPE if own[method] == SMOLLM2_NAME else {}
    return {"model": own[method], **shape}


def _auto(draft: str, own: Mapping[str, str]) -> SpeculativeConfig:
    """The configuration of `--spec auto`: suffix and a draft model, or else what ships for the target, or the defaults
    where nothing does."""
    if draft:
        member = {"method": DRAFT_MODEL.name, "model": draft, "num_speculative_tokens": AUTO_DEPTH}
    elif own:
        method = next(iter(own))
        member = {"method": method, "num_speculative_tokens": AUTO_DEPTH, **_own_options(own, method)}
    else:
        return SpeculativeConfig(AUTO.name)
    return SpeculativeConfig(AUTO.name, options={"drafters": [{"method": SUFFIX.name}, member]})


def _with_own_model(config: SpeculativeConfig, own: Mapping[str, str]) -> SpeculativeConfig:
    """`config` with `draft` replaced by `draft_model`, and the target's own drafter as its `model` where none is named;
    also inside an ensemble, versions, a cascade or auto."""
    spec = spec_of(config.method)
    if spec is None:
        return config
    given = renamed(config.options, spec.inner, f"{spec.name} key")
    options = {key: _named(value, own) if key in spec.inner else value for key, value in given.items()}
    if spec.name in own and options.get("model", _own_folder(own, spec.name)) == _own_folder(own, spec.name):
        options = {**_own_options(own, spec.name), **options}
    return replace(config, method=spec.name, options=options)


def _own_folder(own: Mapping[str, str], method: str) -> Any:
    """What `SpeculativeConfig` makes of the name of the target's own drafter."""
    return SpeculativeConfig(method, options={"model": own[method]}).options["model"]


def _named(member: Any, own: Mapping[str, str]) -> Any:
    """An inner drafter after `_with_own_model`, or a list or mapping of them.

    An invalid configuration is unchanged, and refused later.
    """
    if isinstance(member, list):
        return [_named(one, own) for one in member]
    if not isinstance(member, dict) or "verifier" in member:
        return member
    if not isinstance(member.get("method"), str):
        return {name: _named(one, own) for name, one in member.items()}
    config = _with_own_model(SpeculativeConfig.from_mapping(member), own)
    return {"method": config.method, **config.options}
