"""Records and tensors for the tests of learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.learn.records.served import CheckedRows, ServedRecord, purpose_of

TOP = 4


def some_rows(rng: np.random.Generator, num_tokens: int, num_branches: int = 2) -> CheckedRows:
    """A row for each token of an answer, and some in rejected branches of one or two tokens."""
    lengths = [0] * num_tokens + [1 + number % 2 for number in range(num_branches)]
    num = len(lengths)
    logits = -np.sort(-rng.normal(size=(num, TOP)), axis=1)
    return CheckedRows(
        positions=np.array([*range(num_tokens), *([0] * num_branches)], np.int32),
        depths=np.array(lengths, np.int32),
        path_ids=rng.integers(0, 50, sum(lengths)).astype(np.int32),
        path_ends=np.cumsum(lengths).astype(np.int32),
        top_ids=rng.integers(0, 50, (num, TOP)).astype(np.int32),
        top_log_probs=(logits - 3).astype(np.float16),
        logsumexps=rng.normal(size=num).astype(np.float32),
    )


def some_record(number: int = 0, num_tokens: int = 6, **changes: Any) -> ServedRecord:
    """A record that depends on `number` alone."""
    rng = np.random.default_rng(number)
    request_id = changes.pop("request_id", f"request-{number}")
    status: dict[str, Any] = {
        "request_id": request_id,
        "model_hash": "model-a",
        "template_hash": "template-a",
        "prompt_ids": rng.integers(0, 50, 9).astype(np.int32),
        "token_ids": rng.integers(0, 50, num_tokens).astype(np.int32),
        "rows": some_rows(rng, num_tokens),
        "tenant": "alpha",
        "created_s": 1000.0 + number,
        "purpose": purpose_of(request_id),
    }
    return ServedRecord(**{**status, **changes})


def some_tensors(number: int = 0) -> dict[str, torch.Tensor]:
    """Small weights that depend on `number` alone."""
    generator = torch.Generator().manual_seed(number)
    return {
        "bias.u": torch.randn(50, 3, generator=generator),
        "bias.v": torch.randn(3, 50, generator=generator),
    }
