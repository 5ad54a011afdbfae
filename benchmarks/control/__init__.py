"""What `--spec auto` is worth: against every fixed setting, where it cannot pay, and when the traffic shifts."""
