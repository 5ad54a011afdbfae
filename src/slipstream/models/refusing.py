"""What a model's own code raises while it is tried out, as one refusal that says where and what would be needed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import nn

from slipstream.errors import UnsupportedModelError
from slipstream.models.attention.hook import UnsupportedAttention
from slipstream.models.support import unsupported

log = logging.getLogger(__name__)


@contextlib.contextmanager
def refusing(model: Any, passes: str) -> Iterator[None]:
    """Turn any exception of a model's own code into an `UnsupportedModelError`.

    `passes` are those in the body: "passes without a cache". What the code has raised is logged, and is no reason: it
    says what the code met, not what it lacks. What no module of the model has raised, such as a kernel of ours, is one.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except UnsupportedAttention as error:
        raise unsupported(model.config, f"{error} (in {_place(model, error.__traceback__)})") from None
    except Exception as error:
        log.info("%s: %s has raised %s: %s", model.config.model_type, passes, type(error).__name__, error)
        place = _place(model, error.__traceback__)
        if place is None:
            lines = str(error).strip().splitlines()
            raise unsupported(model.config, lines[0] if lines else type(error).__name__) from None
        raise unsupported(
            model.config,
            f"{place} cannot compute {passes}; its code would have to take rows at the "
            "positions that it is given, and leave the cache and masks to Transformers' attention interface",
        ) from None


def _place(model: nn.Module, traceback: TracebackType | None) -> str | None:
    """The innermost of a model's modules whose method had been called, None for none of them:
    "model.layers.3.self_attn (LlamaAttention)"."""
    names = {id(part): name for name, part in model.named_modules()}
    found: nn.Module | None = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = owner
        traceback = traceback.tb_next
    if found is None:
        return None
    name, kind = names[id(found)], type(found).__name__
    return f"{name} ({kind})" if name else kind
