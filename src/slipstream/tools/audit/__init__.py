"""Whether speculation changed anything: replay, tests and certificates."""
