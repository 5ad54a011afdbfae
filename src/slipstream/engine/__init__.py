"""The loop: plan, propose, forward, verify, commit."""
