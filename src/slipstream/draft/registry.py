"""Drafters by name. Built-in ones are imported when they are first used; others are registered or come as entry points.

A package adds a drafter with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.drafters"]
    my_drafter = "my_package.module:MyDrafter"

and without packaging, `method` may itself be `"my_package.module:MyDrafter"`. A built-in name cannot be taken
over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.config import SpeculativeConfig, options_from
from slipstream.core.proposal import VerifierTraits
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.footprint import Footprint, NoGainError
from slipstream.draft.methods import METHODS, MethodSpec
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.registry import Registry
from slipstream.vllm_names import METHODS_ELSEWHERE, SPECULATIVE, split_off

DRAFTERS = Registry[Drafter](
    "drafter",
    Drafter,  # type: ignore[type-abstract]
    "slipstream.drafters",
    {spec.name: spec.drafter for spec in METHODS.values()},
)
"""`DRAFTERS.register(name, cls)` adds one for this process."""


def drafter_names() -> list[str]:
    """Every name that `method` may have, sorted."""
    return DRAFTERS.names()


def method_spec(method: str) -> MethodSpec | None:
    """What is known of a method, of a package's where its class says; raises `ConfigError` for unknown names."""
    return METHODS.get(method) or _drafter_class(method).spec


def validate(config: SpeculativeConfig, verifier: VerifierTraits | None = None) -> tuple[type[Drafter], Any]:
    """The drafter's class and its parsed options; raises `ConfigError` for anything wrong in them.

    With a `verifier`, one that can judge nothing of what the drafter makes is refused too. Loads no model, so that a
    bad configuration costs one clear line and no waiting.
    """
    cls = _drafter_class(config.method)
    if not dataclasses.is_dataclass(getattr(cls, "Options", None)):
        raise ConfigError(f"drafter {config.method!r} has no dataclass Options; see its base class")
    if verifier is not None and not cls.traits.kinds & verifier.kinds:
        kinds = " or ".join(sorted(cls.traits.kinds))
        raise ConfigError(
            f"verifier {verifier.name!r} cannot judge {kinds} proposals, and drafter {config.method!r} "
            f"makes no others; use verifier 'coupled'"
        )
    if config.draft_device is not None:
        _check_device(config, cls)
    fields = {field.name for field in dataclasses.fields(cls.Options)}
    theirs = {name: one for name, one in SPECULATIVE.items() if name not in fields}
    own, _ = split_off(config.options, theirs, config.method, ConfigError)
    return cls, options_from(cls.Options, own, config.method)


def create_drafter(config: SpeculativeConfig, context: DraftContext) -> Drafter:
    """The drafter that `config` names, ready to propose; the verifier that counts is the context's.

    Raises `ConfigError` as `validate` does.
    """
    return make_drafter(config, *validate(config, context.verifier), context)


def make_drafter(
    config: SpeculativeConfig, cls: type[Drafter], options: Any, context: DraftContext
) -> Drafter:
    """The drafter of a configuration of which `validate` has returned the class and the options."""
    if config.draft_device is not None:
        from slipstream.models.resolve import resolve_device

        context = dataclasses.replace(context, device=resolve_device(config.draft_device))
    spec, target = method_spec(config.method), context.target
    if spec is not None and spec.reads_unused_tensors and target is not None:
        context = dataclasses.replace(context, unused_tensors=target.unused_tensors)
    try:
        return cls.made(options, context)
    except (SlipstreamError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"drafter {config.method!r} cannot be made: {type(error).__name__}: {error}"
        ) from error


def footprints(context: DraftContext) -> dict[str, tuple[str, Footprint]]:
    """Name to what it is, in a line, and what it would hold with its default options, for every installed drafter."""
    from slipstream.models.unloaded import shared_outlines

    found: dict[str, tuple[str, Footprint]] = {}
    with shared_outlines():
        for name in drafter_names():
            try:
                cls = _drafter_class(name)
                found[name] = (_help(name, cls), _default_footprint(cls, context))
            except Exception as error:  # a package's own fault
                found[name] = ("", Footprint.unknown(f"does not run as it is: {error}"))
    return found


def _default_footprint(cls: type[Drafter], context: DraftContext) -> Footprint:
    """A drafter with its default options; one that lacks options that have no default says which."""
    required = [
        field.name
        for field in dataclasses.fields(cls.Options)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if required:
        return Footprint.unknown(f"needs {' and '.join(required)}")
    try:
        return cls.footprint(cls.Options(), context)
    except NoGainError as error:
        return Footprint.unknown(f"cannot gain speed: {error.reason}")


def _help(name: str, cls: type[Drafter]) -> str:
    """What a drafter does, in a line: of a package's own what its class says."""
    spec = METHODS.get(name, cls.spec)
    if spec is not None:
        return spec.help
    return vars(cls).get("summary") or (cls.__doc__ or "").strip().split("\n")[0]


def _check_device(config: SpeculativeConfig, cls: type[Drafter]) -> None:
    """Raise `ConfigError` where a drafter cannot run on another device than its target."""
    if not cls.traits.has_own_model:
        raise ConfigError(
            f"drafter {config.method!r} cannot have a draft_device: it has no model of its own, or reads more of its "
            f"target than the text; draft_model, self, tli and slem can"
        )
    if config.options.get("device", "auto") not in ("auto", config.draft_device):
        raise ConfigError(
            f"draft_device {config.draft_device!r} and device {config.options['device']!r} disagree; give one"
        )


def _drafter_class(method: str) -> type[Drafter]:
    if method in METHODS_ELSEWHERE and method not in DRAFTERS.names():
        raise ConfigError(
            f"drafter {method!r} is vLLM's and is not available here; {METHODS_ELSEWHERE[method]}"
        )
    return DRAFTERS.load(method)
