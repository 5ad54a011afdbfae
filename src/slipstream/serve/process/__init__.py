"""The engine in a process of its own: the protocol, the engine's side and the server's side."""
