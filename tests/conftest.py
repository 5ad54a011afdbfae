"""Settings for every test: no network, one thread, so that runs are repeatable and two cores are not overbooked."""

from __future__ import annotations

import copy
import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)

import httpx2
import pytest
import summary
import torch
import typer
from hypothesis import settings

if TYPE_CHECKING:
    from recipes.real_models import PretrainedModel
    from slipstream.engine.llm import LLM

torch.set_num_threads(1)
gc.disable()  # until all is collected: what is imported stays, and looking through it takes a third of the time
settings.register_profile("slipstream", deadline=None, print_blob=True)
settings.load_profile("slipstream")

# Else each command that a test runs makes all parsers anew.
typer.main.get_command = cache(typer.main.get_command)


for part in ("connect", "read", "write", "pool"):  # a busy machine may take more than the usual five seconds
    setattr(httpx2._config.DEFAULT_TIMEOUT_CONFIG, part, 120.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords have the names of folders too
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Weights that are made at random are the same whichever tests ran before, in fixtures too."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported lives as long as the tests do: nobody need look through it for garbage."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was skipped and how to have it, and how to repeat each failure."""
    stats = terminalreporter.stats
    if stats.get("skipped"):
        terminalreporter.section("skipped")
        for line in summary.skips(stats["skipped"]):
            terminalreporter.line(line)
    failed = [*stats.get("failed", []), *stats.get("error", [])]
    if failed:
        terminalreporter.section("to repeat a failure")
        for line in summary.repeats(failed, config.rootpath):
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for what is made once in a run of the tests, by whichever of its processes needs it first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in the run's
        folder = folder.parent
    os.environ["SLIPSTREAM_TEST_RUN"] = str(folder)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user's cache holds neither helps nor harms a test, and tests leave nothing there.

    But for the compiled CPU kernels, which take ten seconds, and for the downloaded models.
    """
    from recipes.real_models import models_folder
    from slipstream.config import cache_folder
    from slipstream.models.cpu import native

    own = tmp_path_factory.getbasetemp() / "cache"
    own.mkdir(exist_ok=True)
    if native.unavailable() is None:
        for built in cache_folder().glob(f"{native.build().stem}-*.so"):
            shutil.copy(built, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_MODELS", str(models_folder()))
        patch.setenv("SLIPSTREAM_CACHE", str(own))
        yield


@pytest.fixture(scope="session")
def engines_by_request() -> Iterator[dict[str, LLM]]:
    """Engines by what was asked for. When all tests are done, none of them may hold anything."""
    engines: dict[str, LLM] = {}
    yield engines
    for llm in engines.values():
        assert llm.engine.integrity() == []


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """A command that a test runs in this process sets the level of the log: the next test starts at the usual one."""
    level = logging.getLogger().level
    yield
    if logging.getLogger().level != level:  # setting it empties the caches of thousands of loggers
        logging.getLogger().setLevel(level)


@pytest.fixture(autouse=True)
def old_names_warn_again() -> None:
    """An old name warns once in a process: here once in a test."""
    from slipstream.config import warn_renamed

    warn_renamed.cache_clear()


@pytest.fixture
def shared_engines(monkeypatch: pytest.MonkeyPatch, engines_by_request: dict[str, LLM]) -> None:
    """Whoever makes an `LLM` gets the one that was made before with the same arguments, with empty caches."""
    import slipstream.engine.llm

    make = slipstream.engine.llm.LLM

    def shared(model: str | None = None, **options: Any) -> LLM:
        key = repr((model, sorted(options.items())))
        if key not in engines_by_request:
            engines_by_request[key] = make(model, **options)
        engines_by_request[key].reset_caches()
        return engines_by_request[key]

    monkeypatch.setattr(slipstream.engine.llm, "LLM", shared)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct's GGUF file; tests that need it are skipped where it cannot be fetched."""
    from recipes.real_models import SMOLLM2

    return _fetched(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> str:
    """Gemma 3 270M's GGUF file; tests that need it are skipped where it cannot be fetched."""
    from recipes.real_models import GEMMA3

    return _fetched(GEMMA3)


def _fetched(model: PretrainedModel) -> str:
    from recipes.real_models import fetch
    from slipstream.errors import ModelError

    try:
        return str(fetch(model))
    except ModelError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"{error}; `make models` fetches it")


LOADERS = (
    "slipstream.engine.target",
    "slipstream.draft.model.draft_model",
    "slipstream.draft.model.shared_kv",
)


@pytest.fixture(scope="session", autouse=True)
def pair_loaded_once() -> Iterator[None]:
    """Engines share the weights and tokenizers of the models in the package and of the real ones, which no test writes
    to. `create_engine(like=…)` does the same; `own_weights` has them loaded anew."""
    from slipstream import models

    def load(folder: str, *given: Any, **options: Any) -> Any:
        return (_model if folder in _unchanging() else models.load_model)(folder, *given, **options)

    with pytest.MonkeyPatch.context() as patched:
        for module in LOADERS:
            patched.setattr(f"{module}.load_model", load)
        _keep_tokenizers(patched, lambda folder: folder in _unchanging())
        yield


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine loads its models, for tests of what loading says or does."""
    from slipstream import models

    for module in LOADERS:
        monkeypatch.setattr(f"{module}.load_model", models.load_model)


@pytest.fixture
def drafts_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models and tokenizers are kept from test to test, those in other folders too."""
    monkeypatch.setattr("slipstream.draft.model.draft_model.load_model", _model)
    _keep_tokenizers(monkeypatch, lambda folder: True)


@cache
def _unchanging() -> frozenset[str]:
    """Models that do not change; what another folder holds may be another model next time."""
    from recipes.real_models import GEMMA3, SMOLLM2
    from slipstream import assets

    real = (str(model.path()) for model in (SMOLLM2, GEMMA3))
    return frozenset((assets.EMBEDDED_TARGET, assets.EMBEDDED_DRAFT, *real))


def _model(folder: str, *given: Any, **options: Any) -> Any:
    """The model that is kept, with attributes of its own."""
    from slipstream.models.cpu import threads

    return copy.copy(_model_for(threads.available(), folder, *given, **options))


@cache
def _model_for(num_threads: int, folder: str, *given: Any, **options: Any) -> Any:
    from slipstream.models import load_model

    return load_model(folder, *given, **options)


def _keep_tokenizers(patched: pytest.MonkeyPatch, is_kept: Callable[[str], bool]) -> None:
    """What `load_tokenizer` reads from such a folder is read once; each caller has attributes of its own."""
    from transformers import PreTrainedTokenizerFast

    from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET

    def load(cls: Any, folder: Any, *given: Any, **options: Any) -> Any:
        if (
            cls is not PreTrainedTokenizerFast
            or given
            or options != {"revision": None}
            or not is_kept(folder)
        ):
            return _from_pretrained(cls, folder, *given, **options)
        if folder in (EMBEDDED_TARGET, EMBEDDED_DRAFT):  # small, and some tests add tokens
            return copy.deepcopy(_tokenizer(folder))
        own = copy.copy(_tokenizer(folder))
        vars(own).update({k: copy.copy(v) for k, v in vars(own).items() if isinstance(v, dict | list | set)})
        return own

    patched.setattr(PreTrainedTokenizerFast, "from_pretrained", classmethod(load))


@cache
def _tokenizer(folder: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return _from_pretrained(PreTrainedTokenizerFast, folder)


def _from_pretrained(cls: Any, *given: Any, **options: Any) -> Any:
    """`from_pretrained` as Transformers has it."""
    from transformers import PreTrainedTokenizerBase

    return PreTrainedTokenizerBase.from_pretrained.__func__(cls, *given, **options)  # type: ignore[attr-defined]
