"""Train the pairs: `python -m recipes.encoder_decoder_pair --out OUT`; a model that is there is not trained again."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from .plans import PLANS
from .train import TASKS, train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for OUT/t5/target, OUT/t5/draft, …")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("names", nargs="*", help="which of t5/target, t5/draft, …; all where none is named")
    options = parser.parse_args()
    every = [f"{family}/{role}" for family, plans in PLANS.items() for role in plans]
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"there is no model {unknown[0]!r}; train {', '.join(every)}")
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    for name in options.names or every:
        folder = options.out / name
        if (folder / "training.json").is_file():
            continue
        family, role = name.split("/")
        task, plan = TASKS[family](), PLANS[family][role]
        task.save(train(task, plan, name), folder)
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        said = {"plan": asdict(plan), "versions": versions}
        (folder / "training.json").write_text(json.dumps(said, indent=2) + "\n")
        print(f"{name}: {folder}", flush=True)


if __name__ == "__main__":
    main()
