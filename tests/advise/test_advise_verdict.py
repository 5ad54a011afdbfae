"""The advice's sentences say one thing."""

from __future__ import annotations

import pytest

from slipstream.tools.advise.advice import Advice, LoadAdvice
from slipstream.tools.advise.candidates import OFF, Setting
from slipstream.tools.advise.findings import AdviceFindings
from slipstream.tools.advise.predict import AdvisedPlan, Band
from slipstream.tools.advise.verdict import DO_NOT_ENABLE, remarks, verdict

DRAFTS = Setting(0, 2)


def advice(settings: dict[int, str], bands: dict[str | None, tuple[Band, ...]]) -> Advice:
    """Make an advice of loads and what is advised there for all tasks together."""
    return Advice(
        provenance={},
        model="m",
        labels=(),
        traffic="",
        num_requests={},
        num_asked=0,
        max_tokens=None,
        sampling={},
        candidates=(),
        plan=AdvisedPlan(bands),
        speculative={},
        loads=[LoadAdvice(number, setting, 1.2) for number, setting in settings.items()],
        predicted=(),
        findings=AdviceFindings(None, max(settings), None, (), ""),
        trace=None,
        notes=(),
        wall_s=0.0,
    )


@pytest.mark.parametrize("drafts_at", [(1,), (1, 4)])
def test_what_pays_for_some_tasks_is_not_forbidden(drafts_at: tuple[int, ...]) -> None:
    off, own = (Band(None, OFF, 1.0),), (Band(max(drafts_at), DRAFTS, 1.2), Band(None, OFF, 1.0))
    found = advice(dict.fromkeys(drafts_at, "off"), {None: off, "code": own})
    text = verdict(found)
    assert text.startswith("Enable speculation for some tasks only.")
    assert "it pays for some tasks only" in text
    assert DO_NOT_ENABLE not in text
    assert remarks(found)[0].endswith(", for some tasks only.")


def test_a_load_at_which_no_task_drafts_is_forbidden() -> None:
    bands = (Band(1, DRAFTS, 1.2), Band(None, OFF, 1.0))
    found = advice({1: "draft", 4: "off"}, {None: bands, "code": bands})
    assert f"{DO_NOT_ENABLE} at 4 requests at once" in verdict(found)
    assert "some tasks" not in verdict(found)
