"""Medusa and Hydra heads: what each reads and guesses, what they are trained for, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from slipstream.draft.heads import hydra, medusa
from slipstream.draft.heads.hydra import (
    HydraConfig,
    HydraHeads,
    load_hydra,
    save_hydra,
)
from slipstream.draft.heads.medusa import (
    MedusaConfig,
    MedusaHeads,
    load_medusa,
    save_medusa,
)
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.errors import ModelError

HIDDEN, VOCAB = 8, 13
BATCH, LENGTH = 2, 7


def randomised(heads: ProjectedHeads, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return heads


def medusa_heads(**config: Any) -> MedusaHeads:
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, **config}
    heads: MedusaHeads = randomised(MedusaHeads(MedusaConfig(**shape), lm_head()))
    return heads


def hydra_heads(**config: Any) -> HydraHeads:
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, **config}
    heads: HydraHeads = randomised(HydraHeads(HydraConfig(**shape), lm_head()))
    return heads


def lm_head() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_medusa_head_is_blocks_and_a_projection() -> None:
    heads, hidden = medusa_heads(num_layers=2), rows(BATCH, LENGTH, HIDDEN)
    state = heads.state_dict()
    for head, logits in enumerate(heads(hidden)):
        x = hidden
        for layer in range(2):
            name = f"blocks.{head}.{layer}.linear"
            x = x + silu(x @ state[f"{name}.weight"].T + state[f"{name}.bias"])
        torch.testing.assert_close(logits, x @ state[f"projections.{head}.weight"].T)
    assert torch.equal(heads(hidden, 2), heads(hidden)[:2])


def test_heads_begin_as_the_targets_own_output_layer() -> None:
    target, hidden = lm_head(), rows(BATCH, LENGTH, HIDDEN)
    for heads in (
        MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB)),
        MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, shares_lm_head=True), target),
    ):
        heads.init_projections(target.weight)
        torch.testing.assert_close(heads(hidden), target(hidden).expand(4, -1, -1, -1))
    sequential = HydraHeads(HydraConfig(hidden_size=HIDDEN, vocab_size=VOCAB))
    sequential.init_projections(target.weight)
    logits = sequential(hidden, rows(BATCH, LENGTH, HIDDEN, seed=2))
    torch.testing.assert_close(logits, target(hidden).expand(4, -1, -1, -1))


def test_a_shared_output_layer_is_used_but_neither_trained_nor_saved() -> None:
    for heads in (medusa_heads(shares_lm_head=True), hydra_heads(shares_lm_head=True)):
        assert all(name.startswith("blocks.") for name in heads.state_dict())
        assert all(name.startswith("blocks.") for name, _ in heads.named_parameters())
    with pytest.raises(ValueError, match="need the target's"):
        MedusaHeads(MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, shares_lm_head=True))


def test_a_hydra_head_reads_the_tokens_before_its_own() -> None:
    heads, hidden = hydra_heads(num_layers=2), rows(BATCH, LENGTH, HIDDEN)
    embeddings = rows(BATCH, LENGTH, HIDDEN, seed=2)
    logits = heads(hidden, embeddings)
    for head in range(3):
        for t in range(LENGTH - 1 - head):
            read = torch.cat([hidden[0, t], *embeddings[0, t + 1 : t + 2 + head]])
            torch.testing.assert_close(heads.step(head, read), logits[head, 0, t])
    state = heads.state_dict()
    wide = torch.cat([hidden[0, 0], embeddings[0, 1]])
    first = wide @ state["blocks.0.0.res_connection.weight"].T + state["blocks.0.0.res_connection.bias"]
    first = first + silu(wide @ state["blocks.0.0.linear.weight"].T + state["blocks.0.0.linear.bias"])
    second = first + silu(first @ state["blocks.0.1.linear.weight"].T + state["blocks.0.1.linear.bias"])
    expected = second @ state["projections.0.weight"].T + state["projections.0.bias"]
    torch.testing.assert_close(logits[0, 0, 0], expected)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_few_steps_of_training_learn_a_rule(kind: str, shares: bool) -> None:
    """Text that counts upwards, hidden states that say where it is: every head finds out, and only heads change."""
    target = lm_head()
    before = target.weight.clone()
    text = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
    hidden, embeddings = rows(VOCAB, HIDDEN)[text], rows(VOCAB, HIDDEN, seed=2)[text]
    shape = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 2, "shares_lm_head": shares}
    heads: Any = MedusaHeads(MedusaConfig(**shape), target)
    inputs = [hidden]
    if kind == "hydra":
        heads, inputs = HydraHeads(HydraConfig(**shape), target), [hidden, embeddings]
    heads.init_projections(target.weight)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.03)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        logits = heads(*inputs)  # row t of head k guesses token t + 2 + k
        loss = sum(
            nn.functional.cross_entropy(
                logits[k, :, : LENGTH - 2 - k].flatten(0, 1), text[:, 2 + k :].flatten()
            )
            for k in range(2)
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert torch.equal(target.weight, before)


SAVE: dict[str, Any] = {
    "medusa": (medusa_heads, save_medusa, load_medusa),
    "hydra": (hydra_heads, save_hydra, load_hydra),
}


@pytest.mark.parametrize("weight_file", ["model.safetensors", "pickled"])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_files_hold_the_heads(kind: str, shares: bool, weight_file: str, tmp_path: Path) -> None:
    make, save, load = SAVE[kind]
    heads = make(num_layers=2, shares_lm_head=shares, base_model="some/target")
    pickled = {"medusa": medusa.PICKLED, "hydra": hydra.PICKLED}[kind]
    save(heads, tmp_path, pickled if weight_file == "pickled" else weight_file)
    loaded = load(str(tmp_path), lm_head())
    assert loaded.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_the_authors_own_files_are_read(tmp_path: Path) -> None:
    """The authors' Medusa: three keys of configuration, a list of heads, each a list of blocks and a projection."""
    torch.manual_seed(0)
    official = {}
    for head in range(2):
        official[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
        official[f"{head}.0.linear.bias"] = torch.randn(HIDDEN)
        official[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN)
    torch.save(official, tmp_path / "medusa_lm_head.pt")
    found = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna"}
    (tmp_path / "config.json").write_text(json.dumps(found))
    heads = load_medusa(str(tmp_path))
    hidden = rows(HIDDEN)
    x = hidden + silu(official["1.0.linear.weight"] @ hidden + official["1.0.linear.bias"])
    torch.testing.assert_close(heads(hidden)[1], official["1.1.weight"] @ x)


def test_vllms_names_are_read(tmp_path: Path) -> None:
    heads = medusa_heads(bias=False)
    save_medusa(heads, tmp_path)
    renamed = {}
    for name, tensor in heads.state_dict().items():
        part, head, rest = name.split(".", 2)
        renamed[f"lm_heads.{head}.weight" if part == "projections" else f"blocks.{head}.layers.0.weight"] = (
            tensor
        )
        assert rest in ("weight", "0.linear.weight")
    save_file(renamed, tmp_path / "model.safetensors")
    found = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": HIDDEN}
    found |= {"vocab_size": VOCAB, "truncated_vocab_size": VOCAB, "medusa_fc_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert torch.equal(load_medusa(str(tmp_path))(rows(HIDDEN)), heads(rows(HIDDEN)))


def test_a_shared_output_layer_may_stand_in_the_file_for_vllm(tmp_path: Path) -> None:
    heads, target = medusa_heads(shares_lm_head=True), lm_head()
    save_medusa(heads, tmp_path, lm_head=target.weight)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.1.weight"], target.weight)
    assert torch.equal(load_medusa(str(tmp_path), target)(rows(HIDDEN)), heads(rows(HIDDEN)))


NEW = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("kind", "tensors", "config", "message"),
    [
        ("medusa", {"1.0.linear.weight": None}, {}, "lacks the tensor 1.0.linear.weight"),
        ("medusa", {"0.1.weight": None}, {}, "lacks the tensor 0.1.weight"),
        ("medusa", {"0.5.linear.weight": NEW}, {}, "unknown tensor: 0.5.linear.weight"),
        ("medusa", {"2.1.weight": NEW}, {}, r"2.1.weight of shape \[2, 2\], not \[13, 8\]"),
        ("medusa", {}, {"medusa_num_heads": 2}, "unknown tensor: 2.0.linear.bias and 2 more"),
        ("medusa", {}, {"medusa_num_heads": None}, "has no medusa_num_heads"),
        ("medusa", {}, {"medusa_num_heads": "3"}, "medusa_num_heads '3'"),
        ("medusa", {}, {"truncated_vocab_size": 5}, "truncated_vocab_size"),
        (
            "hydra",
            {"hydra_mlp.1.0.res_connection.bias": None},
            {},
            "lacks .*hydra_mlp.1.0.res_connection.bias",
        ),
        ("hydra", {"prefix_embeding_layer.norm.weight": NEW}, {}, "unknown tensor: prefix_embeding_layer"),
        ("hydra", {"hydra_lm_head.0.bias": NEW}, {}, r"hydra_lm_head.0.bias of shape \[2, 2\], not \[13\]"),
        ("hydra", {}, {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch 'prefix-mlp'; only 'mlp'"),
        ("hydra", {}, {"grounded_heads": False}, "grounded_heads False"),
    ],
)
def test_files_that_are_not_exactly_heads_are_refused(
    kind: str, tensors: dict[str, Tensor | None], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make, save, load = SAVE[kind]
    save(make(), tmp_path)
    held = load_file(tmp_path / "model.safetensors") | tensors
    save_file({name: it for name, it in held.items() if it is not None}, tmp_path / "model.safetensors")
    found = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ModelError, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_medusa(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_medusa(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read the configuration"):
        load_medusa(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no weights: none of model\.safetensors"):
        load_medusa(str(tmp_path))
    for name, content in (("model.safetensors", b"x"), (medusa.PICKLED, b"x")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=rf"cannot read .*{name}"):
            load_medusa(str(tmp_path))
        (tmp_path / name).unlink()
