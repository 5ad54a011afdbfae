"""The CUDA path on a GPU: what it costs, and whether its bits are what they must be.

    PYTHONPATH=src python -m benchmarks.gpu.path --budget 500 --output FOLDER
    PYTHONPATH=src python -m benchmarks.gpu.path --parts bits,steps --output FOLDER
    PYTHONPATH=src python -m benchmarks.gpu.path --page --output FOLDER      # what was measured, into docs/benchmarks

`device`: copies, reads, and what launches and a graph's nodes cost. `kernels`: all compiled; attention and choice
against float64. `bits`: whether a row's bits depend on its pass. `steps`: target passes by rows and context, eager and
captured. `baseline`: Transformers' `generate`, compiled. `engine`: drafters against off. `tests`: tests/gpu.

Each part is a process of its own with a time limit, and leaves FOLDER/PART.json. A part that overruns is ended, and the
next begins. The same command goes on: parts that are finished are not measured again. It needs this checkout,
PyTorch for CUDA with its Triton, and Transformers, and nothing from the network.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.gpu.path import page
from benchmarks.gpu.path.runner import DONE, PARTS, Plan, run_parts
from benchmarks.harness.command import DOCS, command, names

NO_DEVICE = "no CUDA device: the CUDA path is measured on a GPU"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--budget", type=float, default=500, help="seconds for all parts together")
    parser.add_argument("--output", type=Path, required=True, help="folder of the parts' results")
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing; write the page of what is there"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        if page.read(options.output).keys() <= {"run"}:
            print(
                f"no results in {options.output}; measure first, with --output {options.output}",
                file=sys.stderr,
            )
            sys.exit(2)
        print(page.publish(options.output, DOCS))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, _stopped)
    limits_s = {name: float(seconds) for name, seconds in PARTS.items() if name in options.parts}
    options.output.mkdir(parents=True, exist_ok=True)
    outcomes = run_parts(Plan(limits_s, options.budget, options.output.resolve(), options.device))
    print(page.tables(page.read(options.output)))
    sys.exit(0 if all(each["outcome"] in DONE for each in outcomes.values()) else 1)


def _stopped(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
