"""Slipstream on a CUDA GPU: what runs, how fast, and what limits it.

    python -m benchmarks.gpu                           # all sections, some ten minutes on an H100
    python -m benchmarks.gpu --quick --output FOLDER   # a rough look, docs/benchmarks as it is
    python -m benchmarks.gpu --sections step,transfers --output FOLDER

`device`: name, memory, the rate of a copy and of a matrix product. `tests`: tests/gpu. `speed`: each drafter against
speculation off, on the embedded target and on one that is cost-expanded to 1G. `step`: a target step by rows, beside
the least time in which the memory could give what it reads. `transfers`: the calls that wait for the device.

Without `--output` the result is docs/benchmarks/gpu.json, and docs/benchmarks/gpu.md gets its tables.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import page
from benchmarks.gpu.suite import run_tests
from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept
from benchmarks.harness.models import expanded

SECTIONS = ("device", "tests", "speed", "step", "transfers")
NO_DEVICE = "no CUDA device; this agenda needs one"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells, fewer repeats; needs --output")
    some = f"some of {', '.join(SECTIONS)}"
    parser.add_argument("--sections", type=names(SECTIONS), default=list(SECTIONS), help=some)
    parser.add_argument("--output", type=Path, help="folder for gpu.json and gpu.md")
    options = parser.parse_args()
    sections = options.sections
    if options.output is None and (options.quick or set(sections) != set(SECTIONS)):
        parser.error("--quick and --sections need --output FOLDER; the page is of one whole run")
    if not torch.cuda.is_available():
        sys.exit(NO_DEVICE)
    folder: Path = options.output or DOCS
    result = measure(folder / "gpu.json", sections, quick=options.quick)
    page.write(result, folder / "gpu.md")
    print(page.tables(result))


def _speed(
    model: Callable[[], str | None], dtype: str, concurrency: int, lengths: dict[str, Any]
) -> dict[str, Any]:
    from benchmarks.gpu import speed

    return speed.measure(model(), dtype, concurrency, **lengths)


def measure(file: Path, sections: list[str], *, quick: bool) -> dict[str, Any]:
    """The result, written to `file`; cells of a run that was stopped are not measured again."""
    from benchmarks.gpu import device, speed, step

    settings = {"quick": quick, "sections": sections, "device": torch.cuda.get_device_name()}
    kept = Kept(file, settings, driver=device.driver(), cuda=torch.version.cuda)
    result: dict[str, Any] = {"provenance": kept.origin, "quick": quick}
    result["device"] = kept.cell("device", lambda: {**device.description(), **device.rates()})
    if "tests" in sections:
        result["tests"] = kept.cell("tests", run_tests)
    with tempfile.TemporaryDirectory() as folder:
        # 4,096 positions are for the times at long contexts; no text here is as long
        larger = partial(expanded, Path(folder) / "1G", 10**9, dtype="bfloat16", positions=4096)
        if "step" in sections:
            rate = result["device"]["copy_gb_per_s"]
            result["step"] = kept.cell("step", lambda: step.by_rows(larger(), "bfloat16", rate, quick=quick))
        if "transfers" in sections:
            result["transfers"] = kept.cell("transfers", lambda: step.transfers(larger(), "bfloat16"))
        if "speed" in sections:
            result["self"] = kept.cell("self", speed.refusal)
            result["speed"] = []
            lengths: dict[str, Any] = {"max_tokens": 16 if quick else 32, "repeats": 1 if quick else 2}
            for name, dtype, model in _targets(larger, quick):
                for concurrency in speed.CONCURRENCIES:
                    cell = f"speed, {name} {dtype}, {concurrency} at once"
                    row = kept.cell(cell, partial(_speed, model, dtype, concurrency, lengths))
                    result["speed"].append({**row, "model": name})
    kept.finish(result)
    return result


def _targets(larger: Callable[[], str], quick: bool) -> list[tuple[str, str, Callable[[], str | None]]]:
    """Name, dtype and where the checkpoint is, None being the embedded one."""
    embedded = [("embedded target", dtype, lambda: None) for dtype in ("float16", "bfloat16", "float32")]
    return [("cost-expanded to 1G", "bfloat16", larger), *embedded[: 1 if quick else None]]


if __name__ == "__main__":
    main()
