"""Every kind of trained drafter for the embedded target."""
