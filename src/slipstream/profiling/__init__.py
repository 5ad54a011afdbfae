"""What passes cost on this machine, and the floors below which they cannot go."""
