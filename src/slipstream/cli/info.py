"""`slipstream info`: describes a checkpoint, its memory, and the drafters that can run with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from slipstream.assets import EMBEDDED, EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    Json,
    ModelArgument,
    chosen_speculation,
    load,
    model_name,
)
from slipstream.cli.measure import Measurement
from slipstream.cli.output.console import print_rows, results, stderr, wide_results
from slipstream.cli.output.head import print_head
from slipstream.cli.output.loading import loaded_name, waiting
from slipstream.cli.output.profile_plot import check_plot, plot_profiles
from slipstream.cli.output.results import print_json
from slipstream.cli.output.writing import Overwrite
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.model_path import check_model_path
from slipstream.core.model_path import describe as describe_path
from slipstream.core.pretrained import own_drafters, path_of
from slipstream.draft.methods import DRAFT_MODEL, short_name
from slipstream.engine.labels import is_cost_expanded
from slipstream.errors import ConfigError, VocabularyMismatchError
from slipstream.profiling.break_even import round_cost
from slipstream.profiling.store import prepare_folder

if TYPE_CHECKING:
    from slipstream.draft.footprint import Footprint
    from slipstream.engine.description import EngineDescription
    from slipstream.engine.llm import LLM
    from slipstream.models.identity import ModelIdentity


@dataclass(frozen=True, kw_only=True)
class InfoFlags:
    """What is described."""

    model: ModelArgument = None
    draft: str | None = None
    """Check whether this model or head can draft for it, and plan memory for both."""
    draft_for: str | None = None
    """Check whether it can draft for this model."""
    measure: Annotated[bool, Option("--measure")] = False
    """Time steps of 1 to 64 rows, show them with the machine's roofline, and save the profile. Takes half a minute or
    more."""
    quick: Annotated[bool, Option("--quick")] = False
    """With --measure: a rough measurement in a few seconds, not saved."""
    by_part: Annotated[bool, Option("--by-part")] = False
    """With --measure: time passes' parts."""
    plot: Path | None = None
    """With --measure: plot the times into this .png, .svg or .pdf."""
    overwrite: Overwrite = False
    json: Json = False
    engine: EngineValues

    def checked(self) -> InfoFlags:
        """Return it with the folders of models that are called `embedded`; raises `ConfigError` or `ModelError`."""
        given = {"--quick": self.quick, "--by-part": self.by_part, "--plot": self.plot is not None}
        if not self.measure and any(given.values()):
            raise ConfigError(f"{next(flag for flag in given if given[flag])} needs --measure; add it")
        if self.plot is not None:
            check_plot(self.plot, self.overwrite)
        if self.measure and not self.quick:
            prepare_folder()
        draft = EMBEDDED_DRAFT if self.draft == EMBEDDED else self.draft
        target = EMBEDDED_TARGET if self.draft_for == EMBEDDED else self.draft_for
        target = None if target is None else path_of(target)
        for path in (draft, target):
            if path is not None:
                check_model_path(path)
        return replace(self, draft=draft, draft_for=target)

    def loading(self) -> str:
        """What is read, as it is said."""
        others = [
            path for path in (self.draft, self.draft_for) if path is not None and not Path(path).exists()
        ]
        extra = "".join(f", with {describe_path(path)}" for path in others)
        return f"{'loading' if self.measure else 'reading'} {loaded_name(self.model)}{extra}"


@dataclass
class _Described:
    """A model with the draft that was named, or with its own."""

    flags: InfoFlags
    about: EngineDescription
    speculative: SpeculativeConfig
    can_draft: str | None
    """Whether the named draft can draft for it: `yes`, or why not."""

    @classmethod
    def read(cls, flags: InfoFlags) -> _Described:
        """Read it from configuration and tokenizer."""
        from slipstream.engine.description import describe

        config = EngineConfig.from_options(flags.model, flags.engine)
        if flags.draft is None:
            speculative = chosen_speculation({}, flags.model)
            return cls(flags, describe(config, speculative), speculative, None)
        method = _head_in(flags.draft) or DRAFT_MODEL.name
        try:
            speculative = SpeculativeConfig.from_mapping({"method": method, "model": flags.draft})
            return cls(flags, describe(config, speculative), speculative, "yes")
        except VocabularyMismatchError as error:
            speculative = SpeculativeConfig()
            return cls(flags, describe(config, speculative), speculative, f"no: {error}")

    def details(self) -> dict[str, Any]:
        """All that is known without a measurement."""
        flags, model = self.flags, self.flags.model
        details = _details(self.about, model_name(model))
        drafters = details["drafters"]
        if flags.draft is None and model is None:
            runs = "the embedded draft, which runs by default and is in the memory plan"
            drafters[DRAFT_MODEL.name] = f"{runs}: {_costs(_holds(self.about.draft, self.about.model))}"
        for name in own_drafters(model).keys() - {DRAFT_MODEL.name}:
            drafters[name] = f"the target's own head: {drafters[name].partition(': ')[2]}"
        if flags.draft is not None:
            method = self.speculative.method if self.can_draft == "yes" else DRAFT_MODEL.name
            drafters[method] = f"{flags.draft}: {self.can_draft}"
        if flags.draft_for is not None:
            details["drafts_for"] = {flags.draft_for: _compatible(flags.draft_for, model, flags.engine)}
        return details

    def first_try(self, measurement: Measurement | None) -> str:
        """The line with which a description ends."""
        from slipstream.cli.first_try import CHAIN, KnownModel, first_try

        verify, rounds = None, None
        if measurement is not None and measurement.fault is None:
            verify = measurement.target.verify_cost(CHAIN + 1, measurement.context)
            if measurement.draft is not None:
                rounds = round_cost(measurement.target, measurement.draft, CHAIN, measurement.context)
        copy_pays = not self.about.drafters["self"][1].missing
        draft = self.flags.draft if self.can_draft == "yes" else None
        if draft is not None and self.speculative.method != DRAFT_MODEL.name:
            name = short_name(self.speculative.method)
            return f"--spec {name}:{draft}: the head that was named; `bench` says what it gains"
        stored_as = self.about.model.stored_as
        is_embedded = self.flags.model is None
        head = None if is_embedded else next(iter(own_drafters(self.flags.model)), None)
        return first_try(KnownModel(is_embedded, stored_as, copy_pays, draft, verify, rounds, head))


@with_flags
def info(flags: InfoFlags) -> None:
    """Print a model's properties, its memory and the drafters that can run with it, from its configuration and its
    tokenizer: weights are read with `--measure` only, and of a hub id not downloaded. `doctor` checks what they
    compute. Of a draft head here it prints what it is and for which targets."""
    flags = flags.checked()
    if (method := _head_method(flags)) is not None:
        print_head(str(flags.model), method, flags.draft_for, flags.json)
        return
    with waiting(flags.loading()):
        found = _Described.read(flags)
        llm = load(flags.model, found.speculative, flags.engine) if flags.measure else None
    details = found.details()
    saved = None if flags.measure else Measurement.find(found.about.model, found.about.draft_model)
    if not flags.json:
        print_rows(results(), [*_lines(details), *([] if saved is None else saved.lines())])
    measurement = saved
    if llm is not None:
        measurement = _measured(llm, flags, details)
    details["try"] = found.first_try(measurement)
    if flags.json:
        print_json({**details, "measured": None if measurement is None else measurement.as_json()})
        return
    if llm is not None and measurement is not None:
        measurement.print(wide_results())
        if details["passes"]:
            print_rows(results(), _pass_lines(details["passes"]))
        for file in [*details["profile_files"], *([] if flags.plot is None else [flags.plot])]:
            stderr().print(f"saved {file}", markup=False)
    print_rows(results(), [("try", details["try"])])


def _head_method(flags: InfoFlags) -> str | None:
    """The method that runs what is described, if it is a draft head; raises `ConfigError` for flags of models."""
    method = _head_in(flags.model)
    if method is not None and (flags.measure or flags.draft is not None):
        flag = "--measure" if flags.measure else "--draft"
        raise ConfigError(
            f"{flags.model!r} is a draft head of method {method}; {flag} takes a model, omit it"
        )
    return method


def _head_in(path: str | None) -> str | None:
    """The method that runs the head in a folder or file; None where there is none, or another model."""
    if path is None or not Path(path).exists():
        return None
    from slipstream.draft.heads.description import method_of

    return method_of(path)


def _measured(llm: LLM, flags: InfoFlags, details: dict[str, Any]) -> Measurement:
    """A measurement, saved and plotted as the flags say."""
    measurement = Measurement.take(llm, flags.quick, flags.by_part)
    if not flags.quick and measurement.fault is not None and not flags.json:
        measurement.print_tables(wide_results())  # also when saving is refused
    details["profile_files"] = [] if flags.quick else measurement.save()
    details["passes"] = {model: asdict(counts) for model, counts in llm.engine.stats().passes.items()}
    if flags.plot is not None:
        plot_profiles(measurement.profiles(), flags.plot)
    return measurement


def _details(described: EngineDescription, name: str) -> dict[str, Any]:
    from slipstream.models.cpu.quota import cpu_quota

    model, tokenizer, plan = described.model, described.tokenizer, described.memory_plan
    holds = {name: (about, _holds(each, model)) for name, (about, each) in described.drafters.items()}
    return {
        "model": name,
        "family": model.family,
        "num_parameters": model.num_parameters,
        "num_layers": model.num_layers,
        "context_length": model.context_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(model.cache_dtype).removeprefix("torch."),
        "fast_prompts": model.fast_prompts,
        "exact_rows": model.exact_rows,
        "device": str(model.device),
        "quantization": model.quantization,
        "weights": model.weight_type,
        "runs_as": model.runs_as,
        "threads": model.num_threads,
        "cpu_quota": cpu_quota(),
        "cost_expanded": is_cost_expanded(model),
        "tokenizer": _tokenizer_kind(tokenizer),
        "vocabulary": len(tokenizer),
        "logits_width": model.vocab_size,
        "chat_template": bool(tokenizer.chat_template),
        "end_tokens": {
            str(tokenizer.convert_ids_to_tokens(token)): token for token in sorted(described.end_token_ids)
        },
        "memory_plan": {**asdict(plan), "kv_bytes": plan.kv_bytes},
        "memory_plan_text": str(plan),
        "drafters": {name: _summary(about, costs) for name, (about, costs) in holds.items()},
        "drafter_costs": {name: costs for name, (_, costs) in holds.items()},
    }


def _tokenizer_kind(tokenizer: Any) -> str:
    """The tokenizer's kind: 'byte-level BPE', 'BPE with byte fallback', 'Unigram'."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "code of its own"
    kind, decoder = type(backend.model).__name__, repr(backend.decoder)
    if "ByteLevel" in decoder:
        return f"byte-level {kind}"
    return f"{kind} with byte fallback" if "ByteFallback" in decoder else kind


def _holds(drafter: Footprint, target: ModelIdentity) -> dict[str, Any]:
    """What a drafter holds besides its target; None depends on what is missing."""
    traits, is_known = drafter.traits, drafter.is_known
    weight_bytes = drafter.weight_bytes + sum(table.first_bytes for table in traits.tables)
    return {
        "missing": drafter.missing,
        "weight_bytes": weight_bytes if is_known else None,
        "kv_bytes_per_token": traits.kv_bytes_per_token if is_known else None,
        "feature_bytes_per_token": drafter.feature_bytes_per_token(target) if is_known else None,
        "grows_with": traits.grows_with,
    }


def _summary(about: str, costs: dict[str, Any]) -> str:
    """'needs model: a smaller model drafts', or its memory when it can run."""
    if missing := costs["missing"]:
        return f"{missing}: {about}" if about else str(missing)
    return f"runs, {_costs(costs)}: {about}"


def _costs(costs: dict[str, Any]) -> str:
    """'weights 3.5 MiB, 512 B a token'."""
    from slipstream.plan.sizes import format_bytes

    a_token = [
        f"{name} {format_bytes(num_bytes)}"
        for name, num_bytes in (
            ("keys and values", costs["kv_bytes_per_token"]),
            ("features", costs["feature_bytes_per_token"]),
        )
        if num_bytes
    ]
    parts = [f"weights {format_bytes(costs['weight_bytes'])}"] if costs["weight_bytes"] else []
    parts += [f"{' and '.join(a_token)} a token"] if a_token else []
    parts += [costs["grows_with"]] if costs["grows_with"] else []
    return ", ".join(parts) or "holds next to nothing"


def _compatible(target: str, model: str | None, engine: Values) -> str:
    """'yes', or why the vocabularies differ. Raises `ModelError` when a tokenizer cannot be loaded."""
    from slipstream.models import load_draft_tokenizer, load_tokenizer
    from slipstream.text.vocabulary import check_same_vocabulary

    options = {key: engine[key] for key in ("revision", "trust_remote_code") if key in engine}
    name = model or EMBEDDED_TARGET
    try:
        ours = load_tokenizer(target, **options)
        check_same_vocabulary(
            ours, load_draft_tokenizer(engine.get("tokenizer", name), ours, **options), name
        )
    except VocabularyMismatchError as error:
        return f"no: {error}"
    return "yes"


def _pass_lines(passes: dict[str, Any]) -> list[tuple[str, str]]:
    """Of each model whose passes are recorded '812 replayed, 3 outside a graph (too many rows: 3)'."""
    lines = []
    for model, counts in passes.items():
        reasons = ", ".join(f"{reason}: {number:,}" for reason, number in counts["eager"].items())
        outside = f"{sum(counts['eager'].values()):,} outside a graph" + (f" ({reasons})" if reasons else "")
        lines.append((f"{model} passes", f"{counts['num_replayed']:,} replayed, {outside}"))
    return lines


def _threads_line(details: dict[str, Any]) -> str:
    """'2, under a CPU quota of 1.5 cores'."""
    quota = details["cpu_quota"]
    return f"{details['threads']}" + (f", under a CPU quota of {quota:g} cores" if quota is not None else "")


def _end_tokens_line(details: dict[str, Any]) -> str:
    """'<|im_end|> (2), <|endoftext|> (0)'."""
    named = [f"{content} ({token})" for content, token in details["end_tokens"].items()]
    return ", ".join(named) or "no token: at stop strings, stop_token_ids or max_tokens"


def _lines(details: dict[str, Any]) -> list[tuple[str, str]]:
    template = "with" if details["chat_template"] else "without"
    expanded = ", cost-expanded" if details["cost_expanded"] else ""
    lines = [
        ("model", f"{details['model']}{expanded}"),
        ("family", details["family"]),
        ("parameters", f"{details['num_parameters']:,} in {details['num_layers']} layers"),
        ("context", f"{details['context_length']:,} tokens"),
        ("runs as", details["runs_as"]),
        ("threads", _threads_line(details)),
        ("tokenizer", f"{details['tokenizer']}, {details['vocabulary']:,} tokens, {template} chat template"),
        ("answers end at", _end_tokens_line(details)),
        ("memory", details["memory_plan_text"]),
    ]
    place = "" if details["drafters"][DRAFT_MODEL.name].startswith("the embedded") else ":PATH"
    short = {DRAFT_MODEL.name: DRAFT_MODEL.short_name + place}
    lines += [(f"--spec {short.get(name, name)}", needs) for name, needs in details["drafters"].items()]
    lines += [(f"drafts for {target}", answer) for target, answer in details.get("drafts_for", {}).items()]
    return lines
