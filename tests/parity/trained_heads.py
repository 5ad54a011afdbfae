"""Heads for the embedded target, trained on the spot: random ones would hardly ever be right, and prove little."""

from __future__ import annotations

import fcntl
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.draft.heads.dflash_files import save_dflash
from slipstream.draft.heads.eagle_files import save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.heads.hydra import HydraConfig, HydraHeads, save_hydra
from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from slipstream.draft.heads.mtp_files import save_mtp
from slipstream.draft.heads.mtp_head import MtpForm, MtpHead
from slipstream.kv.pool import LayerShape
from slipstream.models.single_layer import SingleLayer, single_layer_config
from slipstream.text.prompts import encode_chat
from slipstream.train.batches import TargetScores
from slipstream.train.eagle_loss import TargetText, training_time_test
from tests.kit.block_heads import BLOCK, LAYOUTS, random_block_head

NUM_TEXTS = 32
NUM_TOKENS = 32
"""Tokens of each text's end, the target's own greedy answer for the most part."""
NUM_STEPS = 20


@functools.cache
def trained_heads(method: str) -> str:
    """A folder of heads; seconds of training, seeded. Medusa's and Hydra's share the target's output layer.

    They are trained once in a run of the tests: a process waits while another one trains them.
    """
    folder = Path(os.environ["SLIPSTREAM_TEST_RUN"], f"heads-{method}")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            unfinished.mkdir(exist_ok=True)
            _train_heads(method, unfinished)
            unfinished.rename(folder)
    return str(folder)


def _train_heads(method: str, folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).requires_grad_(False)
    hidden, token_ids = _answers()
    embeddings = target.get_input_embeddings()(token_ids)
    config: dict[str, Any] = {"hidden_size": 320, "vocab_size": 4096, "num_heads": 4, "shares_lm_head": True}
    if method.startswith("eagle"):
        _train_eagle(3 if method == "eagle3" else 1, target, token_ids, folder)
    elif method == "mtp":
        _train_mtp(target, hidden, token_ids, folder)
    elif method == "dflash":
        _train_dflash(target, token_ids, folder)
    elif method == "medusa":
        medusa = MedusaHeads(MedusaConfig(**config), target.lm_head)
        _train(medusa, [hidden], token_ids)
        save_medusa(medusa, folder)
    else:
        hydra = HydraHeads(HydraConfig(**config), target.lm_head)
        _train(hydra, [hidden, embeddings], token_ids)
        save_hydra(hydra, folder)


@functools.cache
def _answers() -> tuple[torch.Tensor, torch.Tensor]:
    """The target's states and tokens at the ends of its own answers, [texts, tokens, ...]."""
    llm = LLM(max_num_seqs=16)
    prompts = [encode_chat(llm.engine.tokenizer, row["messages"]) for row in sample_prompts()[-NUM_TEXTS:]]
    wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts = [
        prompt + out.outputs[0].token_ids
        for prompt, out in zip(prompts, llm.generate(prompts, wanted), strict=True)
    ]
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    with torch.no_grad():
        states = [target.model(torch.tensor([text])).last_hidden_state[0, -NUM_TOKENS:] for text in texts]
    token_ids = torch.tensor([text[-NUM_TOKENS:] for text in texts])
    return torch.stack(states), token_ids


def _train(heads: Any, inputs: list[torch.Tensor], token_ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_TEXTS, (8,))
        optimizer.zero_grad()
        logits = heads(*(part[chosen] for part in inputs))  # [heads, batch, length, vocab]
        sum(_loss(rows, token_ids[chosen], head) for head, rows in enumerate(logits)).backward()
        optimizer.step()


def _train_eagle(version: int, target: Any, token_ids: torch.Tensor, folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64}
    config = EagleConfig(
        version=version,
        target_hidden_size=320,
        vocab_size=4096,
        draft_vocab_size=1024 if version == 3 else 4096,
        intermediate_size=128,
        feature_layers=(1, 3, 5) if version == 3 else (6,),
        **sizes,
    )
    head = EagleHead(config)
    if version == 3:
        head.draft_token_ids = token_ids.flatten().bincount(minlength=4096).topk(1024).indices.sort().values
        head.lm_head.weight.data.copy_(target.lm_head.weight[head.draft_token_ids])
        head.norm.weight.data.copy_(target.model.norm.weight)
    documents = torch.arange(len(token_ids))[:, None].expand_as(token_ids)
    with torch.no_grad():
        output = target(token_ids, output_hidden_states=True)
    states = [*output.hidden_states[:-1], output.hidden_states[-1]]
    features = torch.cat([states[layer] for layer in config.feature_layers], dim=-1)
    positions = torch.arange(NUM_TOKENS)[None].expand_as(token_ids)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_TEXTS, (8,))
        learns = torch.ones(8, NUM_TOKENS, dtype=torch.bool)
        text = TargetText(
            target.model.embed_tokens(token_ids[chosen]),
            features[chosen],
            positions[chosen],
            documents[chosen],
            learns,
        )
        scores = TargetScores.of(output.logits[chosen].flatten(0, 1), head.draft_token_ids)
        optimizer.zero_grad()
        training_time_test(head, text, scores, target.lm_head, num_steps=2).loss.backward()
        optimizer.step()
    save_eagle(head, folder, target="embedded", layout="eagle3" if version == 3 else "eagle")


def _train_mtp(target: Any, hidden: torch.Tensor, token_ids: torch.Tensor, folder: Path) -> None:
    """It begins as the target's last layer, over the mean of both inputs."""
    torch.manual_seed(0)
    config = single_layer_config(target.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.model.layers[0].load_state_dict(target.model.layers[-1].state_dict())
    head = MtpHead([SingleLayer(model, LayerShape(5, 64, 64), frozenset())], MtpForm(masks_first=False))
    half = torch.eye(config.hidden_size) / 2
    head.layer(0).projection.weight.data.copy_(torch.cat([half, half], dim=1))
    embeds = target.get_input_embeddings()(token_ids)
    positions = torch.arange(NUM_TOKENS - 1)[None]
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_TEXTS, (8,))
        optimizer.zero_grad()
        _, normed = head(0, embeds[chosen, 1:], hidden[chosen, :-1], positions, {})
        _loss(target.lm_head(normed)[:, :-1], token_ids[chosen], 0).backward()
        optimizer.step()
    save_mtp(head, folder, target="embedded", config=target.config)


def twice_mtp(folder: Path) -> str:
    """A folder in which the trained layer for multi-token prediction is the second one too."""
    trained = Path(trained_heads("mtp"))
    tensors = load_file(trained / "model.safetensors")
    second = {
        name.replace("mtp_layers.0.", "mtp_layers.1."): tensor.clone() for name, tensor in tensors.items()
    }
    config = json.loads((trained / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **second}, folder / "model.safetensors")
    return str(folder)


def _train_dflash(target: Any, token_ids: torch.Tensor, folder: Path) -> None:
    """A block behind one place of all texts at each step; the Markov head reads the tokens that are there."""
    head = random_block_head(**LAYOUTS["markov"]).requires_grad_()
    torch.nn.init.zeros_(head.left_to_right.markov_w2.weight)
    with torch.no_grad():
        states = target(token_ids, output_hidden_states=True).hidden_states
        head.norm.weight.copy_(target.model.norm.weight)
    features = torch.cat([states[layer] for layer in head.config.feature_layers], dim=-1)
    embed = target.model.embed_tokens
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for step in range(3 * NUM_STEPS):
        first = 8 + 5 * step % (NUM_TOKENS - BLOCK - 8)
        entries = head.context_entries(head.encode(features[:, :first]), torch.arange(first)[None])

        def attend(layer: int, query: Any, *own: Any, entries: Any = entries) -> torch.Tensor:
            key, value = (torch.cat(parts, dim=2) for parts in zip(entries[layer], own, strict=True))
            over = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            return over.transpose(1, 2)

        tokens = token_ids[:, first : first + BLOCK]
        given = torch.where(torch.arange(BLOCK) > 0, head.config.mask_token_id, tokens)
        hidden = head(embed(given), torch.arange(first, first + BLOCK)[None], attend)
        base = target.lm_head(hidden[:, 1:])
        logits = head.left_to_right(hidden, base, tokens, token_ids[:, first - 1], embed)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    save_dflash(head, folder, target="embedded")


def _loss(logits: torch.Tensor, token_ids: torch.Tensor, head: int) -> torch.Tensor:
    """Cross-entropy of one head's `logits` [batch, length, vocab]: row t predicts token t + 2 + head."""
    wanted = token_ids[:, head + 2 :]
    return torch.nn.functional.cross_entropy(logits[:, : wanted.shape[1]].flatten(0, 1), wanted.flatten())
