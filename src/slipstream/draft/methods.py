"""The built-in drafting methods: their names here and elsewhere, what they need, and what can be done with them.

Plain data that imports nothing of Slipstream, so that any room may read it. The name of a method is here and in its
drafter's own file. A drafter that a package brings has its specification in its class, as `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

VLLM, SGLANG, TENSORRT_LLM = "vllm", "sglang", "tensorrt-llm"
LLAMA_CPP, OPENVINO, TRANSFORMERS = "llama-cpp", "openvino", "transformers"


class DraftWeights(Enum):
    """Whose weights a method drafts with."""

    NONE = "none"
    """Texts, tables or the target's logits are enough."""
    DRAFT_MODEL = "draft"
    """A smaller language model, in a folder, a GGUF file or on the hub: the option `model`."""
    HEAD = "head"
    """A head that was trained for the target: the option `model`."""
    TARGET = "target"
    """The target's own, rounded or in part."""
    CHECKPOINT = "checkpoint"
    """Tensors of the target's own checkpoint that the target does not read, or a head where the option `model` names
    one."""
    INNER = "inner"
    """Those of the drafters inside it."""


class TargetFeatures(Enum):
    """Which hidden states of the target a method reads."""

    NONE = "none"
    LAST = "last"
    """What the final norm puts out."""
    CHOSEN = "chosen"
    """Those of the layers that its checkpoint names."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One drafting method."""

    name: str
    """The value of `method`."""
    drafter: str
    """Its class, as "module:Class"."""
    help: str
    """What it does, in a line."""
    aliases: tuple[str, ...] = ()
    """Other names on the command line. The shortest of all is printed."""
    short_value: str = "model"
    """The option that `NAME:VALUE` sets."""
    weights: DraftWeights = DraftWeights.NONE
    features: TargetFeatures = TargetFeatures.NONE
    reads_unused_tensors: bool = False
    """True where its weights are tensors of the target's checkpoint that the target does not read: its drafter finds
    them as `DraftContext.unused_tensors`."""
    is_lookup: bool = False
    """True where it looks into texts only: calling it again costs next to nothing, and it drafts as configured."""
    drafts_chains: bool = False
    """True where `num_speculative_tokens` says anew for each step how deep it drafts."""
    trainer: str | None = None
    """Its verb of `slipstream train`."""
    learners: tuple[str, ...] = ()
    """By what it learns while it serves; for all but draft models the first suits best."""
    learns_by_itself: bool = False
    """True where its tables take in every answer as it is."""
    inner: tuple[str, ...] = ()
    """Options that hold the configurations of other drafters: one, a list, or a mapping of them."""
    unscored: str = ""
    """Why a recorded text does not determine its drafts; empty where it does."""
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Engine to what it calls the method there: the name that is written, then others that are read."""
    nearest: tuple[str, ...] = ()
    """Methods that come nearest to it; the first that an engine has counts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "elsewhere", MappingProxyType(dict(self.elsewhere)))

    @property
    def needs_model(self) -> bool:
        """True where it cannot run without the option `model`."""
        return self.weights in (DraftWeights.DRAFT_MODEL, DraftWeights.HEAD)

    @property
    def is_head(self) -> bool:
        """True for a head that was trained for the target, or with it."""
        return self.weights in (DraftWeights.HEAD, DraftWeights.CHECKPOINT)

    @property
    def uses_target(self) -> bool:
        """True where the target drafts for itself, with weights of its own."""
        return self.weights is DraftWeights.TARGET

    @property
    def short_name(self) -> str:
        """The name on the command line."""
        return min((self.name, *self.aliases), key=len)


OFF = MethodSpec(name="off", drafter="slipstream.draft.off:OffDrafter", help="no speculation")
NGRAM = MethodSpec(
    name="ngram",
    drafter="slipstream.draft.lookup.ngram:NgramDrafter",
    help="drafts what followed the same words earlier in the prompt and answer (prompt lookup)",
    is_lookup=True,
    learns_by_itself=True,
    elsewhere={
        VLLM: ("ngram", "[ngram]", "ngram_gpu"),
        SGLANG: ("NGRAM",),
        TENSORRT_LLM: ("NGram",),
        LLAMA_CPP: ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"),
        OPENVINO: ("ngram",),
        TRANSFORMERS: ("prompt_lookup_num_tokens",),
    },
)
SUFFIX = MethodSpec(
    name="suffix",
    drafter="slipstream.draft.lookup.suffix:SuffixDrafter",
    help="drafts what followed the same words in this text and in earlier answers (suffix decoding)",
    is_lookup=True,
    learns_by_itself=True,
    elsewhere={VLLM: ("suffix",), TENSORRT_LLM: ("SA",)},
    nearest=("ngram",),
)
TOKEN_RECYCLING = MethodSpec(
    name="token_recycling",
    drafter="slipstream.draft.lookup.token_recycling:TokenRecyclingDrafter",
    help="drafts the tokens that last looked likely after each token (token recycling)",
    learns_by_itself=True,
    unscored="it learns from what the target says of its own draft tokens",
    nearest=("suffix", "ngram"),
)
SIBLINGS = MethodSpec(
    name="siblings",
    drafter="slipstream.draft.lookup.siblings:SiblingsDrafter",
    help="lets samples of one prompt draft for each other, with the target's own logits along them",
    unscored="it learns from what the target says of other answers",
    nearest=("suffix", "ngram"),
)
LOOKAHEAD = MethodSpec(
    name="lookahead",
    drafter="slipstream.draft.parallel.lookahead:LookaheadDrafter",
    help="n-grams that the target computes on the side (lookahead decoding)",
    learns_by_itself=True,
    unscored="it learns from what the target says of its own draft tokens",
    nearest=("ngram",),
)
JACOBI = MethodSpec(
    name="jacobi",
    drafter="slipstream.draft.parallel.lookahead:JacobiDrafter",
    help="drafts what the target said of the same places a step before",
    learns_by_itself=True,
    unscored="it learns from what the target says of its own draft tokens",
    nearest=("ngram",),
)
DRAFT_MODEL = MethodSpec(
    name="draft_model",
    aliases=("draft",),
    drafter="slipstream.draft.model.draft_model:DraftModelDrafter",
    help="a smaller model with the same vocabulary drafts",
    weights=DraftWeights.DRAFT_MODEL,
    drafts_chains=True,
    trainer="draft",
    learners=("whole", "low_rank", "corrective"),
    elsewhere={
        VLLM: ("draft_model",),
        SGLANG: ("STANDALONE",),
        TENSORRT_LLM: ("DraftTarget", "Draft_Target"),
        LLAMA_CPP: ("draft-simple",),
        OPENVINO: ("draft_model",),
        TRANSFORMERS: ("assistant_model",),
    },
)
TLI = MethodSpec(
    name="tli",
    drafter="slipstream.draft.model.tli:TliDrafter",
    help="a smaller model with another vocabulary drafts, in the tokens that both have",
    weights=DraftWeights.DRAFT_MODEL,
    drafts_chains=True,
    elsewhere={VLLM: ("draft_model",), TRANSFORMERS: ("assistant_model",)},
    nearest=("ngram",),
)
SLEM = MethodSpec(
    name="slem",
    drafter="slipstream.draft.model.slem:SlemDrafter",
    help="a smaller model with another vocabulary drafts, in text",
    weights=DraftWeights.DRAFT_MODEL,
    elsewhere={TRANSFORMERS: ("assistant_model",)},
    nearest=("tli", "ngram"),
)
PARD = MethodSpec(
    name="pard",
    drafter="slipstream.draft.model.pard:PardDrafter",
    help="a smaller model that reads mask tokens drafts all its tokens in one pass (PARD)",
    weights=DraftWeights.DRAFT_MODEL,
    drafts_chains=True,
    trainer="pard",
    elsewhere={VLLM: ("draft_model",)},
    nearest=("draft_model", "ngram"),
)
SELF = MethodSpec(
    name="self",
    drafter="slipstream.draft.model.self_model:SelfDrafter",
    help="the target's own weights in int8, with a cache of their own",
    short_value="quantization",
    weights=DraftWeights.TARGET,
    learners=("corrective",),
    nearest=("ngram",),
)
LAYER_SKIP = MethodSpec(
    name="layer_skip",
    drafter="slipstream.draft.model.layer_skip:LayerSkipDrafter",
    help="the target itself with some layers left out, in the target's own cache",
    short_value="quantization",
    weights=DraftWeights.TARGET,
    drafts_chains=True,
    learners=("corrective",),
    elsewhere={TRANSFORMERS: ("assistant_early_exit",)},
    nearest=("ngram",),
)
CASCADE = MethodSpec(
    name="cascade",
    drafter="slipstream.draft.combine.cascade:CascadeDrafter",
    help="a draft model, or part of the target, that itself drafts with a cheaper drafter",
    weights=DraftWeights.INNER,
    inner=("draft",),
    unscored="its inner drafts depend on what was accepted before",
    nearest=("draft_model", "ngram"),
)
EAGLE = MethodSpec(
    name="eagle",
    drafter="slipstream.draft.heads.eagle:Eagle1Drafter",
    help="a head of one layer, trained on the target's hidden states (EAGLE, EAGLE-2)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.LAST,
    drafts_chains=True,
    trainer="eagle",
    learners=("corrective",),
    elsewhere={VLLM: ("eagle",), SGLANG: ("EAGLE",)},
    nearest=("ngram",),
)
EAGLE3 = MethodSpec(
    name="eagle3",
    drafter="slipstream.draft.heads.eagle:Eagle3Drafter",
    help="a head of one layer, trained on three of the target's hidden states (EAGLE-3)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.CHOSEN,
    drafts_chains=True,
    trainer="eagle3",
    learners=("eagle", "corrective"),
    elsewhere={
        VLLM: ("eagle3",),
        SGLANG: ("EAGLE3",),
        TENSORRT_LLM: ("Eagle3", "Eagle"),
        LLAMA_CPP: ("draft-eagle3",),
        OPENVINO: ("eagle3",),
    },
    nearest=("ngram",),
)
MTP = MethodSpec(
    name="mtp",
    drafter="slipstream.draft.heads.mtp:MtpDrafter",
    help="the layer for multi-token prediction in the target's own checkpoint, or Gemma 4's assistant",
    weights=DraftWeights.CHECKPOINT,
    features=TargetFeatures.LAST,
    reads_unused_tensors=True,
    drafts_chains=True,
    elsewhere={
        VLLM: ("mtp",),
        SGLANG: ("NEXTN",),
        TENSORRT_LLM: ("MTP",),
        LLAMA_CPP: ("draft-mtp",),
        TRANSFORMERS: ("use_mtp",),
    },
    nearest=("ngram",),
)
PEAGLE = MethodSpec(
    name="peagle",
    drafter="slipstream.draft.heads.peagle:PEagleDrafter",
    help="an EAGLE-3 head that reads mask tokens drafts all its tokens in one pass (P-EAGLE)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.CHOSEN,
    drafts_chains=True,
    trainer="peagle",
    elsewhere={VLLM: ("eagle3",)},
    nearest=("eagle3", "ngram"),
)
MEDUSA = MethodSpec(
    name="medusa",
    drafter="slipstream.draft.heads.medusa:MedusaDrafter",
    help="small heads on the target, one for each position ahead (Medusa)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.LAST,
    trainer="medusa",
    elsewhere={VLLM: ("medusa",)},
    nearest=("ngram",),
)
HYDRA = MethodSpec(
    name="hydra",
    drafter="slipstream.draft.heads.hydra:HydraDrafter",
    help="small heads on the target, each of which reads the tokens before its own (Hydra)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.LAST,
    trainer="hydra",
    nearest=("ngram",),
)
DFLASH = MethodSpec(
    name="dflash",
    aliases=("dspark",),
    drafter="slipstream.draft.heads.dflash:DFlashDrafter",
    help="a head of a few layers on the target's hidden states drafts a whole block in one pass (DFlash, DSpark)",
    weights=DraftWeights.HEAD,
    features=TargetFeatures.CHOSEN,
    drafts_chains=True,
    trainer="dflash",
    elsewhere={
        VLLM: ("dflash", "dspark"),
        SGLANG: ("DFLASH", "DSPARK"),
        TENSORRT_LLM: ("DFlash",),
        LLAMA_CPP: ("draft-dflash", "draft-dspark"),
    },
    nearest=("eagle3", "ngram"),
)
REMOTE = MethodSpec(
    name="remote",
    drafter="slipstream.draft.remote.drafter:RemoteDrafter",
    help="a drafter in another process or on another machine (slipstream draft-worker)",
    short_value="workers",
)
ENSEMBLE = MethodSpec(
    name="ensemble",
    drafter="slipstream.draft.combine.ensemble:EnsembleDrafter",
    help="several drafters whose drafts are united, voted on or tried in turn",
    weights=DraftWeights.INNER,
    inner=("members",),
    unscored="its tree depends on what was accepted before",
    nearest=("suffix", "ngram"),
)
AUTO = MethodSpec(
    name="auto",
    drafter="slipstream.draft.combine.auto:AutoDrafter",
    help="chooses for each request and step among drafters, or none, by what they gain",
    weights=DraftWeights.INNER,
    inner=("drafters",),
    unscored="it chooses by itself while it runs",
    nearest=("suffix", "ngram"),
)
VERSIONS = MethodSpec(
    name="versions",
    drafter="slipstream.draft.combine.versions:VersionsDrafter",
    help="versions of one drafter side by side, a request each its own; what serve --learn swaps",
    weights=DraftWeights.INNER,
    inner=("drafter", "versions"),
    nearest=("ngram",),
)

METHODS: Mapping[str, MethodSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            *(OFF, NGRAM, SUFFIX, TOKEN_RECYCLING, SIBLINGS, LOOKAHEAD, JACOBI),
            *(DRAFT_MODEL, TLI, SLEM, PARD),
            *(MTP, EAGLE3, EAGLE, PEAGLE, DFLASH, MEDUSA, HYDRA, SELF, LAYER_SKIP),
            *(CASCADE, ENSEMBLE, AUTO, VERSIONS, REMOTE),
        )
    }
)
"""Every built-in method by its name, in the order in which they are listed."""

LOOKUPS = tuple(spec.name for spec in METHODS.values() if spec.is_lookup)
WITH_MODEL = tuple(spec.name for spec in METHODS.values() if spec.needs_model)
"""Methods that cannot run without a draft model or a head."""
MAY_NAME_MODEL = (*WITH_MODEL, MTP.name)
"""Methods that take a draft model or a head."""
DRAFT_MODELS = tuple(spec.name for spec in METHODS.values() if spec.weights is DraftWeights.DRAFT_MODEL)
HEADS = tuple(spec.name for spec in METHODS.values() if spec.is_head)
IN_CHECKPOINT = tuple(spec.name for spec in METHODS.values() if spec.weights is DraftWeights.CHECKPOINT)
"""Methods whose head is in the target's own checkpoint."""
OWN_WEIGHTS = tuple(spec.name for spec in METHODS.values() if spec.uses_target)
"""Methods by which the target drafts for itself."""
CHAINS = tuple(spec.name for spec in METHODS.values() if spec.drafts_chains)
"""Methods of which a plan says how deep they draft."""
LEARNING = tuple(spec.name for spec in METHODS.values() if spec.learners)
"""Methods whose weights learn while they serve."""

ALIASES = {alias: spec.name for spec in METHODS.values() for alias in spec.aliases}


def full_name(method: str) -> str:
    """The name of a method that may be named by an alias; others, such as a package's own, unchanged."""
    return ALIASES.get(method, method)


def spec_of(method: str) -> MethodSpec | None:
    """The specification of a method or of its alias; None for one that is not built in."""
    return METHODS.get(full_name(method))


def short_name(method: str) -> str:
    """What the command line calls a method; one that is not built in unchanged."""
    spec = spec_of(method)
    return method if spec is None else spec.short_name


def names_in(engine: str) -> dict[str, str]:
    """Method to the name that is written for `engine`, for those that it has."""
    return {spec.name: spec.elsewhere[engine][0] for spec in METHODS.values() if engine in spec.elsewhere}


def names_from(engine: str) -> dict[str, str]:
    """The inverse of `names_in`, with the other names that `engine` reads; of several methods the first counts."""
    found: dict[str, str] = {}
    for spec in METHODS.values():
        for name in spec.elsewhere.get(engine, ()):
            found.setdefault(name, spec.name)
    return found


MUSE_ASSISTANT = "muse_glimmer_assistant"
"""Muse Glimmer's drafter, in Transformers too: a DFlash head with its settings beside its sizes."""

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of Gemma 4's drafters, which read their target's keys and values."""


def kind_of_checkpoint(config: Mapping[str, Any]) -> str:
    """The method that runs the draft with this `config.json`; a plain language model is one of `draft_model`."""
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if "hydra_num_heads" in config:
        return HYDRA.name
    if "medusa_num_heads" in config or config.get("model_type") == MEDUSA.name:
        return MEDUSA.name
    if config.get("speculators_model_type") == MTP.name or config.get("model_type") in ASSISTANTS:
        return MTP.name
    said = f"{config.get('speculators_model_type')} {architectures}".lower()
    if config.get("model_type") == MUSE_ASSISTANT or "dflash_config" in config:
        return DFLASH.name
    if any(name in said for name in ("dflash", "dspark", "xpress")):
        return DFLASH.name
    masks = [config.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")]
    if "speculators_model_type" in config or "draft_vocab_size" in config or "Eagle3" in architectures:
        kind = config.get("speculators_model_type", EAGLE3.name)
        reads_masks = kind == EAGLE3.name and masks != [None] * len(masks)
        return PEAGLE.name if kind == PEAGLE.name or reads_masks else EAGLE3.name
    if "Eagle" in architectures:
        return EAGLE.name
    return PARD.name if "pard_token" in config else DRAFT_MODEL.name


def is_pard2(config: Mapping[str, Any]) -> bool:
    """Whether a draft model of `kind_of_checkpoint` PARD reads the target's hidden states, as PARD-2's do."""
    return bool(config.get("pard2")) or config.get("spd_type") == "pard2"
