"""What a checkpoint recommends is what requests get that do not say otherwise, and can be turned off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.engine.factory import create_engine
from slipstream.errors import ConfigError
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

RECOMMENDED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 7}
OWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 7}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target with sampling parameters of its own."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in Path(EMBEDDED_TARGET).iterdir():
        (folder / file.name).symlink_to(file)
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(written | RECOMMENDED | {"do_sample": True}))
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, kv_cache_bytes=16 * 2**20)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    options: dict[str, Any] = {"model": llm.engine.config.model, "kv_cache_bytes": 16 * 2**20}
    engine = create_engine(type(llm.engine.config)(**options), like=llm.engine)
    with TestClient(create_app(AsyncEngine(engine=engine), ServeConfig(), "tiny")) as made:
        yield made


def test_only_requests_without_parameters_get_them(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(**OWN)
    [without] = llm.generate([[5, 9, 70]])
    seed = without.outputs[0].seed
    [same] = llm.generate([[5, 9, 70]], SamplingParams(seed=seed, **OWN))
    assert without.outputs[0].token_ids == same.outputs[0].token_ids
    [own] = llm.generate([[5, 9, 70]], SamplingParams(ignore_eos=True))
    assert len(own.outputs[0].token_ids) == 16


def test_a_server_fills_in_what_a_request_does_not_say(llm: LLM, client: TestClient) -> None:
    [prompt] = [[5, 9, 70]]
    for said in (
        {},
        {"temperature": 1.0},
        {"top_p": 1.0, "top_k": 0, "max_tokens": 12, "repetition_penalty": 1.0},
    ):
        body = {"prompt": prompt, "seed": 3, "return_token_ids": True, **said}
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        [output] = llm.generate([prompt], SamplingParams(**{**OWN, "seed": 3, **said}))
        assert choice["token_ids"] == output.outputs[0].token_ids, said


def test_it_can_be_turned_off_and_overridden(llm: LLM, checkpoint: Path, tmp_path: Path) -> None:
    def defaults(**options: Any) -> SamplingParams:
        config = type(llm.engine.config)(model=str(checkpoint), kv_cache_bytes=2**24, **options)
        return create_engine(config, like=llm.engine).intake.default_params()

    assert defaults(generation_config="vllm") == SamplingParams()
    assert defaults(override_generation_config={"top_k": 3}) == SamplingParams(**OWN | {"top_k": 3})
    only = defaults(generation_config="vllm", override_generation_config={"max_new_tokens": 9})
    assert only == SamplingParams(max_tokens=9)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.1}')
    assert defaults(generation_config=str(tmp_path)) == SamplingParams(temperature=0.1)
    for options, told in (
        ({"generation_config": str(tmp_path / "none")}, "must be auto, vllm or a folder"),
        ({"override_generation_config": {"temprature": 1}}, "did you mean 'temperature'"),
        (
            {"override_generation_config": {"top_p": 3}},
            'top_p must be .*; generation_config="vllm" does without',
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            defaults(**options)


def test_commands_use_it_for_flags_that_are_not_given(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.llm.LLM", lambda *args, **options: llm)
    seen: list[SamplingParams] = []
    generate = llm.generate

    def watched(prompts: Any, params: SamplingParams, **options: Any) -> Any:
        seen.append(params)
        return generate(prompts, params, **options)

    monkeypatch.setattr(llm, "generate", watched)
    args = ["generate", "hi", "--model", str(checkpoint), "--temperature", "0", "--max-tokens", "2"]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert seen == [SamplingParams(**OWN | {"temperature": 0, "max_tokens": 2})]
