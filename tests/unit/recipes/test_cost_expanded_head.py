"""Enlarged heads guess for enlarged targets what their sources guess for theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.cost_expanded.__main__ import main
from recipes.cost_expanded.head import expand_head
from recipes.cost_expanded.target import expand
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.heads.dflash_files import load_dflash, save_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.eagle_files import load_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.heads.hydra import HydraConfig, HydraHeads, load_hydra, save_hydra
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.heads.medusa import PICKLED, MedusaConfig, MedusaHeads, load_medusa, save_medusa
from slipstream.errors import ConfigError, ModelError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model, load_tokenizer
from tests.kit.dflash_heads import attend_over
from tests.kit.small_llama import sizes

VOCAB, HIDDEN, LAYERS, EPS = 4096, 24, 3, 1e-2
WIDE = {"hidden_size": 48, "num_layers": 7, "intermediate_size": 72, "num_heads": 6}
DEEP = {"num_layers": 5}
"""No wider state: what is added cannot hide in its new part."""
EAGLE: dict[str, dict[str, Any]] = {
    "eagle": {"version": 1, "fc_bias": True, "attention_bias": True, "feature_layers": (LAYERS,)},
    "eagle3": {"feature_layers": (0, 2, 3)},
    "speculators": {"feature_layers": (1, 2), "draft_vocab_size": 3600, "norm_before_residual": True},
    "eagle3-other-heads": {"head_dim": 4, "num_attention_heads": 3, "num_key_value_heads": 3},
    "eagle3-own-embedding": {"draft_vocab_size": 3600},
}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"num_layers": 2},
    "medusa-shared": {"shares_lm_head": True},
    "hydra": {"num_layers": 2},
    "hydra-shared": {"shares_lm_head": True},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {"causal": (True, True)},
    "dflash-dspark": {
        "left_to_right": LeftToRightConfig(kind="vanilla", rank=6),
        "confidence": "hidden+token",
        "draft_vocab_size": 3600,
    },
}
KINDS = (*EAGLE, *HEADS, *BLOCKS)


@pytest.fixture(autouse=True)
def progress_bars_as_before() -> Iterator[None]:
    """The command line turns them off for its process."""
    before = transformers.utils.logging.is_progress_bar_enabled()
    yield
    if before:
        transformers.utils.logging.enable_progress_bar()


def save_target(folder: Path, seed: int = 0) -> Path:
    """A tiny random Llama that likes to say again what it has just read, so that some guesses are right."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **sizes(
            HIDDEN, LAYERS, 4, 2, vocab=VOCAB, inner=40, head_dim=8, rms_norm_eps=EPS, context=128, tied=True
        )
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.12) if parameter.ndim == 2 else parameter.uniform_(0.7, 1.3)
        model.lm_head.weight.normal_(std=0.7)
    model.save_pretrained(folder)
    load_tokenizer(EMBEDDED_TARGET).save_pretrained(folder)
    return folder


def disturb(head: nn.Module, std: float) -> None:
    """Weights that are large enough for mistakes to show."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.add_(torch.randn_like(parameter) * std)


def save_head(kind: str, target: Path, folder: Path, **changes: Any) -> Path:
    """A random head that is right now and then, since it says the last token again too."""
    torch.manual_seed(1)
    output_layer = load_model(str(target), pack=False, canary=False).model.lm_head
    if kind in HEADS:
        sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, **HEADS[kind], **changes}
        if kind.startswith("medusa"):
            medusa = MedusaHeads(MedusaConfig(**sizes), output_layer)
            medusa.init_projections(output_layer.weight)
            disturb(medusa, 0.1)
            own = kind == "medusa"
            save_medusa(
                medusa, folder, PICKLED if own else "model.safetensors", None if own else output_layer.weight
            )
        else:
            hydra = HydraHeads(HydraConfig(**sizes), output_layer)
            hydra.init_projections(output_layer.weight)
            disturb(hydra, 0.1)
            save_hydra(hydra, folder)
        return folder
    if kind in BLOCKS:
        return save_block_head(BLOCKS[kind] | changes, output_layer, folder)
    options: dict[str, Any] = {
        "version": 3,
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "feature_layers": (1, 2, 3),
        "rms_norm_eps": EPS,
        "max_position_embeddings": 128,
    }
    head = EagleHead(EagleConfig(**{**options, **EAGLE[kind], **changes}))
    with torch.no_grad():
        head.fc.weight[:, -HIDDEN:] += torch.eye(HIDDEN)
        if head.config.version == 3:
            head.draft_token_ids = torch.randperm(VOCAB)[: head.config.draft_vocab_size].sort().values
            head.lm_head.weight.copy_(output_layer.weight[head.draft_token_ids])
    disturb(head, 0.1)
    if kind == "eagle3-own-embedding":
        head.embedding = torch.randn(VOCAB, HIDDEN)
    layout = kind if kind in ("eagle", "speculators") else "eagle3"
    save_eagle(head, folder, target="tiny", layout=layout, num_speculative_tokens=6)
    return folder


def save_block_head(changes: dict[str, Any], output_layer: nn.Linear, folder: Path) -> Path:
    config: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "feature_layers": (1, 2, 3),
        "rms_norm_eps": 1e-6,  # the enlarged one is that of queries and keys too, whose width does not grow
        "max_position_embeddings": 128,
        "block_size": 4,
        "mask_token_id": VOCAB - 1,
        "from_anchor": True,
        "causal": (False, False),
        "windows": (None, None),
    }
    head = DFlashHead(DFlashConfig(**{**config, **changes}))
    if head.config.draft_vocab_size < VOCAB:
        head.draft_token_ids = torch.randperm(VOCAB)[: head.config.draft_vocab_size].sort().values
        head.lm_head = nn.Linear(HIDDEN, head.config.draft_vocab_size, bias=False)
        with torch.no_grad():
            head.lm_head.weight.copy_(output_layer.weight[head.draft_token_ids])
    disturb(head, 0.05)
    save_dflash(head, folder, target="tiny")
    return folder


@dataclass(frozen=True)
class Models:
    small: Path
    wide: Path
    deep: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    made = Models(save_target(folder / "small"), folder / "wide", folder / "deep")
    expand(made.small, made.wide, **WIDE)
    expand(made.small, made.deep, **DEEP)
    return made


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def features_of(target: CausalLM, token_ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """[n, taps * hidden]"""
    pool = KVPool(target.shapes, len(token_ids), target.dtype, target.device)
    hidden = target.forward([RowGroup(pool.slots, 0, token_ids, range(len(token_ids)))], pool, layers).hidden
    return torch.cat([hidden[layer] for layer in layers], dim=-1)


@torch.inference_mode()
def logits_of(kind: str, head: Path, target_path: Path) -> Tensor:
    """What the head says over a text; an EAGLE head twice, the second time from its own states."""
    target = load_model(str(target_path), canary=False)
    token_ids = [(131 * i * i + 7 * i) % VOCAB for i in range(40)]
    embeds = target.embed(torch.tensor(token_ids))
    if kind in HEADS:
        states = features_of(target, token_ids, (target.num_layers,))
        if kind.startswith("medusa"):
            return load_medusa(str(head), target.project)(states)
        return load_hydra(str(head), target.project)(states[None], embeds[None])
    if kind in BLOCKS:
        block = load_dflash(str(head), target)
        features = features_of(target, token_ids[:20], block.config.feature_layers)
        masked = target.embed(torch.tensor([[token_ids[20], *[VOCAB - 1] * 3]]))
        hidden = block(masked, torch.arange(20, 24)[None], attend_over(block, features))
        sure = block.confidence(hidden, torch.tensor([token_ids[20:24]]))
        logits = block.logits(hidden, target.project)
        return logits if sure is None else torch.cat([logits, sure[..., None]], dim=-1)
    eagle = load_eagle(str(head), target)
    state = eagle.encode(features_of(target, token_ids, eagle.config.feature_layers))[None, :-1]
    said = []
    for _ in range(2):
        tokens = torch.tensor([token_ids[1:]])
        read = embeds[None, 1:] if eagle.embedding is None else eagle.embedding[tokens]
        state = eagle(read, state, torch.arange(1, len(token_ids))[None], attend)
        said.append(eagle.logits(state) if eagle.config.version == 3 else target.project(state))
    return torch.stack(said)


@pytest.mark.parametrize("size", ["wide", "deep"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits(kind: str, size: str, models: Models, tmp_path: Path) -> None:
    head = save_head(kind, models.small, tmp_path / "head")
    large: Path = getattr(models, size)
    expand_head(head, models.small, large, tmp_path / "large")
    expected = logits_of(kind, head, models.small)
    found = logits_of(kind, tmp_path / "large", large)
    assert float(expected.std()) > 0.3
    assert float((found - expected).abs().max()) <= 1e-4


def drafted(kind: str, head: Path, target: Path) -> tuple[list[Any], list[str], list[tuple[int, int]]]:
    """Everything that was proposed, the texts, and what was counted as drafted and accepted."""
    spec = {
        "method": kind.partition("-")[0].replace("speculators", "eagle3"),
        "model": str(head),
        "num_speculative_tokens": 3,
        "tree_top_k": 2,
        "num_draft_nodes": 5,
        "draft_sample_method": "greedy",
    }
    llm = LLM(str(target), speculative_config=spec, dtype="float32")
    proposals: list[Any] = []
    drafter = llm.engine.drafter
    propose = drafter.propose

    def noted(sequences: Any, budgets: Any) -> Any:
        made = propose(sequences, budgets)
        proposals.extend((proposal.token_ids, proposal.parents) for proposal in made)
        return made

    drafter.propose = noted  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(["Show me", "SELECT name FROM table WHERE", "def add(a, b):"], sampling)
    counts = [(o.metrics.num_draft_tokens, o.metrics.num_accepted_tokens) for o in outputs]
    return proposals, [output.outputs[0].text for output in outputs], counts


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_drafts_the_same(kind: str, models: Models, tmp_path: Path) -> None:
    head = save_head(kind, models.small, tmp_path / "head")
    expand_head(head, models.small, models.wide, tmp_path / "large")
    proposals, texts, counts = drafted(kind, head, models.small)
    assert drafted(kind, tmp_path / "large", models.wide) == (proposals, texts, counts)
    drafts, accepted = map(sum, zip(*counts, strict=True))
    assert drafts > 40
    assert 0 < accepted < drafts


@pytest.mark.parametrize("kind", EAGLE)
def test_an_eagle_head_has_its_targets_sizes(kind: str, models: Models, tmp_path: Path) -> None:
    head = save_head(kind, models.small, tmp_path / "head")
    (head / "training.json").write_text("{}")
    num_parameters = expand_head(head, models.small, models.wide, tmp_path / "large")
    old, new = load_eagle(str(head), load_model(str(models.small))).config, json_of(tmp_path / "large")
    layer = new["transformer_layer_config"] if kind == "speculators" else new
    other_heads = kind == "eagle3-other-heads"  # of 4 dimensions, so twice as many cost as much
    heads, keys, dim = (12, 12, 4) if other_heads else (6, 3, 8)
    assert (layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]) == (48, 72, dim)
    assert (layer["num_attention_heads"], layer["num_key_value_heads"]) == (heads, keys)
    version, states = (1, 1) if kind == "eagle" else (3, 2)
    matrices = 48 * (2 if version == 1 else 3 if len(old.feature_layers) == 3 else 2) * 48  # fc
    matrices += states * 48 * (heads + 2 * keys) * dim + heads * dim * 48 + 3 * 48 * 72
    matrices += old.draft_vocab_size * 48 if version == 3 else 0
    vectors = (
        48 * 4 if version == 3 else 48 + 48 + (heads + 2 * keys) * dim + 48
    )  # norms; norm, fc, attention
    assert num_parameters == matrices + vectors
    assert new["cost_expanded"] == {"from": "head", "parameters": num_parameters}
    assert (tmp_path / "large" / "training.json").read_text() == "{}"
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "large").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


@pytest.mark.parametrize("kind", EAGLE)
def test_layouts_and_draft_vocabularies_stay(kind: str, models: Models, tmp_path: Path) -> None:
    head = save_head(kind, models.small, tmp_path / "head")
    expand_head(head, models.small, models.wide, tmp_path / "large")
    old, new = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "large"))
    assert new.keys() == old.keys()
    assert ("embed_tokens.weight" in new) == (kind == "eagle3-own-embedding")
    assert ("d2t" in new) == ("draft_vocab_size" in EAGLE[kind])
    for name in new.keys() & {"d2t", "t2d"}:
        assert torch.equal(new[name], old[name])
    config = json_of(tmp_path / "large")
    assert config["architectures"] == json_of(head)["architectures"]
    if kind == "speculators":
        speculators = config["speculators_config"]
        assert speculators["verifier"]["name_or_path"] == str(models.wide)
        assert speculators["proposal_methods"][0]["speculative_tokens"] == 6


def test_feature_layers_are_where_the_source_layers_are(models: Models, tmp_path: Path) -> None:
    """The third, fifth and last of seven layers are the source's; the states behind are its states 1 to 3."""
    for number, (taps, expected) in enumerate([((0, 1, 2), [0, 3, 5]), ((1, 2, 3), [3, 5, 7])]):
        head = save_head("eagle3", models.small, tmp_path / f"head{number}", feature_layers=taps)
        expand_head(head, models.small, models.wide, tmp_path / f"large{number}")
        found = json_of(tmp_path / f"large{number}")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert found == expected


@pytest.mark.parametrize("kind", HEADS)
def test_medusa_and_hydra_heads_have_their_targets_width(kind: str, models: Models, tmp_path: Path) -> None:
    head = save_head(kind, models.small, tmp_path / "head")
    num_parameters = expand_head(head, models.small, models.wide, tmp_path / "large")
    names = ("config.json", PICKLED if kind == "medusa" else "model.safetensors")
    assert {file.name for file in (tmp_path / "large").iterdir()} == set(names)
    config = json_of(tmp_path / "large")
    assert (config["hidden_size"], config["vocab_size"]) == (48, VOCAB)
    assert config["base_model_name_or_path"] == str(models.wide)
    assert config["cost_expanded"] == {"from": "head", "parameters": num_parameters}
    hydra, layers = kind.startswith("hydra"), HEADS[kind].get("num_layers", 1)
    own = 0 if HEADS[kind].get("shares_lm_head") else VOCAB * 48 + (VOCAB if hydra else 0)
    first = [2 * ((k + 2) * 48 * 48 + 48) if hydra else 48 * 48 + 48 for k in range(3)]
    assert num_parameters == sum(first) + 3 * ((layers - 1) * (48 * 48 + 48) + own)


def test_the_copy_of_the_output_layer_is_the_enlarged_targets(models: Models, tmp_path: Path) -> None:
    """vLLM reads it out of the heads' own file; heads that came without it stay without it."""
    head = save_head("medusa-shared", models.small, tmp_path / "head")
    expand_head(head, models.small, models.wide, tmp_path / "large")
    copy = load_file(tmp_path / "large" / "model.safetensors")["0.1.weight"]
    assert torch.equal(copy, load_file(models.wide / "model.safetensors")["model.embed_tokens.weight"])
    config = MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=2, shares_lm_head=True)
    save_medusa(MedusaHeads(config, nn.Identity()), tmp_path / "alone")
    expand_head(tmp_path / "alone", models.small, models.wide, tmp_path / "large alone")
    assert "0.1.weight" not in load_file(tmp_path / "large alone" / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_not_zero(kind: str, models: Models, tmp_path: Path) -> None:
    """New outputs have weights, if only for what is zero in a state; only behind new heads and units all are zero."""
    head = save_head(kind, models.small, tmp_path / "head")
    expand_head(head, models.small, models.wide, tmp_path / "large")
    weights = tensors_of(tmp_path / "large")
    matrices = {name: w for name, w in weights.items() if w.ndim == 2 and len(w) < VOCAB // 2}
    assert len(matrices) >= 3
    for name, weight in matrices.items():
        rows_with_weights = weight.any(dim=1)
        assert rows_with_weights[:HIDDEN].all(), name
        assert rows_with_weights.all() != name.endswith(("o_proj.weight", "down_proj.weight")), name


def test_the_same_seed_makes_the_same_head(models: Models, tmp_path: Path) -> None:
    head = save_head("eagle3", models.small, tmp_path / "head")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        expand_head(head, models.small, models.wide, tmp_path / name, seed=seed)
        torch.rand(3)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_an_enlarged_model_in_bfloat16(models: Models, tmp_path: Path) -> None:
    expand(models.small, tmp_path / "bfloat16", **WIDE, dtype="bfloat16")
    head = save_head("medusa-shared", models.small, tmp_path / "head")
    assert expand_head(head, models.small, tmp_path / "bfloat16", tmp_path / "large")


def refusals(models: Models, folder: Path) -> dict[str, tuple[type[Exception], str, list[Path]]]:
    """What is wrong, by name: the exception, what it says, and head, source, enlarged model and output."""
    head, output = save_head("eagle3", models.small, folder / "head"), folder / "output"
    other = save_target(folder / "other", seed=1)
    renamed = shutil.copytree(models.wide, folder / "renamed")
    config = json_of(renamed) | {"head_dim": 16}
    (renamed / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    wide = EagleConfig(
        version=3,
        hidden_size=96,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        feature_layers=(0, 1, 2),
    )
    save_eagle(EagleHead(wide), folder / "wide", target="tiny")
    sizes = {"hidden_size": HIDDEN + 8, "vocab_size": VOCAB, "num_heads": 2}
    save_medusa(MedusaHeads(MedusaConfig(**sizes)), folder / "medusa")
    save_hydra(HydraHeads(HydraConfig(**sizes)), folder / "hydra")
    save_head("eagle3", models.small, folder / "eagle", target_hidden_size=32)
    output_layer = load_model(str(models.small), pack=False, canary=False).model.lm_head
    save_block_head({"convolution_taps": 2, "convolution_group": 8}, output_layer, folder / "convolutions")
    gated = {"left_to_right": LeftToRightConfig(kind="gated", rank=6)}
    save_block_head(gated, output_layer, folder / "gated")
    small, large = models.small, models.wide
    return {
        "convolutions": (ConfigError, "has convolutions", [folder / "convolutions", small, large, output]),
        "gated": (ConfigError, "gated, which reads hidden states", [folder / "gated", small, large, output]),
        "no head": (ModelError, "is not a folder", [folder / "none", small, large, output]),
        "not a head": (ModelError, "not an EAGLE head", [small, small, large, output]),
        "eagle": (ModelError, "target with a hidden size of 32", [folder / "eagle", small, large, output]),
        "medusa": (ModelError, "trained for it", [folder / "medusa", small, large, output]),
        "hydra": (ModelError, "trained for it", [folder / "hydra", small, large, output]),
        "not enlarged": (ModelError, "is not an enlarged model", [head, small, other, output]),
        "another's": (ModelError, "its weights are another model's", [head, other, large, output]),
        "swapped": (ModelError, "is not an enlarged model", [head, large, small, output]),
        "smaller": (ModelError, "hidden_size 24 is below", [head, large, models.deep, output]),
        "other heads": (ModelError, "heads of 16 dimensions, not 8", [head, small, renamed, output]),
        "not empty": (ModelError, "is not empty", [head, small, large, head]),
        "too wide": (ConfigError, "96 wide, the enlarged target 48", [folder / "wide", small, large, output]),
    }


def test_what_cannot_be_is_refused(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (kind, message, folders) in refusals(models, tmp_path).items():
        with pytest.raises(kind, match=message):
            expand_head(*folders)
        capsys.readouterr()
        assert main(["head", *map(str, folders)]) == 2, name
        error = capsys.readouterr().err
        assert error.startswith("error: "), name
        assert error.count("\n") == 1, name
        assert not (tmp_path / "output").exists(), name


def test_command_line(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = save_head("hydra", models.small, tmp_path / "head")
    capsys.readouterr()
    assert main(["head", *map(str, (head, models.small, models.wide, tmp_path / "large"))]) == 0
    num_parameters = json_of(tmp_path / "large")["cost_expanded"]["parameters"]
    assert capsys.readouterr().err == f"{num_parameters:,} parameters\n"
    with pytest.raises(SystemExit, match="2"):
        main(["head", str(head)])
    assert capsys.readouterr().err.startswith("error: the following arguments are required: source")


def json_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return read


def tensors_of(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    return load_file(file) if file.exists() else torch.load(folder / PICKLED)
