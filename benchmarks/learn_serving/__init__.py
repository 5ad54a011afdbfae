"""The bars of a server that learns that need the server: text, memory, crashes, rollbacks, latency, privacy."""
