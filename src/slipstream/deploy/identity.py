"""The fingerprint of an engine: of what it computes with, and of what decides the bits that it computes."""

from __future__ import annotations

import json
import platform

import torch

from slipstream.deploy.fingerprint import Fingerprint
from slipstream.engine.engine import Engine
from slipstream.models.files.digest import digest_of, digest_of_model


def fingerprint_of(engine: Engine) -> Fingerprint:
    """Return the fingerprint of the loaded target: its files, and its kernels, formats and number types.

    Where the fused decoder computes, its result is the same on every processor that has a build; elsewhere PyTorch's
    version, the processor's features and the number of threads can decide the last bits.
    """
    config, model = engine.config, engine.model
    about: dict[str, object] = {
        "kernels": model.kernels,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weight_type,
        "cache": str(model.cache_dtype).removeprefix("torch."),
        "fast_prompts": model.fast_prompts,
        "exact_rows": model.exact_rows,
        "max_model_len": engine.max_model_len,
    }
    if not model.is_fused or model.fast_prompts:
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        on_cpu = model.device.type == "cpu"
        about |= {
            "torch": torch.__version__,
            "device": processor if on_cpu else torch.cuda.get_device_name(model.device),
            "threads": model.num_threads,
        }
    words = json.dumps(about, sort_keys=True)
    digest = digest_of_model(config.model, config.tokenizer, config.lora)
    return Fingerprint(digest, digest_of(words.encode()), words)
