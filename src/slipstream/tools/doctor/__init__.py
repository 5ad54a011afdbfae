"""Checks whether a draft matches a target before it is deployed."""

from slipstream.tools.doctor.examination import examine
from slipstream.tools.doctor.findings import CheckOutcome, Finding

__all__ = ["CheckOutcome", "Finding", "examine"]
