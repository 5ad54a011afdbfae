"""Writes the generated pages, from the code and the tests: `python docs/generate.py`.

A test compares the pages with what this program would write, so they cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from slipstream.cli.flags.flags import field_help
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.methods import METHODS, MethodSpec
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.models.families.registry import FAMILIES as FUSED
from slipstream.models.text_tower import text_tower
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput

FOLDER = Path(__file__).parent
FROM_VLLM = "guides/from-vllm.md"
CLI_PAGE = runpy.run_path(str(FOLDER / "cli_page.py"))
_row: Callable[..., str] = CLI_PAGE["table_row"]

CONFIG_INTRODUCTION = """\
# Configuration

Written from the code by `make docs`; do not edit.

All configurations are frozen and checked when they are made. An unknown key raises an error that names the nearest
valid one. `LLM(model, speculative_config=…, **engine)` takes the keys of `EngineConfig` as keywords.
"""

TESTED_INTRODUCTION = """\
# Tested models

Written from the parity tests by `make docs`; do not edit.

A model is loaded exactly or refused with the reason. A family that is not listed may still work: when a model is
loaded, a dozen tokens are compared with what Transformers computes, and a model that fails is refused.
`slipstream info MODEL` says what is used. [Checkpoints](../guides/checkpoints.md) has formats, adapters and long
contexts.
"""

FAMILIES_INTRODUCTION = """\
## Families

`tests/parity/test_families.py` compares tiny random models of each family with Transformers' own: whole and chunked
prompts, packed batches, draft trees, hidden states, greedy text, in float32, and some in bfloat16 and float16.
`test_latent_caches.py` does so for families with latents.

*Whole pass* means that one call of the CPU kernels computes all layers, with weights in any format that they have.
*Layer by layer* means that Transformers' code runs; in it the kernels compute the linear layers and the
attention. *Latents* are what the cache of such a model holds on a CPU, and there the kernels attend too
([latent attention](../guides/checkpoints.md#latent-attention)). With
`cpu_kernels="torch"`, and on other devices, everything runs in PyTorch.
"""

TOWERS_INTRODUCTION = """\
## Text towers of models that read images or sound

Only the language model is loaded, for text. `tests/parity/test_text_towers.py` compares its logits with the whole
model's.
"""

ENCODER_DECODERS = """\
## Encoder-decoders

`tests/parity/test_encoder_decoders.py` compares tiny random models of these families with Transformers' greedy text,
with drafts and without: `t5` (also gated and untied, as FLAN-T5), `mt5`, `umt5`, `bart`, `mbart`, `marian`, `pegasus`,
`m2m_100`, `blenderbot` and `whisper`. See [the guide](../guides/encoder-decoders.md)."""

REFUSED_INTRODUCTION = """\
## Refused

`tests/parity/test_refusals.py` checks that these end in one line with the reason, before any request.
"""

INNER: dict[str, Any] = {
    "draft": {"method": "off"},
    "drafter": {"method": "ngram"},
    "members": [{"method": "suffix"}, {"method": "ngram"}],
}
"""Values of options that hold other drafters and have no default."""


def _required(spec: MethodSpec) -> dict[str, Any]:
    """The options of a drafter that have no default."""
    model = {"model": "draft"} if spec.needs_model else {}
    return {**model, **{name: INNER[name] for name in spec.inner if name in INNER}}


NO_OPTIONS = {spec.name: _required(spec) for spec in METHODS.values()}
"""The built-in drafters with the options that have no default."""


def cli_page() -> str:
    """Every verb but those of training with its flags, and the groups that several share."""
    page: str = CLI_PAGE["cli_page"]()
    return page


def training_page() -> str:
    """The same for the verbs of training."""
    page: str = CLI_PAGE["training_page"]()
    return page


def config_page() -> str:
    """Every configuration class with its fields."""
    parts = [CONFIG_INTRODUCTION]
    parts += [_class(cls) for cls in (EngineConfig, SamplingParams, StructuredOutput, SpeculativeConfig)]
    parts.append(
        "## Options of the drafters\n\nThey are keys besides `method` and `verifier` in `speculative_config`.\n"
    )
    for method, options in NO_OPTIONS.items():
        made = ParsedSpeculation.of(SpeculativeConfig(method, options=options)).options
        parts.append(_class(type(made), title=f"### `method: {method}`"))
    return "\n".join(parts)


def tested_models_page() -> str:
    """The families, text towers and refusals of tests/parity."""
    tests = {name: _parity(name) for name in ("tiny_models", "test_text_towers", "test_refusals")}
    parts = [TESTED_INTRODUCTION, FAMILIES_INTRODUCTION, "| family | tested as | on a CPU |", "|---|---|---|"]
    by_type: dict[str, list[str]] = {}
    tiny = tests["tiny_models"]
    families = ("FAMILIES", "LATENT", "LIKE_OTHERS", "SPARSE", "RECURRENT")
    for name, config in {key: made for each in families for key, made in tiny[each].items()}.items():
        by_type.setdefault(config().model_type, []).append(name)
    latent = {config().model_type for config in tiny["LATENT"].values()}
    for model_type, names in by_type.items():
        way = _cpu_path(model_type) + (", latents" if model_type in latent else "")
        parts.append(_row(f"`{model_type}`", ", ".join(names), way))
    parts += ["", TOWERS_INTRODUCTION, "| checkpoint | its language model | on a CPU |", "|---|---|---|"]
    for make in tests["test_text_towers"]["FAMILIES"].values():
        config = make().config
        tower = text_tower(config)
        assert tower is not None
        inner = tower.config.model_type
        parts.append(_row(f"`{config.model_type}`", f"`{inner}`", _cpu_path(inner)))
    parts += ["", ENCODER_DECODERS]
    parts += ["", REFUSED_INTRODUCTION, "| model | reason |", "|---|---|"]
    parts += [_row(f"`{name}`", reason) for name, (_, reason) in tests["test_refusals"]["REFUSED"].items()]
    return "\n".join([*parts, ""])


def from_vllm_page() -> str:
    """The page as it is, with its tables written anew."""
    options = {
        method: type(ParsedSpeculation.of(SpeculativeConfig(method, options=given)).options)
        for method, given in NO_OPTIONS.items()
    }
    tables = runpy.run_path(str(FOLDER / "vllm_tables.py"))
    page: str = tables["filled"]((FOLDER / FROM_VLLM).read_text(encoding="utf-8"), options)
    return page


def _parity(name: str) -> dict[str, Any]:
    """The names of a file in tests/parity."""
    root = Path(__file__).parents[1]
    folder = root / "tests/parity"
    sys.path[:0] = [str(folder), str(root)]  # the tests' kit is below the root
    try:
        return runpy.run_path(str(folder / f"{name}.py"))
    finally:
        sys.path[:2] = []


def _cpu_path(model_type: str) -> str:
    return "whole pass" if model_type in FUSED.names() else "layer by layer"


def _class(cls: type, title: str | None = None) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    lines = [title or f"## `{cls.__name__}`", "", " ".join(doc.split()), ""]
    rows = list(_fields(cls))
    if rows:
        lines += ["| key | type | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _fields(cls: type) -> Iterator[str]:
    help_ = field_help(cls)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()!r}`"
        else:
            default = "required"
        yield _row(f"`{field.name}`", f"`{field.type}`", default, help_[field.name])


PAGES = {
    "reference/cli.md": cli_page,
    "reference/cli-train.md": training_page,
    "reference/config.md": config_page,
    "reference/tested-models.md": tested_models_page,
    FROM_VLLM: from_vllm_page,
}

if __name__ == "__main__":
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns of small configurations
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
