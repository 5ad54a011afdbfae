"""`slipstream quantize`: saves a checkpoint with weights of 4 or 8 bits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from slipstream.cli.flags.flags import filled, with_flags
from slipstream.cli.output.console import print_rows, results, stderr
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import check_folder
from slipstream.core.model_path import check_model_path
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.tools.quantize.calibration import LayerDone
    from slipstream.tools.quantize.job import SavedCheckpoint


@dataclass(frozen=True, kw_only=True)
class QuantizeFlags:
    """What is quantised, and how."""

    model: Annotated[str, Argument()]
    """Checkpoint folder or hub id, or a GGUF file in 16 or 32 bits; `embedded` is the embedded target."""
    out: Annotated[Path, Argument()]
    """A new folder for the quantised checkpoint."""
    quantization: str = "int4"
    """int4 (4 bits in groups of 32 inputs), int4_g64, int4_g128, or int8 (8 bits, a scale an output)."""
    calibration: bool = True
    """Round weights so that a layer's outputs on sample text change least (GPTQ); else to the nearest."""
    data: Path | None = None
    """The text to calibrate on: JSON lines with `messages`, `text` or `prompt`. Text like what the model will serve is
    best; by default the bundled sample conversations."""
    num_texts: int = 128
    """Rows of text to calibrate on."""
    length: int = 512
    """Tokens of a row."""
    seed: int = 0
    """Seed of the choice of texts."""


@with_flags
def quantize(flags: QuantizeFlags) -> None:
    """Save MODEL with weights of 4 or 8 bits into OUT, in a layout of compressed-tensors.

    The linear layers of the decoder are rounded; embedding, norms, experts and output layer stay as they are. The
    formats of 4 bits are written as W4A16 in groups, int8 as W8A8 with activations that are rounded row by row as they
    come.
    """
    model, out = flags.model, flags.out
    if flags.data is not None and not flags.calibration:
        raise ConfigError("--data is read for calibration; leave it out, or --no-calibration")
    check_folder(out, "OUT")
    from slipstream.assets import EMBEDDED_TARGET

    if model != "embedded":
        check_model_path(model)
    say_loading(model)

    from slipstream.tools.quantize.job import QuantizeOptions, quantise

    path = EMBEDDED_TARGET if model == "embedded" else model
    outcome = quantise(path, out, filled(QuantizeOptions, flags), flags.data, _Reporter())
    if 0 < outcome.num_rows < flags.num_texts:
        few = f"there was text for {outcome.num_rows} rows of the {flags.num_texts} requested"
        stderr().print(f"{few}; with little text, calibration gains little", markup=False)
    print_rows(results(), [("model", f"{model} in {flags.quantization}"), *_rows(outcome, out)])


def _rows(outcome: SavedCheckpoint, out: Path) -> list[tuple[str, str]]:
    rows = [
        (
            "weights",
            f"{outcome.bytes_before / 2**20:,.1f} MiB before, {outcome.bytes_after / 2**20:,.1f} after",
        ),
        ("time", f"{outcome.seconds:,.0f} s"),
        ("written", str(out)),
    ]
    if outcome.mean_lost is not None:
        lost = (
            f"{outcome.mean_lost:.2g} of the layers' outputs on {outcome.num_tokens:,} tokens (energy, mean)"
        )
        rows.insert(1, ("rounded away", lost))
    if outcome.bytes_left:
        left = (
            f"{outcome.bytes_left / 2**20:,.1f} MiB of experts and routers; --quantization int8 or int4 rounds experts "
            "where OUT is loaded"
        )
        rows.insert(1, ("not rounded", left))
    return rows


class _Reporter:
    """Prints a line a layer, at intervals."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, done: LayerDone) -> Any:
        now = time.monotonic()
        if now - self._said_s < self._every_s and done.number < done.count:
            return
        self._said_s = now
        left = (done.count - done.number) * (now - self._began_s) / done.number
        stderr().print(f"layer {done.number} of {done.count}, {left:,.0f} s left", markup=False)
