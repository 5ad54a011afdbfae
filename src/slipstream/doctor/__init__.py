"""Checks whether a draft matches a target before it is deployed."""

from slipstream.doctor.examination import examine
from slipstream.doctor.findings import CheckOutcome, Finding

__all__ = ["CheckOutcome", "Finding", "examine"]
