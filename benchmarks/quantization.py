"""What int8 weights cost in quality: perplexity on held-out text, beside float32's.

    python -m benchmarks.quantization [MODEL ...]

Text: the messages of the bundled held-out prompts, as the chat template writes them, each as one sequence.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept, say
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model, load_tokenizer
from slipstream.provenance import provenance
from slipstream.text.prompts import encode_chat

RESULT = Path(__file__).parent.parent / "docs/benchmarks/quantization.json"
KINDS = (None, "int8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="checkpoint folders; the embedded target unless given")
    parser.add_argument("--prompts", type=int, default=350)
    options = parser.parse_args()
    kept = Kept(RESULT, {"prompts": options.prompts})
    paths = options.models or [EMBEDDED_TARGET]
    rows = [kept.cell(path, partial(compare, path, options.prompts)) for path in paths]
    kept.finish({"provenance": provenance(), "rows": rows})
    for row in rows:
        print(
            f"{row['model']}: perplexity {row['perplexity']['float32']:.4f} -> {row['perplexity']['int8']:.4f}, "
            f"ratio {row['ratio']:.5f}, greedy choice equal in {row['argmax_equal']:.2%} of {row['tokens']} rows"
        )


def compare(path: str, num_prompts: int) -> dict[str, Any]:
    """The same tokens under both kinds of weights."""
    tokenizer = load_tokenizer(path)
    texts = [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:num_prompts]]
    losses, choices = {}, {}
    for kind in KINDS:
        lm = load_model(path, quantization=kind)
        texts = [text[: lm.context_length] for text in texts]
        losses[kind], choices[kind] = score(lm, texts)
    tokens = sum(len(text) - 1 for text in texts)
    return {
        "model": Path(path).name,
        "num_parameters": lm.num_parameters,
        "prompts": len(texts),
        "tokens": tokens,
        "perplexity": {kind or "float32": math.exp(loss / tokens) for kind, loss in losses.items()},
        "ratio": math.exp((losses["int8"] - losses[None]) / tokens),
        "argmax_equal": float((choices["int8"] == choices[None]).float().mean()),
    }


@torch.inference_mode()
def score(lm: CausalLM, texts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Negative log-likelihood in nats, summed over all tokens but the first of each text; and every row's argmax."""
    pool = KVPool(lm.shapes, max(len(text) for text in texts), lm.dtype, lm.device)
    total, choices = 0.0, []
    for number, text in enumerate(texts):
        if number % 50 == 0:
            say(f"  text {number} of {len(texts)}")
        logits = lm.forward(
            [RowGroup(pool.slots, 0, text, range(len(text) - 1))], pool
        ).logits  # [n - 1, vocab]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum")
        total += float(loss)
        choices.append(logits.argmax(-1))
    return total, torch.cat(choices)


if __name__ == "__main__":
    main()
