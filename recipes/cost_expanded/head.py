"""Enlarge a trained head for its target's enlarged model: the same draft tokens at the larger model's cost.

    python -m recipes.cost_expanded head HEAD SOURCE EXPANDED OUTPUT

SOURCE is the target that the head was trained for, EXPANDED what `target` made of it. A state of the enlarged model is
the source's state and zeros behind it, behind the final norm too, whose weights are scaled so that the first part keeps
its values. The head gets the enlarged model's width, and the layers of EAGLE and block heads its number of attention
heads and its intermediate size. As there, what is added computes on real numbers and adds zero: new rows of a matrix
that makes a state see only what is zero in the state before it, new heads and new intermediate units have a zero column
behind them. Where several states are read side by side, each one's columns are placed apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recipes.cost_expanded.target import (
    ModelShape,
    check_new,
    check_source,
    copy_other_files,
    misfits,
    place,
    place_norm,
    share,
    source_layer,
)
from slipstream.draft.heads import dflash_files, dflash_layouts, eagle_files, hydra, medusa
from slipstream.draft.heads.checkpoints import WEIGHT_FILES, check_fits, read_checkpoint
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.head_config import HeadConfig
from slipstream.draft.heads.residual import ResidualBlock
from slipstream.draft.methods import DFLASH, EAGLE, EAGLE3, HYDRA, MEDUSA, kind_of_checkpoint
from slipstream.errors import ConfigError, ModelError
from slipstream.models import CausalLM, load_model

Config = TypeVar("Config", bound=HeadConfig)
ALL_WEIGHT_FILES = tuple(dict.fromkeys((*WEIGHT_FILES, *medusa.WEIGHT_FILES, *hydra.WEIGHT_FILES)))


@dataclass(frozen=True)
class EnlargedPair:
    """A target and the model that it was enlarged to."""

    source: CausalLM
    path: str
    """Path of the enlarged model, which heads record."""
    config: Any
    """Configuration of the enlarged model."""

    @property
    def hidden_size(self) -> int:
        """Width of an enlarged head."""
        return int(self.config.hidden_size)

    def layer(self, number: int) -> int:
        """The enlarged model's number of a hidden state: what source layer `number` puts out, 0 the embedding."""
        small, large = self.source.num_layers, int(self.config.num_hidden_layers)
        if number in (0, small):  # the last one is the output of the final norm
            return 0 if number == 0 else large
        return next(i + 1 for i in range(large) if source_layer(i, small, large) == number - 1)


def expand_head(
    head: str | Path, target: str | Path, expanded: str | Path, output: str | Path, *, seed: int = 0
) -> int:
    """Write the head of `target` as one of `expanded` to the folder `output`; returns its parameter count.

    EAGLE and block heads keep their layout, Medusa and Hydra heads the name of their weights' file; all is float32.
    Raises `ModelError` for a head of another target, an enlarged model of another one, or an output that is not empty,
    and `ConfigError` for a head that is larger than the enlarged model allows or has parts that cannot be enlarged.
    """
    head, output = Path(head), Path(output)
    check_new(output)
    if not head.is_dir():
        raise ModelError(f"{str(head)!r} is not a folder")
    pair = _pair(Path(target), Path(expanded))
    raw, tensors = read_checkpoint(str(head), weight_files=ALL_WEIGHT_FILES)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        kind = kind_of_checkpoint(raw)
        if kind == HYDRA.name:
            num_parameters = _expand_hydra(head, pair, output)
        elif kind == MEDUSA.name:
            num_parameters = _expand_medusa(head, pair, output, tensors)
        elif kind == DFLASH.name:
            num_parameters = _expand_block(head, pair, output, raw)
        else:
            num_parameters = _expand_eagle(head, pair, output, raw)
    _label(output, {"from": head.resolve().name, "parameters": num_parameters})
    copy_other_files(head, output)
    share(output)
    return num_parameters


def _pair(source: Path, expanded: Path) -> EnlargedPair:
    """The pair; raises `ModelError` unless `expanded` is the enlarged `source`."""
    small, large = check_source(source), check_source(expanded)
    if not getattr(large, "cost_expanded", None):
        raise ModelError(f"{str(expanded)!r} is not an enlarged model; recipes.cost_expanded makes them")
    faults = misfits(small, ModelShape.of(small), ModelShape.of(large))
    if small.head_dim != large.head_dim:
        faults.append(f"heads of {large.head_dim} dimensions, not {small.head_dim}")
    model = load_model(str(source), dtype="float32", device="cpu", canary=False, pack=False)
    if faults or not _holds(expanded, large, model):
        why = f": {'; '.join(faults)}" if faults else ": its weights are another model's"
        raise ModelError(f"{str(expanded)!r} was not enlarged from {str(source)!r}{why}")
    return EnlargedPair(model, str(expanded), large)


def _holds(expanded: Path, config: Any, source: CausalLM) -> bool:
    """Whether the embedding and a matrix of every layer of the source are where enlarging puts them."""
    old = source.model.model
    wanted = {"model.embed_tokens.weight": old.embed_tokens.weight}
    for index in range(config.num_hidden_layers):
        layer = source_layer(index, source.num_layers, config.num_hidden_layers)
        if layer is not None:
            wanted[f"model.layers.{index}.mlp.down_proj.weight"] = old.layers[layer].mlp.down_proj.weight
    found = 0
    for file in expanded.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as tensors:
                for name in wanted.keys() & set(tensors.keys()):
                    rows, columns = wanted[name].shape
                    corner = tensors.get_slice(name)[:rows, :columns]
                    found += torch.equal(corner, wanted[name].to(corner.dtype))
        except SafetensorError as error:
            raise ModelError(f"cannot read {str(file)!r}: {str(error).splitlines()[0]}") from None
    return found == len(wanted)


def _expand_eagle(path: Path, pair: EnlargedPair, output: Path, raw: Mapping[str, Any]) -> int:
    old = eagle_files.read_eagle(str(path), pair.source)
    new = EagleHead(_enlarged(old.config, pair))
    _randomise(new)
    _fill_eagle(new, old)
    layout = (EAGLE if old.config.version == 1 else EAGLE3).name
    if "speculators_model_type" in raw:
        layout = "speculators"
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    eagle_files.save_eagle(
        new,
        output,
        target=pair.path,
        layout=layout,
        num_speculative_tokens=methods[0].get("speculative_tokens", 4),
    )
    return new.num_parameters()


def _enlarged(old: Config, pair: EnlargedPair) -> Config:
    """The sizes of the enlarged model's layer, in heads of the old width; none below the head's own.

    Norms of queries and keys get the smaller epsilon of the others too, which their width does not ask for: it does not
    show where it is as small as usual.
    """
    large = ModelShape.of(pair.config)
    if old.hidden_size > large.hidden_size:
        raise ConfigError(f"the head is {old.hidden_size} wide, the enlarged target {large.hidden_size}")
    group = old.num_attention_heads // old.num_key_value_heads
    wanted = large.num_heads * pair.config.head_dim / old.head_dim
    possible = [
        heads
        for heads in range(old.num_attention_heads, large.hidden_size + 1, group)
        if large.hidden_size % heads == 0  # Transformers' rule
    ]
    if not possible:
        raise ConfigError(
            f"no number of attention heads from {old.num_attention_heads} on in steps of {group} divides the enlarged "
            f"target's hidden size {large.hidden_size}"
        )
    num_heads = min(possible, key=lambda heads: abs(heads - wanted))
    return replace(
        old,
        hidden_size=large.hidden_size,
        target_hidden_size=large.hidden_size,
        intermediate_size=max(old.intermediate_size, large.intermediate_size),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // group,
        feature_layers=tuple(pair.layer(number) for number in old.feature_layers),
        rms_norm_eps=old.rms_norm_eps * old.hidden_size / large.hidden_size,
    )


def _fill_eagle(new: EagleHead, old: EagleHead) -> None:
    fuses = old.config.version == 3
    _place_into_state(new.fc, old.fc, len(old.config.feature_layers) if fuses else 2)
    new_layer: Any = new.layer
    old_layer: Any = old.layer
    _fill_layer(new_layer, old_layer, 2 if fuses else 1)
    if fuses:
        place_norm(new_layer.hidden_norm, old_layer.hidden_norm)
        place_norm(new_layer.input_layernorm, old_layer.input_layernorm)
        place_norm(new.norm, old.norm)
        _place_linear(new.lm_head, old.lm_head)
    new.draft_token_ids = old.draft_token_ids
    if old.embedding is not None:
        new.embedding = _widened(old.embedding, new.config.hidden_size)


def _fill_layer(new: Any, old: Any, states: int) -> None:
    """A layer whose attention reads so many states side by side, but for the norm before it."""
    for name in ("q_proj", "k_proj", "v_proj"):
        _place_linear(getattr(new.self_attn, name), getattr(old.self_attn, name), states)
    for name in ("gate_proj", "up_proj"):
        _place_linear(getattr(new.mlp, name), getattr(old.mlp, name))
    _place_output(new.self_attn.o_proj, old.self_attn.o_proj)
    _place_output(new.mlp.down_proj, old.mlp.down_proj)
    place_norm(new.post_attention_layernorm, old.post_attention_layernorm)


def _expand_block(path: Path, pair: EnlargedPair, output: Path, raw: Mapping[str, Any]) -> int:
    old = dflash_files.read_dflash(str(path), pair.source)
    if old.config.convolution_taps:
        raise ConfigError(f"{str(path)!r} has convolutions, which cannot be enlarged")
    new = DFlashHead(_enlarged(old.config, pair))
    if old.lm_head is not None:
        new.lm_head = nn.Linear(new.config.hidden_size, old.lm_head.out_features, bias=False)
    _randomise(new)
    _fill_block_head(new, old, str(path))
    layout = dflash_layouts.layout_of(raw)
    assert layout is not None, "it was read"
    dflash_files.save_dflash(new, output, target=pair.path, layout=layout)
    return _num_parameters(new)


def _fill_block_head(new: DFlashHead, old: DFlashHead, path: str) -> None:
    """Raises `ConfigError` for a correction that reads hidden states."""
    _place_into_state(new.fc, old.fc, len(old.config.feature_layers))
    place_norm(new.hidden_norm, old.hidden_norm)
    place_norm(new.norm, old.norm)
    for new_layer, old_layer in zip(new.layers, old.layers, strict=True):
        _fill_layer(new_layer, old_layer, 1)
        place_norm(new_layer.input_layernorm, old_layer.input_layernorm)
        for name in ("q_norm", "k_norm"):  # of one attention head each, whose width stays
            getattr(new_layer.self_attn, name).load_state_dict(
                getattr(old_layer.self_attn, name).state_dict()
            )
    if old.left_to_right is not None:
        assert new.left_to_right is not None
        for name, weight in old.left_to_right.named_parameters():
            own = new.left_to_right.get_parameter(name)
            if own.shape != weight.shape:
                kind = old.config.left_to_right and old.config.left_to_right.kind
                raise ConfigError(
                    f"{path!r} corrects its draft by {kind}, which reads hidden states and cannot be enlarged"
                )
            own.copy_(weight)
    if old.confidence_head is not None:
        assert new.confidence_head is not None
        weights, width = old.confidence_head.weight, old.config.hidden_size
        nn.init.zeros_(new.confidence_head.weight)
        new.confidence_head.weight[:, :width].copy_(weights[:, :width])
        new.confidence_head.weight[:, new.config.hidden_size :].copy_(weights[:, width:])
        new.confidence_head.bias.copy_(old.confidence_head.bias)
    if old.lm_head is not None:
        assert new.lm_head is not None
        _place_linear(new.lm_head, old.lm_head)
    new.draft_token_ids = old.draft_token_ids
    if old.embedding is not None:
        new.embedding = _widened(old.embedding, new.config.hidden_size)


def _expand_medusa(path: Path, pair: EnlargedPair, output: Path, tensors: Mapping[str, Tensor]) -> int:
    source = pair.source
    old = medusa.load_medusa(str(path), source.project)
    check_fits(str(path), old.config.hidden_size, old.config.vocab_size, source)
    config = replace(old.config, hidden_size=pair.hidden_size, base_model=pair.path)
    new = medusa.MedusaHeads(config, source.project)
    _fill_heads(new, old)
    output_layer = None
    if config.shares_lm_head and any(
        "linear" not in name and tensor.ndim == 2 for name, tensor in tensors.items()
    ):
        # The file has a copy of the target's output layer, because vLLM does not share it with heads.
        output_layer = _widened(source.model.lm_head.weight, pair.hidden_size)
    medusa.save_medusa(new, output, _weight_file(path, medusa.WEIGHT_FILES), output_layer)
    return _num_parameters(new)


def _expand_hydra(path: Path, pair: EnlargedPair, output: Path) -> int:
    source = pair.source
    old = hydra.load_hydra(str(path), source.project)
    check_fits(str(path), old.config.hidden_size, old.config.vocab_size, source)
    config = replace(old.config, hidden_size=pair.hidden_size, base_model=pair.path)
    new = hydra.HydraHeads(config, source.project)
    _fill_heads(new, old)
    hydra.save_hydra(new, output, _weight_file(path, hydra.WEIGHT_FILES))
    return _num_parameters(new)


def _fill_heads(new: Any, old: Any) -> None:
    _randomise(new)
    hidden_size = old.config.hidden_size
    for new_blocks, old_blocks in zip(new.blocks, old.blocks, strict=True):
        for new_block, old_block in zip(new_blocks, old_blocks, strict=True):
            _fill_block(new_block, old_block, old_block.linear.in_features // hidden_size)
    for new_projection, old_projection in zip(new.projections, old.projections, strict=True):
        _place_linear(new_projection, old_projection)


def _fill_block(new: ResidualBlock, old: ResidualBlock, states: int) -> None:
    """`x + SiLU(Linear(x))`: SiLU(0) is 0, so what is zero in a state stays zero."""
    _place_into_state(new.linear, old.linear, states)
    if isinstance(old.res_connection, nn.Linear):
        assert isinstance(new.res_connection, nn.Linear)
        _place_into_state(new.res_connection, old.res_connection, states)


def _randomise(head: nn.Module) -> None:
    """What is not written below keeps these values; zeros, with which some blocks begin, cost some engines less."""
    for weight in head.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02)


def _place_linear(new: nn.Linear, old: nn.Linear, states: int = 1) -> None:
    """`new` reads so many enlarged states side by side; its new outputs are random."""
    for new_part, old_part in zip(
        new.weight.chunk(states, dim=1), old.weight.chunk(states, dim=1), strict=True
    ):
        place(new_part, old_part)
    _place_bias(new, old)


def _place_into_state(new: nn.Linear, old: nn.Linear, states: int) -> None:
    """As `_place_linear`, where the output is a state: its new part reads only the zero parts of the input states."""
    _place_linear(new, old, states)
    for part in new.weight.chunk(states, dim=1):
        part[old.out_features :, : old.in_features // states] = 0


def _place_output(new: nn.Linear, old: nn.Linear) -> None:
    """Write `old` with zeros for all new weights, because the new inputs are not zero."""
    nn.init.zeros_(new.weight)
    place(new.weight, old.weight)
    _place_bias(new, old)


def _place_bias(new: nn.Linear, old: nn.Linear) -> None:
    if old.bias is not None:
        nn.init.zeros_(new.bias)
        new.bias[: old.out_features] = old.bias


def _widened(table: Tensor, width: int) -> Tensor:
    """[rows, old width] -> [rows, width], with zeros behind."""
    return nn.functional.pad(table, (0, width - table.shape[1]))


def _weight_file(folder: Path, names: tuple[str, ...]) -> str:
    """The one that was read; the authors' own code looks for another name than vLLM."""
    return next(name for name in names if (folder / name).is_file())


def _num_parameters(head: nn.Module) -> int:
    return sum(parameter.numel() for parameter in head.parameters())


def _label(folder: Path, origin: Mapping[str, Any]) -> None:
    """The configuration says what the head is, as an enlarged model's does."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"cost_expanded": origin}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
