"""Drafters in another process or on another machine: the protocol, the engine's side and the worker's."""
