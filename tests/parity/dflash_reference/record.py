"""Record what the libraries that train DFlash's kin of heads compute, for `test_dflash_reference.py`.

Needs `transformers` 5.24.0, `speculators` 0.9.0 and `specforge` 0.2.0 from the package index, `deepspec` from its
repository (deepseek-ai/DeepSpec, afdfa7c), and `dflash/model.py` of z-lab/dflash (44947fb) as `zlab_dflash/model.py`:

    python tests/parity/dflash_reference/record.py

Each case is a head with random weights, a text and blocks that begin at two of its places. Written are the
configuration and the tensors as the library stores them, what went in, and the logits that came out. Numbers are
rounded to half precision before use, so that the file is small and the recording exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config

FILE = Path(__file__).with_name("recorded.safetensors")
HIDDEN, VOCAB, DRAFTED, BLOCK, LENGTH = 16, 40, 24, 4, 16
BLOCKS = (5, 11)
"""Places of the text at which a block begins."""
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 3}
RECORDED: dict[str, Tensor] = {}
CASES: dict[str, Any] = {}


def half(tensor: Tensor) -> Tensor:
    return tensor.half().float()


def randomise(module: nn.Module) -> None:
    """Weights of a size at which every part of a head is seen in its logits."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = "norm" in name
            parameter.copy_(half(torch.randn(parameter.shape) * 0.3 + norm))


def text() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(VOCAB - 1, (LENGTH,)),
        "features": half(torch.randn(LENGTH, 2 * HIDDEN)),
        "embed": half(torch.randn(VOCAB, HIDDEN)),
        "project": half(torch.randn(VOCAB, HIDDEN)),
    }


def record(case: str, config: dict[str, Any], weights: dict[str, Tensor], **found: Tensor) -> None:
    """Keep a case; `found` are logits [blocks, rows, tokens] and confidences [blocks, rows]."""
    CASES[case] = config
    for name, tensor in weights.items():
        RECORDED[f"{case}/weights/{name}"] = tensor.half() if tensor.is_floating_point() else tensor
    for name, tensor in found.items():
        RECORDED[f"{case}/{name}"] = tensor


def speculators_case(case: str, kind: str, layer: dict[str, Any] | None = None, **options: Any) -> None:
    """A head of the speculators library, by the function that it is trained with."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    torch.manual_seed(0)
    layers = Qwen3Config(**LAYER, **(layer or {}))
    layers._attn_implementation = "eager"
    options = {"draft_vocab_size": VOCAB, "block_size": BLOCK, "mask_token_id": VOCAB - 1} | options
    config_class = SpeculatorModelConfig.registry[kind]
    config = config_class(transformer_layer_config=layers, aux_hidden_state_layer_ids=[1, 3], **options)
    model = SpeculatorModel.registry[kind](config)
    given = text()
    randomise(model)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(given["embed"])
        model.lm_head.weight.copy_(given["project"][: config.draft_vocab_size])
    if config.draft_vocab_size < VOCAB:
        ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        model.load_vocab_mappings(
            torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
            ids - torch.arange(len(ids)),
        )
        model.lm_head.weight.data.copy_(given["project"][ids])
    seen = spied(model, given, kind)
    unsaved = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    if config.draft_vocab_size == VOCAB:
        unsaved.add("lm_head.weight")
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    record(case, json.loads(config.to_json_string(use_diff=False)), weights, **seen)


def spied(model: Any, given: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """What the training pass of a speculators model gives to its loss."""
    module = __import__(f"speculators.models.{kind}.core", fromlist=["core"])
    caught: dict[str, Any] = {}

    def loss(*args: Any, **kwargs: Any) -> tuple[None, dict[str, Any]]:
        caught["args"], caught["kwargs"] = args, kwargs
        return None, {}

    anchors = (torch.tensor(BLOCKS), torch.ones(len(BLOCKS), dtype=torch.bool))
    backbone = "speculators.models.dflash.core.select_anchors"
    with (
        mock.patch(backbone, return_value=anchors),
        mock.patch.object(module, "compute_metrics", loss),
        torch.no_grad(),
    ):
        more = {"consistency_passes": 0} if kind == "xpress" else {}
        model(
            hidden_states=given["features"][None],
            input_ids=given["tokens"][None],
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=torch.zeros(1, LENGTH, HIDDEN),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.int64),
            max_anchors=len(BLOCKS),
            **more,
        )
        if kind == "dflash2":
            return selected(model, given, caught["kwargs"]["unary_logits"])
    found = {"logits": caught["args"][0].view(len(BLOCKS), BLOCK, -1)}
    if kind == "dspark" and caught["args"][2] is not None:
        found["confidence"] = caught["args"][2].view(len(BLOCKS), BLOCK)
    return found


def selected(model: Any, given: dict[str, Tensor], unary: Tensor) -> dict[str, Tensor]:
    """The scores of a selector's candidates, as logits in which no other token is possible."""
    places = torch.cat([torch.arange(place, place + BLOCK) for place in BLOCKS])
    previous = model._predecessor_ids(given["tokens"][None], places).view(1, -1)
    hidden = model.seen_hidden
    ids, scores = model.candidate_selector.select(unary, hidden, previous)
    logits = torch.full_like(unary, float("-inf")).scatter(-1, ids, scores)
    return {"logits": logits.view(len(BLOCKS), BLOCK, -1)}


def keep_hidden() -> None:
    """Let a DFlash2 model remember the hidden states of its last pass."""
    from speculators.models.dflash2.core import DFlash2DraftModel

    whole = DFlash2DraftModel._backbone_forward

    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = whole(self, *args, **kwargs)
        self.__dict__["seen_hidden"] = result[0]
        return result

    DFlash2DraftModel._backbone_forward = kept


def blockwise(
    case: str,
    config: Any,
    model: Any,
    backbone: Callable[..., Tensor],
    correct: Callable[..., dict[str, Tensor]],
) -> None:
    """A head whose library drafts block by block: `backbone` gives its hidden states, `correct` the logits."""
    given, found = text(), []
    with torch.no_grad():
        for place in BLOCKS:
            ids = torch.full((1, BLOCK), VOCAB - 1)
            ids[0, 0] = given["tokens"][place]
            hidden = backbone(
                position_ids=torch.arange(place + BLOCK)[None],
                noise_embedding=given["embed"][ids],
                features=given["features"][None, :place],
            )
            tokens = given["tokens"][None, place : place + BLOCK]
            found.append(correct(hidden @ given["project"].T, hidden, tokens, given["embed"][tokens]))
    together = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    record(case, json.loads(config.to_json_string(use_diff=False)), model.state_dict(), **together)


def zlab_case() -> None:
    from zlab_dflash.model import DFlashDraftModel

    torch.manual_seed(0)
    own = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]}
    config = Qwen3Config(**LAYER, block_size=BLOCK, num_target_layers=6, dflash_config=own)
    config.architectures, config._attn_implementation = ["DFlashDraftModel"], "eager"
    model = DFlashDraftModel(config)
    randomise(model)

    def backbone(features: Tensor, **rest: Tensor) -> Tensor:
        found: Tensor = model(target_hidden=features, is_causal=False, **rest)
        return found

    blockwise("z-lab", config, model, backbone, lambda logits, *_: {"logits": logits})


def transformers_case() -> None:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(0)
    sizes = {name: value for name, value in LAYER.items() if name not in ("vocab_size", "rope_theta")}
    sizes["layer_types"] = ["full_attention"] * 2
    own = {"block_size": BLOCK, "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]}
    config = MuseGlimmerAssistantConfig(**sizes, **own)
    config.architectures, config._attn_implementation = ["MuseGlimmerAssistantModel"], "eager"
    model = MuseGlimmerAssistantModel(config)
    randomise(model)

    def backbone(features: Tensor, noise_embedding: Tensor, position_ids: Tensor) -> Tensor:
        found: Tensor = model(
            noise_embedding, context_hidden_states=features, position_ids=position_ids
        ).last_hidden_state
        return found

    blockwise("transformers", config, model, backbone, lambda logits, *_: {"logits": logits})


def specforge_case(case: str, name: str, **own: Any) -> None:
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    torch.manual_seed(0)
    settings = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2], **own}
    config = Qwen3Config(**LAYER, block_size=BLOCK, num_target_layers=6, dflash_config=settings)
    config.architectures, config._attn_implementation = [name], "eager"
    model = {"DominoDraftModel": DominoDraftModel, "DSparkDraftModel": DSparkDraftModel}[name](config)
    randomise(model)

    def backbone(features: Tensor, **rest: Tensor) -> Tensor:
        found: Tensor = model(target_hidden=features, **rest)
        return found

    def correct(logits: Tensor, hidden: Tensor, tokens: Tensor, embeds: Tensor) -> dict[str, Tensor]:
        found = model.apply_logits_head(
            logits[:, None],
            prev_token_ids=tokens[:, None],
            prev_token_embeddings=embeds[:, None],
            hidden_states=hidden[:, None],
        )
        confidence = model.predict_confidence(hidden, prev_token_ids=tokens)
        return {"logits": found[:, 0]} | ({} if confidence is None else {"confidence": confidence})

    blockwise(case, config, model, backbone, correct)


def deepspec_case(kind: str) -> None:
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    torch.manual_seed(0)
    config = Qwen3Config(
        **LAYER,
        block_size=BLOCK,
        num_target_layers=6,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[0, 2],
        num_anchors=2,
        markov_rank=6,
        markov_head_type=kind,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    config.architectures, config._attn_implementation = ["Qwen3DSparkModel"], "eager"
    model = Qwen3DSparkModel(config)
    randomise(model)
    given = text()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(given["embed"])
        model.lm_head.weight.copy_(given["project"])

    def backbone(features: Tensor, **rest: Tensor) -> Tensor:
        found: Tensor = model._forward_backbone(target_hidden_states=features, is_causal=False, **rest)
        return found

    def correct(logits: Tensor, hidden: Tensor, tokens: Tensor, embeds: Tensor) -> dict[str, Tensor]:
        found = model.markov_head.apply_block_logits(
            logits[:, None], token_ids=tokens[:, None], hidden_states=hidden[:, None]
        )
        confidence = model.predict_confidence_step(hidden, prev_token_ids=tokens)
        return {"logits": found[:, 0], "confidence": confidence.view(1, -1)}

    blockwise(f"deepspec {kind}", config, model, backbone, correct)


def main() -> None:
    """Write all cases into one file."""
    keep_hidden()
    sliding = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
    speculators_case("speculators", "dflash")
    speculators_case("speculators from the anchor", "dflash", sample_from_anchor=True)
    speculators_case("speculators causal window", "dflash", sliding)
    speculators_case("speculators window both ways", "dflash", sliding, sliding_window_non_causal=True)
    speculators_case("speculators reduced vocabulary", "dflash", draft_vocab_size=DRAFTED)
    for kind in ("vanilla", "gated", "rnn"):
        for anchor in (True, False):
            name = f"speculators {kind}" + ("" if anchor else " of masks")
            options = {"markov_head_type": kind, "markov_rank": 6, "sample_from_anchor": anchor}
            speculators_case(name, "dspark", **options)
    speculators_case(
        "speculators confidence alone", "dspark", markov_rank=0, confidence_head_with_markov=False
    )
    speculators_case("speculators dspark reduced", "dspark", markov_rank=6, draft_vocab_size=DRAFTED)
    convolved = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    every = {**WINDOWED, "layer_types": ["sliding_attention"] * 2}
    speculators_case("speculators dflash2", "dflash2", every, **convolved)
    speculators_case("speculators dflash2 of three taps", "dflash2", conv_kernel_size=3, **convolved)
    for anchor in (True, False):
        name = "speculators xpress" + (" from the anchor" if anchor else "")
        speculators_case(name, "xpress", xpress_rank=6, sample_from_anchor=anchor)
    zlab_case()
    transformers_case()
    gru = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 5}
    specforge_case("specforge domino", "DominoDraftModel", shift_label=True, pure_draft_prefix_len=1, **gru)
    specforge_case("specforge domino of masks", "DominoDraftModel", shift_label=False, **gru)
    specforge_case(
        "specforge dspark",
        "DSparkDraftModel",
        projector_type="dspark",
        markov_rank=6,
        markov_head_type="rnn",
        enable_confidence_head=True,
    )
    for kind in ("vanilla", "gated", "rnn"):
        deepspec_case(kind)
    tensors = RECORDED | {f"text/{name}": tensor for name, tensor in text().items()}
    metadata = {"cases": json.dumps(CASES), "blocks": json.dumps(BLOCKS)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE, metadata)
    print(f"{FILE.name}: {len(CASES)} cases, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
