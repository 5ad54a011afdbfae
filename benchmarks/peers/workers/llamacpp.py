"""llama.cpp's own server, built from the sources in llama-cpp-python's package, over HTTP on this machine.

`options` of a mode: `arguments`, more of the server's arguments. llama-cpp-python's own loop has no drafts from a GGUF
model; the server has.

Checkpoints become GGUF files here, with every tensor as it is, by llama.cpp's own `gguf` package: its converter
refuses tokenizers that it does not know by name.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import http.client
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.loop import Answers, Loaded, Refused, serve

START_TIMEOUT_S = 120
GGUF_TYPES = {"bfloat16": "BF16", "Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K_M": "Q4_K_M"}
BINARIES = Path(os.environ.get("LLAMA_BINARIES", f"{sys.prefix}/bin"))


class LlamaServer:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        bodies = [
            {
                "prompt": prompt,
                "n_predict": max_tokens,
                "temperature": 0,
                "samplers": ["temperature"],
                "ignore_eos": True,
                "cache_prompt": False,  # the same prompts come again in every round
                "return_tokens": True,
                **options,
            }
            for prompt in prompts
        ]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            started_s = time.perf_counter()
            answers = list(pool.map(self._post, bodies))
            seconds = time.perf_counter() - started_s
        first_ms = min(answer["timings"]["prompt_ms"] for answer in answers)
        return Answers([answer["tokens"] for answer in answers], seconds, first_ms / 1e3)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise Refused(f"llama-server answered {response.status}: {answer}")
        return dict(answer)


FALLBACK = BINARIES / "llama-server-without-amx"
"""Server of `environments.LLAMA_FALLBACK`; it is there on processors with AMX alone."""


class Crashed(Refused):
    """The server died of a signal while it started, when it computes its first pass."""


def load(request: dict[str, Any]) -> Loaded:
    try:
        return _load(request, BINARIES / "llama-server", [])
    except Crashed:
        if not FALLBACK.is_file():
            raise
        return _load(request, FALLBACK, ["built without AMX: with it, it crashes here"])


def _load(request: dict[str, Any], server: Path, remarks: list[str]) -> Loaded:
    exact = request["weights"] == "float32"
    slots = request["max_num_seqs"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = request["options"].get("arguments", [])
    command = [
        *(str(server), "--model", request["target"]),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(request["threads"]), "--threads-batch", str(request["threads"])),
        *("--parallel", str(slots), "--ctx-size", str(slots * request["max_model_len"])),
        *(("--cache-type-k", "f32", "--cache-type-v", "f32") if exact else ()),
        *("--cache-ram", "0"),
        *extra,
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(process.kill)  # when the driver goes away, so do both
    backend = LlamaServer(process, port)
    _wait_until_ready(process, port)
    version = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=False)
    about = (version.stdout + version.stderr).strip().splitlines()
    lines = [line for line in about if line.startswith("version")]
    notes = [
        "float32 weights and cache" if exact else f"{request['weights']} weights, float16 cache",
        "prompt cache off, llama-server",
        *([" ".join(extra)] if extra else []),
        *remarks,
    ]
    return Loaded(
        backend,
        {"llama.cpp": lines[0].removeprefix("version: ") if lines else "unknown"},
        [note.replace(request["draft"], "DRAFT") for note in notes],
    )


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            kind = Crashed if process.returncode < 0 else Refused
            raise kind(f"llama-server ended with {process.returncode} while it started")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise Refused(f"llama-server was not ready after {START_TIMEOUT_S} s")


def convert(source: Path, target: Path, weights: str) -> None:
    """Write a Llama checkpoint with tied embeddings as GGUF; other types than float32 are llama.cpp's own work."""
    if weights == "float32":
        _write(source, target, widen=True)
        return
    exact = target.with_name(target.name + ".stored")
    _write(source, exact, widen=False)
    command = [str(BINARIES / "llama-quantize"), str(exact), str(target), GGUF_TYPES[weights]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    exact.unlink()
    if done.returncode:
        raise Refused(f"llama-quantize ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")


def _write(source: Path, target: Path, widen: bool) -> None:
    """Every tensor in float32, or, unless `widen`, matrices in bfloat16 as they are. Holds one tensor at a time."""
    import gguf
    import numpy as np

    config = json.loads((source / "config.json").read_text())
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if widen else gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, gguf, json.loads((source / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors = list(_tensors(source / "model.safetensors", widen))
    for tensor in tensors:
        kept = gguf.GGMLQuantizationType.BF16 if tensor.is_kept else None
        name = names.get_name(tensor.name, try_suffixes=(".weight",))
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = tensor.read()
        if tensor.name.endswith("q_proj.weight"):
            values = _interleaved(values, heads)
        elif tensor.name.endswith("k_proj.weight"):
            values = _interleaved(values, kv_heads)
        writer.write_tensor_data(np.ascontiguousarray(values))
    writer.close()


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a checkpoint's file: where it lies, and whether its bfloat16 is kept as it is."""

    file: Path
    name: str
    shape: tuple[int, ...]
    stored: str
    begin: int
    is_kept: bool

    @property
    def num_bytes(self) -> int:
        """As it is written."""
        return math.prod(self.shape) * (2 if self.is_kept else 4)

    def read(self) -> Any:
        """Its values in float32, or its bfloat16 as 16-bit integers: NumPy has no bfloat16."""
        import numpy as np

        kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[self.stored]
        values = np.fromfile(self.file, kind, math.prod(self.shape), offset=self.begin).reshape(self.shape)
        if self.is_kept:
            return values
        return (
            (values.astype(np.uint32) << 16).view(np.float32)
            if self.stored == "BF16"
            else values.astype(np.float32)
        )


def _tensors(file: Path, widen: bool) -> Iterator[_Tensor]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, about in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(about["shape"])
        is_kept = not widen and about["dtype"] == "BF16" and len(shape) == 2
        yield _Tensor(file, name, shape, about["dtype"], 8 + size + about["data_offsets"][0], is_kept)


def _interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring pairs, Transformers halves: reorder the rows of each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: Any, gguf: Any, tokenizer: dict[str, Any]) -> None:
    """The vocabulary under neutral names for the special tokens.

    llama.cpp ends an answer at any token that is *called* like an end token, and forbids such tokens when told to
    ignore the end; neutral names let the end token pass like any other, as it does in the other engines.
    """
    special = {token["id"]: f"[special {token['id']}]" for token in tokenizer["added_tokens"]}
    vocabulary = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    ids = range(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([vocabulary[index] for index in ids])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in ids]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)  # padding, which the model never writes
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    serve(load, convert)
