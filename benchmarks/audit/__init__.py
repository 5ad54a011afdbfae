"""How soon `slipstream audit` finds named faults, and how often it accuses an honest engine."""
