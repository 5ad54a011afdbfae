"""A recorded hand-off to vLLM: start, bench, load, dashboard, alarm, audit, stop."""
