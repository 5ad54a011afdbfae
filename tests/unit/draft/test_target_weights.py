"""What drafters share with a target, its embedding and its output layer, is what the target itself uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from slipstream.assets import EMBEDDED_TARGET
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.linear.int8 import Int8
from tests.kit.small_llama import sizes

SHAPE = sizes(48, 1, 4, 2, vocab=97, inner=50, bos=None, eos=None, pad=None)
TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(9)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The embedded target, a Llama with an output layer of its own, and a family that runs layer by layer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("targets")
    shape = {"vocab_size": 97, "hidden_size": 72, "intermediate_size": 101, "num_hidden_layers": 1}
    LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=6, tie_word_embeddings=False, initializer_range=0.2)
    ).save_pretrained(folder / "untied")
    GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=1, n_head=2)).save_pretrained(
        folder / "gpt2"
    )
    return {"tied": EMBEDDED_TARGET, **{name: str(Path(folder) / name) for name in ("untied", "gpt2")}}


def forward(lm: CausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """The states behind the final norm, and the logits, of the rows of TEXT."""
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    output = lm.forward([RowGroup(pool.slots, 0, TEXT, range(len(TEXT)))], pool, [lm.num_layers])
    return output.hidden[lm.num_layers], output.logits


@pytest.mark.parametrize("kernels", ["native", "torch", "plain"])
@pytest.mark.parametrize("name", ["tied", "untied", "gpt2"])
def test_they_are_those_of_the_transformers_model(name: str, kernels: str, folders: dict[str, str]) -> None:
    lm = load_model(
        folders[name], cpu_kernels="auto" if kernels == "plain" else kernels, pack=kernels != "plain"
    )
    stock = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    token_ids = torch.tensor(TEXT).view(3, 3)
    hidden, logits = forward(lm)
    with torch.no_grad():
        torch.testing.assert_close(
            lm.embed(token_ids), stock.get_input_embeddings()(token_ids), atol=1e-5, rtol=0
        )
        ours = lm.project(hidden.view(3, 3, -1))
        torch.testing.assert_close(ours, stock.lm_head(hidden).view(3, 3, -1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.view_as(logits), logits, atol=1e-5, rtol=1e-5)


SCALED = {
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=12, final_logit_softcapping=2.0),
    "granite": lambda: GraniteConfig(**SHAPE, embedding_multiplier=3.0, logits_scaling=2.0),
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", SCALED)
def test_scales_of_embeddings_and_logits_are_the_layers_own_or_none(
    name: str, kernels: str, tmp_path: Path
) -> None:
    """Gemma's embedding scales its rows itself, Granite's model does; caps and divisors are no part of the layer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SCALED[name]()).save_pretrained(tmp_path)
    lm = load_model(str(tmp_path), cpu_kernels=kernels)
    assert lm.kernels == ("decoder" if kernels == "native" else "torch")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.tensor(TEXT).view(3, 3)
    with torch.no_grad():
        embedded = stock.get_input_embeddings()(token_ids)
        torch.testing.assert_close(lm.embed(token_ids), embedded, atol=1e-6, rtol=1e-6)
        hidden, _ = forward(lm)
        torch.testing.assert_close(lm.project(hidden), stock.lm_head(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "untied", "gpt2"])
def test_an_int8_target_lends_what_it_reads_itself(name: str, folders: dict[str, str]) -> None:
    """An embedding of its own stays as it was; one that is tied to the output layer is rounded with it."""
    lm = load_model(folders[name], quantization="int8", cpu_kernels="native")
    stock = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    expected = stock.get_input_embeddings().weight.detach()[TEXT]
    if name == "tied":
        expected = Int8().rounded(expected).dequantised()
    with torch.no_grad():
        torch.testing.assert_close(lm.embed(torch.tensor(TEXT)), expected, atol=1e-5, rtol=0)
        hidden, logits = forward(lm)
        assert torch.equal(lm.project(hidden), logits)


def test_a_token_without_embedding_is_refused() -> None:
    lm = load_model(EMBEDDED_TARGET, cpu_kernels="native")
    with pytest.raises(IndexError, match="numbered 0 to 4095"):
        lm.embed(torch.tensor([4096]))
