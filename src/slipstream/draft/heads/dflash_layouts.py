"""Configurations of DFlash's kin of heads, as other libraries write them.

| layout | written by | recognised by | feature layers | says if the anchor's row predicts |
|---|---|---|---|---|
| `z-lab` | DFlash's authors, SpecForge, XPress | `dflash_config` | from 0 | `shift_label`, `sample_from_anchor` |
| `speculators` | the speculators library | `speculators_model_type` | from 1 | `sample_from_anchor` |
| `deepspec` | DeepSpec | `Qwen3DSparkModel` | from 0 | always |

A feature layer is the one whose output is read; Slipstream counts from 1 too, since its number 0 is the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from slipstream.draft.heads.checkpoints import TargetSizes
from slipstream.draft.heads.corrections import MARKOV_KINDS
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.methods import MUSE_ASSISTANT
from slipstream.errors import ModelError
from slipstream.models.huggingface import AutoConfig

ZLAB, SPECULATORS, DEEPSPEC = "z-lab", "speculators", "deepspec"
LAYOUTS = (ZLAB, SPECULATORS, DEEPSPEC)
SPECULATORS_TYPES = ("dflash", "dspark", "dflash2", "xpress")
_FAMILIES = ("qwen3", "llama")
"""Families whose sizes a file may leave out; the layers are Qwen3's whatever it names."""
_SLIDING = "sliding_attention"
_ARCHITECTURES: dict[str | None, str] = {
    None: "DFlashDraftModel",
    "selector": "DFlash2DraftModel",
    "gru": "DominoDraftModel",
    "refiner": "Qwen3XPressModel",
    **dict.fromkeys(MARKOV_KINDS, "DSparkDraftModel"),
}
"""What the layout `z-lab` calls a head with each kind of correction."""


def layout_of(raw: Mapping[str, Any]) -> str | None:
    """The layout of a `config.json`; None where it is of no such head."""
    if "speculators_model_type" in raw:
        return SPECULATORS if raw["speculators_model_type"] in SPECULATORS_TYPES else None
    if "Qwen3DSparkModel" in (raw.get("architectures") or ()):
        return DEEPSPEC
    named = isinstance(raw.get("dflash_config"), Mapping) or raw.get("model_type") == MUSE_ASSISTANT
    return ZLAB if named else None


class DFlashSettings:
    """What a `config.json` says, looked up in the places where its layout has it."""

    def __init__(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> None:
        layout = layout_of(raw)
        if layout is None:
            architectures = ", ".join(map(str, raw.get("architectures") or ())) or "no architecture"
            kind = raw.get("speculators_model_type") or architectures
            raise ModelError(
                f"{path!r} is not a DFlash head: its config.json names {kind}, and has neither a dflash_config nor a "
                f"speculators_model_type of {', '.join(SPECULATORS_TYPES)} nor the architecture Qwen3DSparkModel"
            )
        self.layout, self.path, self.tensors, self.raw = layout, path, tensors, raw
        said = raw.get("transformer_layer_config") or {} if layout == SPECULATORS else raw
        family = said.get("model_type") if said.get("model_type") in _FAMILIES else _FAMILIES[0]
        try:
            sizes = {name: value for name, value in said.items() if not name.endswith("_token_id")}
            usual = AutoConfig.for_model(**{**sizes, "model_type": family}).to_dict()
        except (StrictDataclassError, TypeError, ValueError) as error:
            self.refuse(f"cannot be read: {str(error).splitlines()[-1].strip()}")
        self.layer = usual | {name: value for name, value in said.items() if value is not None}
        """The layers' sizes, with the family's own where a file leaves them out."""
        self.own = raw.get("dflash_config") or {}
        """What `dflash_config` says in the layout `z-lab`."""

    def refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path!r}: its configuration {why}")

    def get(self, name: str, default: Any = None) -> Any:
        """The head's own setting, in `dflash_config` or beside it."""
        found = self.own.get(name)
        found = self.raw.get(name) if found is None else found
        return default if found is None else found

    def number(self, name: str, default: int | None = None, of_layer: bool = False) -> int:
        """A whole number; raises `ModelError` where there is none."""
        value = self.layer.get(name) if of_layer else self.get(name)
        value = default if value is None else value
        if type(value) is not int:
            self.refuse(
                f"has no {name}" if value is None else f"has {name} {value!r}, which is not a whole number"
            )
        return value

    def correction(self) -> LeftToRightConfig | None:
        """The head behind the layers."""
        names = "".join(self.tensors)
        kind = self.get("projector_type") or self.raw.get("speculators_model_type")
        if "candidate_selector." in names or kind == "dflash2":
            rank, top_k = self.number("selector_rank"), self.number("selector_top_k", 16)
            if top_k < 1:
                self.refuse(f"has selector_top_k {top_k}; it must be 1 or more")
            return LeftToRightConfig(kind="selector", rank=rank, top_k=top_k)
        if "prefix_gru." in names or kind == "domino":
            return LeftToRightConfig(
                kind="gru",
                rank=self.number("emb_dim"),
                state_size=self.number("gru_hidden_dim"),
                num_uncorrected=self.number("pure_draft_prefix_len", 0),
            )
        if any(f"{name}." in names for name in ("refiner_head", "xpress_head")) or kind == "xpress":
            rank = self.number("xpress_rank", 256)
            width = self.number("xpress_mlp_hidden", rank * self.number("xpress_mlp_ratio", 2))
            if width % rank:
                self.refuse(f"has xpress_mlp_hidden {width}, which is no multiple of xpress_rank {rank}")
            passes = self.number("xpress_num_passes", self.number("num_jacobi_passes", 6))
            return LeftToRightConfig(kind="refiner", rank=rank, mlp_ratio=width // rank, num_passes=passes)
        if "markov_head." in names or self.is_dspark:
            kind, rank = self.get("markov_head_type", "vanilla"), self.number("markov_rank", 0)
            if kind not in MARKOV_KINDS:
                self.refuse(f"has markov_head_type {kind!r}, not {', '.join(MARKOV_KINDS)}")
            return LeftToRightConfig(kind=kind, rank=rank) if rank else None
        return None

    @property
    def is_dspark(self) -> bool:
        """Whether it is DSpark's, with or without a Markov head."""
        named = "".join(map(str, self.raw.get("architectures") or ()))
        marked = (self.get("projector_type"), self.raw.get("speculators_model_type"))
        return "DSpark" in named or "dspark" in marked

    @property
    def from_anchor(self) -> bool:
        """Whether the anchor's row predicts: said, or what the writing library takes where nothing is said."""
        said = self.get("sample_from_anchor")
        if said is None:
            said = self.get("shift_label")
        return self.is_dspark if said is None else bool(said)

    def confidence(self) -> str | None:
        """What the confidence head reads."""
        has = self.get("enable_confidence_head", "confidence_head.proj.weight" in self.tensors)
        if not has:
            return None
        reads_token = self.get("confidence_head_with_markov", self.layout == SPECULATORS)
        return "hidden+token" if reads_token else "hidden"

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The window of each layer."""
        types = list(self.layer.get("layer_types") or ())
        if self.own.get("use_swa") and _SLIDING not in types:
            types = [_SLIDING] * num_layers
        types = types or ["full_attention"] * num_layers
        if len(types) != num_layers:
            self.refuse(f"has {len(types)} layer_types for {num_layers} layers")
        window = self.own.get("swa_window_size") or self.layer.get("sliding_window")
        if _SLIDING in types and not isinstance(window, int):
            self.refuse("has sliding_attention layers but no sliding_window")
        if _SLIDING in types and isinstance(window, int) and window < 1:
            self.refuse(f"has sliding_window {window}; it must be 1 or more")
        return tuple(window if name == _SLIDING else None for name in types)

    def causal(self, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
        """For each layer whether its rows see earlier rows only; where nothing is said, those with a window do."""
        if self.layout == SPECULATORS:
            both = self.raw.get("sliding_window_non_causal")
            both = self.raw["speculators_model_type"] == "dflash2" if both is None else both
            return tuple(window is not None and not both for window in windows)
        said = self.raw.get("is_causal")
        for name in ("causal", "causal_head"):
            said = self.own.get(name) if said is None else said
        if said is None and ("selector_rank" in self.own or self.raw.get("model_type") == MUSE_ASSISTANT):
            said = False
        return tuple(window is not None if said is None else bool(said) for window in windows)

    def feature_layers(self) -> tuple[int, ...]:
        """In Slipstream's numbers."""
        name = "aux_hidden_state_layer_ids" if self.layout == SPECULATORS else "target_layer_ids"
        ids = self.get(name)
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            self.refuse(f"has no {name}, the layers of the target that it reads")
        return tuple(i if self.layout == SPECULATORS else i + 1 for i in ids)

    def rope(self) -> dict[str, Any]:
        """Rotary settings; of settings for each type of layer those of the sliding one, as all who write them read."""
        rope = self.layer["rope_parameters"]
        return dict(rope.get(_SLIDING, rope))


def config_of(settings: DFlashSettings, target: TargetSizes) -> DFlashConfig:
    """The configuration that `settings` describe; what a file leaves to its target is taken from `target`."""
    layer, tensors = settings.layer, settings.tensors
    hidden, heads = (settings.number(name, of_layer=True) for name in ("hidden_size", "num_attention_heads"))
    num_layers = settings.number("num_hidden_layers", of_layer=True)
    says_vocab = settings.layout == SPECULATORS or "vocab_size" in settings.raw
    vocab = settings.number("vocab_size", of_layer=True) if says_vocab else target.vocab_size
    windows = settings.windows(num_layers)
    correction = settings.correction()
    convolves = any(".attention_conv." in name for name in tensors) or settings.get("conv_kernel_size")
    return DFlashConfig(
        hidden_size=hidden,
        target_hidden_size=settings.raw.get("target_hidden_size") or hidden,
        vocab_size=vocab,
        draft_vocab_size=len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab,
        intermediate_size=settings.number("intermediate_size", of_layer=True),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        feature_layers=settings.feature_layers(),
        block_size=settings.number("xpress_block_size", settings.number("block_size", 0))
        or settings.refuse("has no block_size"),
        mask_token_id=settings.number("mask_token_id"),
        from_anchor=settings.from_anchor,
        causal=settings.causal(windows),
        windows=windows,
        convolution_taps=settings.number("conv_kernel_size", 2) if convolves else 0,
        convolution_group=settings.number("conv_group_size", 16),
        left_to_right=correction,
        confidence=settings.confidence(),
        embedding_scale=float(settings.get("input_embedding_scale", 1.0)),
        logit_scale=float(settings.get("output_multiplier", settings.raw.get("logit_scale") or 1.0)),
        logit_softcap=float(settings.own.get("final_logit_softcapping") or 0.0) or None,
        attention_bias=bool(layer.get("attention_bias", False)),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=layer.get("max_position_embeddings") or target.context_length,
        rope_parameters=settings.rope(),
        hidden_act=layer.get("hidden_act", "silu"),
    )


def written_config(config: DFlashConfig, layout: str, target: str) -> dict[str, Any]:
    """The `config.json` of a head in `layout`, for the target called `target`.

    Raises `ModelError` for a head that the layout cannot describe.
    """
    if layout == SPECULATORS:
        return _speculators(config, target)
    if layout == DEEPSPEC:
        return _deepspec(config)
    if layout == ZLAB:
        return _zlab(config)
    raise ModelError(f"there is no layout {layout!r} of DFlash heads; there are {', '.join(LAYOUTS)}")


def _layer(config: DFlashConfig) -> dict[str, Any]:
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise ModelError(
            f"windows of {sorted(windows)} cannot be written: all layouts have one for all layers"
        )
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "use_sliding_window": bool(windows),
        "sliding_window": min(windows, default=None),
        "layer_types": ["full_attention" if window is None else _SLIDING for window in config.windows],
    }


def _markov(config: DFlashConfig) -> dict[str, Any]:
    """The settings of DSpark, which all layouts call the same."""
    correction = config.left_to_right
    return {
        "markov_rank": 0 if correction is None else correction.rank,
        "markov_head_type": "vanilla" if correction is None else correction.kind,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "hidden+token",
    }


def _scales(config: DFlashConfig) -> dict[str, float]:
    """The settings of scaled embeddings and logits, where they are scaled."""
    usual = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
    values = (config.embedding_scale, config.logit_scale, config.logit_softcap or 0.0)
    return {name: value for name, value in zip(usual, values, strict=True) if value != usual[name]}


def _target_size(config: DFlashConfig) -> dict[str, int]:
    """The target's hidden size, where it is not the head's own."""
    same = config.target_hidden_size == config.hidden_size
    return {} if same else {"target_hidden_size": config.target_hidden_size}


def _is_dspark(config: DFlashConfig) -> bool:
    kind = None if config.left_to_right is None else config.left_to_right.kind
    return kind in MARKOV_KINDS or (kind is None and config.confidence is not None)


def _zlab(config: DFlashConfig) -> dict[str, Any]:
    correction = config.left_to_right
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        "sample_from_anchor": config.from_anchor,
    }
    is_selector = correction is not None and correction.kind == "selector"
    legacy = tuple(window is not None and not is_selector for window in config.windows)
    if len(set(config.causal)) == 1:
        own["causal"] = config.causal[0]
    elif config.causal != legacy:
        raise ModelError(
            "a head with causal and other layers of one kind cannot be written in the layout z-lab"
        )
    if config.convolution_taps:
        own |= {"conv_kernel_size": config.convolution_taps, "conv_group_size": config.convolution_group}
    own |= _scales(config)
    beside: dict[str, Any] = {}
    kind = None if correction is None else correction.kind
    if _is_dspark(config):
        beside = _markov(config)
        own |= {"projector_type": "dspark", "attention_mode": "gqa", **beside}
        beside |= {name: own[name] for name in ("mask_token_id", "target_layer_ids", "sample_from_anchor")}
        kind = "vanilla"
    elif correction is not None and kind == "selector":
        own |= {"selector_rank": correction.rank, "selector_top_k": correction.top_k}
    elif correction is not None and kind == "gru":
        own |= {"projector_type": "domino", "shift_label": config.from_anchor, "emb_dim": correction.rank}
        own |= {"gru_hidden_dim": correction.state_size, "pure_draft_prefix_len": correction.num_uncorrected}
    elif correction is not None:
        beside = {"xpress_rank": correction.rank, "xpress_mlp_hidden": correction.rank * correction.mlp_ratio}
        beside |= {"xpress_num_passes": correction.num_passes, "xpress_block_size": config.block_size}
    return (
        _layer(config)
        | {"architectures": [_ARCHITECTURES[kind]], "block_size": config.block_size, "dflash_config": own}
        | _target_size(config)
        | beside
    )


def _speculators(config: DFlashConfig, target: str) -> dict[str, Any]:
    correction = config.left_to_right
    kind = None if correction is None else correction.kind
    convolves = bool(config.convolution_taps)
    if kind == "gru" or convolves != (kind == "selector") or _scales(config):
        raise ModelError("the layout speculators has no such head; write it in the layout z-lab")
    sees_both = {
        not causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None
    }
    if len(sees_both) > 1 or any(
        c for c, window in zip(config.causal, config.windows, strict=True) if window is None
    ):
        raise ModelError(
            "the layout speculators has causal layers only as all those with a window; write it as z-lab"
        )
    own: dict[str, Any] = {}
    name, architecture = "dflash", "DFlashSpeculator"
    if _is_dspark(config):
        name, architecture, own = "dspark", "DSparkSpeculator", _markov(config)
    elif correction is not None and kind == "selector":
        name, architecture = "dflash2", "DFlash2DraftModel"
        own = {"conv_kernel_size": config.convolution_taps, "conv_group_size": config.convolution_group}
        own |= {"selector_rank": correction.rank, "selector_top_k": correction.top_k}
    elif correction is not None:
        name, architecture = "xpress", "XPressSpeculator"
        own = {"xpress_rank": correction.rank, "xpress_mlp_ratio": correction.mlp_ratio}
        own |= {"num_jacobi_passes": correction.num_passes}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return own | {
        "architectures": [architecture],
        "speculators_model_type": name,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_anchor,
        # True also where no layer has a window: other engines take False for all layers.
        "sliding_window_non_causal": sees_both != {False},
        "target_hidden_size": config.target_hidden_size,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": _layer(config),
    }


def _deepspec(config: DFlashConfig) -> dict[str, Any]:
    plain = not config.convolution_taps and set(config.windows) == {None} and not any(config.causal)
    if not _is_dspark(config) or not config.from_anchor or not plain or _scales(config):
        raise ModelError("the layout deepspec has DSpark heads alone; write this head in the layout z-lab")
    return (
        _layer(config)
        | _markov(config)
        | _target_size(config)
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
            "draft_vocab_size": config.draft_vocab_size,
            "num_anchors": 512,
        }
    )
