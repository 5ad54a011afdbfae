"""Train the pair: `python -m recipes.reasoning_pair --out OUT`; run again, it goes on where it was."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers

from .tokenizer import make_tokenizer
from .train import PLANS, provenance, train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for OUT/target and OUT/draft")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; one is faster than two for models this small"
    )
    parser.add_argument("names", nargs="*", help="which models; all where none is named")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in PLANS]:
        parser.error(f"there is no model {unknown[0]!r}; train {' or '.join(PLANS)}")
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    for name in options.names or PLANS:
        folder = options.out / name
        model = train(PLANS[name], name, tokenizer, options.out / f"{name}.pt")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        said = {"plan": provenance(PLANS[name]), "versions": versions}
        (folder / "training.json").write_text(json.dumps(said, indent=2) + "\n")
        print(f"{name}: {folder}", flush=True)


if __name__ == "__main__":
    main()
