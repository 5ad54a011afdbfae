"""What a start imports, counted in processes of their own: only what a decoder, or a server, uses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

UNUSED = (
    "accelerate",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.generation.continuous_batching.continuous_api",
    "transformers.integrations.flash_attention",
    "transformers.integrations.flex_attention",
    "transformers.loss.loss_for_object_detection",
)
"""`torch.distributed` itself and `torch.export` are imported by `import torch`."""

STEPS = f"""
import json, sys
def imported():
    return {{"unused": [name for name in {(*UNUSED, "fastapi")!r} if name in sys.modules], "all": len(sys.modules)}}
found = {{}}
from slipstream import LLM, AsyncEngine, SamplingParams
found["imported"] = imported()
from slipstream.assets import EMBEDDED_DRAFT
drafter = {{"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 2}}
auto = {{"method": "auto", "drafters": [{{"method": "suffix"}}, drafter]}}
llm = LLM(speculative_config=auto, max_num_seqs=2, num_threads=1)
text = llm.generate("Once", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
import torch
from slipstream.models.huggingface import creating_models
with creating_models(llm.engine.model.config):  # as Transformers does for weights that a file names otherwise
    moved = torch.empty_like(torch.empty(2, device="meta"), device="cpu")
assert (moved.device.type, len(moved)) == ("cpu", 2)
found["answered"] = imported()
from starlette.testclient import TestClient
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
with TestClient(create_app(AsyncEngine(engine=llm.engine), ServeConfig(), "embedded")) as client:
    body = {{"model": "embedded", "prompt": "Once", "max_tokens": 24, "temperature": 0}}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
found["served"] = imported()
from slipstream.config import SpeculativeConfig
from slipstream.engine.description import describe
describe(llm.engine.config, SpeculativeConfig())
found["described"] = imported()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Step to what was imported by then; one process goes through all of them."""
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    steps: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return steps


@pytest.mark.parametrize(
    ("step", "most"),
    [("imported", 1900), ("answered", 1950), ("served", 2250), ("described", 2300)],
    ids=["imported", "answered", "served", "described"],
)
def test_a_start_imports_only_what_it_uses(found: dict[str, Any], step: str, most: int) -> None:
    """With all that `from transformers import AutoModelForCausalLM` brings there are over 3,000 modules."""
    allowed = {"served": {"fastapi"}, "described": {"fastapi"}}
    unused = set(found[step]["unused"]) - allowed.get(step, set())
    assert not unused
    assert found[step]["all"] <= most


HELP = """
import json, sys
from slipstream.cli.main import app
try:
    app(["--help"])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""


def test_help_imports_neither_models_nor_servers() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    modules = set(json.loads(run.stdout.splitlines()[-1]))
    assert not modules & {
        "torch",
        "transformers",
        "numpy",
        "scipy",
        "fastapi",
        "matplotlib",
        "huggingface_hub",
    }
    assert len(modules) <= 700


AFTERWARDS = """
import torch
import slipstream.models.huggingface as ours
from slipstream.models.deferred import Placeholder
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
import sys, transformers
assert transformers.LlamaForCausalLM is LlamaForCausalLM
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
torch.manual_seed(0)
model = ours.AutoModelForCausalLM.from_config(config).eval()
ids = torch.tensor([[1, 2, 3]])
model.generate(ids, max_new_tokens=2)
assert callable(model.generate_batch)
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
assert model.generate_batch.__func__ is ContinuousMixin.generate_batch
compiled = torch.compile(model, backend="eager")
assert torch.allclose(compiled(ids).logits, model(ids).logits)
left = [
    (module.__name__, name)
    for module in list(sys.modules.values()) for name, value in list(vars(module).items())
    if type(value) is Placeholder
]
assert not left, left
"""


@pytest.mark.long
def test_a_program_that_uses_transformers_too_finds_all_of_it() -> None:
    """Generation, continuous batching and PyTorch's compiler, after Slipstream deferred what they use."""
    run = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


FAMILIES = """
import slipstream.models.huggingface as ours
mapping, failed = ours.MODEL_FOR_CAUSAL_LM_MAPPING, {}
for name in list(mapping._model_mapping):
    config = mapping._load_attr_from_module(name, mapping._config_mapping[name])
    try:
        ours.model_class(config.__new__(config))
    except Exception as error:
        failed[name] = repr(error)
assert not failed, failed
import sys
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.long
def test_the_file_of_every_family_is_imported_without_the_rest() -> None:
    """Some look into what is deferred while they are imported; Gemma 3's, for one, into processors."""
    run = subprocess.run([sys.executable, "-c", FAMILIES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


GEMMA = """
import slipstream.models.huggingface as ours
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
assert ours.model_class(Gemma3TextConfig()).__name__ == "Gemma3ForCausalLM"
import sys
assert not {"scipy", "torch._dynamo", "torch.distributed.tensor"} & {*sys.modules}
"""


def test_a_family_whose_file_looks_into_processors_is_imported() -> None:
    run = subprocess.run([sys.executable, "-c", GEMMA], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
