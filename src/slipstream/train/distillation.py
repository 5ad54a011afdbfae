"""Distillation of the target into a draft model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import DRAFT_MODEL, is_pard2
from slipstream.errors import ConfigError, VocabularyMismatchError
from slipstream.models.huggingface import AutoModelForCausalLM
from slipstream.train.attention import ATTENTION
from slipstream.train.batches import TrainingBatch, TrainingDocument, TrainingRows, pack
from slipstream.train.options import DistillOptions
from slipstream.train.target import FrozenTarget, check_plain_head, load_model


class DraftStudent:
    """A causal language model with the target's vocabulary; implements `train.trainer.Student`."""

    name = "draft"
    feature_layers: Seq[int] = ()

    def __init__(self, model: Any, tokenizer: Any, options: DistillOptions, seed: int) -> None:
        check_plain_head(model, model.device)
        self.model = model
        self.module: nn.Module = model
        self._tokenizer = tokenizer
        self._options = options
        self._losses = options.losses
        self._seed = seed

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The weighted losses, averaged over the answers' tokens; logs `alpha`, one minus the total variation, and
        `agreement` of the two models' first choices.
        """
        where = batch.loss_mask
        hidden = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).last_hidden_state
        draft = self.model.get_output_embeddings()(hidden[where]).float()  # [n, vocab]
        target = batch.target_logits_at(where)  # [n, vocab]
        return distillation_loss(draft, target, batch.labels[where], self._losses)

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows`, or on a fraction of the steps the draft's own answers to their prompts, sampled at temperature 1.

        Deterministic for the seed, the step and the weights.
        """
        rng = np.random.default_rng([self._seed, step])
        if rng.random() >= self._options.on_policy:
            return rows
        prompts = _prompts(rows)
        if not prompts:
            return rows
        answers = self._sample(prompts, int(rng.integers(2**31)))
        length = rows.tokens.shape[1]
        documents = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = np.array([*prompt, *answer][:length], dtype=np.int64)
            is_answer = np.arange(len(tokens)) >= len(prompt)
            documents.append(TrainingDocument("own", tokens, is_answer))
        own = pack(documents, length, self._pad, rng)
        own.sources[:] = -1  # new texts are not in the feature cache
        return own

    def target_path(self, folder: Path) -> None:
        """None: the target does not change."""

    def about_loss(self) -> str:
        """See `Student`."""
        vocab = self.model.config.vocab_size
        return (
            f"in the log: loss is the mean over the answers' tokens of {self._options.loss}, KL in nats a token: 0 is "
            f"perfect, about ln {vocab:,} = {math.log(vocab):.1f} is chance. alpha is the share of draft tokens that "
            "sampling would accept, agreement how often the draft's first choice is the target's token"
        )

    def save(self, folder: Path) -> None:
        """A float16 checkpoint with the target's tokenizer."""
        model = copy.deepcopy(self.model).half()
        model.config._attn_implementation = None
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        return SpeculativeConfig(DRAFT_MODEL.name, options={"model": str(folder)})

    @property
    def _pad(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(self._tokenizer.eos_token_id if pad is None else pad)

    @torch.no_grad()
    def _sample(self, prompts: Seq[list[int]], seed: int) -> list[list[int]]:
        """The draft's answer to each prompt, its end token included."""
        width = max(map(len, prompts))
        token_ids = torch.full((len(prompts), width), self._pad)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self.model.device
        end = self._tokenizer.eos_token_id
        self.model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            written = self.model.generate(
                input_ids=token_ids.to(device),
                attention_mask=mask.to(device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._options.on_policy_tokens,
                eos_token_id=end,
                pad_token_id=self._pad,
            )[:, width:].tolist()
        self.model.train()
        return [row[: row.index(end) + 1] if end in row else row for row in written]


def distillation_loss(
    draft: Tensor, target: Tensor, labels: Tensor, weights: Mapping[str, float], counts: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(weighted mean loss in nats, metrics to log) for logits [n, vocab] of both and the text's tokens `labels` [n].

    `counts` [n] says how much each token counts in the mean; all count the same by default.
    """
    log_q = F.log_softmax(draft, dim=-1)
    log_p = F.log_softmax(target, dim=-1)
    p = log_p.exp()
    loss = log_q.new_zeros(())
    for name, weight in weights.items():
        if name == "forward_kl":
            one = (p * (log_p - log_q)).sum(-1)
        elif name == "reverse_kl":
            one = (log_q.exp() * (log_q - log_p)).sum(-1)
        elif name == "total_variation":
            one = (p - log_q.exp()).abs().sum(-1) / 2
        else:
            one = F.nll_loss(log_q, labels, reduction="none")
        loss = loss + weight * (one.mean() if counts is None else (counts * one).sum() / counts.sum())
    with torch.no_grad():
        some = slice(None, None, 8)  # a sample is enough for the log
        alpha = torch.minimum(p[some], log_q[some].exp()).sum(-1).mean()
        agreement = (draft[some].argmax(-1) == target[some].argmax(-1)).float().mean()
    return loss, {"alpha": float(alpha), "agreement": float(agreement)}


def make_draft(
    options: DistillOptions, target: FrozenTarget, seed: int, *, may_read_target: bool = False
) -> Any:
    """The initial draft model that `options` describe; raises `ConfigError` or `ModelError`.

    One that reads the target's hidden states is refused unless `may_read_target`.
    """
    if options.init is not None:
        model = load_model(options.init, target.device)
        if is_pard2(model.config.to_dict()) and not may_read_target:
            raise ConfigError(
                f"{options.init!r} is a PARD-2 model, which reads the target's hidden states; go on from it with "
                "`train pard`"
            )
        if model.config.vocab_size != target.vocab_size:
            raise VocabularyMismatchError(
                f"{options.init!r} has {model.config.vocab_size} tokens, the target {target.vocab_size}"
            )
        return model
    if options.keep_layers is not None:
        return _pruned(target, options.keep_layers)
    return _fresh(target, options.shape or "", seed)


def _pruned(target: FrozenTarget, keep: str) -> Any:
    """A copy of the target with some of its layers."""
    try:
        layers = [int(part) for part in keep.split(",")]
    except ValueError:
        raise ConfigError(f"--keep-layers takes layer numbers separated by commas, got {keep!r}") from None
    if not layers or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < target.num_layers:
        raise ConfigError(
            f"--keep-layers takes ascending layer numbers from 0 to {target.num_layers - 1}, got {keep!r}"
        )
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer] for layer in layers]
    numbers = {old: new for new, old in enumerate(layers)}
    weights = {}
    for name, weight in target.model.state_dict().items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        if found is None:
            weights[name] = weight
        elif int(found[1]) in numbers:
            weights[name.replace(found[0], f".layers.{numbers[int(found[1])]}.", 1)] = weight
    model = _empty(config)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise ConfigError(
            f"--keep-layers does not support {config.model_type}; use --init or --shape"
        ) from None
    model.tie_weights()
    return model.to(target.device)


def _fresh(target: FrozenTarget, shape: str, seed: int) -> Any:
    """Fresh weights in the target's family."""
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    if match is None:
        raise ConfigError(f"--shape is LAYERSxWIDTH, as in 2x128, got {shape!r}")
    num_layers, width = int(match[1]), int(match[2])
    config = copy.deepcopy(target.model.config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not num_layers or not width or width % head_dim:
        raise ConfigError(
            f"--shape needs at least one layer and a width that is a multiple of {head_dim}, got {shape!r}"
        )
    ratio = config.intermediate_size / config.hidden_size
    config.intermediate_size = max(32, round(ratio * width / 32) * 32)
    config.num_hidden_layers, config.hidden_size = num_layers, width
    config.num_attention_heads = config.num_key_value_heads = width // head_dim
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    torch.manual_seed(seed)
    model = _empty(config)
    return model.to(target.device)


def _empty(config: Any) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32, attn_implementation=ATTENTION)


def _prompts(rows: TrainingRows) -> list[list[int]]:
    """For each document in the rows: the tokens before its last answer."""
    prompts: list[list[int]] = []
    for tokens, documents, is_answer in zip(rows.tokens, rows.documents, rows.is_answer, strict=True):
        for number in range(int(documents.max()) + 1):
            mine = documents == number
            text, answered = tokens[mine], is_answer[mine]
            begins = np.flatnonzero(answered[1:] & ~answered[:-1]) + 1
            if len(begins):
                prompts.append(text[: begins[-1]].tolist())
    return prompts
