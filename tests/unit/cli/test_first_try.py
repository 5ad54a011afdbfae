"""The last line of `slipstream info`: what to try first with this model on this machine."""

from __future__ import annotations

import pytest

from slipstream.cli.first_try import KnownModel, first_try

SMOLLM2_V5 = 1.58
"""Measured: five rows over one."""
STORED = KnownModel(is_embedded=False, stored_as="Q8_0, Q4_1", copy_pays=False)


@pytest.mark.parametrize(
    ("known", "flags", "why"),
    [
        (KnownModel(True, "", True), "--spec draft", "the embedded target's own draft model"),
        (KnownModel(False, "", True), "--spec auto", "the target itself in int8"),
        (STORED, "--spec auto", "would read as much as Q8_0, Q4_1"),
        (STORED, "--spec auto", "info --measure says from when on one gains"),
        (
            KnownModel(False, "Q4_K", False, None, SMOLLM2_V5),
            "--spec auto",
            "gains from 1.82 tokens a pass on",
        ),
        (KnownModel(False, "Q4_1", False, head="eagle3"), "--spec auto", "the eagle3 head that ships"),
        (KnownModel(False, "Q4_K", False, None, 5.5), "--spec off", "checking 5 rows costs 5.50 steps"),
        (KnownModel(False, "", False, "small", 1.2), "--spec auto:small", "`bench` says what"),
        (KnownModel(False, "", True, "small", 1.2, 2.0), "--spec auto:small", "rate of 0.52 on"),
        (KnownModel(False, "", True, "small", 1.2, 5.0), "--spec auto", "costs 5.00 steps, more than"),
    ],
)
def test_the_line_follows_from_what_is_known(known: KnownModel, flags: str, why: str) -> None:
    line = first_try(known)
    assert line.startswith(f"{flags}: ")
    assert why in line
    assert "\n" not in line
