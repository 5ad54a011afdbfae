"""What is planned for a family, from its configuration alone, is what its loaded model holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LIKE_OTHERS, RECURRENT, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.errors import ConfigError
from slipstream.models import load_model
from slipstream.models.outline import outline_model
from slipstream.profiling.pass_times import profile_key

CASES = [(name, None) for name in FAMILIES] + [(name, "int8") for name in ("llama-gqa", "gemma2", "gpt-neox")]
CASES += [
    ("qwen3", "int4_g128"),
    ("gemma2", "int4"),
    ("mixtral-odd", "int8"),
    ("qwen3-moe", "int4"),
    ("gpt-oss-odd", "int8"),
    ("bart", "int8"),  # a decoder whose attention to an encoder stays as it is: nothing calls it
]
CASES += [(name, None) for name in ("bloom", "mpt", "gpt-neo", "bart", "zamba", "zamba2", "dbrx")]


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_weights_and_entries_are_planned_to_the_byte(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    save_tiny((FAMILIES | LIKE_OTHERS | RECURRENT)[name](), tmp_path)
    model = load_model(str(tmp_path), quantization=quantization)
    for path in (tmp_path, tmp_path / "config.json"):
        planned = outline_model(str(path), quantization=quantization)
        assert planned.weight_bytes == model.weight_bytes
        assert planned.runs_as == model.runs_as
        assert (planned.weight_type, planned.quantization) == (model.weight_type, model.quantization)
        assert (planned.dtype, planned.cache_dtype) == (model.dtype, model.cache_dtype)
        assert planned.kernels == model.kernels
        assert planned.shapes == model.shapes
        assert profile_key(planned) == profile_key(model)
        assert planned.kv_unit == model.kv_unit
        assert (planned.vocab_size, planned.context_length) == (model.vocab_size, model.context_length)
        assert planned.num_parameters == model.num_parameters


class _Products(TorchDispatchMode):
    """Notes the weights of zeros with which something is multiplied: they are one number, seen everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.sizes += [each.numel() for each in tensors if not each.is_meta and not any(each.stride())]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_large_weight_is_multiplied_to_describe_a_model(name: str, tmp_path: Path) -> None:
    """A router of these models has 256 weights at most, every other matrix 1,024 or more."""
    save_tiny(FAMILIES[name](), tmp_path)
    with _Products() as products:
        outline_model(str(tmp_path / "config.json"))
    assert max(products.sizes, default=0) <= 256


@pytest.mark.parametrize("backend", ["auto", "native", "packed"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_backend_that_is_named_is_refused_or_planned_as_it_is_loaded(
    backend: str, dtype: str, kernels: str, tmp_path: Path
) -> None:
    save_tiny(FAMILIES["llama"](), tmp_path, dtype=torch.bfloat16)
    options: dict[str, Any] = {"attention_backend": backend, "dtype": dtype, "cpu_kernels": kernels}
    try:
        model = load_model(str(tmp_path), **options)
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            outline_model(str(tmp_path), **options)
        return
    planned = outline_model(str(tmp_path), **options)
    assert (planned.kernels, planned.runs_as) == (model.kernels, model.runs_as)
    assert profile_key(planned) == profile_key(model)


@pytest.mark.parametrize("name", ["llama", "opt", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"cpu_kernels": "torch"}])
def test_other_types_and_kernels_too(name: str, options: dict[str, str], tmp_path: Path) -> None:
    save_tiny(FAMILIES[name](), tmp_path, dtype=torch.bfloat16)
    model = load_model(str(tmp_path), **options)  # type: ignore[arg-type]
    planned = outline_model(str(tmp_path), **options)  # type: ignore[arg-type]
    assert planned.held.total_bytes == model.weight_bytes
    assert planned.kernels == model.kernels
    assert planned.stored_bytes == 2 * model.num_parameters


def test_a_tied_embedding_keeps_its_numbers_where_packed_weights_are_given_back(tmp_path: Path) -> None:
    """Layer by layer, an output layer that shares its weight with the embedding is packed, and the table stays."""
    save_tiny(FAMILIES["gemma2"](), tmp_path)
    model = load_model(str(tmp_path), attention_backend="packed")
    assert model.kernels == "native"
    table = model.embed(torch.arange(8))
    assert bool((table.abs().sum(-1) > 0).all())
    assert torch.allclose(table / table.norm(dim=-1, keepdim=True), _head(model)[:8], atol=1e-5)


def _head(model: object) -> torch.Tensor:
    weight: torch.Tensor = model.model.get_output_embeddings().unpack(torch.arange(8))  # type: ignore[attr-defined]
    return weight / weight.norm(dim=-1, keepdim=True)
