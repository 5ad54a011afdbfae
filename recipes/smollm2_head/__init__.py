"""A drafting head for SmolLM2-135M-Instruct, from prompts to checkpoints and their acceptance length.

| stage | does | needs |
|---|---|---|
| `prompts` | tokenises the prompts, without those that the evaluation asks | Slipstream |
| `answers` | lets the target answer them, in batches | PyTorch |
| `train` | trains a head on the answers, and counts its acceptance length without an engine | PyTorch, Transformers |

All but the first run on a GPU machine that has nothing else. Every stage goes on where it was stopped.
"""
