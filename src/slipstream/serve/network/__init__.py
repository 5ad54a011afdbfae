"""Connections and bodies, before there is a request."""
