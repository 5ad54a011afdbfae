"""What a block drafter begins with: its shape, its mask token, its vocabulary, and weights of another head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.corrections import MARKOV_KINDS
from slipstream.draft.heads.dflash_files import read_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead, spread_feature_layers
from slipstream.draft.heads.dflash_layouts import layout_of
from slipstream.draft.heads.eagle_files import read_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingDocument
from slipstream.train.block_options import CORRECTIONS, PRESETS, BlockTrainOptions
from slipstream.train.eagle import first_norm, most_used, output_weight, rope_of
from slipstream.train.mask_tokens import mask_token
from slipstream.train.options import parse_layers
from slipstream.train.target import FrozenTarget

_MOST_LAYERS, _LAYERS_OF_TARGET = 5, 15
_LARGEST_RANK = 256


@dataclass(frozen=True)
class HeadStart:
    """A head to train, the options with all that they left open, and what is to be said of it."""

    head: DFlashHead
    options: BlockTrainOptions
    notes: Seq[str]


def make_head(
    options: BlockTrainOptions,
    target: FrozenTarget,
    tokenizer: Any,
    documents: Seq[TrainingDocument],
    method: str,
) -> HeadStart:
    """The head that `options` describe, `method` being one of `PRESETS`, with weights of `options.init` where they fit.

    Raises `ConfigError` for a shape that cannot be, `ModelError` for a head of another target.
    """
    source = None if options.init is None else _read(options.init, target)
    given = source.config if isinstance(source, DFlashHead) else None
    open_ = [name for name, value in PRESETS[method].items() if getattr(options, name) is None]
    if given is not None:
        open_ = [name for name in open_ if name == "loss"]
    options = replace(options, **{name: PRESETS[method][name] for name in open_})
    notes = []
    if given is None:
        base = _fresh_config(options, target, source)
        mask, how = mask_token(options.mask_token, tokenizer, target.vocab_size, documents)
        notes.append(f"the mask token is {how}")
        base = replace(base, mask_token_id=mask)
    else:
        base = given
        if options.mask_token is not None:
            base = replace(
                base, mask_token_id=mask_token(options.mask_token, tokenizer, target.vocab_size, ())[0]
            )
    ids = _draft_token_ids(options, target, source, documents)
    config = _changed(replace(base, draft_vocab_size=len(ids)), options, target)
    corrects = None if config.left_to_right is None else config.left_to_right.kind
    if config.confidence is not None and corrects == "selector":
        raise ConfigError(
            "a selector leaves out most tokens, which a confidence head does not know; omit confidence from --loss, or "
            "give another --left-to-right"
        )
    head = DFlashHead(config)
    head.draft_token_ids = ids
    _initialise(head, target)
    if source is not None:
        notes.append(_take(head, source, options.init or ""))
    return HeadStart(head, options, notes)


def _read(path: str, target: FrozenTarget) -> DFlashHead | EagleHead:
    """The head to begin with; raises `ModelError` for another target's, `ConfigError` for another kind."""
    if layout_of(read_checkpoint(path)[0]) is not None:
        return read_dflash(path, target)
    head = read_eagle(path, target)
    if head.config.version != 3:
        raise ConfigError(
            f"{path!r} is an EAGLE-1 head; a block drafter begins with an EAGLE-3 or a DFlash head"
        )
    return head


def _fresh_config(
    options: BlockTrainOptions, target: FrozenTarget, source: DFlashHead | EagleHead | None
) -> DFlashConfig:
    """A head for the target as its authors would shape it, reading what an EAGLE head read where that is the source."""
    model = target.model.config
    heads = model.num_attention_heads
    depth = min(_MOST_LAYERS, max(1, round(target.num_layers / _LAYERS_OF_TARGET)))
    return DFlashConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        intermediate_size=model.intermediate_size if source is None else source.config.intermediate_size,
        num_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=getattr(model, "num_key_value_heads", None) or heads,
        head_dim=getattr(model, "head_dim", None) or target.hidden_size // heads,
        feature_layers=source.config.feature_layers if source else spread_feature_layers(target.num_layers),
        block_size=options.block_size or 1,
        mask_token_id=0,
        causal=(False,) * depth,
        windows=(None,) * depth,
        rms_norm_eps=getattr(model, "rms_norm_eps", 1e-6),
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=rope_of(model),
    )


def _changed(base: DFlashConfig, options: BlockTrainOptions, target: FrozenTarget) -> DFlashConfig:
    """`base` with all that the options say."""
    depth = options.num_layers or base.num_layers
    causal = base.causal if options.causal is None else (options.causal,) * depth
    windows = base.windows if options.window is None else (options.window,) * depth
    changes: dict[str, Any] = {
        "num_layers": depth,
        "causal": causal if len(causal) == depth else (causal[0],) * depth,
        "windows": windows if len(windows) == depth else (windows[0],) * depth,
        "left_to_right": _correction(base, options),
    }
    for name in ("block_size", "intermediate_size"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    if options.layout is not None:
        changes["from_anchor"] = options.layout == "anchor"
    if options.feature_layers is not None:
        changes["feature_layers"] = _layers(options.feature_layers, target.num_layers)
    reads_token = changes["left_to_right"] is not None and changes["left_to_right"].kind in MARKOV_KINDS
    if "confidence" in options.losses or base.confidence is not None:
        changes["confidence"] = "hidden+token" if reads_token else "hidden"
    config = replace(base, **changes)
    if config.num_drafts < 1:
        raise ConfigError(
            f"--block-size {config.block_size} leaves no row that drafts; it must be at least {config.first_slot + 1}"
        )
    return config


def _correction(base: DFlashConfig, options: BlockTrainOptions) -> LeftToRightConfig | None:
    if options.left_to_right is None:
        return base.left_to_right
    if options.left_to_right == "none":
        return None
    rank = options.rank or max(1, min(_LARGEST_RANK, base.hidden_size // 4))
    kind = CORRECTIONS[options.left_to_right]
    return LeftToRightConfig(kind=kind, rank=rank, state_size=2 * rank if kind == "gru" else 0)


def _layers(text: str, num_layers: int) -> tuple[int, ...]:
    layers = parse_layers(text)
    if sorted(set(layers)) != list(layers) or not 1 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(
            f"--feature-layers takes ascending numbers from 1 to {num_layers - 1}, got {text!r}"
        )
    return layers


def _draft_token_ids(
    options: BlockTrainOptions,
    target: FrozenTarget,
    source: DFlashHead | EagleHead | None,
    documents: Seq[TrainingDocument],
) -> Tensor:
    size = options.draft_vocab_size
    if size is None:
        return torch.arange(target.vocab_size) if source is None else source.draft_token_ids
    if size > target.vocab_size:
        raise ConfigError(f"--draft-vocab-size {size} is more than the target's {target.vocab_size}")
    return most_used(documents, target.vocab_size, size)


def _initialise(head: DFlashHead, target: FrozenTarget) -> None:
    """Small weights, a final norm as `first_norm` says, and rows of the target's output layer for a part of the
    vocabulary.

    What corrects from left to right begins without an effect. The output layer does not learn, as in DFlash.
    """
    for module in (head.fc, *head.layers.modules()):
        if isinstance(module, nn.Linear) and module.weight.any():  # convolutions begin as the identity
            nn.init.normal_(module.weight, std=0.02)
    head.norm.weight.data.copy_(first_norm(target))  # type: ignore[operator]
    if head.config.draft_vocab_size < head.config.vocab_size:
        head.lm_head = nn.Linear(head.config.hidden_size, head.config.draft_vocab_size, bias=False)
        head.lm_head.weight.data.copy_(output_weight(target)[head.draft_token_ids])
    for name, weight in head.named_parameters():
        if name.endswith("markov_w1.weight"):
            nn.init.normal_(weight, std=0.02)
        if name.endswith(("markov_w2.weight", "left_to_right.up.weight", "left_to_right.readout.weight")):
            nn.init.zeros_(weight)
    if head.lm_head is not None:
        head.lm_head.requires_grad_(False)


def _take(head: DFlashHead, source: DFlashHead | EagleHead, path: str) -> str:
    """Copy what fits into `head`; returns what was copied and what begins anew, in words."""
    tensors = _of_eagle(source) if isinstance(source, EagleHead) else dict(source.state_dict())
    if isinstance(source, DFlashHead):
        head.embedding = source.embedding
    same_vocabulary = torch.equal(source.draft_token_ids, head.draft_token_ids)
    if isinstance(source, DFlashHead) and source.lm_head is not None and same_vocabulary:
        head.lm_head = deepcopy(source.lm_head).requires_grad_(False)
    mine = head.state_dict()
    taken = {
        name: tensor
        for name, tensor in tensors.items()
        if name in mine
        and mine[name].shape == tensor.shape
        and (same_vocabulary or len(tensor) != source.config.draft_vocab_size)
        and (name != "fc.weight" or source.config.feature_layers == head.config.feature_layers)
    }
    head.load_state_dict(taken, strict=False)
    weights = {name for name, _ in head.named_parameters()}
    fresh = sorted(weights - taken.keys())
    number = len(weights & taken.keys())
    left = sorted(tensors.keys() - taken.keys() - {"draft_token_ids"})
    return "".join(
        [
            f"{number} of {len(weights)} tensors are taken from {path!r}",
            f"; these begin anew: {', '.join(fresh)}" if fresh else "",
            f"; these of it are not used: {', '.join(left)}" if left else "",
        ]
    )


def _of_eagle(head: EagleHead) -> Mapping[str, Tensor]:
    """An EAGLE-3 head's weights under the names of a block drafter's.

    Its first attention reads the token's embedding and the fused features side by side. A block's rows are embeddings
    and its context is features, so queries come from the one half and keys and values from the other.
    """
    width = head.config.hidden_size
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if name.endswith("layer.self_attn.q_proj.weight"):
            tensor = tensor[:, :width]
        elif name.endswith(("layer.self_attn.k_proj.weight", "layer.self_attn.v_proj.weight")):
            tensor = tensor[:, width:]
        name = re.sub(r"^upper\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}.", name)
        name = name.removeprefix("layer.") if name == "layer.hidden_norm.weight" else name
        tensors[re.sub(r"^layer\.", "layers.0.", name)] = tensor
    return tensors
