"""What docs/extend shows how to add works from an installed package, by the entry point that its page names.

The pages' programs, which register by a call, run in test_docs.py.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import ProposalKind
from slipstream.draft.heads.checkpoints import write_checkpoint
from slipstream.draft.methods import TargetFeatures
from slipstream.draft.registry import create_drafter, drafter_names, method_spec
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError, ModelError
from slipstream.models import adapt
from slipstream.models.attention.base import ModelTraits
from slipstream.models.attention.registry import choose_backend
from slipstream.models.linear.formats import WEIGHT_FORMATS
from slipstream.models.mixers.registry import recurrences
from slipstream.plan.planner import Planner
from slipstream.plan.process import USUAL
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.testing.conformance import check_drafter
from slipstream.testing.enumeration import Target, exactness_gap
from slipstream.testing.stub_drafters import draft_context
from slipstream.testing.table_model import CHAIN_3, SIBLINGS_2, TWO_LEVELS, TableDrafter, TableModel
from slipstream.testing.weight_formats import check_weight_format
from slipstream.verify.registry import VERIFIERS, create_verifier
from tests.kit.marks import needs_kernels

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/extend"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md"))
TREE = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4, "tree_top_k": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

Install = Callable[[str], str]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes what a page shows an installed package, and returns the name that its entry point gives.

    The programs before "Prove it" are the package's module.
    """

    def make(page: str) -> str:
        text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
        [entry_points] = blocks(text, "toml")
        named = re.fullmatch(
            r'\[project\.entry-points\."(.+)"\]\n(\w+) = "my_package\.(\w+):\w+"\n', entry_points
        )
        assert named is not None, entry_points
        group, name, module = named.groups()
        package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
        for folder in (package, info):
            folder.mkdir()
        program = "\n\n".join(blocks(text.split("\n## Prove it\n")[0], "python"))
        (package / "__init__.py").write_text("")
        (package / f"{module}.py").write_text(program, encoding="utf-8")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            entry_points.replace(f'[project.entry-points."{group}"]', f"[{group}]").replace('"', "")
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return ["1, 2, 3, 1, 2, 3, 1, 2, 3,", "Show me how to use the command `tar`.", "Once upon a time"]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list[list[int]]:
    """The texts of the model by itself, computed by PyTorch."""
    return texts(LLM(attention_backend="packed"), prompts)


def texts(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def tiny(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()


SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


# --- drafter ----------------------------------------------------------------------------------------------------


def test_the_drafter_keeps_the_contract(install: Install) -> None:
    name = install("drafter")
    assert name in drafter_names()
    config = SpeculativeConfig(name, options={"period": 3})
    check_drafter(lambda: create_drafter(config, draft_context(vocab_size=50)), vocab_size=50)
    with pytest.raises(ConfigError, match="did you mean 'period'"):
        ParsedSpeculation.of(SpeculativeConfig(name, options={"perod": 3}))
    with pytest.raises(ConfigError, match="period must be a whole number of at least 1, got 0"):
        ParsedSpeculation.of(SpeculativeConfig(name, options={"period": 0}))


def test_the_drafter_drafts_and_changes_no_text(
    install: Install, prompts: list[str], plain: list[list[int]]
) -> None:
    llm = LLM(speculative_config={"method": install("drafter"), "period": 6}, attention_backend="packed")
    outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    assert llm.engine.drafting.num_failures == 0


# --- head with its proposer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, {"tree_top_k": 3}, {"tree_choices": [[0], [1], [0, 0]]}])
def test_the_head_drafts_and_changes_no_text(
    install: Install, prompts: list[str], plain: list[list[int]], tmp_path: Path, shape: dict[str, Any]
) -> None:
    """With weights that leave the target's state as it is: a poor draft."""
    name, folder = install("head"), str(tmp_path / "head")
    lm = LLM(attention_backend="packed").engine.model
    sizes = {"hidden_size": lm.hidden_size, "vocab_size": lm.vocab_size}
    weight = torch.eye(lm.hidden_size, 2 * lm.hidden_size)
    write_checkpoint(folder, sizes, {"roll.weight": weight})
    speculation = {"method": name, "model": folder, **shape}
    llm = LLM(speculative_config=speculation, attention_backend="packed")
    outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs)
    assert llm.engine.drafting.num_failures == 0
    config = EngineConfig(model=EMBEDDED_TARGET)
    planned = Planner(config, SpeculativeConfig.from_mapping(speculation), USUAL).draft
    assert planned.traits.feature_layers == (lm.num_layers,)
    assert planned.head_bytes == llm.engine.drafter.memory_bytes() == weight.nbytes // 2, (
        "16 bits, as the target"
    )


def test_the_head_refuses_weights_that_are_not_its_own(install: Install, tmp_path: Path) -> None:
    name, folder = install("head"), str(tmp_path / "head")
    write_checkpoint(folder, {}, {"roll.weight": torch.zeros(2, 4)})
    with pytest.raises(ModelError, match=r"has roll\.weight of shape \[2, 4\]"):
        LLM(speculative_config={"method": name, "model": folder})
    context = draft_context(vocab_size=50)
    with pytest.raises(ConfigError, match="rolling reads the target's hidden states"):
        create_drafter(SpeculativeConfig(name, options={"model": folder}), context)
    spec = method_spec(name)
    assert spec is not None
    assert (spec.name, spec.is_head, spec.features) == (name, True, TargetFeatures.LAST)


# --- verifier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), CHAIN_3, SIBLINGS_2, TWO_LEVELS])
def test_the_verifier_is_exact(install: Install, shape: tuple[int, ...]) -> None:
    verifier = create_verifier(install("verifier"))
    params = SamplingParams(temperature=0.7, top_k=2, frequency_penalty=0.5)
    target = Target(TableModel(vocab_size=3, seed=4), params, prompt=(1, 0))
    assert len(verifier.kinds) == 3
    for kind in verifier.kinds:
        drafter = TableDrafter(TableModel(vocab_size=3, seed=5).log_probs, shape, kind)
        assert exactness_gap(target, drafter, verifier, num_tokens=4) < 1e-12


def test_an_engine_runs_the_verifier(install: Install, prompts: list[str], plain: list[list[int]]) -> None:
    name = install("verifier")
    llm = LLM(speculative_config={**TREE, "verifier": name}, attention_backend="packed")
    assert texts(llm, prompts) == plain
    assert ProposalKind.COUPLED not in llm.engine.drafter.traits.kinds
    [output] = llm.generate(prompts[:1], SamplingParams(temperature=0.8, max_tokens=16, seed=1))
    assert output.metrics.num_accepted_tokens > 0
    assert not output.outputs[0].reproducible
    assert VERIFIERS.load(name).traits().name == "DrawingVerifier", "messages call it by its class"


# --- attention backend ------------------------------------------------------------------------------------------


def test_the_backend_gives_the_texts_of_the_built_in_one(
    install: Install, prompts: list[str], plain: list[list[int]]
) -> None:
    """Several sequences in chunks, trees, and a prefix that is reused."""
    llm = LLM(
        speculative_config=TREE,
        attention_backend=install("attention-backend"),
        max_num_batched_tokens=64,
    )
    assert type(llm.engine.model.backend).__name__ == "PlainBackend"
    outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    assert all(output.metrics.num_accepted_tokens > 0 for output in outputs)
    assert texts(llm, prompts) == plain


def test_the_backend_computes_sliding_windows_and_refuses_what_it_cannot(install: Install) -> None:
    name = install("attention-backend")
    windowed = {"sliding_window": 3, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
    mistral = MistralConfig(**SMALL, **windowed)
    assert type(adapt(tiny(mistral), attention_backend=name).backend).__name__ == "PlainBackend"
    falcon = ModelTraits(FalconConfig(), torch.device("cpu"), torch.float32, native=True)
    with pytest.raises(
        ConfigError, match=f"'{name}' cannot run falcon: its attention reads keys from a cache"
    ):
        choose_backend(name, falcon)
    gemma = Gemma2Config(**SMALL, num_key_value_heads=2, intermediate_size=96, head_dim=16)
    with pytest.raises(ConfigError, match=f"'{name}' cannot run gemma2: its attention has capped logits"):
        adapt(tiny(gemma), attention_backend=name)


# --- executor ---------------------------------------------------------------------------------------------------


def test_the_executor_gives_the_texts_of_the_built_in_one(
    install: Install, prompts: list[str], plain: list[list[int]]
) -> None:
    """Of a target and of a draft model, whose chains and trees it computes too."""
    name = install("executor")
    for speculation in (None, {**TREE, "tree_top_k": 1}, TREE):
        llm = LLM(speculative_config=speculation, executor=name, max_num_batched_tokens=64)
        assert type(llm.engine.model.executor).__name__ == "AloneExecutor"
        outputs = llm.generate(prompts, GREEDY)
        assert [list(output.outputs[0].token_ids) for output in outputs] == plain
        assert speculation is None or all(output.metrics.num_accepted_tokens > 0 for output in outputs)


# --- weight format and family -----------------------------------------------------------------------------------


def test_the_weight_format_keeps_the_contract(install: Install) -> None:
    check_weight_format(WEIGHT_FORMATS.load(install("weight-format"))(), same_bits=False)


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineModel(LlamaForCausalLM):
    config_class = MineConfig
    __module__ = "my_package.families"


@needs_kernels
def test_the_family_is_fused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, MineConfig, MineModel)
    config = MineConfig(**SMALL, num_key_value_heads=2, intermediate_size=96, head_dim=16)
    assert adapt(tiny(config)).kernels == "native", "layer by layer"
    assert install("fused-family") == "mine"
    assert adapt(tiny(config)).kernels == "decoder"


# --- recurrence -------------------------------------------------------------------------------------------------


def test_the_recurrence_is_found_by_its_functions_name(install: Install) -> None:
    assert install("recurrence") == "moving_average"
    assert type(recurrences()["moving_average"]).__module__ == "my_package.mixers"


# --- endpoint ---------------------------------------------------------------------------------------------------


def test_the_endpoint_answers_with_the_servers_rules(install: Install) -> None:
    install("endpoint")
    llm = LLM(kv_cache_bytes=8 * 2**20)
    text = "One, two, three"
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([text], params)
    known = [entry.logprob for entry in output.prompt_token_logprobs or [] if entry is not None]
    engine = AsyncEngine(engine=llm.engine)
    with TestClient(create_app(engine, ServeConfig(api_key=["k"], max_body_bytes=2048), "pair")) as client:
        key = {"Authorization": "Bearer k"}
        answer = client.post("/score", json={"text": text}, headers=key).json()
        assert answer["model"] == "pair"
        assert answer["num_tokens"] == len(known) > 1
        assert math.isclose(answer["logprob"], sum(known), rel_tol=1e-4)
        refused = client.post("/score", json={"text": text})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.post("/score", json={"text": "a" * 4096}, headers=key).status_code == 413
        assert client.post("/score", json={"text": ""}, headers=key).status_code == 400
        entry = client.get("/openapi.json").json()["paths"]["/score"]["post"]
    assert entry["security"] == [{"key": []}]
    assert entry["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ScoreBody")
    with TestClient(create_app(AsyncEngine(engine=llm.engine), ServeConfig(), "pair")) as client:
        assert client.post("/score", json={"text": text}).status_code == 200, "without keys it is open"


# --- pages ------------------------------------------------------------------------------------------------------


def test_every_extension_point_has_its_page() -> None:
    """In the table of extension points, and among the pages that CONTRIBUTING.md and the architecture name."""
    table = (ROOT / "docs/reference/api/extending.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(slipstream\.\w+)` \| \[.*?\]\(\.\./\.\./extend/([\w-]+)\.md\)", table, re.MULTILINE
    )
    assert sorted(page for _, page in rows) == PAGES
    for group, page in rows:
        assert f'[project.entry-points."{group}"]' in (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for linking, folder in (("CONTRIBUTING.md", "docs/extend"), ("docs/architecture.md", "extend")):
        links = (ROOT / linking).read_text(encoding="utf-8")
        for page in PAGES:
            assert f"]({folder}/{page}.md)" in links, f"{linking} lacks {page}"
