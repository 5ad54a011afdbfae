"""The certificate as a page and as tables."""

from __future__ import annotations

import math
from typing import Any

from slipstream.tools.audit.certificate import Certificate
from slipstream.tools.audit.decision import AuditDecision, level_of_tests
from slipstream.tools.bench.report.grid import NONE, Grid, count, number
from slipstream.tools.bench.report.page import Page, Plot
from slipstream.tools.bench.report.plots import Estimate, estimates

_MAX_DIFFERENCES = 20
_METHOD = (
    "The same prompts with the same sampling parameters and seeds were answered by the audited side and by what it is "
    "compared with. Where a seed repeats an answer, answers are compared token for token; elsewhere sampled tokens are "
    "tested against the target's own distributions, or sampled texts against each other. What an answer says of itself "
    "is compared with its own tokens.",
    "A check is violated by one counterexample. A test may reject with the chance of a false alarm that its p-value "
    "has; all tests together have one minus the confidence. A near-tie is a difference whose two tokens the target "
    "tells apart by no more than rounding changes; more of them than rounding explains are a finding too.",
)


def verdict(certificate: Certificate) -> str:
    """The decision in a sentence."""
    if certificate.decision is AuditDecision.CERTIFIED:
        return f"Certified. {certificate.claim}"
    name = str(certificate.decision).capitalize()
    return f"{name}: {'; '.join(certificate.reasons)}."


def audit_tables(certificate: Certificate) -> list[Grid]:
    """Checks, tests and first differences."""
    checks = Grid("Checks", ["check", "compared", "violated", "outcome"])
    for check in certificate.checks:
        why = f" ({check.skipped})" if check.skipped and not check.num_compared else ""
        checks.add(check.name, count(check.num_compared), count(check.num_violations), check.outcome + why)
    grids = [checks]
    if certificate.tests:
        tests = Grid("Tests", ["test", "p-value", "would reject", "smallest deviation that it could find"])
        for test in certificate.tests:
            tests.add(test.name, f"{test.p_value:.2g}", test.what, test.smallest or NONE)
        grids.append(tests)
    ties = certificate.ties
    near = Grid(
        "Near-ties", ["margin up to, nats", "seen", "expected", "largest difference by rounding, nats"]
    )
    near.add(
        f"{ties['tie_margin_nats']:.2g}",
        count(ties["observed"]),
        number(ties["expected"], 2),
        f"{ties['largest_difference_nats']:.2g}",
    )
    grids.append(near)
    if certificate.differences:
        grids.append(_differences(certificate.differences))
    return grids


def _differences(found: list[dict[str, Any]]) -> Grid:
    shown = found[:_MAX_DIFFERENCES]
    caption = "" if len(shown) == len(found) else f"The first {len(shown)} of {len(found)}."
    grid = Grid(
        "Differences",
        ["request", "parameters", "position", "token", "other", "margin, nats", "near-tie"],
        caption,
    )
    for one in shown:
        margin = NONE if one["margin"] is None else f"{one['margin']:.2g}"
        cells = (one["profile"], str(one["position"]), repr(one["first"]), repr(one["second"]), margin)
        grid.add(str(one["request"]), *cells, "yes" if one["is_tie"] else "no")
    return grid


def render_certificate(certificate: Certificate) -> str:
    """The page as HTML."""
    proof = certificate.provenance
    page = Page(
        title=f"{_name(certificate.audited)}: {certificate.decision}",
        subtitle=f"{proof['date']} · compared with {_name(certificate.compared_with)}",
        verdict=verdict(certificate),
        warnings=[] if certificate.complete else ["the audit is incomplete"],
        legend=[],
        plots=_plots(certificate),
        grids=audit_tables(certificate),
        remarks=certificate.notes,
        method=_METHOD,
        details=_details(certificate),
        command=proof["command"],
    )
    return page.html()


def _plots(certificate: Certificate) -> list[Plot]:
    """p-values next to the level at which each rejects."""
    if not certificate.tests:
        return []
    level = level_of_tests(1 - certificate.confidence)
    rows = {test.name: {1: Estimate(max(-300.0, _log10(test.p_value)))} for test in certificate.tests}
    drawing = estimates(rows, "log₁₀ of the p-value", _log10(level))
    return [Plot("Tests", drawing, "A test rejects to the left of the line.")]


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-300))


def _details(certificate: Certificate) -> list[tuple[str, str]]:
    data, proof = certificate.data, certificate.provenance
    details = [
        ("date", proof["date"]),
        ("audited", _described(certificate.audited)),
        ("compared with", _described(certificate.compared_with)),
        (
            "data",
            f"{data.source}: {data.num_prompts} prompts, {data.num_requests:,} requests, SHA-256 {data.sha256[:16]}…",
        ),
        ("answers", f"{data.num_answers:,}, {data.num_tokens:,} tokens, at most {data.max_tokens} each"),
        ("parameters", ", ".join(f"{name} {num}" for name, num in data.profiles.items())),
        ("seed", str(data.seed)),
        ("requests at once", str(data.concurrency)),
        ("confidence", f"{certificate.confidence:g}"),
        ("commit", proof["commit"] or "no checkout"),
        ("versions", f"Slipstream {proof['slipstream']}, Python {proof['python']}"),
        ("machine", proof["cpu"]),
    ]
    hashes = {
        **certificate.audited.get("files_sha256", {}),
        **certificate.compared_with.get("files_sha256", {}),
    }
    return details + [(f"SHA-256 of {name}", value) for name, value in hashes.items()]


def _name(side: dict[str, Any]) -> str:
    return str(side.get("url") or side["model"])


def _described(side: dict[str, Any]) -> str:
    hidden = ("files_sha256", "kind")
    return ", ".join(
        f"{name} {value}"
        for name, value in side.items()
        if name not in hidden and value not in (None, "", {})
    )
