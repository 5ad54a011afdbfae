"""Running only some of a Transformers model's layers, each in its own place of the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.models.support import text_config


class LayerStack:
    """The list in which a Transformers model keeps its layers."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        self._parent = parent
        self._name = name
        self._layers: nn.ModuleList = getattr(parent, name)

    @contextlib.contextmanager
    def only(self, layers: Sequence[int]) -> Iterator[None]:
        """Let the model have no other layers within the body. Each keeps its own number in the cache.

        The model must not run for other callers meanwhile; see `EagerExecutor.forward`.
        """
        setattr(self._parent, self._name, nn.ModuleList(self._layers[layer] for layer in layers))
        try:
            yield
        finally:
            setattr(self._parent, self._name, self._layers)

    @contextlib.contextmanager
    def idle(self, layers: Sequence[int]) -> Iterator[None]:
        """Let `layers` compute within the body, but hand on what they were given."""
        handles = [self._layers[layer].register_forward_hook(_hand_on, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def tried_layers(model: Any, logits: Callable[[], Tensor]) -> LayerStack:
    """Return where the layers of `model` are, once it was tried out that leaving some out does just that.

    `logits` runs a pass. Raises `ConfigError` for a model whose layers are not found, or which treats a layer by its
    place among those that run (another rotary embedding for every other layer, inputs layer by layer).
    """
    num_layers = text_config(model.config).num_hidden_layers
    stack = find_layers(model, num_layers)
    if stack is None:
        raise _refused(model, "they are not in one list of modules")
    every = range(num_layers)
    # Without its first layer, every other has a new place; idle in its own, the first must give the same logits.
    try:
        with stack.idle(every[:1]):
            expected = logits()
        with stack.only(every[1:]):
            same = torch.equal(logits(), expected)
    except Exception as error:
        raise _refused(model, str(error)) from None
    if not same:
        raise _refused(model, "what a layer computes depends on its place among them")
    return stack


def _refused(model: Any, why: str) -> ConfigError:
    return ConfigError(f"{model.config.model_type} cannot run some of its layers: {why}")


def find_layers(model: nn.Module, num_layers: int) -> LayerStack | None:
    """The one list in which a model keeps its layers, untried; None where there is none such.

    An encoder's layers, which may be numbered alike, are no part of a pass.
    """
    modules = getattr(model, "modules_of_a_pass", model.modules)
    found = [
        (parent, name)
        for parent in modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and _numbers(child) == list(range(num_layers))
    ]
    return LayerStack(*found[0]) if len(found) == 1 else None


def _numbers(layers: nn.ModuleList) -> list[int | None]:
    """The number of each layer in the cache, as its attention says."""
    return [
        next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)  # type: ignore[misc]
        for layer in layers
    ]


def _hand_on(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
