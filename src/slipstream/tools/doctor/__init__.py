"""Checks whether a draft matches a target before it is deployed."""

from slipstream.tools.doctor.examination import CheckOutcome, Finding, examine

__all__ = ["CheckOutcome", "Finding", "examine"]
