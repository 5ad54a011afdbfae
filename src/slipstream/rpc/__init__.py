"""How processes are started and spoken to."""
