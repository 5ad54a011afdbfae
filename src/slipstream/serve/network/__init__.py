"""Connections, request heads and bodies."""
