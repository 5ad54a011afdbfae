"""Train every kind of drafter for the embedded target, one after another.

    python -m recipes.drafters --data DATA/train.jsonl --out OUT                  # about three hours on two cores
    python -m recipes.drafters --data DATA/train.jsonl --out OUT --minutes 1 --num-prompts 200   # does it run at all?

Each step is one `slipstream train` command, printed before it runs. A stopped run goes on where it was; what is done is
not done again. What comes out is measured by `python -m benchmarks.drafters --trained OUT`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream.assets import EMBEDDED_DRAFT


def steps(data: Path, out: Path, num_prompts: int, minutes: float, threads: int) -> Iterator[list[str]]:
    """The arguments of `slipstream`, step by step."""
    answers = out / "answers.jsonl"
    yield [
        *("train", "regenerate", "--data", str(data), "--output", str(answers)),
        *("--num-prompts", str(num_prompts), "--temperature", "0,0.8", "--max-tokens", "192"),
        *("--num-threads", str(threads)),
    ]
    common = [
        *("--data", str(answers), "--time-limit-minutes", str(minutes), "--threads", str(threads)),
        *("--dtype", "bfloat16", "--optimizer", "muon"),
    ]
    yield ["train", "draft", *common, "--output", str(out / "draft"), "--init", EMBEDDED_DRAFT]
    yield ["train", "eagle3", *common, "--output", str(out / "eagle3")]
    yield ["train", "eagle", *common, "--output", str(out / "eagle")]
    yield ["train", "medusa", *common, "--output", str(out / "medusa"), "--shares-lm-head"]
    yield ["train", "hydra", *common, "--output", str(out / "hydra"), "--shares-lm-head"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="conversations, one JSON object a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=9000)
    parser.add_argument("--minutes", type=float, default=25, help="of training, each")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for step in steps(options.data, options.out, options.num_prompts, options.minutes, options.threads):
        print(f"$ slipstream {shlex.join(step)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "slipstream.cli.main", *step], check=False).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
