"""Models in codes on a GPU beside the same codes on a CPU, in the decoder's stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.assets import EMBEDDED_TARGET
from slipstream.models import load_model
from slipstream.models.executor.cuda_kernels import CudaKernels
from tests.cuda.coded_cases import DECODER, error, logits
from tests.kit.quantised_folders import gptq_folder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["int8", "int4", "int4_g128", "GPTQ"])
def test_codes_on_a_gpu(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": name}
    folder = EMBEDDED_TARGET
    if name == "GPTQ":
        folder, options = str(gptq_folder(tmp_path / "m", EMBEDDED_TARGET, 32, act_order=True)), {}
    ours = load_model(folder, device="cuda", **options)
    theirs = load_model(folder, **DECODER, **options)
    assert isinstance(ours.executor, CudaKernels)
    assert ours.weight_type == theirs.weight_type
    assert ours.executor.footprint() == theirs.executor.footprint() or ours.dtype != theirs.dtype
    assert error(logits(ours).cpu(), logits(theirs)) < 0.08
