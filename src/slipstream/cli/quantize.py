"""`slipstream quantize`: saves a checkpoint with weights of 4 or 8 bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.output.console import notes, print_rows, results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import check_folder
from slipstream.core.model_path import check_model_path
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.tools.quantize.calibration import LayerDone


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder or hub id, or a GGUF file in 16 or 32 bits; `embedded` is the embedded target."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the quantised checkpoint.")],
    quantization: Annotated[
        str,
        typer.Option(
            help="int4 (4 bits in groups of 32 inputs), int4_g64, int4_g128, or int8 (8 bits, a scale an output)."
        ),
    ] = "int4",
    calibration: Annotated[
        bool,
        typer.Option(
            help="Round weights so that a layer's outputs on sample text change least (GPTQ); else to the nearest."
        ),
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The text to calibrate on: JSON lines with `messages`, `text` or `prompt`. Text like what the model "
            "will serve is best; by default the bundled sample conversations."
        ),
    ] = None,
    num_texts: Annotated[int, typer.Option(help="Rows of text to calibrate on.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the choice of texts.")] = 0,
) -> None:
    """Save MODEL with weights of 4 or 8 bits into OUT, in a layout of compressed-tensors.

    The linear layers of the decoder are rounded; embedding, norms, experts and output layer stay as they are. The
    formats of 4 bits are written as W4A16 in groups, int8 as W8A8 with activations that are rounded row by row as they
    come.
    """
    if data is not None and not calibration:
        raise ConfigError("--data is read for calibration; leave it out, or --no-calibration")
    check_folder(out, "OUT")
    from slipstream.assets import EMBEDDED_TARGET

    if model != "embedded":
        check_model_path(model)
    say_loading(model)

    from slipstream.tools.quantize.job import QuantizeOptions, quantise

    options = QuantizeOptions(quantization, calibration, num_texts, length, seed)
    path = EMBEDDED_TARGET if model == "embedded" else model
    outcome = quantise(path, out, options, data, _Reporter())
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
    if 0 < outcome.num_rows < num_texts:
        few = f"there was text for {outcome.num_rows} rows of the {num_texts} asked for"
        notes().print(f"{few}; with little text, calibration gains little", markup=False)
    print_rows(results(), [("model", f"{model} in {quantization}"), *rows])


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
        notes().print(f"layer {done.number} of {done.count}, {left:,.0f} s left", markup=False)
