"""Does this draft fit this target? Checks that name the fault before a deployment meets it."""

from slipstream.doctor.examination import examine
from slipstream.doctor.findings import CheckOutcome, Finding

__all__ = ["CheckOutcome", "Finding", "examine"]
