"""The paired benchmark: speculative configurations against speculation off, and servers from the client's side."""
