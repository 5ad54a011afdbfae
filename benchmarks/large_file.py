"""Whether a checkpoint of 8 G weights in 4 bits loads and answers in a process that may hold 8 GiB.

    python -m benchmarks.large_file --folder FOLDER [--memory-gib 8]

Writes a checkpoint of Llama 3 8B's shape with random codes in groups of 32 (compressed-tensors) into FOLDER, unless it
is there, 6.6 GB. Then a process of its own, whose memory a control group limits (Linux, as root), loads it and answers
one prompt. Pages of the file count too, as far as the system keeps them. Writes docs/benchmarks/large_file.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from slipstream.assets import EMBEDDED_TARGET
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance

RESULT = Path(__file__).parent.parent / "docs/benchmarks/large_file.json"
GROUPS = Path("/sys/fs/cgroup")
GROUP = 32
CONFIG = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)
WEIGHTS = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
ANSWER = """
import json, sys, time
from slipstream import LLM, SamplingParams
started = time.perf_counter()
llm = LLM(sys.argv[1], max_num_seqs=1, max_model_len=512, kv_cache_bytes=128 * 2**20)
loaded = time.perf_counter() - started
(output,) = llm.generate([list(range(100, 132))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
model = llm.engine.model
print(json.dumps({
    "weight_bytes": model.weight_bytes, "weights": model.weight_type, "kernels": model.kernels, "peak_bytes": peak,
    "loading_s": loaded, "num_answered": len(output.outputs[0].token_ids),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory-gib", type=float, default=8.0)
    options = parser.parse_args()
    if not (options.folder / "config.json").is_file():
        write(options.folder)
    with limited(round(options.memory_gib * 2**30)) as group:
        print("loading …", flush=True)
        done = subprocess.run(
            [sys.executable, "-c", ANSWER, str(options.folder)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
    if done.returncode:
        raise SystemExit(f"it did not load: exit status {done.returncode}, of -9 where memory ran out")
    told = json.loads(done.stdout.splitlines()[-1])
    files = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    result = {
        "provenance": {**provenance(), "instructions": instructions()},
        "limit_bytes": round(options.memory_gib * 2**30),
        "file_bytes": files,
        **told,
        "peak_over_weights": told["peak_bytes"] / told["weight_bytes"],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "provenance"}, indent=1))


def write(folder: Path) -> None:
    """A checkpoint file by file, one layer each. The numbers are random, and small enough for the layers behind."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}

    def put(number: int, tensors: dict[str, Tensor]) -> None:
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        print(f"wrote {name}", flush=True)

    def packed(name: str, out: int, width: int) -> dict[str, Tensor]:
        codes = torch.randint(-(2**31), 2**31 - 1, (out, width // 8), generator=generator, dtype=torch.int32)
        scales = torch.rand(out, width // GROUP, generator=generator) * 0.4 / width**0.5
        shape = torch.tensor([out, width])
        return {
            f"{name}.weight_packed": codes,
            f"{name}.weight_scale": scales.bfloat16(),
            f"{name}.weight_shape": shape,
        }

    def table() -> Tensor:
        return (torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator) * 0.02).bfloat16()

    ones = torch.ones(CONFIG.hidden_size, dtype=torch.bfloat16)
    hidden, inner = int(CONFIG.hidden_size), int(CONFIG.intermediate_size)
    narrow = hidden // CONFIG.num_attention_heads * int(CONFIG.num_key_value_heads or 0)
    put(0, {"model.embed_tokens.weight": table(), "model.norm.weight": ones})
    put(1, {"lm_head.weight": table()})
    for layer in range(CONFIG.num_hidden_layers):
        at = f"model.layers.{layer}"
        put(
            2 + layer,
            {
                f"{at}.input_layernorm.weight": ones.clone(),
                f"{at}.post_attention_layernorm.weight": ones.clone(),
                **packed(f"{at}.self_attn.q_proj", hidden, hidden),
                **packed(f"{at}.self_attn.k_proj", narrow, hidden),
                **packed(f"{at}.self_attn.v_proj", narrow, hidden),
                **packed(f"{at}.self_attn.o_proj", hidden, hidden),
                **packed(f"{at}.mlp.gate_proj", inner, hidden),
                **packed(f"{at}.mlp.up_proj", inner, hidden),
                **packed(f"{at}.mlp.down_proj", hidden, inner),
            },
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file in Path(EMBEDDED_TARGET).iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG.to_dict(), "quantization_config": WEIGHTS}))


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """A control group whose processes may hold so many bytes together."""
    second = GROUPS / "cgroup.controllers"
    parent, file = (
        (GROUPS, "memory.max") if second.is_file() else (GROUPS / "memory", "memory.limit_in_bytes")
    )
    group = parent / "slipstream-large-file"
    try:
        group.mkdir(exist_ok=True)
        (group / file).write_text(str(num_bytes))
    except OSError as error:
        raise SystemExit(f"memory cannot be limited here: {error}; run it as root on Linux") from None
    try:
        yield group
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
