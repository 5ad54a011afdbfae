"""The sampling parameters that shape a draft, as a message carries them."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ProtocolError
from slipstream.sampling.params import SamplingParams

NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Those that are one number each."""


def sampling_message(params: SamplingParams) -> dict[str, Any]:
    """What a worker needs to draw as the target does; texts (stop strings, bad words, grammars) stay at home."""
    bias = None if params.logit_bias is None else {int(k): float(v) for k, v in params.logit_bias.items()}
    allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    return {name: getattr(params, name) for name in NUMBERS} | {"logit_bias": bias, "allowed": allowed}


def sampling_of(message: dict[str, Any], vocab_size: int) -> SamplingParams:
    """The parameters of such a message; `ProtocolError` where they are none, or name tokens past `vocab_size`."""
    try:
        params = SamplingParams(
            **{name: message[name] for name in NUMBERS if name in message},
            logit_bias=message.get("logit_bias"),
            allowed_token_ids=message.get("allowed"),
            max_tokens=None,
        )
        params.check_vocabulary(vocab_size)
    except (TypeError, ValueError) as error:  # RequestError among them
        raise ProtocolError(f"sampling parameters that cannot be used: {str(error)[:300]!a}") from None
    return params
