"""What must be said with every result of an engine, lest it be taken for something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.models.identity import ModelIdentity

LOSSY_ALLOWED = (
    "step-level speculation is allowed: answers marked lossy, which asked for it, are not the target's own"
)


def is_cost_expanded(model: ModelIdentity) -> bool:
    """True for a checkpoint that was enlarged without changing its function (`recipes.cost_expanded`)."""
    return bool(getattr(model.config, "cost_expanded", None))


def engine_labels(engine: Engine, draft: str = "the draft") -> list[str]:
    """One sentence a label, empty for most engines. `draft` is what they call the model that drafts."""
    lossy = [LOSSY_ALLOWED] if engine.extension.lossy else []
    models = {"the target": engine.model, draft: engine.draft_model}
    return lossy + [
        f"{name} is cost-expanded: a smaller model's text at a larger model's cost"
        for name, model in models.items()
        if model is not None and is_cost_expanded(model)
    ]
