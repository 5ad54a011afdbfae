"""llama.cpp's answers to `benchmarks.export_engines` by the wheels of `xllamacpp`, whose server runs in the process."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import urllib.request


def main() -> None:
    import xllamacpp

    request = json.load(sys.stdin)
    flags = dict(zip(request["argv"][::2], request["argv"][1::2], strict=True))
    params = xllamacpp.CommonParams()
    params.model.path = flags["--model"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 2048, 1, 0
    draft = params.speculative.draft
    draft.mparams.path, draft.n_max = flags["--spec-draft-model"], int(flags["--spec-draft-n-max"])
    draft.n_gpu_layers = 0
    kind = flags["--spec-type"].upper().replace("-", "_")
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    for threads in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads = 1
    for cache in (params, draft):
        cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    answers = [
        _answer(server.listening_address, prompt, length)
        for prompt, length in zip(request["prompts"], request["lengths"], strict=True)
    ]
    version = f"in xllamacpp {importlib.metadata.version('xllamacpp')}"
    print(json.dumps({"version": version, "answers": answers}), flush=True)


def _answer(url: str, prompt: list[int], length: int) -> list[object]:
    """Tokens, how many of them the answer began with, and target passes behind those."""
    body = {"prompt": prompt, "n_predict": length, "temperature": 0, "samplers": ["temperature"]}
    body |= {"return_tokens": True, "cache_prompt": False}
    asked = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=600) as stream:
        reply = json.load(stream)
    # it drafts no token that the length would cut, so every pass ends with a token of the target's own
    accepted = reply["timings"].get("draft_n_accepted", 0)
    return [reply["tokens"], 1, len(reply["tokens"]) - accepted - 1]


if __name__ == "__main__":
    main()
