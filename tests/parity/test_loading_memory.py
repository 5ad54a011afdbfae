"""Loading a 16-bit checkpoint never holds much more than its weights, as they are stored or as they are packed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

PROGRAM = """
import json, sys
from pathlib import Path
from slipstream.models import load_model

def kilobytes(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0])

load_model(sys.argv[1])  # libraries, kernels, threads
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the largest size
model = load_model(sys.argv[2], **json.loads(sys.argv[3]))
print(json.dumps({"peak": (kilobytes("VmHWM") - before) * 1024, "held": model.weight_bytes}))
"""


def save_llama(folder: Path, **sizes: int) -> Path:
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float32"}, {"dtype": "float32", "quantization": "int8"}], ids=str
)
@pytest.mark.parametrize("tied", [True, False])
def test_it_holds_the_weights_and_a_layer(tied: bool, options: dict[str, str], tmp_path: Path) -> None:
    layers = 12
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers, "vocab_size": 4096}
    large = save_llama(tmp_path / "large", **shape, tie_word_embeddings=tied)
    small = save_llama(
        tmp_path / "small", hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small), str(large), json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["held"] < (180 if options == {"dtype": "float32"} else 90) * 2**20
    layer = found["held"] / layers
    rest = 20 * 2**20  # what is widened at a time, and Python's own
    if (
        "quantization" in options
    ):  # the check at load holds a layer as it was and as it is packed, both in float32
        rest += 2 * 4 * (4 * 512 * 512 + 3 * 512 * 1536)
    assert found["peak"] < found["held"] + 2 * layer + rest, found
